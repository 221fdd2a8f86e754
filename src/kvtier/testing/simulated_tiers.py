"""A tier in virtual time that behaves as scripted.

tier = SimulatedTier(memory, latency_s=0.01, block_s=0.001)
tier.behave("read", Fail(Fault.FULL), jobs=3)
tier.behave("write", Hang())

Bytes are not moved: `memory` says for each slot whose bytes lie there, and None while a transfer
smears it. So a wrong byte is seen by whoever loads it.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from kvtier.core.types import BlockKey, Done, Fault, JobId, Slot

Operation = Literal["probe", "read", "write"]

Content = tuple[object, BlockKey]
"""What bytes are: the weights (an epoch, a namespace) under which they were computed, their key."""

Memory = list[Content | None]
"""Slot -> what lies there; None while it is being written, or garbage."""


class SimulatedTierError(Exception):
    """What a tier raises that was told to raise."""


@dataclass(frozen=True, slots=True)
class Fail:
    """Do nothing, and report this."""

    fault: Fault = Fault.ERROR


@dataclass(frozen=True, slots=True)
class Hang:
    """Do nothing and report nothing until healed; what hung then goes on."""


@dataclass(frozen=True, slots=True)
class Short:
    """Do only the first keys of a job."""

    keys: int


@dataclass(frozen=True, slots=True)
class Lie:
    """Say of every key that it is there. For probes."""


@dataclass(frozen=True, slots=True)
class Raise:
    """Raise from the method that submits."""


Behaviour = Fail | Hang | Short | Lie | Raise


@dataclass(slots=True, eq=False)
class Running:
    """A job that the tier carries out."""

    operation: Operation
    job: JobId
    keys: Sequence[BlockKey]
    slots: Sequence[Slot]
    space: object
    behaviour: Behaviour | None
    before: list[Content | None]

    @property
    def hangs(self) -> bool:
        """Whether it stays until the tier is healed."""
        return isinstance(self.behaviour, Hang)


class SimulatedTier:
    """One tier: a queue in front of one device.

    Args:
        memory: of the primary tier.
        latency_s: seconds that each job takes besides.
        block_s: seconds per block read or written, one block after the other over all jobs.

    Attributes:
        held: (space, key) -> what bytes are kept under it.
        jobs: jobs submitted, per operation.
        reads: how often each key was read with success.
        written: blocks written with success.
        raises_on_poll: `finished` raises as well.
    """

    def __init__(self, memory: Memory, latency_s: float = 0.0, block_s: float = 0.0) -> None:
        self.held: dict[Content, Content | None] = {}
        self.jobs: Counter[Operation] = Counter()
        self.reads: Counter[BlockKey] = Counter()
        self.written = 0
        self.raises_on_poll = False
        self.latency_s = latency_s
        self.block_s = block_s
        self._memory = memory
        self._script: dict[Operation, tuple[Behaviour, float]] = {}
        self._running: list[tuple[float, int, Running]] = []  # a heap; never ending ones last
        self._free_at = 0.0
        self._count = 0

    @property
    def running(self) -> list[Running]:
        """Jobs that have not ended, those that hang included."""
        return [job for _, _, job in self._running]

    def behave(self, operation: Operation, behaviour: Behaviour, jobs: float = math.inf) -> None:
        """Let the next so many jobs of an operation go like this."""
        self._script[operation] = (behaviour, jobs)

    def heal(self, now: float) -> None:
        """Behave well again. What hung is carried out now."""
        self._script.clear()
        self.raises_on_poll = False
        jobs = [job for _, _, job in sorted(self._running, key=lambda entry: entry[1])]
        hung = [job for job in jobs if job.hangs]
        self._running = [entry for entry in self._running if not entry[2].hangs]
        heapq.heapify(self._running)
        for job in hung:
            job.behaviour = None
            self._enqueue(job, now)

    def keep(self, space: object, keys: Iterable[BlockKey]) -> None:
        """Hold these, as if a neighbour had written them."""
        for key in keys:
            self.held[(space, key)] = (space, key)

    def lose(self, space: object, keys: Iterable[BlockKey]) -> None:
        """Hold these no more, in silence."""
        for key in keys:
            self.held.pop((space, key), None)

    def submit(
        self,
        now: float,
        operation: Operation,
        job: JobId,
        keys: Sequence[BlockKey],
        slots: Sequence[Slot] = (),
        space: object = 0,
    ) -> None:
        """Take a job on.

        Raises:
            SimulatedTierError: as scripted; the job does not exist then.
        """
        self.jobs[operation] += 1
        behaviour = self._next_behaviour(operation)
        if isinstance(behaviour, Raise):
            raise SimulatedTierError(f"{operation}: told to raise")
        before = [self._memory[slot] for slot in slots]
        if operation == "read":
            for slot in slots:
                self._memory[slot] = None
        self._enqueue(Running(operation, job, keys, slots, space, behaviour, before), now)

    def finished(self, now: float) -> list[Done]:
        """Jobs that ended since the last call.

        Raises:
            SimulatedTierError: if it is to raise when it is polled; nothing ends then.
        """
        if self.raises_on_poll:
            raise SimulatedTierError("poll: told to raise")
        ended: list[Done] = []
        while self._running and self._running[0][0] <= now:
            _, _, job = heapq.heappop(self._running)
            ended.append(self._end(job))
        return ended

    def _next_behaviour(self, operation: Operation) -> Behaviour | None:
        behaviour, left = self._script.get(operation, (None, 0))
        if behaviour is not None:
            if left > 1:
                self._script[operation] = (behaviour, left - 1)
            else:
                del self._script[operation]
        return behaviour

    def _enqueue(self, job: Running, now: float) -> None:
        self._count += 1
        if job.hangs:
            ends_at = math.inf
        elif job.operation == "probe":
            ends_at = now + self.latency_s
        else:
            self._free_at = max(now, self._free_at) + len(job.keys) * self.block_s
            ends_at = self._free_at + self.latency_s
        heapq.heappush(self._running, (ends_at, self._count, job))

    def _end(self, job: Running) -> Done:
        match job.behaviour:
            case Fail(fault):
                return Done(job.job, frozenset(), fault)
            case Short(most):
                keys = job.keys[:most]
            case _:
                keys = job.keys
        if job.operation == "probe":
            if isinstance(job.behaviour, Lie):
                return Done(job.job, frozenset(keys))
            return Done(job.job, frozenset(k for k in keys if (job.space, k) in self.held))
        if job.operation == "read":
            return Done(job.job, self._copy_in(job, keys))
        for key, slot, before in zip(keys, job.slots, job.before, strict=False):
            # Bytes that changed on the way are garbage under a good checksum.
            self.held[(job.space, key)] = before if self._memory[slot] == before else None
        self.written += len(keys)
        return Done(job.job, frozenset(keys))

    def _copy_in(self, job: Running, keys: Sequence[BlockKey]) -> frozenset[BlockKey]:
        good = []
        for key, slot in zip(keys, job.slots, strict=False):
            if (job.space, key) in self.held:
                self._memory[slot] = self.held[(job.space, key)]
                self.reads[key] += 1
                good.append(key)
        return frozenset(good)
