"""kvtier and vLLM's stock tiering manager, each below the same simulated engine and tiers."""

from __future__ import annotations

import logging
import uuid
from collections import Counter
from collections.abc import Callable, Sequence

from vllm.v1.kv_offload.base import (
    LookupResult,
    Medium,
    OffloadingManager,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.base import JobResult
from vllm.v1.kv_offload.tiering.base import SecondaryTierManager as StockTierManager
from vllm.v1.kv_offload.tiering.manager import (
    CPUPrimaryTierOffloadingManager,
    TieringOffloadingManager,
)

from kvtier.config import Settings
from kvtier.core.types import BlockKey, JobId, Lookup, Slot
from kvtier.namespace import Namespace
from kvtier.offloader import Offloader, configure_tiers
from kvtier.region import Geometry, Mark, Region
from kvtier.testing.simulated_caches import Clock, SimulatedDriver
from kvtier.testing.simulated_requests import Shape
from kvtier.testing.simulated_tiers import Memory, Raise, SimulatedTier, SimulatedTierError
from kvtier.testing.simulation import SimulatedEngine
from kvtier.vllm.manager import KVTierManager

ROW_BYTES = 4096
ANSWERS = {
    LookupResult.HIT: Lookup.HIT,
    LookupResult.HIT_PENDING: Lookup.PENDING,
    LookupResult.RETRY: Lookup.RETRY,
    LookupResult.MISS: Lookup.MISS,
}


class ManagerCache:
    """Any `OffloadingManager`, called as vLLM's connector calls it.

    Attributes:
        stored: blocks that got a slot, per request.
    """

    def __init__(self, manager: OffloadingManager, copied: Callable[[list[int]], None]) -> None:
        self.manager = manager
        self.stored: Counter[str] = Counter()
        self._copied = copied
        self._contexts: dict[str, ReqContext] = {}

    def open(self, name: str, keys: Sequence[BlockKey]) -> None:
        context = ReqContext(req_id=name)
        for place, key in enumerate(keys):
            context.set_offload_key_position(key, place)
        self._contexts[name] = context
        self.manager.on_new_request(context)

    def lookup(self, name: str, key: BlockKey) -> Lookup:
        return ANSWERS[self.manager.lookup(key, self._contexts[name])]

    def prepare_load(self, name: str, keys: Sequence[BlockKey]) -> list[Slot | None]:
        return list(self.manager.prepare_load(keys, self._contexts[name]).block_ids)

    def end_schedule(self, started: Sequence[str], preempted: Sequence[str]) -> None:
        self.manager.on_schedule_end(ScheduleEndContext(started, preempted))

    def prepare_store(self, name: str, keys: Sequence[BlockKey]) -> dict[BlockKey, Slot] | None:
        output = self.manager.prepare_store(keys, self._contexts[name])
        if output is None:
            return None
        slots = dict(zip(output.keys_to_store, output.store_spec.block_ids, strict=True))
        self.stored[name] += len(slots)
        return slots

    def finish(self, name: str) -> None:
        self.manager.on_request_finished(self._contexts[name])

    def complete_store(self, name: str, slots: dict[BlockKey, Slot]) -> None:
        self._copied(list(slots.values()))
        self.manager.complete_store(set(slots), self._contexts[name])

    def complete_load(self, name: str, keys: Sequence[BlockKey]) -> None:
        self.manager.complete_load(set(keys), self._contexts[name])

    def end_step(self) -> None:
        self.manager.get_stats()
        list(self.manager.take_events())

    def reset(self, new_weights: bool) -> None:
        self.manager.reset_cache()

    @property
    def pending(self) -> bool:
        return self.manager.has_pending_work()


class StockTier(StockTierManager):
    """A simulated tier below the stock manager, with the habits of its own fs tier.

    Existence is asked on the side, the verdict is kept while a request uses it, and a failed read
    makes it a miss.
    """

    medium = Medium.STORAGE

    def __init__(self, tier: SimulatedTier, clock: Clock, view: memoryview) -> None:
        super().__init__(None, view, "simulated")
        self._tier = tier
        self._clock = clock
        self._verdicts: dict[BlockKey, bool] = {}
        self._users: dict[BlockKey, set[str]] = {}
        self._used: dict[str, set[BlockKey]] = {}
        self._to_ask: dict[BlockKey, None] = {}
        self._asked: dict[int, tuple[BlockKey, ...]] = {}
        self._reads: dict[int, tuple[BlockKey, ...]] = {}
        self._probes = 0

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def lookup(self, key: BlockKey, req_context: ReqContext) -> LookupResult:
        if isinstance(self._tier._script.get("probe", (None, 0))[0], Raise):
            raise SimulatedTierError("lookup: told to raise")
        self._users.setdefault(key, set()).add(req_context.req_id)
        self._used.setdefault(req_context.req_id, set()).add(key)
        verdict = self._verdicts.get(key)
        if verdict is None:
            if not any(key in keys for keys in self._asked.values()):
                self._to_ask[key] = None
            return LookupResult.RETRY
        return LookupResult.HIT if verdict else LookupResult.MISS

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        if self._to_ask:
            self._probes -= 1
            keys = self._asked[self._probes] = tuple(self._to_ask)
            self._to_ask = {}
            self._tier.submit(self._clock(), "probe", JobId(self._probes), keys)

    def on_request_finished(self, req_context: ReqContext) -> None:
        for key in self._used.pop(req_context.req_id, ()):
            users = self._users[key]
            users.discard(req_context.req_id)
            if not users:
                del self._users[key]
                self._verdicts.pop(key, None)

    def submit_store(self, job_metadata: object) -> None:
        keys = tuple(job_metadata.keys)
        self._tier.submit(
            self._clock(), "write", job_metadata.job_id, keys, job_metadata.chunk_ids.tolist()
        )

    def submit_load(self, job_metadata: object) -> None:
        keys = self._reads[job_metadata.job_id] = tuple(job_metadata.keys)
        slots = [int(slot) for slot in job_metadata.chunk_ids]
        self._tier.submit(self._clock(), "read", job_metadata.job_id, keys, slots)

    def get_finished_jobs(self) -> list[JobResult]:
        results = []
        for done in self._tier.finished(self._clock()):
            if (asked := self._asked.pop(done.job, None)) is not None:
                self._verdicts.update({key: key in done.ok for key in asked})
                continue
            read = self._reads.pop(done.job, None)
            if read is None:
                results.append(JobResult(job_id=done.job, success=done.fault is None))
                continue
            failed = [key for key in read if key not in done.ok]
            self._verdicts.update(dict.fromkeys(failed, False))
            results.append(
                JobResult(job_id=done.job, success=not failed, successful_keys=done.ok or None)
            )
        return results

    def drain_jobs(self) -> None:
        raise AssertionError("no scenario resets the stock manager")


class Logged(logging.Handler):
    """Counts what is logged as an error."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.count = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.count += 1


class World:
    """One manager below an engine, above tiers.

    Args:
        kvtier: which manager; the stock one if false.
        num_slots: of the primary.
        tiers: latency and seconds per block of each.
        shape: of the engine.
        settings: more settings of kvtier.
    """

    def __init__(
        self,
        kvtier: bool,
        num_slots: int,
        tiers: Sequence[tuple[float, float]] = ((0.01, 0.0001),),
        shape: Shape | None = None,
        **settings: object,
    ) -> None:
        self.kvtier = kvtier
        self.clock = Clock()
        self.memory: Memory = [None] * num_slots
        self.tiers = [SimulatedTier(self.memory, *speed) for speed in tiers]
        self.logged = Logged()
        make = self._kvtier if kvtier else self._stock
        self.cache = make(num_slots, settings)
        self.engine = SimulatedEngine(self.cache, self.clock, self.memory, shape or Shape())
        logging.getLogger("kvtier").addHandler(self.logged)

    @property
    def tier(self) -> SimulatedTier:
        """The first one."""
        return self.tiers[0]

    @property
    def pinned(self) -> int:
        """Slots that can be neither handed out nor evicted now."""
        if self.kvtier:
            return self.cache.manager._core.pool.pinned
        primary = self.cache.manager.primary_tier
        free = primary._get_num_free_chunks() + primary._num_evictable_cache_chunks
        return primary._num_chunks - free

    def close(self) -> None:
        logging.getLogger("kvtier").removeHandler(self.logged)
        self.cache.manager.shutdown()

    def _kvtier(self, num_slots: int, settings: dict[str, object]) -> ManagerCache:
        region = Region.create(Geometry(num_slots, ROW_BYTES, 1))
        decoded = Settings.decode(
            {
                "cpu_bytes_to_use": num_slots * ROW_BYTES,
                "secondary_tiers": [{"type": "memory"} for _ in self.tiers],
                **settings,
            }
        )
        waiting = iter(self.tiers)
        offloader = Offloader(
            decoded,
            configure_tiers(decoded.secondary_tiers),
            region,
            Namespace.of({"bench": "scenarios"}),
            clock=self.clock,
            make_driver=lambda *_: SimulatedDriver(next(waiting), self.clock, lambda _: 0),
        )
        manager = KVTierManager(offloader, {0: 16}, emit_events=False)

        def copied(slots: list[int]) -> None:
            region.marks[:, slots] = Mark.COMPLETE

        return ManagerCache(manager, copied)

    def _stock(self, num_slots: int, settings: dict[str, object]) -> ManagerCache:
        region = SharedOffloadRegion(str(uuid.uuid4()), num_slots, None, ROW_BYTES, ROW_BYTES)
        primary = CPUPrimaryTierOffloadingManager(num_slots, region)
        view = primary.get_kv_memoryview()
        tiers = [StockTier(tier, self.clock, view) for tier in self.tiers]
        return ManagerCache(TieringOffloadingManager(primary, tiers), lambda _: None)
