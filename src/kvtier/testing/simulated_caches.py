"""What the simulated engine drives: a cache, through the calls of vLLM's connector.

`CoreCache` is the core itself with simulated tiers. Whatever has vLLM's interface is wrapped where
vLLM may be imported; `SimulatedDriver` then puts a simulated tier below kvtier's own adapter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from kvtier.core.limits import Limits
from kvtier.core.manager import TieringManager
from kvtier.core.policies.lru import LRU
from kvtier.core.pool import BlockPool
from kvtier.core.requests import Request
from kvtier.core.types import (
    BlockKey,
    Completion,
    Done,
    Dropped,
    Event,
    Fault,
    Lend,
    Lookup,
    Probe,
    Read,
    Slot,
    TierId,
    Write,
)
from kvtier.drivers.base import JobMetadata, SecondaryTierManager, SlotViews, TierCounters
from kvtier.testing.engine import positions
from kvtier.testing.simulated_tiers import Operation, SimulatedTier, SimulatedTierError


class Clock:
    """Virtual time, in seconds."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        """The time."""
        return self.now


class Cache(Protocol):
    """A cache as vLLM's connector sees it, in the order of its calls within a step."""

    def open(self, name: str, keys: Sequence[BlockKey]) -> None:
        """A request was added; `keys` are those of its prompt."""
        ...

    def lookup(self, name: str, key: BlockKey) -> Lookup:
        """Whether a block can be loaded."""
        ...

    def prepare_load(self, name: str, keys: Sequence[BlockKey]) -> list[Slot | None]:
        """A hit is going to be loaded: where its blocks lie."""
        ...

    def end_schedule(self, started: Sequence[str], preempted: Sequence[str]) -> None:
        """Scheduling of a step is over."""
        ...

    def prepare_store(self, name: str, keys: Sequence[BlockKey]) -> dict[BlockKey, Slot] | None:
        """Slots for what is to be stored; None: not now."""
        ...

    def finish(self, name: str) -> None:
        """A request ended; transfers of it may still be running."""
        ...

    def complete_store(self, name: str, slots: dict[BlockKey, Slot]) -> None:
        """The device has written these."""
        ...

    def complete_load(self, name: str, keys: Sequence[BlockKey]) -> None:
        """The device has read these."""
        ...

    def end_step(self) -> None:
        """The step is over: statistics and events are collected."""
        ...

    def reset(self, new_weights: bool) -> None:
        """Forget everything; what is in the tiers too, if the weights are new."""
        ...

    @property
    def pending(self) -> bool:
        """Whether the engine must keep stepping for its sake."""
        ...


