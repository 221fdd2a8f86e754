from __future__ import annotations

import contextlib
import errno
import json
import mmap
import os
import random
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
from segments_world import (
    SMALL,
    Capacity,
    buffers,
    get,
    held,
    open_tier,
    put,
    segments_of,
    stores_of,
    vanish,
)

from kvtier.core.types import BlockKey
from kvtier.drivers.threaded import ThreadedDriver
from kvtier.errors import MissingBlockError, TierFullError
from kvtier.testing.blocks import NAMESPACE, block_of, key_of
from kvtier.testing.contract import DriverContract, TierContract
from kvtier.tiers.base import SupportsBatch, SupportsDelete, SupportsDropped, SupportsFigures
from kvtier.tiers.fs.segments import SegmentsTier
from kvtier.tiers.fs.segments.owned import RETRY_S

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvtier.drivers.base import SecondaryTierManager
    from kvtier.tiers.base import Tier


class TestSegmentsTier(TierContract):
    @pytest.fixture(autouse=True)
    def place(self, tmp_path: Path) -> None:
        self.root = tmp_path

    def make(self) -> Tier:
        return SegmentsTier(self.root, NAMESPACE)

    def reopen(self) -> Tier:
        return SegmentsTier(self.root, NAMESPACE)


class TestSegmentsTierWithDurableData(TestSegmentsTier):
    def make(self) -> Tier:
        return SegmentsTier(self.root, NAMESPACE, durability="data")


class TestThreadedDriverOverSegments(DriverContract):
    @pytest.fixture(autouse=True)
    def place(self, tmp_path: Path) -> None:
        self.root = tmp_path

    def make(self) -> SecondaryTierManager:
        return ThreadedDriver("fs", lambda namespace: SegmentsTier(self.root, namespace), 4)

    def make_over(self, tier: Tier) -> SecondaryTierManager:
        return ThreadedDriver("fs", lambda namespace: tier, num_threads=4)


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[SegmentsTier]:
    tier = open_tier(tmp_path)
    yield tier
    tier.close()


def test_it_has_all_optional_protocols(tier: SegmentsTier) -> None:
    for protocol in (SupportsBatch, SupportsDelete, SupportsDropped, SupportsFigures):
        assert isinstance(tier, protocol)


# --- the back door: the files themselves


def test_a_block_lies_in_a_slot(tmp_path: Path, tier: SegmentsTier) -> None:
    put(tier, 0, 1, 2)
    (segment,) = segments_of(tmp_path)
    content = segment.read_bytes()
    assert len(content) == 16 * SMALL
    for i in range(3):
        assert content[i * SMALL : (i + 1) * SMALL] == block_of(key_of(i), SMALL)
    assert not any(content[3 * SMALL :])


def test_the_names_of_a_store(tmp_path: Path, tier: SegmentsTier) -> None:
    put(tier, 1)
    (store,) = stores_of(tmp_path)
    assert store.parent == tmp_path / NAMESPACE / "stores"
    assert sorted(path.name for path in store.iterdir()) == [
        "0.segment",
        "index.log",
        "lock",
        "requests",
    ]


def test_nothing_is_made_before_the_first_write(tmp_path: Path, tier: SegmentsTier) -> None:
    assert held(tier, range(3)) == set()
    assert [path.name for path in tmp_path.rglob("*")] == [NAMESPACE, "namespace.json"]


def test_an_empty_store_goes_with_its_owner(tmp_path: Path) -> None:
    capacity = Capacity(1 << 20)
    tier = open_tier(tmp_path, capacity)
    put(tier, 1)
    tier.delete(key_of(1))
    tier.close()
    assert stores_of(tmp_path) == []
    assert capacity.used == 0


def test_the_namespace_is_described_once(tmp_path: Path) -> None:
    for model in ("tiny", "other"):
        SegmentsTier(tmp_path, NAMESPACE, {"model": model}).close()
    assert json.loads((tmp_path / NAMESPACE / "namespace.json").read_text()) == {"model": "tiny"}


