"""Cases that break tiered caches, in simulation: kvtier beside vLLM's own tiering manager.

Both managers run below the same engine, which calls them in vLLM's order in virtual time, and
above the same tiers. A step is 10 ms; tiers answer in 10 ms and move a block in 0.1 ms. Where a run
has no end, the figure is that of the steps that were run. `--steps N` walks kvtier's core through
so many steps with random faults, every load checked.
"""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from _report import Row, main
from _scale import measure_scale
from _simulated import World

from kvtier.core.health import State
from kvtier.core.types import Fault
from kvtier.testing.engine import key_of
from kvtier.testing.simulated_requests import Phase, Shape
from kvtier.testing.simulated_tiers import Fail, Hang, Raise
from kvtier.testing.simulated_walk import Walk, seed_of_environment

STEPS_MAX = 400
BASELINE = "vLLM stock tiering manager"
Figures = dict[str, tuple[float, str, str]]
"""Name -> value, unit, which is better."""


@contextmanager
def world(kvtier: bool, num_slots: int = 64, **options: object) -> Iterator[World]:
    made = World(kvtier, num_slots, **options)
    try:
        yield made
    finally:
        made.close()


def keys_from(first: int, count: int) -> list:
    return [key_of(first + i) for i in range(count)]


def read_per_used(run: World) -> float:
    """Blocks read from tiers per block that the device loaded; if none was, the blocks read."""
    read = sum(sum(tier.reads.values()) for tier in run.tiers)
    return read / max(1, len(run.engine.loaded))


def prefix_larger_than_pool(kvtier: bool) -> Figures:
    """P-1: one request, an idle engine, 16 slots."""
    figures: Figures = {}
    for name, blocks in (("plus_1", 17), ("x2", 32), ("x10", 160)):
        with world(kvtier, 16) as run:
            run.tier.keep(0, keys_from(0, blocks))
            request = run.engine.add("a", range(blocks))
            while request.phase is Phase.WAITING and run.engine.steps < STEPS_MAX:
                run.engine.step()
            steps = run.engine.steps
            while run.engine.step() and run.engine.steps < STEPS_MAX:
                pass
            hit = sum(request.hits)
        name = f"p1_prefix_pool_{name}"
        figures[f"{name}_steps_until_resolved"] = (steps, "steps", "lower")
        figures[f"{name}_hit_blocks"] = (hit, f"of {blocks} blocks, 16 slots", "higher")
        figures[f"{name}_read_per_used"] = (read_per_used(run), "blocks per block", "lower")
    return figures


def waiting_requests(kvtier: bool) -> Figures:
    """P-2: n requests of 16 blocks wait, 64 slots, while four requests compute and store.

    In the last run they may wait 300 ms only, which is too short for half of them.
    """
    figures: Figures = {}
    for n, wait_ms in ((8, 30_000), (16, 30_000), (32, 30_000), (64, 30_000), (64, 300)):
        waits = {"max_wait_ms": wait_ms} if kvtier else {}
        with world(kvtier, 64, shape=Shape(chunk_blocks=1), **waits) as run:
            runners = [
                run.engine.add(f"s{i}", range((i + 1) << 32, ((i + 1) << 32) + 4 * STEPS_MAX))
                for i in range(4)
            ]
            for _ in range(4):
                run.engine.step()
            requests = []
            for i in range(n):
                run.tier.keep(0, keys_from(1000 * i, 16))
                requests.append(run.engine.add(f"w{i}", range(1000 * i, 1000 * i + 16)))
            before = sum(run.cache.stored[r.name] for r in runners)
            computed = sum(r.computed for r in runners)
            while run.engine.steps < STEPS_MAX and any(r.answered_at is None for r in requests):
                run.engine.step()
            waited = run.engine.steps
            stored = sum(run.cache.stored[r.name] for r in runners) - before
            computed = sum(r.computed for r in runners) - computed
            while run.engine.steps < 2 * STEPS_MAX and any(
                r.phase is not Phase.FINISHED for r in requests
            ):
                run.engine.step()
            hits = sum(sum(r.hits) for r in requests)
            lost = sum(not r.hits for r in requests)
            if kvtier:
                lost -= run.cache.manager._core.ledger.counts.expired_waits
        name = f"p2_{n}_waiting" if wait_ms == 30_000 else f"p2_{n}_waiting_{wait_ms}_ms"
        figures[f"{name}_lost_but_not_by_deadline"] = (lost, "requests", "lower")
        figures[f"{name}_read_per_used"] = (read_per_used(run), "blocks per block", "lower")
        figures[f"{name}_hits_served"] = (hits / (16 * n), "share of those available", "higher")
        figures[f"{name}_stores_served"] = (stored / computed, "share of blocks", "higher")
        figures[f"{name}_steps_until_all_are_answered"] = (waited, "steps", "lower")
    return figures


