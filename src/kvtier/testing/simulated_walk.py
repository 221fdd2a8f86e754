"""A random walk of the simulated engine: requests, faults of the tiers, resets, leaps of time.

    walk = Walk(seed=7)
    walk.run(10_000)
    walk.settle()

Everything is drawn from the seed, so that a walk that fails is walked again:
`KVTIER_SEED=7 pytest tests/machine/test_simulation.py`.
"""

from __future__ import annotations

import os
import random
import secrets
from collections import Counter
from dataclasses import replace

from kvtier.core.health import Patience
from kvtier.core.limits import Limits
from kvtier.core.types import Fault, TierId
from kvtier.testing.engine import Groups, key_of
from kvtier.testing.simulated_caches import Clock, CoreCache
from kvtier.testing.simulated_requests import Shape
from kvtier.testing.simulated_tiers import (
    Behaviour,
    Fail,
    Hang,
    Lie,
    Memory,
    Operation,
    Raise,
    Short,
    SimulatedTier,
)
from kvtier.testing.simulation import SimulatedEngine

LIMITS = Limits(
    promoting_max=12,
    writing_max=6,
    reading_max=8,
    storing_max=16,
    job_deadline_s=5.0,
    wait_max_s=3.0,
    hold_s=1.0,
    absent_ttl_s=0.5,
    known_max=4_000,
    patience=Patience(failures_max=3, stall_s=1.5, backoff_s=0.2, backoff_max_s=2.0),
)
SHAPE = Shape(device_blocks=64, running_max=4, load_steps=2, store_steps=2, store_decoded=True)
NUM_SLOTS = 32
NUM_TIERS = 2
REQUESTS_MAX = 10
PREFIXES = 12


def seed_of_environment() -> int:
    """`KVTIER_SEED`, or a fresh seed."""
    return int(os.environ.get("KVTIER_SEED", secrets.randbelow(1 << 32)))


