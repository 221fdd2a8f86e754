"""The manager, told as stories: an engine that scans as vLLM does, tiers that hold everything."""

from __future__ import annotations

from collections import Counter

import pytest

from kvtier.core.policies.lru import LRU
from kvtier.core.types import (
    BlockKey,
    Cleared,
    Done,
    Dropped,
    JobId,
    Lookup,
    Probe,
    Reason,
    Removed,
    Stored,
)
from kvtier.testing.engine import Groups, key_of, scan
from kvtier.testing.world import T0, T1, World

# -- prefixes longer than the pool, more requests than slots ------------------


@pytest.mark.parametrize("length", [17, 32, 160])
@pytest.mark.parametrize("promoting", [16, 8])
def test_a_prefix_longer_than_the_pool_gets_what_fits(length: int, promoting: int) -> None:
    world = World(16, promoting)
    world.fill(T0, range(length))
    world.open("a", range(length))
    hit = world.until_answered("a", most=4)
    assert hit == promoting
    world.load("a", hit)
    assert world.reads == Counter({key_of(i): 1 for i in range(hit)}), "each block read once"
    world.loaded("a")
    world.whole()


@pytest.mark.parametrize("length", [17, 32, 160])
@pytest.mark.parametrize(
    ("groups", "right"), [(Groups((0,), {1: 2}), 14), (Groups((0, 1), {2: 2}), 7)]
)
def test_a_long_prefix_of_several_groups_gets_what_fits(
    length: int, groups: Groups, right: int
) -> None:
    """Windows are promoted at the boundary of the cut, not at the end of the prompt."""
    world = World(16, 16, groups=groups)
    world.fill(T0, range(length))
    world.open("a", range(length))
    hit = world.until_answered("a", most=6)
    assert hit == right
    world.load("a", hit)
    assert world.reads.total() == world.used, "nothing was read in vain"
    world.loaded("a")
    world.whole()


@pytest.mark.parametrize("waiting", [8, 16, 32])
@pytest.mark.parametrize("shared", [0, 8])
def test_waiting_requests_are_served_in_waves(waiting: int, shared: int) -> None:
    """Four fit at a time; the device takes one per step."""
    world = World(64, 64)
    for n in range(waiting):
        prompt = [*range(shared), *range(1000 * (n + 1), 1000 * (n + 1) + 16 - shared)]
        world.fill(T0, prompt)
        world.open(str(n), prompt)
    served = 0
    for _ in range(4 * waiting):
        answers = {name: world.ask(name) for name in world.requests}
        ready = [name for name, hit in answers.items() if hit is not None]
        assert all(answers[name] == 16 for name in ready), "a hit was lost"
        if ready:
            world.load(ready[0], 16)
        world.step(0.1)
        if ready:
            world.loaded(ready[0])
            served += 1
        if not world.requests:
            break
    assert served == waiting
    distinct = shared + waiting * (16 - shared)
    assert world.reads.total() <= 1.05 * distinct
    world.whole()


@pytest.mark.parametrize("delay", [1, 3])
def test_waiting_requests_that_are_cut_at_windows_are_served_in_waves(delay: int) -> None:
    """Each gets 10 of its 16 blocks and a window of 2: the budget of 12, one after the other."""
    world = World(64, 12, groups=Groups((0,), {1: 2}))
    for n in range(8):
        world.fill(T0, range(1000 * n, 1000 * n + 16))
        world.open(str(n), range(1000 * n, 1000 * n + 16))
    world.hung.add(T0)
    for step in range(60 * delay):
        for name in tuple(world.requests):
            hit = world.ask(name)
            if hit is not None:
                assert hit == 10
                world.load(name, hit)
                world.loaded(name)
        world.step()
        while step % delay == 0 and world.stuck:
            world.answer(world.stuck.pop())
        if not world.requests:
            break
    assert not world.requests, "all are served"
    assert world.reads.total() == world.used


def test_requests_that_share_a_prefix_share_its_reads_and_all_hold_it() -> None:
    """They ask in the same step: the later ones find it on the tier, then filling."""
    world = World(32, 32)
    for n in range(4):
        world.fill(T0, [0, 1, 2, 100 + n])
        world.open(str(n), [0, 1, 2, 100 + n])
    for _ in range(2):
        assert [world.ask(str(n)) for n in range(4)] == [None] * 4
        world.step()
    assert set(world.reads.values()) == {1}
    assert world.reads.total() == 3 + 4
    for i in range(3):
        block = world.pool.blocks[key_of(i)]
        assert block.pins == block.holds == 4, "every one of them holds the shared blocks"
    for n in range(4):
        assert world.ask(str(n)) == 4
        world.load(str(n), 4)
        world.loaded(str(n))
    world.whole()


