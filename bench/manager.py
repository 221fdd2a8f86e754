"""Scheduler-thread cost of kvtier's manager beside vLLM's own tiering manager, in one run.

Both managers are driven through vLLM's interface as the connector does it: one request of 8,192
blocks, one tier below the CPU pool. The tier answers at once and moves no bytes, so that only the
scheduler thread's own work is timed. Each figure is the median of several fresh repetitions, the
two managers in turn.
"""

from __future__ import annotations

import statistics
import time
import uuid
from collections.abc import Callable, Iterator, Mapping

from _report import Row, main
from vllm.v1.kv_offload.base import (
    LookupResult,
    Medium,
    OffloadingManager,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
    make_offload_key,
)
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.base import JobResult
from vllm.v1.kv_offload.tiering.base import SecondaryTierManager as StockTier
from vllm.v1.kv_offload.tiering.manager import (
    CPUPrimaryTierOffloadingManager,
    TieringOffloadingManager,
)

from kvtier.config import Settings
from kvtier.core.types import BlockKey, Completion, Done
from kvtier.drivers.base import JobMetadata, SecondaryTierManager, TierCounters
from kvtier.namespace import Namespace
from kvtier.offloader import Offloader, configure_tiers
from kvtier.region import Geometry, Mark, Region
from kvtier.vllm.manager import KVTierManager

NUM_BLOCKS = 8192
ROW_BYTES = 4096
REPETITIONS = 7
Timings = dict[str, float]


class InstantTier(SecondaryTierManager):
    """Ends every job at once; holds what it is told to hold."""

    def __init__(self) -> None:
        self.held: set[BlockKey] = set()
        self.finished: list[Completion] = []
        self.silent = False

    def submit_store(self, job: JobMetadata) -> None:
        self.held.update(job.block_hashes)
        self.finished.append(Done(job.job_id, frozenset(job.block_hashes)))

    def submit_load(self, job: JobMetadata) -> None:
        if not self.silent:
            self.finished.append(Done(job.job_id, frozenset(job.block_hashes)))

    def submit_lookup(self, job: JobMetadata) -> None:
        self.finished.append(Done(job.job_id, frozenset(self.held.intersection(job.block_hashes))))

    def get_finished(self) -> list[Completion]:
        finished, self.finished = self.finished, []
        return finished

    def counters(self) -> TierCounters:
        return TierCounters()

    def close(self, timeout_s: float = 5.0) -> bool:
        return True


class InstantStockTier(StockTier):
    """The same for the stock manager."""

    medium = Medium.STORAGE

    def __init__(self, view: memoryview) -> None:
        super().__init__(None, view, "instant")
        self.held: set[OffloadKey] = set()
        self.finished: list[JobResult] = []
        self.silent = False

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        return LookupResult.HIT if key in self.held else LookupResult.MISS

    def submit_store(self, job_metadata: object) -> None:
        self.held.update(job_metadata.keys)
        self.finished.append(JobResult(job_id=job_metadata.job_id, success=True))

    def submit_load(self, job_metadata: object) -> None:
        if not self.silent:
            self.finished.append(JobResult(job_id=job_metadata.job_id, success=True))

    def get_finished_jobs(self) -> list[JobResult]:
        finished, self.finished = self.finished, []
        return finished

    def drain_jobs(self) -> None:
        """Nothing is ever running."""


def scan(manager: OffloadingManager, keys: list[OffloadKey], context: ReqContext) -> int | None:
    """What the connector does for a full-attention group: to the first miss, past what waits."""
    hits, waits = 0, False
    for key in keys:
        answer = manager.lookup(key, context)
        if answer is LookupResult.MISS:
            break
        if answer is LookupResult.HIT:
            hits += 1
        else:
            waits = True
    return None if waits else hits


def end_step(manager: OffloadingManager) -> None:
    manager.on_schedule_end(ScheduleEndContext((), ()))
    manager.get_stats()
    list(manager.take_events())


def make_keys(start: int) -> list[OffloadKey]:
    return [make_offload_key((start + i).to_bytes(32, "big"), 0) for i in range(NUM_BLOCKS)]


def request(manager: OffloadingManager, name: str, keys: list[OffloadKey]) -> ReqContext:
    context = ReqContext(req_id=name)
    for place, key in enumerate(keys):
        context.set_offload_key_position(key, place)
    manager.on_new_request(context)
    return context