@pytest.mark.parametrize("umask", [0o000, 0o077, 0o777])
def test_only_the_owner_may_read(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        tier = open_tier(tmp_path)
        put(tier, 1)
        tier._owned.stores()[0].log.rewrite(list, 1)
        vanish(tier)
    finally:
        os.umask(before)
    paths = list(tmp_path.rglob("*"))
    assert len(paths) == 8
    for path in paths:
        expected = 0o700 if path.is_dir() else 0o600
        assert stat.S_IMODE(path.stat().st_mode) == expected, path


def test_a_link_in_place_of_a_segment_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    tier = open_tier(tmp_path / "root")
    put(tier, 1)
    tier.close()
    (segment,) = segments_of(tmp_path / "root")
    elsewhere = tmp_path / "elsewhere"
    segment.rename(elsewhere)
    segment.symlink_to(elsewhere)
    tier = open_tier(tmp_path / "root")
    assert held(tier, [1]) == set()
    put(tier, 2)
    tier.close()
    assert elsewhere.read_bytes()[:SMALL] == block_of(key_of(1), SMALL), "it was written to"


def test_a_root_that_is_gone_is_not_made_again(tmp_path: Path) -> None:
    root = tmp_path / "mount"
    root.mkdir()
    tier = open_tier(root)
    put(tier, 1)
    root.rename(tmp_path / "unmounted")
    for i in range(2, 40):
        with contextlib.suppress(OSError):
            put(tier, i)
    tier.maintain()
    with pytest.raises(FileNotFoundError):
        put(tier, 100)
    with pytest.raises(FileNotFoundError):
        SegmentsTier(root, NAMESPACE)
    assert not root.exists()
    tier.close()


# --- slots, and moving many blocks with few calls


class Calls:
    """Counts the calls that move bytes of segments."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reads: list[tuple[int, int]] = []
        self.writes: list[tuple[int, int]] = []
        preadv, pwritev = os.preadv, os.pwritev

        def reading(fd: int, views: list[memoryview], at: int) -> int:
            count = preadv(fd, views, at)
            self.reads.append((at, count))
            return count

        def writing(fd: int, views: list[memoryview], at: int) -> int:
            count = pwritev(fd, views, at)
            self.writes.append((at, count))
            return count

        monkeypatch.setattr(os, "preadv", reading)
        monkeypatch.setattr(os, "pwritev", writing)


def test_a_batch_is_one_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = open_tier(tmp_path, direct=False)
    put(tier, *range(100, 116))
    put(tier, *range(116, 132))
    calls = Calls(monkeypatch)
    put(tier, *range(32))
    assert calls.writes == [(0, 32 * SMALL)]
    numbers = list(range(32))
    random.Random(1).shuffle(numbers)
    into = [memoryview(bytearray(SMALL)) for _ in numbers]
    errors = tier.read_batch([key_of(i) for i in numbers], [(view,) for view in into])
    assert errors == [None] * 32
    assert calls.reads == [(0, 32 * SMALL)]
    assert all(bytes(v) == block_of(key_of(i), SMALL) for i, v in zip(numbers, into, strict=True))
    tier.close()


def test_a_batch_of_more_buffers_than_a_call_takes(tmp_path: Path) -> None:
    """Blocks in 300 buffers each: three to a call."""
    tier = open_tier(tmp_path, direct=False)
    keys = [key_of(i) for i in range(16)]
    cut = [
        [memoryview(block_of(k, SMALL))[at : at + 28] for at in range(0, SMALL, 28)] for k in keys
    ]
    assert tier.write_batch(keys, cut) == [None] * 16
    into = [bytearray(SMALL) for _ in keys]
    views = [[memoryview(b)[at : at + 31] for at in range(0, SMALL, 31)] for b in into]
    assert tier.read_batch(keys, views) == [None] * 16
    assert [bytes(b) for b in into] == [block_of(k, SMALL) for k in keys]
    many = memoryview(bytearray(SMALL))
    tier.read(keys[3], [many[at : at + 4] for at in range(0, SMALL, 4)])
    assert bytes(many) == block_of(keys[3], SMALL)
    tier.close()


def test_short_reads_and_writes_are_continued(
    tmp_path: Path, tier: SegmentsTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel may move less than asked for; here it never moves more than 5,000 bytes."""
    whole_read, whole_write = os.preadv, os.pwritev

    def cut(views: list[memoryview]) -> list[memoryview]:
        return [next(view for view in views if view.nbytes)[:5000]]

    monkeypatch.setattr(os, "preadv", lambda fd, views, at: whole_read(fd, cut(views), at))
    monkeypatch.setattr(os, "pwritev", lambda fd, views, at: whole_write(fd, cut(views), at))
    put(tier, *range(5))
    assert held(tier, range(5)) == set(range(5))


def test_a_write_that_makes_no_progress_fails(
    tier: SegmentsTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "pwritev", lambda fd, views, at: 0)
    with pytest.raises(OSError, match="takes no more bytes"):
        put(tier, 1)
    monkeypatch.undo()
    assert held(tier, [1]) == set()


def test_one_bad_block_of_a_run_costs_itself(
    tier: SegmentsTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The medium fails wherever slot 3 is touched."""
    whole_read, whole_write = os.preadv, os.pwritev

    def bad(views: list[memoryview], at: int) -> None:
        if at <= 3 * SMALL < at + sum(view.nbytes for view in views):
            raise OSError(errno.EIO, "bad sector")

    def reading(fd: int, views: list[memoryview], at: int) -> int:
        bad(views, at)
        return whole_read(fd, views, at)

    def writing(fd: int, views: list[memoryview], at: int) -> int:
        bad(views, at)
        return whole_write(fd, views, at)

    put(tier, *range(6))
    keys = [key_of(i) for i in range(12)]
    monkeypatch.setattr(os, "preadv", reading)
    into = [(memoryview(bytearray(SMALL)),) for _ in range(6)]
    errors = tier.read_batch(keys[:6], into)
    assert [type(error) for error in errors] == [
        OSError if i == 3 else type(None) for i in range(6)
    ]
    for k in keys[:6]:
        tier.delete(k)
    monkeypatch.setattr(os, "pwritev", writing)
    errors = tier.write_batch(keys[6:], [buffers(block_of(k, SMALL)) for k in keys[6:]])
    assert sum(error is not None for error in errors) == 1
    monkeypatch.undo()
    assert len(held(tier, range(12))) == 5
    tier._owned.slots.check()
    put(tier, *range(20, 31))  # its slot was not lost: 16 are there
    assert tier.figures()["segments"] == 1


def test_blocks_of_several_lengths_lie_apart(tmp_path: Path, tier: SegmentsTier) -> None:
    lengths = [1, 4095, 4096, 4097, SMALL, SMALL + 1, 5 * 4096]
    for i, length in enumerate(lengths):
        tier.write(key_of(i), (memoryview(block_of(key_of(i), length)),))
    for i, length in enumerate(lengths):
        into = memoryview(bytearray(length))
        tier.read(key_of(i), (into,))
        assert bytes(into) == block_of(key_of(i), length)
    sizes = sorted(path.stat().st_size // 4096 // 16 for path in segments_of(tmp_path))
    assert sizes == [1, 2, 3, 5]


@pytest.mark.parametrize("length", [SMALL - 1, SMALL - 4095])
def test_a_batch_of_blocks_that_do_not_fill_their_slots(tier: SegmentsTier, length: int) -> None:
    put(tier, *range(5), length=length)
    keys = [key_of(i) for i in range(5)]
    into = [bytearray(length) for _ in keys]
    assert tier.read_batch(keys, [buffers_of(content) for content in into]) == [None] * 5
    assert into == [block_of(k, length) for k in keys]
    assert held(tier, range(5), length) == set(range(5)), "each lies at the start of its own slot"


def test_a_block_of_another_length_is_replaced(tier: SegmentsTier) -> None:
    put(tier, 1, length=SMALL)
    put(tier, 1, length=3 * SMALL)
    assert held(tier, [1], 3 * SMALL) == {1}
    assert tier.figures()["blocks"] == 1
    tier._owned.slots.check()


@pytest.mark.parametrize("length", [0, 129])
def test_a_key_that_fits_no_record_is_refused(tier: SegmentsTier, length: int) -> None:
    with pytest.raises(ValueError, match=f"1 to 128 bytes, this one {length}"):
        tier.write(BlockKey(bytes(length)), buffers(bytes(SMALL)))


def test_the_longest_key(tier: SegmentsTier) -> None:
    long = BlockKey(b"\xff" * 127 + b"\0")
    tier.write(long, buffers(bytes(SMALL)))
    assert tier.exists([long, BlockKey(long[:-1])]) == [True, False]


def test_direct_io_is_used_for_aligned_buffers(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    put(tier, 0)
    (segment,) = tier._owned.slots.segments()
    if segment.file._direct < 0:
        pytest.skip("this file system has no direct I/O")
    aligned = memoryview(mmap.mmap(-1, 4 * SMALL))
    seen: list[int] = []
    whole = os.pwritev

    def noting(fd: int, views: list[memoryview], at: int) -> int:
        count = whole(fd, views, at)
        seen.append(fd)
        return count

    aligned[:SMALL] = block_of(key_of(5), SMALL)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pwritev", noting)
        tier.write(key_of(5), (aligned[:4096], aligned[4096:SMALL]))
        tier.write(key_of(6), (aligned[1 : SMALL + 1],))
    assert seen == [segment.file._direct, segment.file._buffered]
    into = aligned[2 * SMALL : 3 * SMALL]
    tier.read(key_of(5), (into,))
    assert bytes(into) == block_of(key_of(5), SMALL)
    assert get(tier, 5) == block_of(key_of(5), SMALL), "the page cache agrees"
    tier.close()


# --- room


def test_segments_grow_with_the_store(tmp_path: Path) -> None:
    tier = open_tier(tmp_path, segment_bytes=64 * SMALL)
    sizes = []
    for i in range(300):
        put(tier, i)
        sizes = [path.stat().st_size // SMALL for path in segments_of(tmp_path)]
    assert sizes == [16, 16, 32, 64, 64, 64, 64]
    tier.close()


@pytest.mark.parametrize("slots", [1, 2, 10, 17, 40])
def test_a_small_capacity_is_used_and_kept(tmp_path: Path, slots: int) -> None:
    capacity = Capacity(slots * SMALL)
    tier = open_tier(tmp_path, capacity)
    for i in range(3 * slots):
        put(tier, i)
        assert held(tier, [i]) == {i}
        assert capacity.used == sum(path.stat().st_size for path in segments_of(tmp_path))
    assert tier.figures()["blocks"] >= max(1, slots // 2)
    tier.close()


def test_without_any_room_a_write_is_refused(tmp_path: Path) -> None:
    tier = open_tier(tmp_path, Capacity(SMALL - 1))
    with pytest.raises(TierFullError):
        put(tier, 1)
    assert held(tier, [1]) == set()
    tier.close()


def test_a_batch_larger_than_the_capacity_keeps_its_head(tmp_path: Path) -> None:
    tier = open_tier(tmp_path, Capacity(16 * SMALL))
    keys = [key_of(i) for i in range(20)]
    errors = tier.write_batch(keys, [buffers(block_of(k, SMALL)) for k in keys])
    assert [isinstance(error, TierFullError) for error in errors] == [False] * 16 + [True] * 4
    assert held(tier, range(20)) == set(range(16))
    tier.close()


def test_the_block_that_was_not_used_for_longest_goes(tmp_path: Path) -> None:
    tier = open_tier(tmp_path, Capacity(16 * SMALL))
    put(tier, *range(16))
    get(tier, 0)  # a read is a use,
    put(tier, 1)  # and so is a write
    put(tier, 20, 21)
    assert tier.take_dropped() == [key_of(2), key_of(3)]
    assert tier.take_dropped() == []
    assert held(tier, range(16)) == set(range(16)) - {2, 3}
    tier.close()


def test_other_lengths_make_room_for_one_another(tmp_path: Path) -> None:
    tier = open_tier(tmp_path, Capacity(32 * SMALL))
    put(tier, *range(32))
    put(tier, 50, length=2 * SMALL)
    assert held(tier, [50], 2 * SMALL) == {50}
    assert len(held(tier, range(32))) == 16
    tier.close()


def test_a_debt_is_paid_with_the_coldest_segment(tmp_path: Path) -> None:
    capacity = Capacity(64 * SMALL)
    tier = open_tier(tmp_path, capacity)
    put(tier, *range(16))
    put(tier, *range(16, 32))
    for i in range(16):
        get(tier, i)
    capacity.debt = 1
    tier.maintain()
    assert held(tier, range(32)) == set(range(16))
    assert capacity.used == 16 * SMALL
    assert set(tier.take_dropped()) == {key_of(i) for i in range(16, 32)}
    capacity.debt = 1000 * SMALL
    tier.maintain()
    assert (held(tier, range(32)), capacity.used) == (set(), 0)
    assert segments_of(tmp_path) == []
    capacity.debt = 0
    put(tier, 1)
    assert held(tier, [1]) == {1}
    tier.close()


def test_refused_space_is_asked_for_again_after_a_while(tmp_path: Path) -> None:
    now = [0.0]
    capacity = Capacity(16 * SMALL)
    tier = open_tier(tmp_path, capacity, clock=lambda: now[0])
    put(tier, *range(16))
    capacity.refusals = 0
    for i in range(16, 32):
        put(tier, i)
    assert capacity.refusals == 1, "a ledger is not asked for each block"
    capacity.nbytes *= 2
    now[0] += RETRY_S
    put(tier, *range(32, 48))
    assert tier.figures()["blocks"] == 32
    tier.close()


# --- threads


def test_two_threads_write_one_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second waits for the first, and takes no slot of its own."""
    tier = open_tier(tmp_path, direct=False)
    entered, release = threading.Event(), threading.Event()
    whole = os.pwritev
    writes = []

    def held_up(fd: int, views: list[memoryview], at: int) -> int:
        writes.append(at)
        entered.set()
        assert release.wait(30)
        return whole(fd, views, at)

    monkeypatch.setattr(os, "pwritev", held_up)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(put, tier, 1)
        assert entered.wait(30)
        second = pool.submit(put, tier, 1)
        assert not second.done()
        release.set()
        first.result(30)
        second.result(30)
    monkeypatch.undo()
    assert held(tier, [1]) == {1}
    assert tier._owned.slots.counts() == {SMALL: (16, 15)}
    tier._owned.slots.check()
    tier.close()


def test_who_waits_for_a_write_that_fails_writes_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = open_tier(tmp_path, direct=False)
    entered, release = threading.Event(), threading.Event()
    whole = os.pwritev
    failing = [True]

    def fails_once(fd: int, views: list[memoryview], at: int) -> int:
        if failing:
            entered.set()
            assert release.wait(30)
            failing.clear()
            raise OSError(errno.EIO, "bad sector")
        return whole(fd, views, at)

    monkeypatch.setattr(os, "pwritev", fails_once)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(put, tier, 1)
        assert entered.wait(30)
        second = pool.submit(put, tier, 1)
        release.set()
        with pytest.raises(OSError, match="bad sector"):
            first.result(30)
        second.result(30)
    assert held(tier, [1]) == {1}
    assert tier._owned.slots.counts() == {SMALL: (16, 15)}
    tier.close()


def test_a_block_that_is_being_read_keeps_its_slot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is deleted, and everything else is evicted for new blocks, while a reader is in the call:
    the reader has the bytes it came for."""
    tier = open_tier(tmp_path, Capacity(16 * SMALL), direct=False)
    put(tier, *range(16))
    whole = os.preadv
    main = threading.current_thread()

    def meanwhile(fd: int, views: list[memoryview], at: int) -> int:
        if threading.current_thread() is main:
            monkeypatch.undo()
            tier.delete(key_of(0))
            for i in range(100, 140):
                put(tier, i)
            assert held(tier, [0]) == set()
            assert tier._owned.slots.counts() == {SMALL: (16, 0)}
        return whole(fd, views, at)

    monkeypatch.setattr(os, "preadv", meanwhile)
    assert get(tier, 0) == block_of(key_of(0), SMALL)
    assert tier._owned.slots.counts() == {SMALL: (16, 1)}, "the slot is free now"
    tier._owned.slots.check()
    tier.close()


def test_a_block_that_is_being_read_is_not_evicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though by now all others were used later."""
    tier = open_tier(tmp_path, Capacity(4 * SMALL), direct=False)
    put(tier, *range(4))
    whole = os.preadv

    def meanwhile(fd: int, views: list[memoryview], at: int) -> int:
        monkeypatch.undo()
        for i in range(100, 112):
            put(tier, i)
        return whole(fd, views, at)

    monkeypatch.setattr(os, "preadv", meanwhile)
    assert get(tier, 0) == block_of(key_of(0), SMALL)
    assert held(tier, [0, 1, 2, 3]) == {0}
    tier.close()


def test_a_segment_that_goes_under_a_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = open_tier(tmp_path, direct=False)
    put(tier, 0)
    whole = os.preadv

    def meanwhile(fd: int, views: list[memoryview], at: int) -> int:
        monkeypatch.undo()
        (segment,) = tier._owned.slots.segments()
        tier._owned.remove_segment(segment, "evicted_blocks")
        put(tier, 7)
        return whole(fd, views, at)

    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, "preadv", meanwhile)
    assert get(tier, 0) == block_of(key_of(0), SMALL)
    assert held(tier, [0, 7]) == {7}
    assert len(os.listdir("/proc/self/fd")) == before, "the descriptors of the old one are closed"
    tier.close()


def test_a_segment_that_goes_under_a_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody may believe that the block is there: neither this process nor one that follows it."""
    tier = open_tier(tmp_path, direct=False)
    put(tier, 0)
    whole = os.pwritev

    def meanwhile(fd: int, views: list[memoryview], at: int) -> int:
        monkeypatch.undo()
        (segment,) = tier._owned.slots.segments()
        tier._owned.remove_segment(segment, "evicted_blocks")
        return whole(fd, views, at)

    monkeypatch.setattr(os, "pwritev", meanwhile)
    put(tier, 1)
    other = open_tier(tmp_path)
    assert other.exists([key_of(0), key_of(1)]) == [False, False]
    assert tier.exists([key_of(0), key_of(1)]) == [False, False]
    tier.close()
    other.close()


def test_threads_write_read_and_delete_under_eviction(tmp_path: Path) -> None:
    tier = SegmentsTier(tmp_path, NAMESPACE, space=Capacity(40 * SMALL), upkeep_s=0.01)

    def work(seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(150):
            numbers = chance.sample(range(120), 5)
            keys = [key_of(i) for i in numbers]
            data = [buffers(block_of(k, SMALL)) for k in keys]
            for error in tier.write_batch(keys, data):
                assert error is None or isinstance(error, TierFullError)
            into = [bytearray(SMALL) for _ in keys]
            errors = tier.read_batch(keys, [buffers_of(b) for b in into])
            for k, content, error in zip(keys, into, errors, strict=True):
                if error is None:
                    assert bytes(content) == block_of(k, SMALL)
                else:
                    assert isinstance(error, MissingBlockError), error
            tier.delete(chance.choice(keys))

    with ThreadPoolExecutor(6) as pool:
        for future in [pool.submit(work, seed) for seed in range(6)]:
            future.result(120)
    tier._owned.slots.check()
    slots, free = tier._owned.slots.counts()[SMALL]
    assert slots - free == tier.figures()["blocks"], "a slot leaked"
    assert tier.figures()["upkeep_failures"] == 0
    assert not tier._owned.slots._pins
    tier.close()


def buffers_of(content: bytearray) -> tuple[memoryview, memoryview]:
    view = memoryview(content)
    return view[:4096], view[4096:]


def test_nothing_is_left_open(tmp_path: Path) -> None:
    before = sorted(os.listdir("/proc/self/fd"))
    for _ in range(3):
        one = SegmentsTier(tmp_path, NAMESPACE, space=Capacity(64 * SMALL))
        two = SegmentsTier(tmp_path, NAMESPACE, space=Capacity(64 * SMALL))
        put(one, *range(40))
        put(two, *range(40, 90))
        held(one, range(90))
        one.maintain()
        one.close()
        two.close()
    assert sorted(os.listdir("/proc/self/fd")) == before
