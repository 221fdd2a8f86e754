"""Stores of living processes, read and followed while their owners change them."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
import segments_world
from descriptors import opened_below
from segments_world import SMALL, Capacity, content_of, get, held, open_tier, put, rewrite_log

from kvtier.errors import MissingBlockError
from kvtier.testing.blocks import key_of
from kvtier.tiers.fs.segments import follower
from kvtier.tiers.fs.segments.records import RECORD_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from kvtier.tiers.fs.segments import SegmentsTier

    Open = Callable[..., SegmentsTier]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Open]:
    """Opens tiers over one root, and closes them."""
    tiers: list[SegmentsTier] = []

    def open_one(capacity: Capacity | None = None, **options: object) -> SegmentsTier:
        tiers.append(open_tier(tmp_path, capacity, **options))
        return tiers[-1]

    yield open_one
    for tier in tiers:
        tier.close()


@pytest.fixture
def owner(opened: Open) -> SegmentsTier:
    return opened()


@pytest.fixture
def reader(opened: Open) -> SegmentsTier:
    return opened()


@pytest.fixture
def buffered_reader(opened: Open) -> SegmentsTier:
    return opened(direct=False)


@pytest.fixture
def owner_of_one(opened: Open) -> SegmentsTier:
    """Has room for one block, and a clock that stands still; holds block 1."""
    owner = opened(Capacity(SMALL), direct=False, wall_clock_ns=lambda: 10**18)
    put(owner, 1)
    return owner


def around_the_next_read(
    monkeypatch: pytest.MonkeyPatch,
    before: Callable[[], None],
    after: Callable[[list[memoryview]], None] = lambda _: None,
) -> None:
    """Between a look at the log and the read, and between the read and the next look."""
    whole = os.preadv

    def meanwhile(fd: int, views: list[memoryview], at: int) -> int:
        monkeypatch.undo()
        before()
        count = whole(fd, views, at)
        after(views)
        return count

    monkeypatch.setattr(os, "preadv", meanwhile)


def test_a_log_that_is_truncated_is_read_anew(
    tmp_path: Path, owner: SegmentsTier, reader: SegmentsTier
) -> None:
    put(owner, 1, 2)
    assert held(reader, [1, 2]) == {1, 2}
    os.truncate(segments_world.stores_of(tmp_path)[0] / "index.log", 2 * RECORD_BYTES)
    assert held(reader, [1, 2]) == {1}


def test_a_block_evicted_under_a_reader_in_another_process_is_missing(
    owner_of_one: SegmentsTier, buffered_reader: SegmentsTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slot is written again between the look at the log and the read."""
    assert held(buffered_reader, [1]) == {1}

    def it_was_early_enough(views: list[memoryview]) -> None:
        assert bytes(views[1]) == content_of(2)[4096:]

    around_the_next_read(monkeypatch, lambda: put(owner_of_one, 2), it_was_early_enough)
    with pytest.raises(MissingBlockError):
        get(buffered_reader, 1)
    assert held(buffered_reader, [1, 2]) == {2}


def test_a_block_that_came_back_to_its_slot_is_another_block(
    owner_of_one: SegmentsTier, buffered_reader: SegmentsTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Evicted, overwritten, and written again: what was read in between is not it, though the clock
    stands still."""
    assert held(buffered_reader, [1]) == {1}
    around_the_next_read(monkeypatch, lambda: put(owner_of_one, 2), lambda _: put(owner_of_one, 1))
    with pytest.raises(MissingBlockError):
        get(buffered_reader, 1)
    assert held(buffered_reader, [1]) == {1}


def test_a_log_that_was_rewritten_under_a_reader(
    owner_of_one: SegmentsTier, buffered_reader: SegmentsTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the old file does not say, the new one does."""
    assert held(buffered_reader, [1]) == {1}

    def rewritten() -> None:
        rewrite_log(owner_of_one)
        put(owner_of_one, 2)

    around_the_next_read(monkeypatch, rewritten)
    with pytest.raises(MissingBlockError):
        get(buffered_reader, 1)


def test_a_use_by_another_process_counts(opened: Open, reader: SegmentsTier) -> None:
    owner = opened(Capacity(16 * SMALL))
    put(owner, *range(16))
    get(reader, 0)
    put(reader, 1)  # there already: a use
    assert reader.figures()["stores"] == 0
    reader.maintain()
    owner.maintain()
    put(owner, 20, 21)
    assert owner.take_dropped() == [key_of(2), key_of(3)]
    reader.maintain()
    assert reader.take_dropped() == [key_of(2), key_of(3)], "who follows tells of it too"


def test_a_damaged_block_of_another_process_is_forgotten_by_both(
    owner: SegmentsTier, reader: SegmentsTier
) -> None:
    put(owner, 1, 2)
    assert held(reader, [1, 2]) == {1, 2}
    reader.delete(key_of(1))
    assert held(reader, [1, 2]) == {2}
    owner.maintain()
    assert held(owner, [1, 2]) == {2}
    put(reader, 1)
    assert held(reader, [1, 2]) == {1, 2}


def test_new_stores_are_found_at_once(reader: SegmentsTier, opened: Open) -> None:
    assert reader.exists([key_of(1)]) == [False]
    for i in range(5):
        owner = opened()
        owner._followers._followers = {}
        put(owner, i)
        assert held(reader, range(5)) == set(range(i + 1))


def test_the_descriptors_of_segments_that_are_gone_are_closed(
    tmp_path: Path, owner: SegmentsTier, reader: SegmentsTier
) -> None:
    put(owner, *range(16))
    assert len(held(reader, range(16))) == 16
    before = len(opened_below(tmp_path))
    (segment,) = owner._owned.slots.segments()
    owner._owned.remove_segment(segment, "evicted_blocks")
    reader.maintain()
    assert len(opened_below(tmp_path)) <= before - 2


def test_a_long_log_that_was_rewritten_keeps_nobody_waiting(
    owner: SegmentsTier, reader: SegmentsTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the upkeep reads it, lookups say what they knew, and reads miss."""
    put(owner, *range(16))
    assert held(reader, range(16)) == set(range(16))
    rewrite_log(owner)
    monkeypatch.setattr(follower, "INLINE_BYTES", RECORD_BYTES)
    whole = follower.LogReader.follow
    entered, release = threading.Event(), threading.Event()

    def slow(self: follower.LogReader, *arguments: object) -> None:
        entered.set()
        assert release.wait(30)
        whole(self, *arguments)

    monkeypatch.setattr(follower.LogReader, "follow", slow)
    with ThreadPoolExecutor(1) as pool:
        tending = pool.submit(reader.maintain)
        assert entered.wait(30)
        assert reader.exists([key_of(3)]) == [True]
        with pytest.raises(MissingBlockError):
            get(reader, 3)
        assert not tending.done()
        release.set()
        tending.result(30)
    assert held(reader, range(16)) == set(range(16))
