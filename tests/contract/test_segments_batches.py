"""Slots, and moving many blocks with few calls."""

from __future__ import annotations

import errno
import mmap
import os
import random
from typing import TYPE_CHECKING

import pytest
import segments_world
from segments_world import (
    SMALL,
    buffers,
    content_of,
    data_of,
    get,
    held,
    open_tier,
    put,
    segments_of,
)

from kvtier.core.types import BlockKey
from kvtier.testing.blocks import block_of, key_of
from kvtier.tiers.fs.segments import SegmentsTier

if TYPE_CHECKING:
    from pathlib import Path


tier = segments_world.tier


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
    assert all(bytes(v) == content_of(i) for i, v in zip(numbers, into, strict=True))
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
    errors = tier.write_batch(keys[6:], data_of(keys[6:]))
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
    assert tier.read_batch(keys, [buffers(content) for content in into]) == [None] * 5
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

    aligned[:SMALL] = content_of(5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pwritev", noting)
        tier.write(key_of(5), (aligned[:4096], aligned[4096:SMALL]))
        tier.write(key_of(6), (aligned[1 : SMALL + 1],))
    assert seen == [segment.file._direct, segment.file._buffered]
    into = aligned[2 * SMALL : 3 * SMALL]
    tier.read(key_of(5), (into,))
    assert bytes(into) == content_of(5)
    assert get(tier, 5) == content_of(5), "the page cache agrees"
    tier.close()
