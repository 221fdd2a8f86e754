"""Stores of processes that ended: who takes them over, and what is in them then."""

from __future__ import annotations

import fcntl
import os
import random
from typing import TYPE_CHECKING

import pytest
from descriptors import opened_below
from segments_world import (
    SMALL,
    Capacity,
    data_of,
    get,
    held,
    open_tier,
    put,
    stores_of,
    vanish,
)

from kvtier.testing.blocks import NAMESPACE, key_of
from kvtier.tiers.fs.segments import follower, store, upkeep
from kvtier.tiers.fs.segments.records import RECORD_BYTES

if TYPE_CHECKING:
    from pathlib import Path


def test_a_restart_has_its_blocks_at_once_and_in_order(tmp_path: Path) -> None:
    capacity = Capacity(16 * SMALL)
    tier = open_tier(tmp_path, capacity)
    put(tier, *range(16))
    order = list(range(16))
    random.Random(3).shuffle(order)
    for i in order:
        get(tier, i)
    tier.close()
    tier = open_tier(tmp_path, capacity)
    assert tier.exists([key_of(i) for i in range(16)]) == [True] * 16
    for i, expected in enumerate(order):
        put(tier, 100 + i)
        assert tier.take_dropped() == [key_of(expected)]
    tier.close()


def test_a_killed_process_forgets_the_last_uses_alone(tmp_path: Path) -> None:
    tier = open_tier(tmp_path, Capacity(16 * SMALL))
    put(tier, *range(16))
    get(tier, 0)
    tier.maintain()
    get(tier, 1)
    vanish(tier)
    tier = open_tier(tmp_path, Capacity(0))
    put(tier, 100)
    assert tier.take_dropped() == [key_of(1)]
    tier.close()


def test_a_living_process_takes_over_from_one_that_died(tmp_path: Path) -> None:
    survivor, victim = open_tier(tmp_path), open_tier(tmp_path)
    put(survivor, 1)
    put(victim, 2)
    survivor.maintain()
    assert survivor.figures()["stores"] == 1
    vanish(victim)
    survivor.maintain()
    assert survivor.figures()["stores"] == 2
    assert survivor.figures()["followed_stores"] == 0
    assert held(survivor, [1, 2]) == {1, 2}
    survivor.delete(key_of(2))
    survivor.maintain()
    survivor._owned.evict(survivor._owned.stores()[1], None)
    survivor.maintain()
    assert len(stores_of(tmp_path)) == 1, "an empty store was taken over and goes"
    survivor.close()


def test_a_store_that_is_removed_while_it_is_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its owner removes it between our opening the lock and our taking it: nothing was taken."""
    owner = open_tier(tmp_path)
    put(owner, 1)
    owner.delete(key_of(1))
    (directory,) = stores_of(tmp_path)
    whole = fcntl.flock

    def meanwhile(fd: int, operation: int) -> None:
        monkeypatch.undo()
        owner.close()
        whole(fd, operation)

    before = len(opened_below(tmp_path))
    monkeypatch.setattr(fcntl, "flock", meanwhile)
    assert store.lock_store(str(directory)) is None
    assert not directory.exists()
    assert len(opened_below(tmp_path)) < before


def test_a_store_is_locked_before_it_can_be_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process looks for orphans at the moment at which a store appears."""
    owner, other = open_tier(tmp_path), open_tier(tmp_path)
    whole = os.rename

    def meanwhile(source: str, target: str) -> None:
        other.maintain()
        whole(source, target)
        other.maintain()

    monkeypatch.setattr(os, "rename", meanwhile)
    put(owner, 1)
    monkeypatch.undo()
    assert other.figures()["stores"] == 0
    assert held(other, [1]) == {1}
    owner.close()
    other.close()


def test_a_block_in_two_stores_is_kept_once(tmp_path: Path) -> None:
    one, two = open_tier(tmp_path), open_tier(tmp_path)
    # neither knows of the other's store when it writes: as if at the same moment
    put(one, 5)
    two._followers._followers = {}
    two._blocks.write([key_of(5)], data_of([key_of(5)]), [0])
    vanish(one)
    vanish(two)
    tier = open_tier(tmp_path)
    assert tier.figures()["blocks"] == 1
    assert tier.figures()["stores"] == 2
    tier._owned.slots.check()
    counts = tier._owned.slots.counts()[SMALL]
    assert counts == (32, 31), "the slot of the other copy is free"
    tier.delete(key_of(5))
    vanish(tier)
    tier = open_tier(tmp_path)
    assert held(tier, [5]) == set(), "the other copy came back"
    tier.close()


def test_a_block_that_is_taken_over_while_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    orphan, tier = open_tier(tmp_path), open_tier(tmp_path, direct=False)
    put(orphan, 5)
    tier._followers._followers = {}
    whole = os.pwritev

    def meanwhile(fd: int, views: list[memoryview], at: int) -> int:
        monkeypatch.undo()
        vanish(orphan)
        tier.maintain()
        assert tier.figures()["blocks"] == 1
        return whole(fd, views, at)

    monkeypatch.setattr(os, "pwritev", meanwhile)
    tier._blocks.write([key_of(5)], data_of([key_of(5)]), [0])
    assert tier.figures()["stores"] == 2
    assert tier._owned.slots.counts()[SMALL] == (32, 31), "a slot leaked"
    tier._owned.slots.check()
    assert held(tier, [5]) == {5}
    tier.delete(key_of(5))
    vanish(tier)
    tier = open_tier(tmp_path)
    assert held(tier, [5]) == set(), "the other copy came back"
    tier.close()


def test_long_logs_are_read_in_the_background(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = open_tier(tmp_path)
    put(tier, *range(40))
    put(tier, 41)
    vanish(tier)
    monkeypatch.setattr(upkeep, "INLINE_BYTES", 10 * RECORD_BYTES)
    monkeypatch.setattr(follower, "INLINE_BYTES", 10 * RECORD_BYTES)
    tier = open_tier(tmp_path)
    assert tier.figures()["inventory_complete"] == 0
    assert tier.exists([key_of(0)]) == [False]
    monkeypatch.undo()
    tier.maintain()
    assert tier.figures()["inventory_complete"] == 1
    assert held(tier, range(40)) == set(range(40))
    tier.close()


def test_a_store_that_was_never_finished_is_swept(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    put(tier, 1)
    stores = tmp_path / NAMESPACE / "stores"
    unborn = stores / "1-abc-0.tmp"
    for path in (unborn, stores / "2-abc-0.tmp", stores / "foreign"):
        path.mkdir()
    (unborn / "lock").touch()
    (unborn / "index.log").touch()
    for path in (unborn, stores / "foreign"):
        os.utime(path, (0, 0))
    tier.maintain()
    assert not unborn.exists()
    assert (stores / "2-abc-0.tmp").exists(), "its maker may live"
    assert (stores / "foreign").exists()
    assert tier.figures()["upkeep_failures"] == 0
    tier.close()