def stores_fail(kvtier: bool) -> Figures:
    """P-3: a request stores a block a step; every write fails, and later none."""
    with world(kvtier, shape=Shape(chunk_blocks=1)) as run:
        run.tier.behave("write", Fail(Fault.ERROR))
        run.engine.add("a", range(1 << 32, (1 << 32) + 2000))
        opened = steps_until(run, lambda: circuit_is(run, State.OPEN), 200)
        while run.engine.steps < 200:
            run.engine.step()
        submitted = run.tier.jobs["write"]
        run.tier.heal(run.clock.now)
        recovered = steps_until(run, lambda: run.tier.written > 0, STEPS_MAX)
    return {
        "p3_stores_fail_writes_submitted_in_200_steps": (submitted, "jobs", "lower"),
        "p3_stores_fail_steps_until_circuit_opens": (opened, "steps", "lower"),
        "p3_stores_fail_steps_until_recovered": (recovered, "steps", "lower"),
    }


def stores_hang(kvtier: bool) -> Figures:
    """P-3: a request stores four blocks a step to a tier that ends no write."""
    with world(kvtier, shape=Shape(chunk_blocks=4)) as run:
        run.tier.behave("write", Hang())
        runner = run.engine.add("a", range(1 << 32, (1 << 32) + 100_000))
        pinned = 0

        def step_is_seen() -> bool:
            nonlocal pinned
            pinned = max(pinned, run.pinned)
            return circuit_is(run, State.OPEN)

        opened = steps_until(run, step_is_seen, 2000)
        while run.engine.steps < 2000:
            run.engine.step()
            pinned = max(pinned, run.pinned)
        stored = run.cache.stored["a"] / runner.computed
        run.tier.heal(run.clock.now)
        before = run.tier.jobs["write"]
        recovered = steps_until(run, lambda: run.tier.jobs["write"] > before, STEPS_MAX)
    return {
        "p3_stores_hang_slots_pinned_at_most": (pinned, "of 64 slots", "lower"),
        "p3_stores_hang_stores_served": (stored, "share of blocks", "higher"),
        "p3_stores_hang_seconds_until_circuit_opens": (opened / 100, "s", "lower"),
        "p3_stores_hang_steps_until_recovered": (recovered, "steps", "lower"),
    }


