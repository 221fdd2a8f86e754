"""Stores of living processes, read and followed while their owners change them."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
from descriptors import opened_below
from segments_world import (
    SMALL,
    Capacity,
    content_of,
    get,
    held,
    open_tier,
    put,
    rewrite_log,
    stores_of,
)

from kvtier.errors import MissingBlockError
from kvtier.testing.blocks import key_of
from kvtier.tiers.fs.segments import follower
from kvtier.tiers.fs.segments.records import RECORD_BYTES

if TYPE_CHECKING:
    from pathlib import Path


def test_a_log_that_is_truncated_is_read_anew(tmp_path: Path) -> None:
    owner, reader = open_tier(tmp_path), open_tier(tmp_path)
    put(owner, 1, 2)
    assert held(reader, [1, 2]) == {1, 2}
    os.truncate(stores_of(tmp_path)[0] / "index.log", 2 * RECORD_BYTES)
    assert held(reader, [1, 2]) == {1}
    owner.close()
    reader.close()


def test_a_block_evicted_under_a_reader_in_another_process_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slot is written again between the look at the log and the read."""
    owner = open_tier(tmp_path, Capacity(SMALL), direct=False)
    reader = open_tier(tmp_path, direct=False)
    put(owner, 1)
    assert held(reader, [1]) == {1}
    whole = os.preadv

    def meanwhile(fd: int, views: list[memoryview], at: int) -> int:
        monkeypatch.undo()
        put(owner, 2)
        count = whole(fd, views, at)
        assert bytes(views[1]) == content_of(2)[4096:], "it was too late"
        return count

    monkeypatch.setattr(os, "preadv", meanwhile)
    with pytest.raises(MissingBlockError):
        get(reader, 1)
    assert held(reader, [1, 2]) == {2}
    owner.close()
    reader.close()


def test_a_block_that_came_back_to_its_slot_is_another_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Evicted, overwritten, and written again: what was read in between is not it, though the clock
    stands still."""
    owner = open_tier(tmp_path, Capacity(SMALL), direct=False, wall_clock_ns=lambda: 10**18)
    reader = open_tier(tmp_path, direct=False)
    put(owner, 1)
    assert held(reader, [1]) == {1}
    whole = os.preadv

    def meanwhile(fd: int, views: list[memoryview], at: int) -> int:
        monkeypatch.undo()
        put(owner, 2)
        count = whole(fd, views, at)
        put(owner, 1)
        return count

    monkeypatch.setattr(os, "preadv", meanwhile)
    with pytest.raises(MissingBlockError):
        get(reader, 1)
    assert held(reader, [1]) == {1}
    owner.close()
    reader.close()


def test_a_log_that_was_rewritten_under_a_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the old file does not say, the new one does."""
    owner = open_tier(tmp_path, Capacity(SMALL), direct=False)
    reader = open_tier(tmp_path, direct=False)
    put(owner, 1)
    assert held(reader, [1]) == {1}
    whole = os.preadv

    def meanwhile(fd: int, views: list[memoryview], at: int) -> int:
        monkeypatch.undo()
        rewrite_log(owner)
        put(owner, 2)
        return whole(fd, views, at)

    monkeypatch.setattr(os, "preadv", meanwhile)
    with pytest.raises(MissingBlockError):
        get(reader, 1)
    owner.close()
    reader.close()


def test_a_use_by_another_process_counts(tmp_path: Path) -> None:
    owner, reader = open_tier(tmp_path, Capacity(16 * SMALL)), open_tier(tmp_path)
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
    owner.close()
    reader.close()


def test_a_damaged_block_of_another_process_is_forgotten_by_both(tmp_path: Path) -> None:
    owner, reader = open_tier(tmp_path), open_tier(tmp_path)
    put(owner, 1, 2)
    assert held(reader, [1, 2]) == {1, 2}
    reader.delete(key_of(1))
    assert held(reader, [1, 2]) == {2}
    owner.maintain()
    assert held(owner, [1, 2]) == {2}
    put(reader, 1)
    assert held(reader, [1, 2]) == {1, 2}
    owner.close()
    reader.close()


def test_new_stores_are_found_at_once(tmp_path: Path) -> None:
    reader = open_tier(tmp_path)
    assert reader.exists([key_of(1)]) == [False]
    owners = []
    for i in range(5):
        owners.append(open_tier(tmp_path))
        owners[-1]._followers._followers = {}
        put(owners[-1], i)
        assert held(reader, range(5)) == set(range(i + 1))
    for owner in owners:
        owner.close()
    reader.close()


def test_the_descriptors_of_segments_that_are_gone_are_closed(tmp_path: Path) -> None:
    owner, reader = open_tier(tmp_path), open_tier(tmp_path)
    put(owner, *range(16))
    assert len(held(reader, range(16))) == 16
    before = len(opened_below(tmp_path))
    (segment,) = owner._owned.slots.segments()
    owner._owned.remove_segment(segment, "evicted_blocks")
    reader.maintain()
    assert len(opened_below(tmp_path)) <= before - 2
    owner.close()
    reader.close()


def test_a_long_log_that_was_rewritten_keeps_nobody_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the upkeep reads it, lookups say what they knew, and reads miss."""
    owner, reader = open_tier(tmp_path), open_tier(tmp_path)
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
    owner.close()
    reader.close()
