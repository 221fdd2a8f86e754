"""The simulated engine, and random walks of it over the core. `KVTIER_SEED=7` walks that walk."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvtier.core.limits import Limits
from kvtier.core.types import BlockKey, Done, Fault, JobId, Lookup, Slot
from kvtier.testing.engine import Groups, key_of
from kvtier.testing.simulated_caches import Clock, CoreCache
from kvtier.testing.simulated_requests import Phase, Shape
from kvtier.testing.simulated_tiers import (
    Fail,
    Hang,
    Lie,
    Memory,
    Raise,
    Short,
    SimulatedTier,
    SimulatedTierError,
)
from kvtier.testing.simulated_walk import LIMITS, Walk, seed_of_environment
from kvtier.testing.simulation import SimulatedEngine, WrongBytesError

STEPS = 2_500


# -- walks ----------------------------------------------------------------


@pytest.mark.parametrize(
    "groups",
    [Groups(), Groups(full=(0,), windows={1: 2}), Groups(full=(0, 1), windows={2: 1, 3: 4})],
    ids=["one full group", "with a window", "two full groups and two windows"],
)
def test_a_random_walk_breaks_nothing(groups: Groups) -> None:
    walk = Walk(seed_of_environment(), groups)
    walk.run(STEPS)
    walk.settle()
    assert walk.engine.loaded, "nothing was ever loaded"


def test_a_walk_with_second_touch_breaks_nothing() -> None:
    walk = Walk(seed_of_environment(), limits=replace(LIMITS, second_touch=True))
    walk.run(STEPS)
    walk.settle()
    assert walk.engine.loaded, "nothing was ever loaded"


def test_the_same_seed_walks_the_same_way() -> None:
    def trace(seed: int) -> tuple[str, list[str]]:
        walk = Walk(seed, traced=True)
        walk.run(800)
        walk.settle()
        return walk.engine.digest, walk.engine.trace

    assert trace(3) == trace(3)
    assert trace(3)[0] != trace(4)[0]


def test_a_walk_meets_everything() -> None:
    walk = Walk(seed=11, check_every=50)
    walk.run(9_000)
    assert walk.happened.keys() >= {
        *(f"abort {phase}" for phase in ("waiting", "loading", "running")),
        *(
            f"{o} {b}"
            for o in ("probe", "read", "write")
            for b in ("fail", "hang", "short", "raise")
        ),
        "probe lie",
        "lose",
        "reset",
        "leap",
    }
    ledger = walk.cache.core.ledger
    assert walk.engine.preemptions
    assert walk.engine.deferrals
    assert walk.cache.raised
    assert all(circuit.opened for circuit in ledger.reads + ledger.writes)
    assert ledger.counts.expired_waits
    assert ledger.counts.expired_holds
    assert any(ledger.counts.expired_jobs)


def test_an_error_names_the_seed() -> None:
    walk = Walk(seed=5)
    walk.run(200)
    walk.memory[:] = [(9, key_of(0))] * len(walk.memory)
    with pytest.raises(AssertionError) as error:
        walk.run(200)
    assert "KVTIER_SEED=5, step 201" in error.value.__notes__


# -- the engine -----------------------------------------------------------


class Recorder(CoreCache):
    """Writes down what is called, in order."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.calls: list[str] = []

    def __getattribute__(self, name: str):
        if name in {
            "open", "lookup", "prepare_load", "prepare_store", "finish", "end_schedule",
            "complete_store", "complete_load", "end_step", "reset",
        }:  # fmt: skip
            calls = super().__getattribute__("calls")
            if name != "lookup" or calls[-1:] != ["lookup"]:
                calls.append(name)
        return super().__getattribute__(name)


class World:
    """An engine over a recorded cache with one tier."""

    def __init__(self, num_slots: int = 32, **shape) -> None:
        self.clock = Clock()
        self.memory: Memory = [None] * num_slots
        self.tier = SimulatedTier(self.memory)
        limits = Limits(promoting_max=num_slots, writing_max=num_slots)
        shape = Shape(**shape)
        windows = frozenset(shape.groups.windows or ())
        self.cache = Recorder(self.clock, num_slots, limits, [self.tier], windows)
        self.engine = SimulatedEngine(self.cache, self.clock, self.memory, shape)

    def calls(self) -> list[str]:
        calls = self.cache.calls[:]
        self.cache.calls.clear()
        return calls

    def until_idle(self) -> int:
        for count in range(1, 100):
            if not self.engine.step():
                return count
        raise AssertionError("never idle")