class CoreCache:
    """The core with simulated tiers, driven as kvtier's adapter drives it.

    A tier that raises counts as one whose job failed, which is what an I/O process makes of it.

    Attributes:
        core: the manager.
        events: everything that it told.
        raised: how often a tier raised.
    """

    def __init__(
        self,
        clock: Clock,
        num_slots: int,
        limits: Limits,
        tiers: Sequence[SimulatedTier],
        windows: frozenset[int] = frozenset(),
        keep_events: bool = False,
    ) -> None:
        self.core = TieringManager(
            BlockPool(num_slots, LRU(num_slots)), len(tiers), clock(), limits, windows
        )
        self.tiers = tuple(tiers)
        self.events: list[Event] = []
        self.raised = 0
        self._clock = clock
        self._keep_events = keep_events
        self._requests: dict[str, Request] = {}
        self._unread = True
        self._inbox: list[Completion] = []
        self._fence_due = False

    def open(self, name: str, keys: Sequence[BlockKey]) -> None:
        """See `Cache`."""
        self._requests[name] = self.core.open_request(name, position=positions(keys).get)

    def lookup(self, name: str, key: BlockKey) -> Lookup:
        """See `Cache`."""
        self._begin()
        return self.core.lookup(self._requests[name], key)

    def prepare_load(self, name: str, keys: Sequence[BlockKey]) -> list[Slot | None]:
        """See `Cache`."""
        return self.core.prepare_load(name, keys)

    def end_schedule(self, started: Sequence[str], preempted: Sequence[str]) -> None:
        """See `Cache`."""
        for name in (*started, *preempted):
            self.core.settle_request(name)
        self._begin()
        for command in self.core.end_step():
            try:
                self._submit(command)
            except SimulatedTierError:
                self.raised += 1
                self._inbox.append(Done(command.job, fault=Fault.ERROR))
        self._unread = True

    def prepare_store(self, name: str, keys: Sequence[BlockKey]) -> dict[BlockKey, Slot] | None:
        """See `Cache`."""
        return self.core.prepare_store(name, keys)

    def finish(self, name: str) -> None:
        """See `Cache`."""
        del self._requests[name]
        self.core.finish_request(name)

    def complete_store(self, name: str, slots: dict[BlockKey, Slot]) -> None:  # noqa: ARG002
        """See `Cache`."""
        self.core.complete_store(slots)

    def complete_load(self, name: str, keys: Sequence[BlockKey]) -> None:  # noqa: ARG002
        """See `Cache`."""
        self.core.complete_load(name)

    def end_step(self) -> None:
        """See `Cache`."""
        if self._fence_due:
            self._fence_due = False
            self.core.fence_passed()
        events = self.core.take_events()
        if self._keep_events:
            self.events += events
        self._unread = True

    def reset(self, new_weights: bool) -> None:
        """See `Cache`."""
        self.core.reset(keep_tiers=not new_weights)
        self._fence_due = True

    @property
    def pending(self) -> bool:
        """See `Cache`."""
        return self.core.busy or self._fence_due

    def tell(self, tier: TierId, keys: Sequence[BlockKey]) -> None:
        """A tier tells that it evicted these."""
        self._inbox.append(Dropped(tier, tuple(keys)))

    def _begin(self) -> None:
        if not self._unread:
            return
        self._unread = False
        completions, self._inbox = self._inbox, []
        now = self._clock()
        for tier in self.tiers:
            try:
                completions += tier.finished(now)
            except SimulatedTierError:
                self.raised += 1
        self.core.begin_step(now, completions)

    def _submit(self, command: Probe | Read | Write | Lend) -> None:
        tier, now = self.tiers[command.tier], self._clock()
        match command:
            case Probe(job=job, keys=keys, epoch=epoch):
                tier.submit(now, "probe", job, keys, space=epoch)
            case Read(job=job, keys=keys, slots=slots, epoch=epoch):
                tier.submit(now, "read", job, keys, slots, epoch)
            case Write(job=job, keys=keys, slots=slots, epoch=epoch):
                tier.submit(now, "write", job, keys, slots, epoch)
            case Lend():
                raise AssertionError("nobody borrowed")


class SimulatedDriver(SecondaryTierManager):
    """A simulated tier below kvtier's own adapter.

    Args:
        tier: what it drives.
        clock: virtual time.
        space_of: namespace digest -> what the tier's contents are filed under.
    """

    def __init__(
        self, tier: SimulatedTier, clock: Clock, space_of: Callable[[str], object]
    ) -> None:
        self._tier = tier
        self._clock = clock
        self._space_of = space_of

    def submit_store(self, job: JobMetadata) -> None:
        """See `SecondaryTierManager`."""
        self._submit("write", job)

    def submit_load(self, job: JobMetadata) -> None:
        """See `SecondaryTierManager`."""
        self._submit("read", job)

    def submit_lookup(self, job: JobMetadata) -> None:
        """See `SecondaryTierManager`."""
        space = self._space_of(job.namespace)
        self._tier.submit(self._clock(), "probe", job.job_id, job.block_hashes, (), space)

    def get_finished(self) -> list[Completion]:
        """See `SecondaryTierManager`."""
        return list(self._tier.finished(self._clock()))

    def counters(self) -> TierCounters:
        """See `SecondaryTierManager`."""
        return TierCounters()

    def close(self, timeout_s: float = 5.0) -> bool:  # noqa: ARG002 - nothing runs
        """See `SecondaryTierManager`."""
        return True

    def _submit(self, operation: Operation, job: JobMetadata) -> None:
        assert isinstance(job.spec, SlotViews), "the offloader passes views of slots"
        slots = tuple(job.spec.slots)
        space = self._space_of(job.namespace)
        self._tier.submit(self._clock(), operation, job.job_id, job.block_hashes, slots, space)
