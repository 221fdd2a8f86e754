"""The asynchronous interface between the scheduler thread and a tier. Nothing in it blocks.

`SecondaryTierManager` keeps the name it has in vLLM's multi-tier design. One change from there:
existence is a job (`submit_lookup`) whose answer arrives with `get_finished`, since asking storage
blocks and window groups need more than a prefix length.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Protocol, overload

from kvtier.core.types import BlockKey, Completion, JobId, Slot


class SlotSource(Protocol):
    """What a driver needs of the primary region."""

    @property
    def slot_bytes(self) -> int:
        """Bytes per slot."""
        ...

    def slot(self, slot: Slot) -> memoryview:
        """Writable view of one slot."""
        ...


class SlotViews(Sequence[memoryview]):
    """Views of primary slots, made when they are asked for: on the driver's thread, not on the
    scheduler's.

    Attributes:
        slots: their numbers, in order.
    """

    __slots__ = ("_readonly", "_source", "slots")

    def __init__(self, source: SlotSource, slots: Sequence[Slot], readonly: bool) -> None:
        self.slots = slots
        self._source = source
        self._readonly = readonly

    @overload
    def __getitem__(self, index: int) -> memoryview: ...
    @overload
    def __getitem__(self, index: slice) -> SlotViews: ...
    def __getitem__(self, index: int | slice) -> memoryview | SlotViews:
        if isinstance(index, slice):
            return SlotViews(self._source, self.slots[index], self._readonly)
        view = self._source.slot(self.slots[index])
        return view.toreadonly() if self._readonly else view

    def __len__(self) -> int:
        return len(self.slots)

    def __iter__(self) -> Iterator[memoryview]:
        return (self[i] for i in range(len(self.slots)))


@dataclass(frozen=True, slots=True)
class JobMetadata:
    """One job for a tier.

    Attributes:
        job_id: echoed by the `Done` that ends the job.
        block_hashes: the keys, in order.
        spec: for a store, read-only views of the primary slots that hold the blocks; for a load,
            writable views of the slots to fill; empty for a lookup.
        namespace: hex digest under which the keys are looked up, read or written.
    """

    job_id: JobId
    block_hashes: tuple[BlockKey, ...]
    spec: Sequence[memoryview] = ()
    namespace: str = ""


@dataclass(slots=True)
class TierCounters:
    """What a tier did since it started. Read by the scheduler thread, written by the tier's.

    Attributes:
        faults: failures by their cause (`drivers.faults.cause_of`): blocks, and batches of lookups.
        figures: what the tier itself tells, the latest: `tiers.base.SupportsFigures`.
        process_starts: I/O processes started for the tier.
        process_kills: those of them that were killed since they hung or sent nonsense.
        process_crashes: those that ended by themselves.
    """

    read_bytes: int = 0
    read_seconds: float = 0.0
    read_blocks: int = 0
    read_failures: int = 0
    write_bytes: int = 0
    write_seconds: float = 0.0
    write_blocks: int = 0
    write_failures: int = 0
    lookup_blocks: int = 0
    lookup_hits: int = 0
    lookup_failures: int = 0
    corrupt_blocks: int = 0
    faults: dict[str, int] = field(default_factory=dict)
    figures: dict[str, float] = field(default_factory=dict)
    process_starts: int = 0
    process_kills: int = 0
    process_crashes: int = 0

    def count_faults(self, cause: str, count: int = 1) -> None:
        """More failures of one cause."""
        self.faults[cause] = self.faults.get(cause, 0) + count

    def add(self, other: TierCounters) -> None:
        """Count what `other` counted as well; its figures are taken to be the newer ones."""
        for name in TOTALS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for cause, count in other.faults.items():
            self.count_faults(cause, count)
        self.figures.update(other.figures)

    def copy(self) -> TierCounters:
        """The totals as they stand."""
        return replace(self, faults=dict(self.faults), figures=dict(self.figures))


TOTALS = tuple(each.name for each in fields(TierCounters) if each.name not in ("faults", "figures"))
"""Names of the counters that are numbers, in order."""


class SecondaryTierManager(ABC):
    """Moves blocks between primary slots and one tier, asynchronously.

    Every submitted job ends in exactly one `Done`; after it no slot of the job is touched. All
    methods are called on the scheduler thread, return at once and raise nothing. (One that raises
    all the same is contained; a submit that raised has not taken its job.)
    """

    @abstractmethod
    def submit_store(self, job: JobMetadata) -> None:
        """Copy the job's slots to the tier."""

    @abstractmethod
    def submit_load(self, job: JobMetadata) -> None:
        """Fill the job's slots from the tier; each block is verified before it counts as ok."""

    @abstractmethod
    def submit_lookup(self, job: JobMetadata) -> None:
        """Ask which of the job's keys the tier holds."""

    def submit_lend(self, ticket: int, job: JobMetadata, missing: Sequence[BlockKey]) -> None:
        """Answer to a `Wanted` of this driver: the job's slots hold its keys, to be read until the
        driver reports `Done`, or the lease ends unrenewed; `missing` cannot be lent.

        Args:
            ticket: of the question.
            job: keys, and read-only views of their slots.
            missing: the keys that were asked for in vain.
        """
        raise NotImplementedError("a driver that asks for blocks takes the answer")

    @abstractmethod
    def get_finished(self) -> list[Completion]:
        """Completions since the last call, in the order in which they happened."""

    def touch(self, keys: Sequence[BlockKey]) -> None:  # noqa: B027 - optional by design
        """Hint: these keys were used. Tiers that evict may use it."""

    @abstractmethod
    def counters(self) -> TierCounters:
        """Running totals."""

    @abstractmethod
    def close(self, timeout_s: float = 5.0) -> bool:
        """Stop: drop queued jobs, wait for running ones up to `timeout_s`.

        Returns:
            True if nothing of this tier is running any more.
        """
