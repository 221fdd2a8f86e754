"""The primary tier as bookkeeping: keys die early, slots die late."""

from __future__ import annotations

import pytest

from kvtier.core.policies.lru import LRU
from kvtier.core.pool import Block, BlockPool
from kvtier.testing.engine import key_of

A, B, C, D = (key_of(i) for i in range(4))
FILL = object()


def filled(pool: BlockPool, *keys: bytes) -> list[Block]:
    """Blocks that are ready and evictable, stored in this order."""
    blocks, _ = pool.allocate(keys, FILL)  # type: ignore[arg-type]
    for block in blocks:
        pool.publish(block)
        pool.unpin(block)
    pool.check()
    return blocks


@pytest.fixture
def pool() -> BlockPool:
    return BlockPool(3, LRU(3))


def test_free_slots_are_used_before_anything_is_evicted(pool: BlockPool) -> None:
    filled(pool, A, B)
    _, evicted = pool.allocate([C], FILL)
    assert evicted == []
    assert pool.available == 2


def test_the_least_recently_used_is_evicted(pool: BlockPool) -> None:
    filled(pool, A, B, C)
    pool.touch([A])
    _, evicted = pool.allocate([D], FILL)
    assert evicted == [B]
    assert set(pool.blocks) == {A, C, D}
    pool.check()


def test_touching_in_order_makes_the_last_the_most_recent(pool: BlockPool) -> None:
    filled(pool, A, B, C)
    pool.touch([C, B, A])
    _, evicted = pool.allocate([D], FILL)
    assert evicted == [C]


def test_a_pinned_block_is_not_evicted(pool: BlockPool) -> None:
    a, _, _ = filled(pool, A, B, C)
    pool.pin(a)
    assert (pool.available, pool.pinned) == (2, 1)
    _, evicted = pool.allocate([D], FILL)
    assert evicted == [B]
    pool.check()


def test_a_block_with_two_readers_is_evictable_after_the_last(pool: BlockPool) -> None:
    (a,) = filled(pool, A)
    pool.pin(a)
    pool.pin(a)
    pool.unpin(a)
    assert not pool.evictable(a)
    pool.unpin(a)
    assert pool.evictable(a)
    pool.check()


def test_a_filling_block_is_neither_readable_nor_evictable(pool: BlockPool) -> None:
    (a,), _ = pool.allocate([A], FILL)
    assert not a.ready
    assert not pool.evictable(a)
    assert pool.available == 2
    with pytest.raises(AssertionError, match="readable"):
        pool.pin(a)


def test_a_forgotten_slot_is_free_when_its_last_reader_ends(pool: BlockPool) -> None:
    a, _, _ = filled(pool, A, B, C)
    pool.pin(a)
    pool.forget(a)
    assert A not in pool.blocks
    assert pool.available == 2
    new, evicted = pool.allocate([A, D], FILL)
    assert evicted == [B, C], "the condemned slot was not given away"
    assert a.slot not in {b.slot for b in new}
    pool.unpin(a)
    assert pool.available == 1
    pool.check()


def test_a_forgotten_idle_block_is_free_at_once(pool: BlockPool) -> None:
    a, _ = filled(pool, A, B)
    pool.forget(a)
    assert pool.used == 1
    assert pool.available == 3
    pool.check()


def test_slots_are_distinct(pool: BlockPool) -> None:
    blocks, _ = pool.allocate([A, B, C], FILL)
    assert sorted(b.slot for b in blocks) == [0, 1, 2]
    assert pool.available == 0


def test_misuse_is_noticed(pool: BlockPool) -> None:
    (a,) = filled(pool, A)
    with pytest.raises(AssertionError, match="more often"):
        pool.unpin(a)
    with pytest.raises(AssertionError, match="twice"):
        pool.publish(a)
    with pytest.raises(AssertionError, match="already in the pool"):
        pool.allocate([A], FILL)
    with pytest.raises(AssertionError, match="available"):
        pool.allocate([B, C, D, key_of(9)], FILL)
    pool.pin(a)
    pool.forget(a)
    with pytest.raises(AssertionError, match="twice"):
        pool.forget(a)