def measure_one(
    manager: OffloadingManager,
    tier: InstantTier | InstantStockTier,
    copied: Callable[[list[int]], None],
) -> Timings:
    """Every figure once, in microseconds, on a fresh manager."""
    clock = time.thread_time  # of this thread alone: neighbours do not count
    timings: Timings = {}
    keys = make_keys(0)
    context = request(manager, "store", keys)
    end_step(manager)

    started = clock()
    output = manager.prepare_store(keys, context)
    timings["prepare_store"] = clock() - started
    copied(output.store_spec.block_ids)
    stored = set(output.keys_to_store)
    started = clock()
    manager.complete_store(stored, context)
    timings["complete_store_cascade"] = clock() - started
    timings["store_cascade"] = timings["prepare_store"] + timings["complete_store_cascade"]
    for _ in range(3):
        end_step(manager)

    started = clock()
    assert scan(manager, keys, context) == NUM_BLOCKS
    timings["primary_hit"] = clock() - started
    started = clock()
    manager.prepare_load(keys, context)
    timings["prepare_load"] = clock() - started
    loaded = set(keys)
    started = clock()
    manager.complete_load(loaded, context)
    timings["complete_load"] = clock() - started
    started = clock()
    manager.on_request_finished(context)
    timings["request_finished"] = clock() - started
    end_step(manager)

    keys = make_keys(10**6)
    tier.held.update(keys)
    tier.silent = True
    context = request(manager, "load", keys)
    if isinstance(manager, KVTierManager):  # its existence check is a job of its own
        assert scan(manager, keys, context) is None
        end_step(manager)
    started = clock()
    assert scan(manager, keys, context) is None
    manager.on_schedule_end(ScheduleEndContext((), ()))
    timings["promotion_start"] = clock() - started
    manager.get_stats()
    list(manager.take_events())
    for _ in range(3):
        assert scan(manager, keys, context) is None  # one begins the step, as with other requests
        end_step(manager)
    first = request(manager, "first in the step", keys[:1])
    scan(manager, make_keys(2 * 10**6)[:1], first)
    started = clock()
    assert scan(manager, keys, context) is None
    timings["reask_deferred"] = clock() - started
    return timings


def fresh_kvtier() -> Iterator[tuple[OffloadingManager, InstantTier, Callable[[list[int]], None]]]:
    region = Region.create(Geometry(2 * NUM_BLOCKS, ROW_BYTES, 1))
    settings = Settings.decode(
        {
            "cpu_bytes_to_use": 2 * NUM_BLOCKS * ROW_BYTES,
            "cascade_share": 0.4,
            "promotion_share": 0.5,
            "secondary_tiers": [{"type": "memory"}],
        }
    )
    tier = InstantTier()
    tiers = configure_tiers(settings.secondary_tiers)
    namespace = Namespace.of({"bench": "manager"})
    offloader = Offloader(settings, tiers, region, namespace, make_driver=lambda *_: tier)
    manager = KVTierManager(offloader, {0: 16}, emit_events=False)

    def copied(slots: list[int]) -> None:
        region.marks[:, slots] = Mark.COMPLETE

    yield manager, tier, copied
    manager.shutdown()


def fresh_stock() -> Iterator[
    tuple[OffloadingManager, InstantStockTier, Callable[[list[int]], None]]
]:
    region = SharedOffloadRegion(str(uuid.uuid4()), 2 * NUM_BLOCKS, None, ROW_BYTES, ROW_BYTES)
    primary = CPUPrimaryTierOffloadingManager(2 * NUM_BLOCKS, region)
    tier = InstantStockTier(primary.get_kv_memoryview())
    manager = TieringOffloadingManager(primary, [tier])
    yield manager, tier, lambda _: None
    manager.shutdown()


def measure() -> list[Row]:
    """Every figure of both managers."""
    sides: Mapping[str, Callable[[], Iterator]] = {"kvtier": fresh_kvtier, "stock": fresh_stock}
    results: dict[str, list[Timings]] = {name: [] for name in sides}
    for _ in range(REPETITIONS):
        for name, fresh in sides.items():
            for manager, tier, copied in fresh():
                results[name].append(measure_one(manager, tier, copied))

    def median(side: str, figure: str) -> float:
        return statistics.median(timings[figure] for timings in results[side]) * 1e6

    rows = []
    for figure in results["kvtier"][0]:
        whole = figure == "reask_deferred"
        share = 1 if whole else NUM_BLOCKS
        name = f"{figure}_{NUM_BLOCKS}_blocks" if whole else f"{figure}_per_block"
        values = (median("kvtier", figure) / share, median("stock", figure) / share)
        rows.append(Row(name, values[0], "us", values[1], "vLLM stock tiering manager", "lower"))
    return rows


if __name__ == "__main__":
    main(__doc__, measure)
