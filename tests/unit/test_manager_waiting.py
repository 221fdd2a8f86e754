"""Waiting costs nothing, and ends: requests, deadlines and turns as the manager keeps them."""

from __future__ import annotations

import pytest

from kvtier.core.types import BlockKey, Done, JobId, Lookup
from kvtier.testing.engine import Groups, key_of, scan
from kvtier.testing.world import T0, T1, World


class CountingDict(dict):  # type: ignore[type-arg]
    """Counts what is looked up in it."""

    touched = 0

    def get(self, key: object, default: object = None) -> object:
        self.touched += 1
        return super().get(key, default)

    def __getitem__(self, key: object) -> object:
        self.touched += 1
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.touched += 1
        return super().__contains__(key)


@pytest.mark.parametrize("groups", [Groups(), Groups((0, 1), {2: 3})])
def test_a_re_ask_looks_nothing_up(groups: Groups) -> None:
    world = World(4096, 4096, groups=groups)
    blocks, beliefs = CountingDict(), CountingDict()
    world.pool.blocks = world.manager._blocks = blocks
    world.manager.ledger.presence[0].beliefs = world.manager._beliefs[0] = beliefs
    world.hung.add(T0)
    world.open("a", range(1000))
    assert world.ask("a") is None
    world.step()
    blocks.touched = beliefs.touched = 0
    calls = 0
    request = world.requests["a"]

    def lookup(key: BlockKey) -> Lookup:
        nonlocal calls
        calls += 1
        return world.manager.lookup(request, key)  # type: ignore[arg-type]

    assert scan(lookup, world.prompts["a"], groups) is None
    assert calls <= 2 * len(groups.full) + sum(n + 1 for n in (groups.windows or {}).values())
    assert blocks.touched == beliefs.touched == 0
    assert world.manager.end_step() == []


def test_waiting_for_a_turn_plans_nothing_until_something_comes_free() -> None:
    world = World(8, 4)
    for name, prompt in {"a": range(4), "b": range(10, 14)}.items():
        world.fill(T0, prompt)
        world.open(name, prompt)
    for _ in range(3):
        world.ask("a")
        world.ask("b")
        world.step()
    blocks, beliefs = CountingDict(world.pool.blocks), CountingDict(world.manager._beliefs[0])
    world.pool.blocks = world.manager._blocks = blocks
    world.manager.ledger.presence[0].beliefs = world.manager._beliefs[0] = beliefs
    assert world.manager.end_step() == []
    assert blocks.touched == beliefs.touched == 0
    world.manager.begin_step(world.now)
    world.manager.finish_request("a")
    (read,) = world.manager.end_step()
    assert len(read.keys) == 4


def test_every_full_group_defers_a_waiting_request() -> None:
    """A MISS for the first key of the second group would end the wait with no hit."""
    world = World(16, 16, groups=Groups((0, 1)))
    world.fill(T0, range(4))
    world.open("a", range(4))
    world.hung.add(T0)
    assert world.ask("a") is None
    world.step()
    assert world.ask("a") is None
    world.answer(world.stuck.pop())
    world.hung.clear()
    world.step()
    assert world.until_answered("a") == 4


def test_a_hung_tier_costs_its_own_budget_and_nothing_else() -> None:
    world = World(16, 4, writing=3, tiers=2, wait_max_s=5.0)
    world.hung.add(T1)
    for n in range(0, 40, 2):
        assert len(world.store("x", [n, n + 1])) == 2, "stores go on"
        world.step(0.01)
    assert world.manager.ledger.cascades.writing == [0, 3]
    assert world.holding[T0] == {key_of(i) for i in range(40)}
    assert world.manager.ledger.cascades.skipped[T1] > 0
    world.open("a", [100, 101])
    assert world.ask("a") is None
    world.step(4.9)
    assert world.ask("a") is None
    world.step(0.2)
    assert world.ask("a") == 0, "at its deadline it gets an answer"
    assert world.pool.pinned == 3


def test_a_hung_promotion_is_given_up_and_its_slots_wait_for_its_end() -> None:
    world = World(4, 4, job_deadline_s=5.0, wait_max_s=30.0)
    world.fill(T0, range(3))
    world.open("a", range(3))
    assert world.ask("a") is None
    world.step()
    world.hung.add(T0)
    assert world.ask("a") is None
    world.step(5.0)
    assert world.ask("a") == 0, "given up: believed absent"
    assert world.pool.pinned == 3, "the read may still land"
    world.answer(world.stuck.pop())
    world.step()
    assert world.pool.pinned == 0
    assert not world.pool.blocks, "what came too late is not readable"
    world.manager.finish_request("a")
    world.whole()


