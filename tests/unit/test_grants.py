"""What a grant takes, and where it cuts."""

from __future__ import annotations

import pytest

from kvtier.core.grants import Plan, plan
from kvtier.core.policies.lru import LRU
from kvtier.core.pool import BlockPool
from kvtier.core.types import BlockKey, TierId
from kvtier.testing.engine import key_of

WINDOW = 5
NO_WINDOWS: frozenset[int] = frozenset()


def keys(*blocks: int, group: int = 0) -> list[BlockKey]:
    return [key_of(i, group) for i in blocks]


def planned(
    pool: BlockPool, scan: list[BlockKey], budget: int, windows: frozenset[int] = NO_WINDOWS
) -> Plan:
    wishes = {k: TierId(0) for k in scan if k not in pool.blocks}
    return plan(scan, wishes, pool, budget, windows)


@pytest.fixture
def pool() -> BlockPool:
    """Block 0 is readable and idle, 1 readable and pinned, 2 is being filled."""
    pool = BlockPool(8, LRU(8))
    blocks, _ = pool.allocate(keys(0, 1, 2), object())
    for block in blocks[:2]:
        pool.publish(block)
    pool.unpin(blocks[0])
    return pool


def test_what_it_takes(pool: BlockPool) -> None:
    granted = planned(pool, keys(0, 1, 2, 3, 4), 8)
    assert granted.missing == tuple(keys(3, 4))
    assert granted.resident == tuple(keys(0, 1))
    assert granted.filling == tuple(keys(2))
    assert granted.slots == 3, "two promoted, one idle resident; the pinned one is not available"
    assert granted.budget == 4
    assert granted.cut == ()


def test_a_block_that_is_held_counts_once(pool: BlockPool) -> None:
    pool.blocks[key_of(0)].holds = 1
    assert planned(pool, keys(0, 3), 8).budget == 1


def test_repeats_count_once(pool: BlockPool) -> None:
    granted = planned(pool, keys(0, 3, 0, 3), 8)
    assert granted.missing == tuple(keys(3))
    assert granted.budget == 2


def test_exactly_the_budget_is_not_cut(pool: BlockPool) -> None:
    assert planned(pool, keys(3, 4, 5), 3).cut == ()
    assert planned(pool, keys(3, 4, 5), 2).cut == tuple(keys(5))


def test_the_head_is_kept(pool: BlockPool) -> None:
    granted = planned(pool, keys(*range(3, 20)), 4)
    assert granted.missing == tuple(keys(3, 4, 5, 6))
    assert granted.cut == tuple(keys(*range(7, 20)))


def test_full_groups_are_cut_at_the_same_boundary(pool: BlockPool) -> None:
    scan = keys(*range(10, 20)) + keys(*range(10, 20), group=1)
    granted = planned(pool, scan, 9)
    assert granted.missing == tuple(keys(*range(10, 14)) + keys(*range(10, 14), group=1))


def test_a_cut_leaves_room_for_the_windows_and_lets_the_engine_ask_again(pool: BlockPool) -> None:
    scan = keys(*range(10, 20)) + keys(19, 18, group=WINDOW)
    granted = planned(pool, scan, 6, frozenset({WINDOW}))
    assert granted.missing == tuple(keys(10, 11, 12, 13)), "6 less a window of 2, no window yet"
    assert granted.cut == tuple(keys(*range(14, 20))), "the windows are not denied"


def test_windows_that_do_not_fit_deny_everything(pool: BlockPool) -> None:
    scan = keys(*range(10, 20)) + keys(19, 18, group=WINDOW)
    granted = planned(pool, scan, 2, frozenset({WINDOW}))
    assert granted.missing == ()
    assert set(granted.cut) == set(scan)


def test_windows_are_granted_when_only_residents_are_beyond_the_budget() -> None:
    pool = BlockPool(8, LRU(8))
    blocks, _ = pool.allocate(keys(*range(6)), object())
    for block in blocks:
        pool.publish(block)
        pool.unpin(block)
    scan = keys(*range(6)) + keys(5, 4, group=WINDOW)
    granted = planned(pool, scan, 4, frozenset({WINDOW}))
    assert granted.missing == tuple(keys(5, 4, group=WINDOW)), "else the engine waits for ever"
    assert granted.cut == ()
    assert granted.budget <= 4
