"""What kvtier counts: one table of definitions, and increments out of running totals.

The core has no metric hooks. Whoever knows a total (a tier's counters, the pool) reports it as it
stands; `Collector` compares it with the last report and says what changed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping


class Kind(Enum):
    """How reports of a metric combine."""

    COUNTER = "counter"  # a running total; increments are emitted
    GAUGE = "gauge"  # a level; the latest one is emitted


@dataclass(frozen=True, slots=True)
class Metric:
    """Definition of a metric.

    Attributes:
        name: as exposed; the exporter appends `_total` to counters where it is its custom. It
            begins with `vllm:`, since vLLM's own reader passes over other names.
        kind: how reports combine.
        documentation: one sentence with the unit.
        labels: names of its labels, in order; empty for a metric of the whole engine.
    """

    name: str
    kind: Kind
    documentation: str
    labels: tuple[str, ...] = ("tier",)


def _counter(name: str, documentation: str, labels: tuple[str, ...] = ("tier",)) -> Metric:
    return Metric(f"vllm:kvtier_{name}", Kind.COUNTER, documentation, labels)


def _gauge(name: str, documentation: str) -> Metric:
    return Metric(f"vllm:kvtier_{name}", Kind.GAUGE, documentation)


LOOKUP_BLOCKS = _counter("lookup_blocks", "Number of blocks whose presence was asked for.")
HIT_BLOCKS = _counter("hit_blocks", "Number of blocks that were asked for and present.")
HIT_TOKENS = _counter("hit_tokens", "Number of prompt tokens that the tier saved from prefill.")
READ_BYTES = _counter("read_bytes", "Bytes read from the tier and verified.")
READ_SECONDS = _counter("read_seconds", "Time spent reading blocks, in seconds over all threads.")
READ_FAILURES = _counter("read_failures", "Number of blocks whose read failed or came too late.")
WRITE_BYTES = _counter("write_bytes", "Bytes written to the tier.")
WRITE_SECONDS = _counter("write_seconds", "Time spent writing blocks, in seconds over all threads.")
WRITE_FAILURES = _counter("write_failures", "Number of blocks whose write failed or came too late.")
CORRUPT_BLOCKS = _counter("corrupt_blocks", "Number of blocks read that failed verification.")
SKIPPED_STORE_BLOCKS = _counter(
    "skipped_store_blocks", "Number of blocks not stored because the budget was used up."
)
EXPIRED_WAITS = _counter("expired_waits", "Number of waits for the tier that max_wait_ms ended.")
EXPIRED_JOBS = _counter("expired_jobs", "Number of jobs that the tier did not end in time.")
RECOMPUTED_BLOCKS = _counter(
    "recomputed_blocks",
    "Number of blocks that a tier had, but that were faster to compute than to read.",
)
FILTERED_BLOCKS = _counter(
    "filtered_blocks", "Number of blocks not written to tiers since they were met only once."
)
DRIVER_ERRORS = _counter("driver_errors", "Number of exceptions that the tier's driver raised.")
READS_OPEN = _gauge("reads_open", "1 while the tier is not read since it fails or stalls, else 0.")
WRITES_OPEN = _gauge(
    "writes_open", "1 while nothing is written to the tier since it fails or stalls, else 0."
)
FAULTS = _counter(
    "tier_faults",
    "Number of failures of the tier by cause: of blocks, and of batches of lookups.",
    ("tier", "cause"),
)
PROCESS_STARTS = _counter("process_starts", "Number of I/O processes started for the tier.")
PROCESS_KILLS = _counter(
    "process_kills", "Number of I/O processes of the tier killed since they hung or sent nonsense."
)
PROCESS_CRASHES = _counter(
    "process_crashes", "Number of I/O processes of the tier that ended by themselves."
)
TIMES_OPENED = _counter("times_opened", "Number of times that the tier began to be left alone.")
INTERNAL_ERRORS = _counter(
    "internal_errors", "Number of errors that were contained; each is a defect of kvtier.", ()
)
USED_SLOTS = _gauge("used_slots", "Number of slots of the pool that hold a block.")
TOTAL_SLOTS = _gauge("total_slots", "Number of slots of the pool.")
PINNED_SLOTS = _gauge("pinned_slots", "Number of slots of the pool that cannot be evicted now.")
JOBS_IN_FLIGHT = _gauge("jobs_in_flight", "Number of jobs that the tier has not ended.")
USED_BYTES = _gauge("used_bytes", "Bytes that the tier's blocks take where they are kept.")
CAPACITY_BYTES = _gauge("capacity_bytes", "Bytes that the tier's blocks may take.")
EVICTED_BLOCKS = _counter("evicted_blocks", "Number of blocks that the tier gave up for others.")
ROOTS_FAILING = _gauge("roots_failing", "Directories of the tier that are not used now.")
REFUSED_TAKES = _counter(
    "refused_takes", "Number of times that a write found the tier's capacity used up."
)

FIGURES: Mapping[str, Metric] = MappingProxyType(
    {
        metric.name.removeprefix("vllm:kvtier_"): metric
        for metric in (USED_BYTES, CAPACITY_BYTES, EVICTED_BLOCKS, ROOTS_FAILING, REFUSED_TAKES)
    }
)
"""Metrics out of what a tier itself tells (`tiers.base.SupportsFigures`), by the name it uses."""

METRICS: Mapping[str, Metric] = MappingProxyType(
    {
        metric.name: metric
        for metric in (
            *(LOOKUP_BLOCKS, HIT_BLOCKS, HIT_TOKENS),
            *(READ_BYTES, READ_SECONDS, READ_FAILURES),
            *(WRITE_BYTES, WRITE_SECONDS, WRITE_FAILURES),
            *(CORRUPT_BLOCKS, SKIPPED_STORE_BLOCKS, EXPIRED_WAITS, INTERNAL_ERRORS),
            *(EXPIRED_JOBS, RECOMPUTED_BLOCKS, FILTERED_BLOCKS, DRIVER_ERRORS),
            *(READS_OPEN, WRITES_OPEN, TIMES_OPENED),
            *(FAULTS, PROCESS_STARTS, PROCESS_KILLS, PROCESS_CRASHES, *FIGURES.values()),
            *(USED_SLOTS, TOTAL_SLOTS, PINNED_SLOTS, JOBS_IN_FLIGHT),
        )
    }
)
"""Every metric by name."""


class Series(NamedTuple):
    """One line of a metric."""

    metric: Metric
    labels: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class MetricsDelta:
    """What changed between two reports; false if nothing did.

    Attributes:
        counters: increments above 0.
        gauges: levels that are new or different.
    """

    counters: Mapping[Series, float] = field(default_factory=dict)
    gauges: Mapping[Series, float] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.counters or self.gauges)


class Collector:
    """Turns running totals into increments. Called by one thread."""

    __slots__ = ("_last",)

    def __init__(self) -> None:
        self._last: dict[Series, float] = {}

    def collect(self, totals: Mapping[Series, float]) -> MetricsDelta:
        """What changed since the last call; the first call compares counters with 0.

        A counter that fell was restarted with its tier: all of it is new. A series that is not
        reported keeps its last value.
        """
        counters: dict[Series, float] = {}
        gauges: dict[Series, float] = {}
        for series, value in totals.items():
            assert len(series.labels) == len(series.metric.labels), f"labels of {series}"
            last = self._last.get(series)
            if value == last:
                continue
            self._last[series] = value
            if series.metric.kind is Kind.GAUGE:
                gauges[series] = value
            elif increment := value - last if last is not None and value > last else value:
                counters[series] = increment
        return MetricsDelta(counters, gauges)
