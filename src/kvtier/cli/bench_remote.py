"""Measures a tier behind a network beside its bare client: same shapes, no envelope, no process.

The tier runs as it does below an engine: in a process of its own, over a region, sealed and
verified. Rounds of both alternate, since the speed of a network and its server changes; each figure
is a median. Every round has keys of its own, or, where a server keeps blocks in memory, those of
the round before.
"""

from __future__ import annotations

import itertools
import secrets
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from kvtier.cli.bench_driver import MeasuredTier
from kvtier.cli.bench_fs_jobs import filled_region
from kvtier.cli.bench_report import Row
from kvtier.core.types import BlockKey, Done, JobId, Slot
from kvtier.drivers.base import JobMetadata, SlotViews
from kvtier.errors import TierError
from kvtier.offloader import ConfiguredTier
from kvtier.tiers.registry import decode_settings, load_tier_type

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kvtier.region import Region

_JOB_S = 300.0
_POLL_S = 0.0001
_TICK_S = 0.001
_TICKS = 1000
_ROUNDS_MIN, _ROUNDS_MAX = 3, 50
_SHAPE_BYTES_MAX = 1 << 30  # of all rounds, where each has its own keys
_ROUND_BYTES = 16 << 20  # elsewhere small blocks go around until a round can be timed
_REPEATS_MAX = 64

KIB, MIB = 1 << 10, 1 << 20


