"""Threads that write, read, delete and evict the same blocks."""

from __future__ import annotations

import errno
import os
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
from descriptors import opened_below
from segments_world import (
    SMALL,
    Capacity,
    buffers,
    content_of,
    data_of,
    get,
    held,
    open_tier,
    put,
)

from kvtier.errors import MissingBlockError, TierFullError
from kvtier.testing.blocks import NAMESPACE, block_of, key_of
from kvtier.tiers.fs.segments import SegmentsTier

if TYPE_CHECKING:
    from pathlib import Path


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
    assert get(tier, 0) == content_of(0)
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
    assert get(tier, 0) == content_of(0)
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

    before = len(opened_below(tmp_path))
    monkeypatch.setattr(os, "preadv", meanwhile)
    assert get(tier, 0) == content_of(0)
    assert held(tier, [0, 7]) == {7}
    assert len(opened_below(tmp_path)) == before, "the descriptors of the old one are closed"
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
            data = data_of(keys)
            for error in tier.write_batch(keys, data):
                assert error is None or isinstance(error, TierFullError)
            into = [bytearray(SMALL) for _ in keys]
            errors = tier.read_batch(keys, [buffers(b) for b in into])
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