def test_the_deadline_is_one_per_request_over_all_rounds() -> None:
    world = World(4, 4, wait_max_s=5.0)
    world.hung.add(T0)
    world.open("a", [0])
    assert world.ask("a") is None
    world.step(3.0)
    world.answer(world.stuck.pop())
    world.fill(T0, [0])
    world.inbox.clear()
    world.inbox.append(Done(JobId(1), frozenset({key_of(0)})))
    world.step()
    assert world.ask("a") is None, "second round: the promotion"
    world.step(1.9)
    assert world.ask("a") is None
    world.step(0.1)
    assert world.ask("a") == 0


def test_late_bytes_serve_others() -> None:
    world = World(4, 4, wait_max_s=5.0)
    world.fill(T0, [0])
    world.open("a", [0])
    assert world.ask("a") is None
    world.step()
    world.hung.add(T0)
    assert world.ask("a") is None
    world.step(5.0)
    assert world.ask("a") == 0
    world.answer(world.stuck.pop())
    world.step()
    assert not world.requests["a"].held  # type: ignore[attr-defined]
    world.open("b", [0])
    assert world.ask("b") == 1


def test_a_hold_ends() -> None:
    world = World(4, 4, hold_s=2.0)
    world.fill(T0, [0, 1])
    world.open("a", [0, 1])
    assert world.until_answered("a") == 2
    assert world.pool.pinned == 2
    world.step(2.0)
    assert world.pool.pinned == 0
    assert world.manager.ledger.promoting == 0
    assert world.manager.ledger.counts.expired_holds == 2
    assert world.ask("a") == 2, "readable until somebody needs the slots"


def test_a_request_waits_for_its_turn_holding_nothing() -> None:
    world = World(8, 4)
    for name, prompt in {"a": range(4), "b": range(10, 14)}.items():
        world.fill(T0, prompt)
        world.open(name, prompt)
    for _ in range(5):
        hit = world.ask("a")
        assert world.ask("b") is None
        world.step()
    assert hit == 4
    assert not world.requests["b"].held  # type: ignore[attr-defined]
    world.load("a", 4)
    world.step()
    assert world.ask("b") == 4


def test_who_waits_for_its_turn_is_not_overtaken_and_holds_nothing() -> None:
    world = World(12, 4)
    for name, prompt in {"a": [0, 1], "b": [20, 10, 11, 12], "c": [30]}.items():
        world.fill(T0, set(prompt) - {20})
        world.open(name, prompt)
    assert world.until_answered("a") == 2
    for name in ("b", "c"):
        assert world.ask(name) is None
    world.step()
    storing = world.manager.prepare_store("x", [key_of(20)])
    for name in ("b", "c"):
        assert world.ask(name) is None
    world.step()
    assert world.requests["b"].queued  # type: ignore[attr-defined]
    assert not world.reads[key_of(30)], "c came later, and its one block would have fitted"
    world.manager.complete_store(storing)
    world.manager.check()
    assert not world.requests["b"].held  # type: ignore[attr-defined]
    world.load("a", 2)
    world.step()
    assert world.ask("b") == 4


def test_settling_in_the_step_of_the_question_leaves_no_wait() -> None:
    """One group says RETRY, another MISS: the engine goes on without a hit."""
    world = World(4, 4)
    request = world.manager.open_request("a")
    assert world.manager.lookup(request, key_of(0)) is Lookup.RETRY
    world.manager.settle_request("a")
    world.manager.end_step()
    assert not request.waiting
    world.manager.check()


def test_who_was_settled_asks_afresh_even_in_the_same_step() -> None:
    world = World(8, 4)
    world.store("x", [0])
    world.hung.add(T0)
    world.open("a", [0, 1])
    assert world.ask("a") is None
    world.step()
    assert world.ask("a") is None
    world.manager.settle_request("a")
    request = world.requests["a"]
    assert world.manager.lookup(request, key_of(0)) is Lookup.HIT


def test_a_deadline_in_the_step_of_the_question_is_the_end() -> None:
    world = World(4, 4, wait_max_s=5.0)
    request = world.manager.open_request("a")
    assert world.manager.lookup(request, key_of(0)) is Lookup.RETRY
    world.manager.begin_step(5.0)
    world.manager.end_step()
    assert not request.waiting
    assert world.manager.lookup(request, key_of(0)) is Lookup.MISS


def test_a_budget_beyond_the_pool_is_cut_to_the_pool() -> None:
    world = World(4, 100)
    world.fill(T0, range(10))
    world.open("a", range(10))
    assert world.until_answered("a") == 4


def test_a_deadline_is_shortened_and_never_put_off() -> None:
    world = World(8, 8, wait_max_s=30.0)
    world.fill(T0, range(2))
    world.open("a", range(2))
    assert world.ask("a") is None
    request = world.requests["a"]
    world.manager._hurry(request, 2.0)
    assert request.deadline == 2.0
    world.manager._hurry(request, 5.0)
    assert request.deadline == 2.0
