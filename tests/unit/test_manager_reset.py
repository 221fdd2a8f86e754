"""Resets and aborts wait for nothing and leave nothing."""

from __future__ import annotations

import pytest

from kvtier.core.types import Cleared
from kvtier.testing.engine import key_of
from kvtier.testing.world import T0, World


@pytest.mark.parametrize("keep", [True, False])
def test_reset_waits_for_nothing_and_reuses_no_slot_in_use(keep: bool) -> None:
    world = World(6, 6, writing=1)
    world.hung.add(T0)
    world.store("x", [0])
    world.step()
    loading = world.manager.prepare_load("x", [key_of(0)])
    storing = world.manager.prepare_store("x", [key_of(1), key_of(2)])
    world.manager.reset(keep_tiers=keep)
    world.manager.check()
    assert world.manager.take_events()[-1] == Cleared(None if keep else T0)
    fresh = world.manager.prepare_store("x", [key_of(i) for i in range(6)])
    assert len(fresh) == 3
    assert set(fresh.values()).isdisjoint({*loading, *storing.values()})
    world.manager.complete_store(fresh)
    world.manager.complete_load("x")
    assert world.pool.available == 3, "ending a transfer from before the reset frees nothing"
    world.manager.fence_passed()
    assert world.pool.available == 5, "the slot that was loaded is still under its cascade"
    world.step()
    for command in world.stuck:
        world.answer(command)
    world.hung.clear()
    world.step()
    world.whole()


def test_a_new_epoch_sees_nothing_of_the_old_one() -> None:
    world = World(8, 8)
    world.hung.add(T0)
    world.store("x", [0])
    world.step()
    world.fill(T0, [0, 1])
    world.open("a", [1])
    world.ask("a")
    world.step()
    old = list(world.stuck)
    world.stuck.clear()
    world.manager.reset(keep_tiers=False)
    for command in old:
        world.answer(command)
    world.step()
    assert world.manager.ledger.presence[0].beliefs == {}, "old answers are not believed"
    world.open("b", [0, 1])
    assert world.ask("b") is None
    (probe,) = world.manager.end_step()
    assert probe.epoch == world.manager.epoch == 1


def test_a_promotion_from_before_a_reset_is_never_readable() -> None:
    world = World(8, 8)
    world.hang_in_a_promotion("a", 0)
    world.manager.reset(keep_tiers=True)
    world.answer(world.stuck.pop())
    world.step()
    assert not world.pool.blocks
    assert not world.requests["a"].waiting  # type: ignore[attr-defined]
    world.whole()


def test_a_cascade_that_was_not_sent_is_recalled() -> None:
    world = World(4, 4, job_deadline_s=5.0)
    world.store("x", [0, 1])
    world.manager.begin_step(5.0)
    world.manager.reset()
    assert world.manager.end_step() == []
    assert not world.manager.busy
    assert world.pool.available == 4
    world.manager.check()


@pytest.mark.parametrize("state", ["new", "probing", "queued", "promoting", "holding", "loading"])
def test_an_abort_in_every_state_leaves_nothing(state: str) -> None:
    world = World(4, 2)
    world.fill(T0, range(4))
    world.open("first", [2, 3])
    if state == "queued":
        assert world.until_answered("first") == 2
    world.open("a", [0, 1])
    if state != "new":
        world.ask("a")
    if state not in {"new", "probing"}:
        world.step()
        if state == "promoting":
            world.hung.add(T0)
        world.ask("a")
        world.step()
    if state == "loading":
        assert world.ask("a") == 2
        world.load("a", 2)
    world.manager.finish_request("a")
    world.manager.finish_request("first")
    world.manager.check()
    for command in world.stuck:
        world.answer(command)
    world.step()
    world.manager.complete_load("a")
    world.whole()