def test_the_calls_of_a_request_that_computes_and_stores() -> None:
    world = World()
    world.engine.add("a", range(8))
    world.engine.step()  # it is not known whether the tier holds them
    assert world.calls() == ["open", "lookup", "end_schedule", "end_step"]
    world.engine.step()  # the tier does not: the first chunk is computed
    assert world.calls() == ["lookup", "end_schedule", "prepare_store", "end_step"]
    world.engine.step()  # the second; the first one is copied now, a step late
    assert world.calls() == ["end_schedule", "prepare_store", "complete_store", "end_step"]
    assert not world.engine.requests
    world.engine.step()  # the request is told to have ended before its last store has
    assert world.calls() == ["end_schedule", "finish", "complete_store", "end_step"]
    world.until_idle()
    assert world.tier.held == {(0, key_of(i)): (0, key_of(i)) for i in range(8)}


def test_the_calls_of_a_request_that_loads() -> None:
    world = World(load_steps=2)
    world.tier.keep(0, [key_of(i) for i in range(8)])
    request = world.engine.add("a", range(9))
    for _ in range(3):
        world.engine.step()
    assert request.phase is Phase.LOADING
    world.calls()
    world.engine.step()
    assert world.calls() == ["end_schedule", "end_step"]
    world.engine.step()
    assert world.calls() == ["end_schedule", "complete_load", "end_step"]
    world.engine.step()
    assert world.calls() == ["end_schedule", "prepare_store", "end_step"]
    assert request.hits == [8]
    world.until_idle()
    assert set(world.tier.reads.values()) == {1}


def test_requests_that_share_a_prefix_wait_for_one_load() -> None:
    world = World(load_steps=3)
    world.tier.keep(0, [key_of(i) for i in range(8)])
    requests = [world.engine.add(name, range(8)) for name in "abc"]
    world.until_idle()
    assert [r.hits for r in requests] == [[8], [8], [8]]
    assert set(world.tier.reads.values()) == {1}
    assert requests[0].answered_at < requests[1].answered_at < requests[2].answered_at


def test_a_full_device_preempts_the_last_and_all_end() -> None:
    world = World(device_blocks=12, chunk_blocks=2, running_max=4)
    for name, first in (("a", 0), ("b", 100)):
        world.engine.add(name, range(first, first + 6), output_blocks=3)
    world.until_idle()
    assert world.engine.preemptions >= 1
    assert world.engine._free_blocks == 12


def test_requests_that_have_loaded_give_way_when_none_can_run() -> None:
    world = World(device_blocks=10, chunk_blocks=1)
    for name, first in (("a", 0), ("b", 100)):
        world.tier.keep(0, [key_of(first + i) for i in range(4)])
        world.engine.add(name, range(first, first + 8))
    world.until_idle()
    assert world.engine._free_blocks == 10


@pytest.mark.parametrize("steps", range(8))
def test_an_abort_at_any_step_gives_everything_back(steps: int) -> None:
    world = World(load_steps=3, store_steps=2)
    world.tier.keep(0, [key_of(i) for i in range(8)])
    world.engine.add("a", range(12), output_blocks=2)
    for _ in range(steps):
        world.engine.step()
    world.engine.abort("a")
    world.until_idle()
    assert world.cache.core.pool.available == 32
    assert world.engine._free_blocks == Shape().device_blocks


@pytest.mark.parametrize("new_weights", [False, True])
@pytest.mark.parametrize("steps", range(1, 9))
def test_a_reset_at_any_step_starts_again(steps: int, new_weights: bool) -> None:
    world = World(load_steps=3, store_steps=2)
    world.tier.keep(0, [key_of(i) for i in range(8)])
    request = world.engine.add("a", range(12), output_blocks=2)
    for _ in range(steps):
        world.engine.step()
    assert request.phase is not Phase.FINISHED
    world.engine.reset(new_weights)
    before = len(request.hits)
    world.until_idle()
    assert request.hits[before:] == ([] if new_weights else [8])
    assert world.cache.core.pool.available == 32
    assert world.engine._free_blocks == Shape().device_blocks


@pytest.mark.parametrize("when", ["before the load", "under the load"])
def test_wrong_bytes_are_seen(when: str) -> None:
    world = World(load_steps=2)
    world.tier.keep(0, [key_of(i) for i in range(4)])
    if when == "before the load":
        world.tier.held[(0, key_of(2))] = (0, key_of(7))
    request = world.engine.add("a", range(4))
    while request.phase is not Phase.LOADING:
        world.engine.step()
    if when == "under the load":
        world.memory[world.engine.loads[0].slots[key_of(2)]] = None
    with pytest.raises(WrongBytesError, match="a loaded"):
        world.until_idle()


