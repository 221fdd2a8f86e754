"""Lending to tiers: what is answered, for how long it stays, and what is read for it."""

from __future__ import annotations

import pytest

from kvtier.core.types import BlockKey, Done, Lookup, Probe, Read, Renewed, Wanted
from kvtier.testing.engine import Groups, key_of
from kvtier.testing.world import T0, T1, World, asked


def keys(*blocks: int, group: int = 0) -> list[BlockKey]:
    return [key_of(i, group) for i in blocks]


def lender(slots: int = 8, lending: int = 4, **limits: object) -> World:
    """A world with two tiers, the second of which asks for blocks."""
    return World(slots, 4, tiers=2, lending_max=lending, lease_s=5.0, lease_max_s=12.0, **limits)


def test_the_answer_is_what_is_readable_now() -> None:
    world = lender()
    world.store("x", [0, 1])
    filling = world.manager.prepare_store("x", keys(2))
    world.step()
    world.want(T1, 7, keys(1, 9, 0, 2, 1))
    world.step()
    world.step()
    (lend,) = world.lends
    assert (lend.tier, lend.ticket, lend.epoch) == (T1, 7, 0)
    assert list(lend.keys) == keys(1, 0)
    assert [world.pool.blocks[k].slot for k in lend.keys] == list(lend.slots)
    assert list(lend.missing) == keys(9, 2), "what is being filled is not readable"
    world.give_back(lend)
    world.manager.complete_store(filling)
    world.step()
    world.whole()


def test_what_is_lent_is_not_evicted() -> None:
    world = lender(slots=4, lending=2)
    world.store("x", [0, 1])
    world.want(T1, 1, keys(0, 1))
    world.step()
    world.step()
    for n in range(10, 30):
        world.store("x", [n])
        world.step()
    assert {key_of(0), key_of(1)} <= world.pool.blocks.keys()
    world.give_back(world.lends[0])
    world.step()
    world.store("x", [40, 41, 42, 43])
    assert key_of(0) not in world.pool.blocks
    world.whole()


def test_no_more_is_lent_than_may_be() -> None:
    world = lender(lending=3)
    world.store("x", range(4))
    world.want(T1, 1, keys(0, 1))
    world.want(T1, 2, keys(1, 2, 3))
    world.step()
    world.step()
    first, second = world.lends
    assert list(second.keys) == keys(1)
    assert list(second.missing) == keys(2, 3)
    assert world.manager.ledger.lending.refused == 2
    world.give_back(first)
    world.want(T1, 3, keys(2, 3))
    world.step()
    world.step()
    assert list(world.lends[-1].keys) == keys(2, 3)


def test_a_lease_ends_but_its_slots_wait_for_the_tier() -> None:
    world = lender()
    world.store("x", [0])
    world.want(T1, 1, keys(0))
    world.step()
    world.step()
    (lend,) = world.lends
    assert world.manager.busy
    world.step(5.0)
    assert not world.manager.busy, "nothing is promised any more"
    assert world.pool.pinned == 1, "it may still be reading"
    assert world.manager.ledger.lending.lent == 1
    world.give_back(lend)
    world.whole()


@pytest.mark.parametrize(
    ("renewals", "ends"), [([], 5), ([4], 9), ([4, 8], 12), ([5], 5), ([4, 8, 11], 12)]
)
def test_a_lease_is_renewed_in_time_and_up_to_its_bound(renewals: list[int], ends: int) -> None:
    world = lender()
    world.store("x", [0])
    world.step()
    world.want(T1, 1, keys(0))
    world.step()
    world.step()
    (lend,) = world.lends
    for now in range(1, 14):
        if now in renewals:
            world.inbox.append(Renewed(lend.job))
        world.step(1.0)
        assert world.manager.busy == (now < ends), now
    world.inbox.append(Renewed(lend.job))
    world.step()
    assert not world.manager.busy, "too late"


def test_renewals_and_ends_of_no_lease_are_ignored() -> None:
    world = lender()
    world.inbox += [Renewed(99), Done(98)]  # type: ignore[arg-type]
    world.step()
    world.whole()


def test_what_other_tiers_hold_is_promoted_first_and_the_tier_that_asks_is_not_asked() -> None:
    world = lender()
    world.fill(T0, [0, 2])
    world.fill(T1, [0, 1, 2])
    world.want(T1, 1, keys(0, 1, 2), promote=True)
    commands = []
    for _ in range(5):
        commands += world.step()
    assert asked(commands, T1) == []
    assert asked(commands, T0) == [Probe, Read]
    (lend,) = world.lends
    assert list(lend.keys) == keys(0, 2)
    assert list(lend.missing) == keys(1)
    assert world.manager.ledger.promoting == 0, "lent is not held"
    world.give_back(lend)
    world.step()
    world.whole()


def test_a_gap_in_a_window_group_costs_a_borrower_only_its_block() -> None:
    """For a request a gap rules out the window; each block that is lent counts by itself."""
    world = lender(groups=Groups((0,), {1: 2}))
    wanted = keys(0, 1, 2, group=1)
    world.holding[T0] = {wanted[0], wanted[2]}
    world.want(T1, 1, wanted, promote=True)
    for _ in range(5):
        world.step()
    (lend,) = world.lends
    assert list(lend.keys) == [wanted[0], wanted[2]]