def test_a_request_that_meets_a_promotion_holds_what_is_readable_before_it() -> None:
    world = World(4, 4)
    world.store("x", [0])
    world.step()
    world.fill(T0, [1])
    world.hung.add(T0)
    world.open("a", [0, 1])
    world.ask("a")
    world.step()
    world.answer(world.stuck.pop())
    world.step()
    world.ask("a")
    world.step()
    world.open("b", [0, 1])
    assert world.ask("b") is None
    world.step()
    world.manager.finish_request("a")
    assert len(world.store("x", range(10, 20))) == 2, "0 is held by b, 1 is filling"
    world.answer(world.stuck.pop(0))
    world.step()
    assert world.ask("b") == 2


# -- waiting costs nothing, and ends -----------------------------------------


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


# -- failures ----------------------------------------------------------------


def test_a_failed_block_ends_the_hit_in_front_of_it() -> None:
    world = World(8, 8)
    world.fill(T0, range(5))
    world.open("a", range(5))
    assert world.ask("a") is None
    world.step()
    world.holding[T0].discard(key_of(2))
    assert world.ask("a") is None
    world.step()
    assert world.ask("a") == 2
    assert set(world.pool.blocks) == {key_of(i) for i in (0, 1, 3, 4)}, "the others are kept"
    events = world.manager.take_events()
    assert Removed(T0, (key_of(2),), Reason.LOST) in events
    world.load("a", 2)
    world.loaded("a")
    world.whole()


def test_a_failed_block_is_read_from_the_next_tier() -> None:
    world = World(8, 8, tiers=2)
    world.fill(T0, [0])
    world.fill(T1, [0])
    world.open("a", [0])
    assert world.ask("a") is None
    world.step()
    world.holding[T0].clear()
    assert world.until_answered("a") == 1
    assert world.manager.source_of("a", key_of(0)) == T1


@pytest.mark.parametrize("slow_s", [0.0, 1.0])
def test_a_tier_that_answers_is_not_held_up_by_a_slower_one_alone(slow_s: float) -> None:
    """T0 does not answer. It comes first, unless it was measured to be the slower one."""
    world = World(8, 8, tiers=2)
    if slow_s:
        speed = world.manager.ledger.speeds[T0]
        speed.submitted(1)
        speed.ended(1, 1, 0.0, slow_s)
        world.step(slow_s)
    world.hung.add(T0)
    world.fill(T1, [0, 1])
    world.open("a", [0, 1])
    assert world.ask("a") is None
    world.step()
    assert any(isinstance(command, Probe) for command in world.stuck)
    for _ in range(3):
        answer = world.ask("a")
        world.step()
    assert answer == (2 if slow_s else None)


def test_a_store_that_fails_is_never_readable() -> None:
    world = World(4, 4)
    slots = world.manager.prepare_store("x", [key_of(0), key_of(1)])
    world.manager.complete_store(slots, bad={key_of(0)})
    assert set(world.pool.blocks) == {key_of(1)}
    (write,) = world.step()
    assert write.keys == (key_of(1),)
    world.whole()


def test_a_failed_cascade_is_not_believed() -> None:
    world = World(4, 4)
    world.hung.add(T0)
    world.store("x", [0])
    world.step()
    world.inbox.append(Done(world.stuck.pop().job))
    world.step()
    assert Stored(T0, (key_of(0),)) not in world.manager.take_events()
    world.whole()


def test_completions_of_unknown_or_ended_jobs_are_ignored() -> None:
    world = World(4, 4)
    world.store("x", [0])
    (write,) = world.step()
    world.inbox += [Done(write.job), Done(JobId(99), frozenset({key_of(5)}))]
    world.step()
    assert world.manager.ledger.cascades.writing == [0]
    assert not any(isinstance(e, Removed) for e in world.manager.take_events())
    world.whole()


def test_what_was_written_during_a_probe_stays_believed() -> None:
    """The probe looked before the write; its late answer is older news."""
    world = World(4, 4, job_deadline_s=5.0)
    world.hung.add(T0)
    world.open("a", [0])
    assert world.ask("a") is None
    world.step()
    probe = world.stuck.pop()
    assert isinstance(probe, Probe)
    world.hung.clear()
    world.store("x", [0])
    world.step()
    world.inbox.append(Done(probe.job))
    world.step()
    assert not any(isinstance(e, Removed) for e in world.manager.take_events())
    assert world.manager.ledger.presence[0].set_present([key_of(0)]) == []


def test_a_probe_that_is_given_up_does_not_deny_what_was_written_meanwhile() -> None:
    world = World(4, 4, job_deadline_s=5.0)
    world.hung.add(T0)
    world.open("a", [0])
    world.ask("a")
    world.step()
    world.hung.clear()
    world.store("x", [0])
    world.step()
    world.step(5.0)
    assert world.manager.ledger.counts.expired_jobs == [1]
    assert not any(isinstance(e, Removed) for e in world.manager.take_events())