class BareClient(Protocol):
    """The client library by itself. Called from several threads at once.

    Attributes:
        overwrites: whether rounds write the keys of the one before.
    """

    overwrites: bool

    def put(self, name: str, data: memoryview) -> None:
        """Store bytes."""
        ...

    def get(self, name: str, into: memoryview) -> None:
        """Fetch what `put` stored; as the client does it, into `into` or memory of its own."""
        ...

    def clean(self) -> None:
        """Delete everything that was stored, by the tier too."""
        ...


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured.

    Attributes:
        kind: the tier's `type`.
        options: of the tier.
        sizes: bytes per block.
        in_flight: blocks moved at once.
        seconds: for all shapes together, roughly.
    """

    kind: str
    options: Mapping[str, object]
    sizes: Sequence[int]
    in_flight: Sequence[int]
    seconds: float


@dataclass(slots=True)
class _Times:
    """Seconds of each round, by `store` and `load`, and how often the blocks went in one."""

    repeats: int = 1
    tier: dict[str, list[float]] = field(default_factory=lambda: {"store": [], "load": []})
    bare: dict[str, list[float]] = field(default_factory=lambda: {"store": [], "load": []})


class RemoteJobs(MeasuredTier):
    """Jobs of a tier over one region.

    Args:
        kind: the tier's `type`.
        options: of the tier.
        region: whose slots are stored and loaded; stays the caller's.

    Raises:
        ConfigError: the tier has no such options.
    """

    def __init__(self, kind: str, options: Mapping[str, object], region: Region) -> None:
        tier_type = load_tier_type(kind, "bench.type")
        plain = dict(options)
        settings = decode_settings(tier_type, plain, "bench")
        tier_type.preflight(settings, "bench")
        super().__init__(ConfiguredTier("bench", tier_type, settings, kind, plain), region)

    def seconds(self, operation: str, keys: Sequence[BlockKey]) -> float:
        """Seconds for one job, from submit until its `Done` is polled.

        Args:
            operation: `store`, `load` or `lookup`.
            keys: of the job, over the first slots.

        Raises:
            TierError: a block was not moved or found.
        """
        started = time.perf_counter()
        job = self._submit(operation, keys)
        while (done := self._done(job)) is None:
            if time.perf_counter() - started > _JOB_S:
                raise TierError(f"a {operation} did not end in {_JOB_S:.0f} s")
            time.sleep(_POLL_S)
        seconds = time.perf_counter() - started
        if len(done.ok) != len(keys):
            raise TierError(f"{operation}: only {len(done.ok)} of {len(keys)} blocks; see the log")
        return seconds

    def ticks(self, count: int, keys: Sequence[BlockKey] = ()) -> list[float]:
        """How late each of `count` ticks of 1 ms came on this thread, in seconds, while stores and
        loads of `keys` alternate; or nothing does, without keys.

        The ticking thread submits and polls, as a scheduler does.
        """
        late: list[float] = []
        job: JobId | None = None
        operations = itertools.cycle(("store", "load"))
        next_tick = time.perf_counter() + _TICK_S
        for _ in range(count):
            time.sleep(max(0.0, next_tick - time.perf_counter()))
            now = time.perf_counter()
            late.append(now - next_tick)
            if keys and (job is None or self._done(job) is not None):
                job = self._submit(next(operations), keys)
            next_tick = max(next_tick, time.perf_counter()) + _TICK_S
        until = time.perf_counter() + _JOB_S
        while job is not None and self._done(job) is None and time.perf_counter() < until:
            time.sleep(_POLL_S)
        return late

    def _submit(self, operation: str, keys: Sequence[BlockKey]) -> JobId:
        job_id = JobId(next(self._job_ids))
        slots = [] if operation == "lookup" else [Slot(i) for i in range(len(keys))]
        views = SlotViews(self._region, slots, readonly=operation == "store")
        job = JobMetadata(job_id, tuple(keys), views, self._namespace)
        {
            "store": self._driver.submit_store,
            "load": self._driver.submit_load,
            "lookup": self._driver.submit_lookup,
        }[operation](job)
        return job_id

    def _done(self, job: JobId) -> Done | None:
        for completion in self._driver.get_finished():
            if isinstance(completion, Done) and completion.job == job:
                return completion
        return None


def measure(plan: Plan, bare: BareClient, doing: Callable[[str], None]) -> list[Row]:
    """Rows of every shape, and of the main thread's ticks.

    Raises:
        ConfigError: the tier's options cannot work.
        TierError: a block was not moved.
    """
    rows: list[Row] = []
    share_s = plan.seconds / (len(plan.sizes) * len(plan.in_flight) + 1)
    for size in plan.sizes:
        with (
            closing(filled_region(size, max(plan.in_flight))) as region,
            RemoteJobs(plan.kind, plan.options, region) as jobs,
        ):
            jobs.seconds("store", fresh_keys(1))  # the process starts, the namespace is opened
            for count in plan.in_flight:
                doing(f"{shape_text(size)}, {count} in flight")
                times = _alternate(jobs, bare, region, count, share_s)
                rows += _rows(plan.kind, size, count, times)
                bare.clean()
            if size == max(plan.sizes):
                doing("ticks of the main thread")
                rows.append(_tick_row(plan.kind, jobs, min(16, max(plan.in_flight))))
    return rows


def fresh_keys(count: int) -> list[BlockKey]:
    """Keys that were not used before."""
    return [BlockKey(secrets.token_bytes(32) + bytes(4)) for _ in range(count)]


def shape_text(size: int) -> str:
    """A block size for names of rows."""
    return f"{size // MIB}MiB" if size % MIB == 0 else f"{size // KIB}KiB"


def _alternate(
    jobs: RemoteJobs, bare: BareClient, region: Region, count: int, share_s: float
) -> _Times:
    times = _Times()
    until = time.perf_counter() + share_s
    slots = [region.slot(Slot(i)) for i in range(count)]
    nbytes = count * region.slot_bytes
    keys, bare_keys = fresh_keys(count), fresh_keys(count)
    if bare.overwrites:
        rounds = _ROUNDS_MAX
        times.repeats = max(1, min(_REPEATS_MAX, _ROUND_BYTES // nbytes))
    else:
        rounds = min(_ROUNDS_MAX, max(_ROUNDS_MIN, _SHAPE_BYTES_MAX // nbytes))
    with ThreadPoolExecutor(count) as threads:
        # the first calls open connections, and start threads
        list(threads.map(bare.put, [key.hex() for key in bare_keys], slots))
        jobs.seconds("store", keys)
        for done in range(1, rounds + 1):
            if not bare.overwrites:
                keys, bare_keys = fresh_keys(count), fresh_keys(count)
            names = [key.hex() for key in bare_keys]
            for operation, call in (("store", bare.put), ("load", bare.get)):
                started = time.perf_counter()
                for _ in range(times.repeats):
                    list(threads.map(call, names, slots))
                times.bare[operation].append(time.perf_counter() - started)
            for operation in ("store", "load"):
                spent = sum(jobs.seconds(operation, keys) for _ in range(times.repeats))
                times.tier[operation].append(spent)
            if done >= _ROUNDS_MIN and time.perf_counter() > until:
                break
    return times


def _rows(kind: str, size: int, count: int, times: _Times) -> list[Row]:
    moved = size * count * times.repeats / 1e9
    return [
        Row(
            f"{kind} {operation} {shape_text(size)} x {count}",
            moved / statistics.median(times.tier[operation]),
            "GB/s",
            moved / statistics.median(times.bare[operation]),
            "bare client",
            "higher",
        )
        for operation in ("store", "load")
    ]


def _tick_row(kind: str, jobs: RemoteJobs, count: int) -> Row:
    idle = jobs.ticks(_TICKS)
    busy = jobs.ticks(_TICKS, fresh_keys(count))
    idle += jobs.ticks(_TICKS)
    busy += jobs.ticks(_TICKS, fresh_keys(count))
    worst = [statistics.quantiles(late, n=100)[98] * 1e6 for late in (busy, idle)]
    return Row(f"{kind} main thread tick p99", worst[0], "us late", worst[1], "idle run", "lower")
