"""Which tier is read, whether it is worth it, how long a request waits, and who has which share."""

from __future__ import annotations

import pytest

from kvtier.core.health import Patience
from kvtier.core.types import Probe, Read, TierId
from kvtier.testing.engine import Groups, key_of
from kvtier.testing.world import T0, T1, World

PATIENT = Patience(stall_s=1000.0)


def warm_up(world: World, tier: TierId, block: int, seconds: float) -> None:
    """Measure a tier: one block in so many seconds."""
    world.fill(tier, [block])
    world.manager.ledger.presence[tier].set_present([key_of(block)])
    world.open("warm-up", [block], [tier])
    assert world.ask("warm-up") is None
    world.hung.add(tier)
    world.step(seconds)
    world.hung.clear()
    world.answer_stuck()
    assert world.ask("warm-up") is None
    world.step()
    assert world.ask("warm-up") == 1
    world.load("warm-up", 1)
    world.loaded("warm-up")


def tiers_read(world: World, name: str) -> dict[TierId, int]:
    """Blocks read from each tier until a request is answered."""
    reads: dict[TierId, int] = {}
    for _ in range(8):
        if world.ask(name) is not None:
            break
        for command in world.step():
            if isinstance(command, Read):
                reads[command.tier] = reads.get(command.tier, 0) + len(command.keys)
    return reads


# -- among tiers --------------------------------------------------------------


def test_ties_are_broken_by_order() -> None:
    world = World(16, 8, tiers=2)
    world.fill(T0, range(4))
    world.fill(T1, range(4))
    world.open("a", range(4))
    assert tiers_read(world, "a") == {T0: 4}


@pytest.mark.parametrize(("slow", "fast"), [(T0, T1), (T1, T0)])
def test_the_faster_tier_is_read(slow: TierId, fast: TierId) -> None:
    world = World(16, 8, tiers=2, patience=PATIENT)
    warm_up(world, slow, 100, 1.0)
    warm_up(world, fast, 101, 0.1)
    for tier in (slow, fast):
        world.fill(tier, range(4))
    world.open("a", range(4))
    assert tiers_read(world, "a") == {fast: 4}


def test_a_long_queue_makes_a_fast_tier_slow() -> None:
    world = World(32, 32, tiers=2, patience=PATIENT)
    warm_up(world, T0, 100, 0.1)
    warm_up(world, T1, 101, 0.5)
    for tier in (T0, T1):
        world.fill(tier, range(16))
        world.manager.ledger.presence[tier].set_present([key_of(i) for i in range(16)])
    world.hung |= {T0, T1}
    world.open("a", range(8))
    world.ask("a")
    world.step()
    world.open("b", range(8, 16))
    world.ask("b")
    world.step()
    assert [(c.tier, len(c.keys)) for c in world.stuck] == [(T0, 8), (T1, 8)]


def test_a_request_reads_only_from_its_tiers() -> None:
    world = World(16, 8, tiers=2)
    world.fill(T0, range(4))
    world.fill(T1, range(2))
    world.open("a", range(4), [T1])
    assert tiers_read(world, "a") == {T1: 2}
    world.open("b", range(10, 12), [])
    world.fill(T0, range(10, 12))
    assert world.ask("b") == 0


def test_what_each_tier_holds_is_put_together() -> None:
    world = World(16, 8, tiers=2)
    world.fill(T0, [0, 2])
    world.fill(T1, [1, 3])
    world.open("a", range(4))
    assert tiers_read(world, "a") == {T0: 2, T1: 2}
    assert world.ask("a") == 4


# -- load or recompute --------------------------------------------------------


@pytest.mark.parametrize(("block_s", "hit"), [(None, 4), (2.0, 4), (0.5, 0)])
def test_what_is_computed_faster_than_read_is_not_read(block_s: float | None, hit: int) -> None:
    world = World(16, 8, patience=PATIENT)
    warm_up(world, T0, 100, 1.0)
    world.manager.set_prefill_rate(block_s)
    world.fill(T0, range(4))
    world.open("a", range(4))
    assert world.until_answered("a") == hit
    assert world.manager.ledger.counts.recomputed_blocks == 4 - hit


def test_a_slow_tier_costs_only_its_own_blocks() -> None:
    world = World(16, 8, tiers=2, patience=PATIENT)
    warm_up(world, T1, 101, 9.0)
    world.manager.set_prefill_rate(1.0)
    world.fill(T0, [0, 1, 2])
    world.fill(T1, [3])
    world.open("a", range(4))
    assert tiers_read(world, "a") == {T0: 3}
    assert world.ask("a") == 3


def test_what_would_come_after_the_deadline_is_not_read() -> None:
    world = World(16, 8, wait_max_s=5.0, patience=PATIENT)
    warm_up(world, T0, 100, 2.0)
    world.fill(T0, range(4))
    world.open("a", range(4))
    assert world.until_answered("a") == 0
    assert world.reads == {key_of(100): 1}
    world.open("b", range(2))
    assert world.until_answered("b") == 2