def test_a_window_is_asked_from_the_right() -> None:
    world = World(groups=Groups(full=(), windows={0: 2}))
    asked: list[BlockKey] = []
    lookup = world.cache.core.lookup

    def spy(request, key) -> Lookup:
        asked.append(key)
        return lookup(request, key)

    world.cache.core.lookup = spy  # type: ignore[method-assign]
    world.engine.add("a", range(4))
    world.engine.step()
    assert asked == [key_of(i) for i in (3, 2, 1, 0)]


# -- the tiers ------------------------------------------------------------

KEYS = [key_of(i) for i in range(4)]
SLOTS = [Slot(i) for i in range(4)]


def tier_with(**speed: float) -> tuple[SimulatedTier, Memory]:
    memory: Memory = [None] * 4
    tier = SimulatedTier(memory, **speed)
    tier.keep(0, KEYS[:3])
    return tier, memory


def test_a_tier_takes_its_time_one_block_after_the_other() -> None:
    tier, _ = tier_with(latency_s=0.5, block_s=1.0)
    tier.submit(0.0, "read", JobId(1), KEYS[:2], SLOTS[:2])
    tier.submit(0.0, "read", JobId(2), KEYS[2:3], SLOTS[2:3])
    tier.submit(0.0, "probe", JobId(3), KEYS)
    assert [d.job for d in tier.finished(0.5)] == [3]
    assert [d.job for d in tier.finished(2.4)] == []
    assert [d.job for d in tier.finished(2.5)] == [1]
    assert [d.job for d in tier.finished(3.5)] == [2]


def test_a_tier_tells_what_it_holds_and_reads_only_that() -> None:
    tier, memory = tier_with()
    tier.submit(0.0, "probe", JobId(1), KEYS)
    tier.submit(0.0, "read", JobId(2), KEYS, SLOTS)
    assert tier.finished(0.0) == [
        Done(JobId(1), frozenset(KEYS[:3])),
        Done(JobId(2), frozenset(KEYS[:3])),
    ]
    assert memory == [(0, KEYS[0]), (0, KEYS[1]), (0, KEYS[2]), None]


def test_a_tier_keeps_what_it_was_given_even_garbage() -> None:
    tier, memory = tier_with()
    memory[:2] = [(7, KEYS[0]), (7, KEYS[1])]
    tier.submit(0.0, "write", JobId(1), KEYS[:2], SLOTS[:2], space=7)
    memory[1] = (7, KEYS[3])  # under the write
    tier.finished(0.0)
    assert tier.held[(7, KEYS[0])] == (7, KEYS[0])
    assert tier.held[(7, KEYS[1])] is None


def test_a_tier_behaves_as_scripted_for_as_many_jobs() -> None:
    tier, memory = tier_with()
    tier.behave("read", Fail(Fault.FULL), jobs=1)
    tier.submit(0.0, "read", JobId(1), KEYS[:1], SLOTS[:1])
    tier.submit(0.0, "read", JobId(2), KEYS[:1], SLOTS[:1])
    assert [(d.ok, d.fault) for d in tier.finished(0.0)] == [
        (frozenset(), Fault.FULL),
        (frozenset(KEYS[:1]), None),
    ]
    tier.behave("read", Short(1))
    tier.behave("probe", Lie())
    tier.submit(0.0, "read", JobId(3), KEYS[:2], SLOTS[:2])
    tier.submit(0.0, "probe", JobId(4), KEYS)
    assert [d.ok for d in tier.finished(0.0)] == [frozenset(KEYS[:1]), frozenset(KEYS)]
    assert memory[1] is None
    tier.behave("write", Raise())
    with pytest.raises(SimulatedTierError):
        tier.submit(0.0, "write", JobId(5), KEYS[:1], SLOTS[:1])
    assert not tier.running


def test_what_hung_goes_on_when_the_tier_is_healed() -> None:
    tier, memory = tier_with(latency_s=1.0)
    tier.behave("read", Hang(), jobs=1)
    tier.submit(0.0, "read", JobId(1), KEYS[:1], SLOTS[:1])
    assert tier.finished(100.0) == []
    tier.heal(100.0)
    assert tier.finished(100.9) == []
    assert [d.ok for d in tier.finished(101.0)] == [frozenset(KEYS[:1])]
    assert memory[0] == (0, KEYS[0])
