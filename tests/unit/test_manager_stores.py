"""Stores and cascades: what is taken, offered, owed and written once."""

from __future__ import annotations

import pytest

from kvtier.core.types import Done, Lookup
from kvtier.testing.engine import key_of
from kvtier.testing.world import T0, World


def test_the_longest_head_that_fits_by_position_over_groups() -> None:
    world = World(5, 5)
    keys = [key_of(i, g) for g in (0, 1) for i in range(4)]
    slots = world.manager.prepare_store("x", keys, lambda k: int.from_bytes(k[:8], "big"))
    assert list(slots) == [key_of(0), key_of(1), key_of(2), key_of(0, 1), key_of(1, 1)]
    assert world.manager.ledger.counts.unstored_blocks == 3


def test_without_positions_the_order_given_decides() -> None:
    world = World(2, 2)
    assert list(world.manager.prepare_store("x", [key_of(i) for i in (3, 1, 2)])) == [
        key_of(3),
        key_of(1),
    ]


def test_a_store_of_nothing_new_takes_nothing() -> None:
    world = World(4, 4)
    world.store("x", [0, 1])
    assert world.manager.prepare_store("y", [key_of(0), key_of(1)]) == {}
    filling = world.manager.prepare_store("y", [key_of(2)])
    assert world.manager.prepare_store("z", [key_of(2)]) == {}, "another request stores it"
    assert filling


def test_completing_what_is_not_being_stored_is_ignored() -> None:
    world = World(4, 4)
    world.hang_in_a_promotion("a", 0)
    world.store("x", [1])
    world.manager.complete_store([key_of(0), key_of(1), key_of(7)])
    assert not world.pool.blocks[key_of(0)].ready, "a promotion is not ended by a store"
    world.manager.check()


def test_an_owed_block_is_offered_again_at_its_next_use() -> None:
    world = World(8, 8, writing=2)
    world.store("x", range(5))
    (write,) = world.step()
    assert write.keys == (key_of(0), key_of(1))
    assert world.step() == [], "never queued with a pin"
    assert world.pool.pinned == 0
    world.manager.prepare_load("a", [key_of(3)])
    (again,) = world.step()
    assert again.keys == (key_of(3),)
    world.manager.complete_load("a")
    world.manager.prepare_store("x", [key_of(i) for i in (2, 4, 2)])
    (again,) = world.step()
    assert again.keys == (key_of(2), key_of(4)), "a key named twice is offered once"
    world.whole()


def test_an_evicted_block_is_not_owed_any_more() -> None:
    world = World(2, 2, writing=1)
    world.store("x", [0, 1])
    world.step()
    world.store("x", [2, 3])
    assert world.manager.ledger.cascades.owed == [{key_of(3): None}]


def test_a_block_that_a_tier_holds_is_not_written_again() -> None:
    world = World(1, 1)
    world.store("x", [0])
    world.step()
    world.step()
    world.store("x", [1])
    world.step()
    world.step()
    world.store("x", [0])
    assert world.step() == []


def test_a_store_that_ends_in_parts_may_outlive_its_first_block() -> None:
    """The first part is evicted and stored again before the second part ends."""
    world = World(2, 2)
    world.hung.add(T0)
    slots = world.manager.prepare_store("x", [key_of(0), key_of(1)])
    world.manager.complete_store([key_of(0)])
    (write,) = world.step()
    world.inbox.append(Done(write.job))
    world.step()
    world.manager.prepare_store("y", [key_of(2)])
    world.manager.complete_store([key_of(2)], bad={key_of(2)})
    again = world.manager.prepare_store("y", [key_of(0)])
    assert set(again) == {key_of(0)}
    world.manager.complete_store([key_of(1), key_of(0)])
    assert world.pool.blocks[key_of(0)].ready
    assert world.pool.blocks[key_of(1)].ready
    assert set(slots) == {key_of(0), key_of(1)}
    world.manager.check()


def test_heads_outlive_tails() -> None:
    world = World(4, 4)
    world.open("a", range(4))
    world.store("a", range(4))
    world.step()
    world.step()
    world.manager.finish_request("a")
    world.store("b", [10, 11])
    assert {key_of(0), key_of(1)} <= set(world.pool.blocks)


@pytest.mark.parametrize("first", range(0, 400, 25))
def test_a_store_that_ends_in_parts_ends_only_what_is_still_its_own(first: int) -> None:
    """The order in which keys of a set come is by chance, so there are several."""
    world = World(4, 4)
    lost, kept = key_of(first), key_of(first + 1)
    world.manager.prepare_store("a", [lost, kept])
    world.manager.complete_store([lost])
    for _ in range(2):
        world.step()
    filler = [key_of(first + i) for i in range(2, 5)]
    world.manager.complete_store(world.manager.prepare_store("b", filler))  # evicts the lost one
    for _ in range(2):
        world.step()
    assert list(world.manager.prepare_store("c", [lost])) == [lost], "it is stored anew"
    world.manager.complete_store([lost, kept])
    world.manager.check()
    request = world.manager.open_request("d")
    assert [world.manager.lookup(request, key) for key in (lost, kept)] == [Lookup.HIT] * 2