def test_a_slow_tier_is_tried_again_after_a_while() -> None:
    world = World(16, 8, patience=PATIENT)
    warm_up(world, T0, 100, 3.0)
    world.manager.set_prefill_rate(1.0)
    world.fill(T0, range(4))
    world.open("a", range(4))
    assert world.until_answered("a") == 0
    world.manager.finish_request("a")
    world.step(200.0)
    world.open("a", range(4))
    assert world.until_answered("a") == 4


def test_no_wait_is_longer_than_computing() -> None:
    world = World(16, 8, wait_max_s=30.0)
    world.manager.set_prefill_rate(0.5)
    world.fill(T0, range(4))
    world.open("a", range(4))
    world.ask("a")
    world.step()
    world.ask("a")
    world.hung.add(T0)
    world.step(1.9)
    assert world.ask("a") is None
    world.step(0.1)
    assert world.ask("a") == 0, "four blocks are computed in two seconds"
    assert world.manager.ledger.counts.expired_waits == 1


def test_a_wait_is_not_shortened_below_its_least() -> None:
    world = World(16, 8, wait_max_s=30.0, wait_min_s=1.0)
    world.manager.set_prefill_rate(0.01)
    world.fill(T0, range(4))
    world.open("a", range(4))
    world.ask("a")
    world.step()
    world.ask("a")
    world.hung.add(T0)
    world.step(0.9)
    assert world.ask("a") is None
    world.step(0.1)
    assert world.ask("a") == 0


def test_who_waits_for_its_turn_waits_no_longer_than_computing() -> None:
    world = World(16, 4, wait_max_s=30.0, hold_s=25.0)
    world.manager.set_prefill_rate(0.5)
    for name, prompt in {"a": range(4), "b": range(10, 14)}.items():
        world.fill(T0, prompt)
        world.open(name, prompt)
    for _ in range(2):
        world.ask("a")
        world.ask("b")
        world.step()
    assert world.requests["b"].queued
    world.step(1.9)
    assert world.ask("b") is None
    world.step(0.1)
    assert world.ask("b") == 0


@pytest.mark.parametrize("who", ["request", "device"])
def test_waiting_for_what_others_fill_is_worth_computing_it(who: str) -> None:
    """Not less: it is what the request would have to compute."""
    world = World(16, 8, wait_max_s=30.0)
    world.manager.set_prefill_rate(1.0)
    if who == "device":
        world.manager.prepare_store("x", [key_of(i) for i in range(4)])
    else:
        world.fill(T0, range(4))
        world.manager.ledger.presence[T0].set_present([key_of(i) for i in range(4)])
        world.open("x", range(4))
        world.ask("x")
        world.hung.add(T0)
        world.step()
    world.open("b", range(4))
    assert world.ask("b") is None
    world.step(3.9)
    assert world.ask("b") is None
    world.step(0.1)
    assert world.ask("b") == 0


def test_all_groups_hold_the_same_tokens() -> None:
    """Computing four blocks of two groups takes as long as four, not eight."""
    world = World(32, 16, groups=Groups((0, 1)), patience=PATIENT)
    world.manager.set_prefill_rate(1.0)
    world.fill(T0, range(4))
    world.open("a", range(4))
    world.ask("a")
    world.step()
    world.ask("a")
    world.hung.add(T0)
    world.step(3.9)
    assert world.ask("a") is None
    world.step(0.1)
    assert world.ask("a") == 0


# -- shares -------------------------------------------------------------------


def test_hung_reads_keep_their_share_and_leave_room_for_another_tier() -> None:
    world = World(16, 8, tiers=2, reading_max=3, wait_max_s=5.0, patience=PATIENT)
    world.fill(T0, range(8))
    world.fill(T1, range(100, 108))
    world.open("a", range(8), [T0])
    world.ask("a")
    world.step()
    world.ask("a")
    world.hung.add(T0)
    world.step(30.0)
    world.step(1.0)
    ledger = world.manager.ledger
    assert ledger.stuck == ledger.reading == [3, 0]
    assert world.ask("a") == 0
    world.open("b", range(8), [T0])
    assert world.ask("b") == 0, "it has just failed"
    assert world.serve("c", range(100, 108), [T1]) == 3, "its own share"
    assert world.serve("d", range(100, 108), [T1]) == 5, "residents count in the budget beside 3"
    assert world.pool.pinned == 3


def test_residents_take_no_share_of_reads() -> None:
    world = World(16, 12, reading_max=2)
    world.store("x", range(6))
    world.fill(T0, range(6, 8))
    world.open("a", range(8))
    assert world.until_answered("a") == 8


def test_who_lacks_room_at_one_tier_is_served_when_it_frees() -> None:
    """And that is noticed although others take as much at another tier in the same step."""
    world = World(32, 16, tiers=2, reading_max=4, patience=PATIENT)
    for tier, prompt in ((T0, range(4)), (T1, range(10, 14)), (T0, range(20, 24))):
        world.fill(tier, prompt)
        world.manager.ledger.presence[tier].set_present([key_of(i) for i in prompt])
    world.hung |= {T0, T1}
    world.open("a", range(4))
    world.ask("a")
    world.step()
    world.open("c", range(20, 24))
    world.ask("c")
    world.step()
    assert world.requests["c"].queued, "no room at its tier"
    early = world.manager.open_request("b")
    early.arrival = 0
    for i in range(10, 14):
        world.manager.lookup(early, key_of(i))
    world.inbox.clear()
    (read,) = world.stuck
    world.stuck.clear()
    world.answer(read)
    world.manager.begin_step(world.now, world.inbox)
    world.inbox.clear()
    commands = world.manager.end_step()
    assert [(c.tier, len(c.keys)) for c in commands if isinstance(c, Read)] == [(T1, 4), (T0, 4)]