def asks_hang(kvtier: bool) -> Figures:
    """P-3: a tier that answers no lookup, or ends no read; a request of 16 blocks waits."""
    figures: Figures = {}
    for operation, name in (("probe", "lookups"), ("read", "reads")):
        with world(kvtier) as run:
            run.tier.keep(0, keys_from(0, 16) + keys_from(100, 16) + keys_from(200, 16))
            run.tier.behave(operation, Hang())
            request = run.engine.add("a", range(16))
            while request.answered_at is None and run.engine.steps < 5000:
                run.engine.step()
            waited = run.engine.steps
            second = run.engine.add("b", range(100, 116))
            while second.answered_at is None and run.engine.steps < 10_000:
                run.engine.step()
            later = run.engine.steps - waited
            run.tier.heal(run.clock.now)
            healed = run.engine.steps
            number = 0
            hit = 0
            while not hit and run.engine.steps - healed < 2000:
                number += 1
                trial = run.engine.add(f"t{number}", range(200, 216))
                while trial.phase is not Phase.FINISHED and run.engine.steps - healed < 2000:
                    run.engine.step()
                hit = sum(trial.hits)
            recovered = run.engine.steps - healed
        figures[f"p3_{name}_hang_seconds_until_answered"] = (waited / 100, "s", "lower")
        figures[f"p3_{name}_hang_steps_until_the_next_is"] = (later, "steps", "lower")
        figures[f"p3_{name}_hang_steps_until_recovered"] = (recovered, "steps", "lower")
    return figures


def many_reads_hang(kvtier: bool) -> Figures:
    """P-3: eight requests of 16 blocks wait for a tier that ends no read; another one stores."""
    with world(kvtier, shape=Shape(chunk_blocks=1)) as run:
        run.tier.behave("read", Hang())
        runner = run.engine.add("s", range(1 << 32, (1 << 32) + 10_000))
        for i in range(8):
            run.tier.keep(0, keys_from(1000 * i, 16))
            run.engine.add(f"w{i}", range(1000 * i, 1000 * i + 16))
        pinned = 0
        for _ in range(500):
            run.engine.step()
            pinned = max(pinned, run.pinned)
        stored = run.cache.stored["s"] / runner.computed
    return {
        "p3_many_reads_hang_slots_pinned_at_most": (pinned, "of 64 slots, stores too", "lower"),
        "p3_many_reads_hang_stores_served": (stored, "share of blocks", "higher"),
    }


def other_tier(kvtier: bool) -> Figures:
    """P-3: what a good tier does beside a bad one, over what it does alone, 30 s each."""
    good = (0.01, 0.0001)

    def writes(bad: bool) -> float:
        with world(kvtier, 256, tiers=[good] * (1 + bad), shape=Shape(chunk_blocks=4)) as run:
            if bad:
                run.tiers[1].behave("write", Hang())
            run.engine.add("a", range(1 << 32, (1 << 32) + 100_000))
            for _ in range(3000):
                run.engine.step()
            return run.tier.written

    def served(operation: str | None) -> float:
        """Hit blocks of 300 requests whose first half the good tier holds."""
        bad = operation is not None
        with world(kvtier, 256, tiers=[good] * (1 + bad)) as run:
            if operation is not None:
                run.tiers[1].behave(operation, Hang())
            requests = []
            for i in range(3000):
                if i % 10 == 0:
                    at = 1000 * i
                    run.tier.keep(0, keys_from(at, 8))
                    if bad:
                        run.tiers[1].keep(0, keys_from(at + 8, 8))
                    requests.append(run.engine.add(f"r{i}", range(at, at + 16)))
                run.engine.step()
            return sum(sum(request.hits) for request in requests)

    alone = served(None)
    return {
        "p3_other_tier_writes_beside_one_whose_stores_hang": (
            writes(True) / writes(False),
            "of its own run",
            "higher",
        ),
        "p3_other_tier_hits_beside_one_whose_lookups_hang": (
            served("probe") / alone,
            "of its own run",
            "higher",
        ),
        "p3_other_tier_hits_beside_one_whose_reads_hang": (
            served("read") / alone,
            "of its own run",
            "higher",
        ),
    }