class Walk:
    """See the module.

    Args:
        seed: of all that is random.
        groups: cache groups of the model.
        limits: of the core.
        traced: keep the trace, line by line.
        check_every: steps between two checks of every invariant.

    Attributes:
        happened: what was done to the cache, and how often.
    """

    def __init__(
        self,
        seed: int,
        groups: Groups | None = None,
        limits: Limits = LIMITS,
        traced: bool = False,
        check_every: int = 1,
    ) -> None:
        self.seed = seed
        self.groups = groups or Groups(full=(0,), windows={1: 2})
        self.memory: Memory = [None] * NUM_SLOTS
        self.clock = Clock()
        self.tiers = [
            SimulatedTier(self.memory, latency_s=0.005, block_s=0.001),
            SimulatedTier(self.memory, latency_s=0.05, block_s=0.01),
        ]
        self.cache = CoreCache(
            self.clock, NUM_SLOTS, limits, self.tiers, frozenset(self.groups.windows or ())
        )
        self.engine = SimulatedEngine(
            self.cache, self.clock, self.memory, replace(SHAPE, groups=self.groups), traced
        )
        self.happened: Counter[str] = Counter()
        self._limits = limits
        self._check_every = check_every
        self._random = random.Random(seed)
        self._names = 0
        self._next_block = 1_000
        self._recent: list[list[int]] = []  # prompts to go on from
        self._waits: dict[str, tuple[int, float]] = {}  # name -> step of its first ask, since

    def run(self, steps: int) -> None:
        """Walk so many steps; an error names the seed and the step."""
        try:
            for _ in range(steps):
                self._step()
        except AssertionError as error:
            error.add_note(f"KVTIER_SEED={self.seed}, step {self.engine.steps}")
            raise

    def settle(self) -> None:
        """Let everything end, and see that everything came back."""
        for tier in self.tiers:
            tier.heal(self.clock.now)
        for name in tuple(self.engine.requests):
            self.engine.abort(name)
        for _ in range(2_000):
            if not self.engine.step(0.05) and not any(tier.running for tier in self.tiers):
                break
        self.check()
        core, ledger = self.cache.core, self.cache.core.ledger
        assert self.engine.idle, "busy with nothing"
        assert core.pool.available == NUM_SLOTS, "slots leaked"
        assert self.engine._free_blocks == SHAPE.device_blocks, "device blocks leaked"
        assert not any(ledger.jobs_in_flight), "jobs leaked"
        assert not ledger._jobs, "jobs leaked"
        assert not core._requests, "requests leaked"
        assert not core._loads, "loads leaked"
        assert ledger.promoting == ledger.storing == 0, "a budget leaked"
        assert not any(ledger.cascades.writing + ledger.reading + ledger.stuck), "a budget leaked"

    def check(self) -> None:
        """Every invariant of the core, and that its books agree with memory."""
        core = self.cache.core
        core.check()
        for key, block in core.pool.blocks.items():
            if block.ready:
                content = self.memory[block.slot]
                assert content == (self.engine.epoch, key), "readable, with wrong bytes"

    def _step(self) -> None:
        if self._random.random() < 0.25:
            self._arrive()
        roll = self._random.random()
        if roll < 0.03:
            self._disturb()
        elif roll < 0.07:
            self._heal()
        elif roll < 0.08:
            self._abort()
        elif roll < 0.085:
            self._lose()
        elif roll < 0.087:
            self.engine.reset(new_weights=self._random.random() < 0.5)
            self.happened["reset"] += 1
        leap = self._random.random() < 0.003
        self.engine.step(self._random.choice((2.0, 6.0)) if leap else 0.01)
        self.happened["leap"] += leap
        if self.engine.steps % self._check_every == 0:
            self.check()
        self._bounded()

    def _bounded(self) -> None:
        """No request waits for the tiers for longer than its deadline, over all its rounds."""
        waits: dict[str, tuple[int, float]] = {}
        for name, request in self.engine.requests.items():
            if request.asked_at is None:
                continue
            asked_at, since = self._waits.get(name, (0, 0.0))
            if self.cache.core._requests[name].waiting:
                if asked_at != request.asked_at:
                    since = self.clock.now
                waited = self.clock.now - since
                assert waited <= self._limits.wait_max_s, "waits beyond its deadline"
                waits[name] = (request.asked_at, since)
            elif asked_at == request.asked_at:
                waits[name] = (asked_at, since)
        self._waits = waits

    def _arrive(self) -> None:
        if len(self.engine.requests) >= REQUESTS_MAX:
            return
        draw = self._random
        if self._recent and draw.random() < 0.4:  # the next turn of a conversation
            prompt = list(draw.choice(self._recent))
        else:
            shared = draw.randrange(PREFIXES) * 100
            prompt = list(range(shared, shared + draw.randint(1, 24)))
        for _ in range(draw.randint(0, 4)):
            self._next_block += 1
            prompt.append((self._next_block << 16) + len(prompt))
        prompt = prompt[:40]
        if self._recent and len(self._recent) > 20:
            self._recent.pop(0)
        self._names += 1
        self.engine.add(f"r{self._names}", prompt, draw.randint(0, 3))
        self._recent.append(prompt)
        self.happened["request"] += 1

    def _abort(self) -> None:
        if self.engine.requests:
            name = self._random.choice(tuple(self.engine.requests))
            self.happened[f"abort {self.engine.requests[name].phase.value}"] += 1
            self.engine.abort(name)

    def _disturb(self) -> None:
        draw = self._random
        tier = draw.choice(self.tiers)
        operation: Operation = draw.choice(("probe", "read", "write"))
        choices: list[Behaviour] = [
            Fail(draw.choice([f for f in Fault if f is not Fault.STALLED])),
            Hang(),
            Short(draw.randint(0, 3)),
            Raise(),
        ]
        if operation == "probe":
            choices.append(Lie())
        behaviour = draw.choice(choices)
        tier.behave(operation, behaviour, draw.choice((1, 3, 1e9)))
        self.happened[f"{operation} {type(behaviour).__name__.lower()}"] += 1

    def _heal(self) -> None:
        self._random.choice(self.tiers).heal(self.clock.now)
        self.happened["heal"] += 1

    def _lose(self) -> None:
        """A tier evicts some of a prefix, and tells, or does not."""
        draw = self._random
        place = draw.randrange(NUM_TIERS)
        shared = draw.randrange(PREFIXES) * 100
        blocks = range(shared + draw.randrange(20), shared + 24)
        keys = [key_of(b, group) for group in self.groups.order for b in blocks]
        self.tiers[place].lose(self.cache.core.epoch, keys)
        if draw.random() < 0.5:
            self.cache.tell(TierId(place), keys)
        self.happened["lose"] += 1