def test_stores_take_no_more_than_their_share() -> None:
    world = World(16, 4, storing_max=3)
    first = world.manager.prepare_store("x", [key_of(i) for i in range(5)])
    assert len(first) == 3
    assert world.manager.prepare_store("x", [key_of(9)]) == {}
    assert world.manager.ledger.counts.unstored_blocks == 3
    world.manager.complete_store([key_of(0)])
    assert len(world.manager.prepare_store("x", [key_of(9)])) == 1
    world.manager.check()


def test_stores_always_find_their_share() -> None:
    """Reads hang, writes hang, leases are not given back: the shares add up to the pool."""
    world = World(16, 6, writing=2, tiers=2, storing_max=4, lending_max=2)
    world.fill(T0, range(100, 110))
    world.store("x", [0, 1, 2, 3])
    world.want(T1, 1, [key_of(0), key_of(1), key_of(2)])
    world.open("a", range(100, 110))
    world.ask("a")
    world.step()
    world.ask("a")
    world.hung |= {T0, T1}
    for n in range(10, 40, 4):
        keys = [key_of(n + i) for i in range(4)]
        slots = world.manager.prepare_store("x", keys)
        assert list(slots) == keys, "running stores go on"
        world.step(1.0)
        world.manager.complete_store(slots)
        world.step(1.0)
    assert world.manager.ledger.cascades.writing == [2, 2]
    assert world.pool.pinned == 6 + 2 + 2, "both writes pin the same blocks"


# -- several groups, several tiers --------------------------------------------


def test_groups_may_come_from_different_tiers() -> None:
    world = World(32, 16, tiers=2, groups=Groups((0,), {1: 2}))
    world.holding[T0] = {key_of(i, 0) for i in range(6)}
    world.holding[T1] = {key_of(i, 1) for i in range(6)}
    world.open("a", range(6))
    assert tiers_read(world, "a") == {T0: 6, T1: 2}
    assert world.ask("a") == 6


def test_a_tier_that_lacks_a_window_shortens_the_hit_of_all() -> None:
    world = World(32, 16, tiers=2, groups=Groups((0,), {1: 2}))
    world.holding[T0] = {key_of(i, 0) for i in range(6)}
    world.holding[T1] = {key_of(i, 1) for i in range(4)}
    world.open("a", range(6))
    assert world.until_answered("a") == 4


def test_one_share_of_reads_cuts_all_groups_at_one_boundary() -> None:
    world = World(64, 40, tiers=2, reading_max=5, groups=Groups((0, 1)))
    world.holding[T0] = {key_of(i, 0) for i in range(8)}
    world.holding[T1] = {key_of(i, 1) for i in range(8)}
    world.open("a", range(8))
    assert world.until_answered("a") == 5
    assert world.reads.total() == 10, "nothing is read beyond it"


@pytest.mark.parametrize("reading", [1, 2, 3, 6])
def test_windows_count_in_the_share_of_their_tier(reading: int) -> None:
    world = World(64, 40, tiers=2, reading_max=reading, groups=Groups((0,), {1: 2}))
    world.fill(T0, range(8))
    world.open("a", range(8))
    assert world.until_answered("a") == max(0, reading - 2)
    assert all(n == 1 for n in world.reads.values())


def test_a_hung_tier_holds_up_only_the_groups_it_has() -> None:
    world = World(32, 16, tiers=2, groups=Groups((0, 1)), wait_max_s=5.0)
    world.fill(T0, range(4))
    world.holding[T1] = {key_of(i, g) for i in range(4, 6) for g in (0, 1)}
    world.hung.add(T1)
    world.open("a", range(6), [T0])
    assert world.until_answered("a") == 4
    world.load("a", 4)
    world.loaded("a")
    world.open("b", range(6))
    world.ask("b")
    (probe,) = world.step(4.9)
    assert isinstance(probe, Probe)
    assert world.ask("b") is None
    world.step(0.1)
    assert world.ask("b") == 4


def test_who_comes_when_hung_reads_have_the_whole_share_does_not_wait_for_it() -> None:
    patient = Patience(failures_max=9, stall_s=1000.0)
    world = World(16, 8, reading_max=3, wait_max_s=50.0, patience=patient)
    world.fill(T0, range(8))
    world.manager.ledger.presence[T0].set_present([key_of(i) for i in range(8)])
    world.hung.add(T0)
    world.open("a", range(3))
    world.ask("a")
    world.step(30.0)
    assert world.manager.ledger.stuck == [3]
    world.open("b", range(4, 8))
    assert world.ask("b") is None
    world.step()
    assert world.ask("b") == 0