def test_no_more_is_promoted_for_a_tier_than_may_be_lent() -> None:
    world = lender(lending=2)
    world.fill(T0, range(4))
    world.want(T1, 1, keys(0, 1, 2, 3), promote=True)
    for _ in range(5):
        world.step()
    assert world.reads.total() == 2
    (lend,) = world.lends
    assert list(lend.keys) == keys(0, 1)


def test_where_nothing_may_be_lent_nothing_is_read() -> None:
    world = lender(lending=0)
    world.fill(T0, [0])
    world.want(T1, 1, keys(0), promote=True)
    commands = world.step() + world.step()
    assert asked(commands, T0) == []
    assert [list(lend.missing) for lend in world.lends] == [keys(0)]


def test_those_who_wait_to_borrow_are_few() -> None:
    world = lender(lending=2)
    world.hung.add(T0)
    for ticket in range(5):
        world.want(T1, ticket, keys(ticket), promote=True)
    world.step()
    world.step()
    assert [lend.ticket for lend in world.lends] == [2, 3, 4], "answered at once, as missing"
    assert len(world.manager._borrowers) == 2


def test_a_borrower_waits_no_longer_than_a_request() -> None:
    world = lender(wait_max_s=3.0)
    world.store("x", [0])
    world.hung.add(T0)
    world.want(T1, 1, keys(0, 1), promote=True)
    world.step()
    world.step(2.9)
    world.step(0.1)
    assert world.lends == []
    world.step()
    (lend,) = world.lends
    assert list(lend.keys) == keys(0), "what is readable is lent all the same"


def test_a_borrower_waits_for_its_turn_and_overtakes_nobody() -> None:
    world = lender(slots=16)
    for n in range(3):
        world.fill(T0, range(10 * n, 10 * n + 4))
    world.open("a", range(4))
    world.until_answered("a")
    world.open("b", range(10, 14))
    world.ask("b")
    world.step()
    world.ask("b")
    world.want(T1, 1, keys(20, 21), promote=True)
    for _ in range(4):
        world.step()
        assert world.ask("b") is None
    assert world.lends == []
    world.load("a", 4)
    world.loaded("a")
    assert world.until_answered("b") == 4
    world.load("b", 4)
    world.loaded("b")
    for _ in range(4):
        world.step()
    assert list(world.lends[0].keys) == keys(20, 21)


# -- reset --------------------------------------------------------------------


@pytest.mark.parametrize("keep", [True, False])
def test_an_answer_that_was_not_sent_lends_nothing_after_a_reset(keep: bool) -> None:
    world = lender()
    world.store("x", [0])
    world.step()
    world.manager.begin_step(0.0, [Wanted(T1, 5, (key_of(0), key_of(1)))])
    world.manager.reset(keep_tiers=keep)
    world.manager.check()
    (lend,) = world.manager.end_step()
    assert (lend.ticket, lend.keys, lend.slots) == (5, (), ())
    assert set(lend.missing) == {key_of(0), key_of(1)}
    assert lend.epoch == world.manager.epoch == (not keep)
    assert world.pool.available == 8
    world.inbox.append(Done(lend.job))
    world.step()
    world.whole()


@pytest.mark.parametrize("keep", [True, False])
def test_what_is_lent_survives_a_reset_until_the_tier_is_done(keep: bool) -> None:
    world = lender(slots=2)
    world.store("x", [0])
    world.step()
    world.want(T1, 1, keys(0))
    world.step()
    world.step()
    (lend,) = world.lends
    world.manager.reset(keep_tiers=keep)
    world.manager.fence_passed()
    slots = world.manager.prepare_store("y", keys(5, 6))
    assert list(slots) == keys(5)
    assert set(slots.values()).isdisjoint(lend.slots)
    world.manager.complete_store(slots)
    world.inbox.append(Renewed(lend.job))
    world.step()
    world.step()
    assert world.manager.busy == keep, "under a new epoch nothing old is promised"
    world.give_back(lend)
    world.step()
    world.whole()


def test_a_borrower_of_an_old_epoch_gets_nothing_of_the_new_one() -> None:
    world = lender()
    world.fill(T0, [0])
    world.hung.add(T0)
    world.want(T1, 1, keys(0), promote=True)
    world.step()
    world.step()
    world.manager.reset()
    world.store("y", [0])
    world.hung.clear()
    for _ in range(3):
        world.step()
    (lend,) = world.lends
    assert (lend.keys, list(lend.missing), lend.epoch) == ((), keys(0), 1)


def test_a_borrower_goes_on_after_a_reset_that_keeps_the_tiers() -> None:
    world = lender()
    world.fill(T0, [0])
    world.want(T1, 1, keys(0), promote=True)
    world.step()
    world.step()
    world.manager.reset(keep_tiers=True)
    for _ in range(5):
        world.step()
    assert [list(lend.keys) for lend in world.lends] == [keys(0)]


def test_a_block_that_is_lent_is_readable_for_requests_too() -> None:
    world = lender()
    world.store("x", [0])
    world.want(T1, 1, keys(0))
    world.step()
    world.step()
    request = world.manager.open_request("a")
    assert world.manager.lookup(request, key_of(0)) is Lookup.HIT