def test_news_between_question_and_probe_is_kept() -> None:
    world = World(4, 4)
    world.hung.add(T0)
    world.store("x", [0])
    world.step()
    write = world.stuck.pop()
    world.manager.reset(keep_tiers=True)
    world.open("a", [0])
    assert world.ask("a") is None
    world.manager.begin_step(0.0, [Done(write.job, frozenset(write.keys))])
    (probe,) = world.manager.end_step()
    world.manager.begin_step(0.0, [Done(probe.job)])
    events = world.manager.take_events()
    assert events.count(Stored(T0, (key_of(0),))) == 1
    assert not any(isinstance(e, Removed) and e.tier == T0 for e in events)


def test_dropped_blocks_are_not_promoted() -> None:
    world = World(4, 4)
    world.fill(T0, [0])
    world.open("a", [0])
    world.ask("a")
    world.step()
    assert world.ask("a") is None
    world.manager.begin_step(0.0, [Dropped(T0, (key_of(0),))])
    assert world.manager.end_step() == [], "the world changed while it waited"
    assert world.ask("a") == 0


# -- stores and cascades -----------------------------------------------------


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
    world.fill(T0, [0])
    world.open("a", [0])
    world.ask("a")
    world.step()
    world.hung.add(T0)
    world.ask("a")
    world.step()
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


# -- windows -----------------------------------------------------------------


def test_of_a_window_group_only_the_window_is_promoted() -> None:
    world = World(32, 32, groups=Groups((), {1: 2}))
    world.fill(T0, range(16))
    world.open("a", range(16))
    assert world.until_answered("a") == 16
    assert set(world.reads) == {key_of(14, 1), key_of(15, 1)}


def test_a_part_of_a_window_is_not_promoted() -> None:
    """Of 0..7 the tier lacks 6: 7 alone is no window, 4 and 5 are."""
    world = World(32, 32, groups=Groups((), {1: 2}))
    world.fill(T0, [0, 1, 2, 3, 4, 5, 7])
    world.open("a", range(8))
    assert world.until_answered("a") == 6
    assert set(world.reads) == {key_of(4, 1), key_of(5, 1)}


# -- reset -------------------------------------------------------------------


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
    world.fill(T0, [0])
    world.open("a", [0])
    world.ask("a")
    world.step()
    world.hung.add(T0)
    world.ask("a")
    world.step()
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


# -- what counts as a use for the eviction policy ------------------------------


class UseCounts(LRU):
    """Counts as the policies do that tell one use from many: all but a key's first `add`."""

    def __init__(self) -> None:
        super().__init__(0)
        self.uses: Counter[BlockKey] = Counter()
        self.added: set[BlockKey] = set()

    def add(self, key: BlockKey) -> None:
        super().add(key)
        self.uses[key] += key in self.added
        self.added.add(key)

    def use(self, key: BlockKey) -> None:
        super().use(key)
        self.uses[key] += key in self

    def of(self, *blocks: int) -> list[int]:
        return [self.uses[key_of(i)] for i in blocks]


def finished(world: World, name: str) -> None:
    world.step()
    world.step()
    world.manager.finish_request(name)


def test_a_store_its_cascade_and_the_end_of_its_request_are_no_use() -> None:
    policy = UseCounts()
    world = World(8, 8, policy=policy)
    world.open("a", range(3))
    world.store("a", range(3))
    finished(world, "a")
    assert policy.of(0, 1, 2) == [0, 0, 0]
    world.whole()


def test_a_load_is_one_use() -> None:
    policy = UseCounts()
    world = World(8, 8, policy=policy)
    world.store("?", range(3))
    finished(world, "?")
    world.open("a", range(2))
    world.load("a", world.until_answered("a"))
    world.loaded("a")
    assert policy.of(0, 1, 2) == [1, 1, 0]


def test_a_promotion_and_its_load_are_no_use_of_it_and_one_of_what_was_there() -> None:
    policy = UseCounts()
    world = World(8, 8, policy=policy)
    world.store("?", range(2))
    world.fill(T0, range(4))
    world.step()
    world.open("a", range(4))
    assert world.until_answered("a") == 4
    world.load("a", 4)
    world.loaded("a")
    assert policy.of(0, 1, 2, 3) == [1, 1, 0, 0], "holds count once with their loads"


@pytest.mark.parametrize("writing", [1, 4])
def test_what_is_there_when_a_request_stores_is_used_once(writing: int) -> None:
    """Also where a tier is owed a block, which is offered again, and pinned for that."""
    policy = UseCounts()
    world = World(8, 8, writing=writing, policy=policy)
    world.store("?", range(3))
    finished(world, "?")
    world.open("a", range(4))
    world.store("a", range(4))
    finished(world, "a")
    assert policy.of(0, 1, 2, 3) == [1, 1, 1, 0]
    world.whole()


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