def tier_raises(kvtier: bool) -> Figures:
    """P-4: a tier raises from every method, while requests ask and store."""
    with world(kvtier, tiers=[(0.01, 0.0001)] * 2) as run:
        for operation in ("probe", "read", "write"):
            run.tier.behave(operation, Raise())
        survived = hits = 0
        requests = []
        try:
            for i in range(200):
                if i % 5 == 0:
                    run.tiers[1].keep(0, keys_from(1000 * i, 8))
                    requests.append(run.engine.add(f"r{i}", range(1000 * i, 1000 * i + 12)))
                if i == 100:
                    run.tier.raises_on_poll = True
                run.engine.step()
                survived += 1
        except Exception:
            logging.getLogger(__name__).debug("the engine would be dead", exc_info=True)
        hits = sum(sum(r.hits) for r in requests)
        figures: Figures = {
            "p4_tier_raises_steps_survived_of_200": (survived, "steps", "higher"),
            "p4_tier_raises_hit_blocks_of_the_other_tier": (hits, "of 320 blocks", "higher"),
        }
        if kvtier:
            driver = run.cache.manager._offloader.drivers[0]
            figures["p4_tier_raises_log_lines_per_cause"] = (
                run.logged.count / max(1, len(driver._causes)),
                f"lines, {driver.errors} errors counted",
                "lower",
            )
    return figures


def shared_prefix(kvtier: bool) -> Figures:
    """A4-06: 50 requests share 32 blocks that a tier holds."""
    with world(kvtier, 128) as run:
        run.tier.keep(0, keys_from(0, 32))
        requests = [
            run.engine.add(f"r{i}", [*range(32), 1000 + 2 * i, 1001 + 2 * i]) for i in range(50)
        ]
        while run.engine.step() and run.engine.steps < STEPS_MAX:
            pass
        hits = sum(sum(r.hits) for r in requests)
    return {
        "shared_prefix_50_requests_reads_per_block": (
            max(run.tier.reads.values()),
            "reads",
            "lower",
        ),
        "shared_prefix_50_requests_hits_served": (hits / (50 * 32), "share", "higher"),
    }


SCENARIOS: tuple[Callable[[bool], Figures], ...] = (
    prefix_larger_than_pool,
    waiting_requests,
    stores_fail,
    stores_hang,
    asks_hang,
    many_reads_hang,
    other_tier,
    tier_raises,
    shared_prefix,
)


def circuit_is(run: World, state: State) -> bool:
    """Of the first tier's writes; the stock manager has no such thing."""
    return run.kvtier and run.cache.manager._core.ledger.writes[0].state is state


def steps_until(run: World, seen: Callable[[], bool], most: int) -> int:
    started = run.engine.steps
    while not seen() and run.engine.steps - started < most:
        run.engine.step()
    return run.engine.steps - started


def walk(steps: int) -> list[Row]:
    """Random faults: an error ends the program, naming the seed."""
    run = Walk(seed_of_environment(), check_every=16)
    started = time.process_time()
    run.run(steps)
    run.settle()
    per_step = (time.process_time() - started) / run.engine.steps * 1e6
    name = "walk with random faults"
    loads = sum(run.engine.loaded.values())
    return [
        Row("walk_steps", run.engine.steps, "steps", steps, "asked for", "higher"),
        Row("walk_blocks_loaded_and_checked", loads, "blocks", loads, name, "higher"),
        Row("walk_wrong_reads", 0, "blocks", 0, name, "lower"),
        Row("walk_slots_leaked", 0, "slots", 0, name, "lower"),
        Row("walk_step", per_step, "us", per_step, name, "lower"),
    ]


def measure(steps: int) -> list[Row]:
    """Every scenario on both sides."""
    logging.disable(logging.WARNING)
    rows = []
    for scenario in SCENARIOS:
        ours, theirs = scenario(True), scenario(False)
        for name, (value, unit, better) in ours.items():
            baseline = theirs.get(name, (value, "", ""))[0]
            rows.append(Row(name, value, unit, baseline, BASELINE, better))
    return [*rows, *measure_scale(), *walk(steps)]


if __name__ == "__main__":
    options = argparse.ArgumentParser(add_help=False)
    options.add_argument("--steps", type=int, default=20_000, help="steps of the random walk")
    main(__doc__, lambda: measure(options.parse_known_args()[0].steps), options)
