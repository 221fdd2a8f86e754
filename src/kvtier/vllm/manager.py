"""The scheduler side: vLLM's `OffloadingManager`, answered by the core.

vLLM calls it on the scheduler thread and does not expect it to fail; so no method here raises. An
error inside is a defect of kvtier: it is logged once per cause, counted, and answered as a miss;
the cache recovers, and is switched off if that goes on. To recover is to answer nothing but misses,
to reset once vLLM has fetched the hits that it was told of, and to begin afresh once all transfers
have ended that vLLM, which knows of no reset, still runs.

Steps are told apart by what vLLM does every step, in whichever order: lookups, the end of
scheduling, and the collection of statistics after the model ran.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
)
from vllm.v1.kv_offload.base import (
    LoadStoreSpec,
    LookupResult,
    OffloadingEvent,
    OffloadingManager,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvtier.core.requests import Request
from kvtier.core.types import GROUP_BYTES, BlockKey, Lookup, TierId, group_of
from kvtier.metrics import Collector
from kvtier.offloader import Offloader
from kvtier.region import Mark
from kvtier.vllm.events import EventTranslator, allowed_tiers, cascade_tiers, hit_source
from kvtier.vllm.prefill import PrefillMeter
from kvtier.vllm.stats import Totals
from kvtier.vllm.worker import NO_SLOT, PrimaryLoadStoreSpec

log = logging.getLogger(__name__)

_HIT, _PENDING, _RETRY = Lookup.HIT, Lookup.PENDING, Lookup.RETRY
_VLLM_HIT, _VLLM_PENDING = LookupResult.HIT, LookupResult.HIT_PENDING
_VLLM_RETRY, _VLLM_MISS = LookupResult.RETRY, LookupResult.MISS

_ERRORS_UNTIL_OFF = 3
_ENGINE_REPORTS_FLUSH = hasattr(OffloadingManager, "on_reset_flushed")  # since vLLM 0.33
_LAST_POSITION = 1 << 62


class KVTierManager(OffloadingManager):
    """See the module.

    Args:
        offloader: the cache; owned from now on.
        tokens_per_chunk: per cache group, the tokens of one block.
        emit_events: vLLM publishes KV events.
        prefill_tokens_per_s: how fast the engine computes prompts; or `measure`, or `unknown`.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        offloader: Offloader,
        tokens_per_chunk: Mapping[int, int],
        *,
        emit_events: bool,
        prefill_tokens_per_s: float | str = "unknown",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._offloader = offloader
        self._core = offloader.core
        self._tokens = dict(tokens_per_chunk)
        self._requests: dict[str, Request] = {}
        self._translator = EventTranslator(offloader.tiers) if emit_events else None
        self._totals = Totals(offloader)
        self._collector = Collector()
        self._clock = clock
        self._prefill = PrefillMeter() if prefill_tokens_per_s == "measure" else None
        if isinstance(prefill_tokens_per_s, float):
            self._set_prefill_rate(prefill_tokens_per_s)
        self._unread = True  # completions may have come since the last look
        self._schedules = 0
        self._updates = 0
        self._fence_at: int | None = None
        self._errors = 0
        self._causes: set[str] = set()
        self._off = False
        self._recovering = False
        self._reset_due = False
        self._transfers = 0  # of the device, prepared and not completed

    # -- lookups ----------------------------------------------------------

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """A request was added."""
        try:
            self._open(req_context)
        except Exception as error:  # noqa: BLE001 - nothing may escape
            self._contain("on_new_request", error)
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Whether one block can be loaded."""
        try:
            if self._off or self._recovering:
                return _VLLM_MISS
            if self._unread:
                self._begin()
            request = self._requests.get(req_context.req_id)
            if request is None:
                request = self._open(req_context)
            self._totals.lookups += 1
            answer = self._core.lookup(request, BlockKey(key))
        except Exception as error:  # noqa: BLE001 - nothing may escape
            self._contain("lookup", error)
            return _VLLM_MISS
        if answer is _HIT:
            return _VLLM_HIT
        if answer is _PENDING:
            return _VLLM_PENDING
        return _VLLM_RETRY if answer is _RETRY else _VLLM_MISS

    def get_load_source(self, key: OffloadKey, req_context: ReqContext) -> CacheHitSource:
        """Where a hit came from."""
        try:
            tier = self._core.source_of(req_context.req_id, BlockKey(key))
        except Exception as error:  # noqa: BLE001 - nothing may escape
            self._contain("get_load_source", error)
            return CacheHitSource.EXTERNAL_UNSPECIFIED
        return CacheHitSource.HOST if tier is None else hit_source(self._offloader.tiers[tier])

    def on_request_finished(self, req_context: ReqContext) -> None:
        """A request ended, in whatever state."""
        try:
            if self._requests.pop(req_context.req_id, None) is not None:
                self._core.finish_request(req_context.req_id)
        except Exception as error:  # noqa: BLE001 - nothing may escape
            self._contain("on_request_finished", error)

    # -- transfers --------------------------------------------------------

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        """Pin the blocks of a hit, and say where they are."""
        try:
            slots = self._prepare_load(req_context.req_id, [BlockKey(key) for key in keys])
        except Exception as error:  # noqa: BLE001 - nothing may escape
            self._contain("prepare_load", error)
            slots = [NO_SLOT] * len(keys)
        self._transfers += bool(keys)
        return PrimaryLoadStoreSpec(slots)

    def _prepare_load(self, request_id: str, keys: list[BlockKey]) -> list[int]:
        request = self._requests.get(request_id)
        origin = request.origin if request is not None else {}
        slots = self._core.prepare_load(request_id, keys)
        first_group = group_of(keys[0]) if keys else 0
        for key, slot in zip(keys, slots, strict=True):
            if slot is None:
                continue
            # Every group covers the same tokens; they are counted once.
            group = group_of(key)
            tokens = self._tokens.get(group, 0) if group == first_group else 0
            self._totals.hit(origin.get(key), tokens)
        return [NO_SLOT if slot is None else slot for slot in slots]

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """All workers have read a load's blocks."""
        self._transfers = max(self._transfers - 1, 0)
        try:
            self._core.complete_load(req_context.req_id)
        except Exception as error:  # noqa: BLE001 - nothing may escape
            self._contain("complete_load", error)

    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        """Reserve slots for the blocks that are not held; as many as fit, from the head."""
        try:
            slots: Mapping[BlockKey, int] = {}
            if not (self._off or self._recovering):
                slots = self._prepare_store(req_context, [BlockKey(key) for key in keys])
        except Exception as error:  # noqa: BLE001 - nothing may escape
            self._contain("prepare_store", error)
            slots = {}
        kept = [key for key in dict.fromkeys(keys) if key in slots]
        spec = PrimaryLoadStoreSpec([slots[BlockKey(key)] for key in kept])
        self._transfers += bool(kept)
        return PrepareStoreOutput(keys_to_store=kept, store_spec=spec, evicted_keys=[])

    def _prepare_store(
        self, req_context: ReqContext, keys: list[BlockKey]
    ) -> Mapping[BlockKey, int]:
        def position(key: BlockKey) -> int:
            end = req_context.get_offload_key_position(OffloadKey(key))
            return _LAST_POSITION if end is None else end

        if self._prefill is not None and keys:
            group = keys[0][-GROUP_BYTES:]  # every group covers the same tokens
            blocks = sum(key.endswith(group) for key in keys)
            self._prefill.offered(blocks * self._tokens.get(group_of(keys[0]), 0))
        slots = self._core.prepare_store(req_context.req_id, keys, position)
        if slots:
            # What a mark said of the slot's last block says nothing of the next one.
            self._offloader.region.marks[:, list(slots.values())] = Mark.UNTOUCHED
        return slots

    def complete_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True
    ) -> None:
        """All workers have written a store's blocks, or say by their marks that they have not."""
        self._transfers = max(self._transfers - 1, 0)
        try:
            storing = self._core.storing([BlockKey(key) for key in keys])
            bad = {key for key, _ in storing}
            if success and storing:
                marks = self._offloader.region.marks[:, [slot for _, slot in storing]]
                good = (marks == Mark.COMPLETE).all(axis=0).tolist()
                bad = {key for (key, _), ok in zip(storing, good, strict=True) if not ok}
            self._core.complete_store([key for key, _ in storing], bad)
        except Exception as error:  # noqa: BLE001 - nothing may escape
            self._contain("complete_store", error)

    # -- steps ------------------------------------------------------------

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """Scheduling of a step is over: tell the tiers what to do."""
        self._schedules += 1
        try:
            if self._off:
                return
            # One that is preempted will ask afresh, with a wait of its own.
            for request_id in (*context.new_req_ids, *context.preempted_req_ids):
                self._core.settle_request(request_id)
            self._begin()
            self._offloader.end()
            if self._prefill is not None:
                self._prefill.scheduled(self._clock())
        except Exception as error:  # noqa: BLE001 - nothing may escape
            self._contain("on_schedule_end", error)
        self._unread = True
        if self._recovering and not self._off:
            self._recover()

    def has_pending_work(self) -> bool:
        """Whether the engine must keep stepping for kvtier's sake."""
        waits = self._recovering or self._fence_at is not None
        return not self._off and (waits or self._core.busy)

    def get_stats(self) -> OffloadingConnectorStats | None:
        """What changed in kvtier's metrics; vLLM asks at the end of every step."""
        self._unread = True
        self._updates = min(self._updates + 1, self._schedules)  # no update precedes its step
        fence_at = None if _ENGINE_REPORTS_FLUSH else self._fence_at
        if fence_at is not None and self._updates >= fence_at:
            self.on_reset_flushed()
        try:
            if self._prefill is not None and self._prefill.step_ended(self._clock()):
                self._set_prefill_rate(self._prefill.tokens_per_s)
            delta = self._collector.collect(self._totals.collect(self._errors))
        except Exception as error:  # noqa: BLE001 - nothing may escape
            self._contain("get_stats", error)
            return None
        if not delta:
            return None
        stats = OffloadingConnectorStats()
        for series, value in delta.counters.items():
            stats.increase_counter(series.metric.name, value, series.labels)
        for series, value in delta.gauges.items():
            stats.set_gauge(series.metric.name, value, series.labels)
        return stats

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Arrivals and departures since the last call, of the primary and of every tier."""
        try:
            events = self._core.take_events()
            return () if self._translator is None else list(self._translator.translate(events))
        except Exception as error:  # noqa: BLE001 - nothing may escape
            self._contain("take_events", error)
            return ()

    # -- reset and end ----------------------------------------------------

    def reset_cache(self) -> None:
        """Forget everything at once. vLLM flushes its transfers with the next step; slots that
        those touch come back when that step has been run.
        """
        self._recovering = self._reset_due = False
        self._transfers = 0  # vLLM tells the end of none of them
        self._fence_at = self._schedules + 1
        try:
            self._offloader.reset()
        except Exception as error:  # noqa: BLE001 - nothing may escape
            self._contain("reset_cache", error)  # and hit nothing until a reset succeeds

    def on_reset_flushed(self) -> None:
        """No transfer from before the last reset is running (vLLM 0.33 says so itself)."""
        self._fence_at = None
        if self._recovering:
            return  # other slots are fenced too, by transfers that are younger than that reset
        try:
            self._core.fence_passed()
        except Exception as error:  # noqa: BLE001 - nothing may escape
            self._contain("on_reset_flushed", error)

    def shutdown(self) -> None:
        """Stop. Nothing depends on this being called."""
        self._off = True
        try:
            self._offloader.close()
        except Exception as error:  # noqa: BLE001 - nothing may escape
            self._contain("shutdown", error)

    # -- inside -----------------------------------------------------------

    def _open(self, req_context: ReqContext) -> Request:
        tiers: set[TierId] | None = allowed_tiers(self._offloader.tiers, req_context)
        stores_to = cascade_tiers(self._offloader.tiers, req_context)

        def position(key: BlockKey) -> int | None:
            end: int | None = req_context.get_offload_key_position(OffloadKey(key))
            return end

        request = self._core.open_request(req_context.req_id, tiers, stores_to, position)
        self._requests[req_context.req_id] = request
        return request

    def _set_prefill_rate(self, tokens_per_s: float | None) -> None:
        if tokens_per_s is not None and self._tokens:
            self._core.set_prefill_rate(max(self._tokens.values()) / tokens_per_s)

    def _begin(self) -> None:
        self._unread = False
        self._offloader.begin()

    def _contain(self, where: str, error: Exception) -> None:
        """An error of our own must not become the engine's."""
        self._errors += 1
        cause = f"{where}: {type(error).__name__}: {error}"
        if cause not in self._causes:
            self._causes.add(cause)
            log.error("kvtier: contained an error in %s", where, exc_info=error)
        if self._off:
            return
        if self._errors >= _ERRORS_UNTIL_OFF:
            self._switch_off()
        else:
            self._recovering = self._reset_due = True

    def _recover(self) -> None:
        """At the end of scheduling: no hit is left that vLLM was told of and has not fetched."""
        try:
            if self._reset_due:
                self._offloader.reset()
                self._reset_due = False
            if self._transfers == 0 and self._fence_at is None:
                self._core.fence_passed()
                self._recovering = False
        except Exception as error:
            self._errors += 1
            log.error("kvtier: the cache cannot recover", exc_info=error)
            self._switch_off()

    def _switch_off(self) -> None:
        self._off = True
        log.error("kvtier: offloading is switched off after %d errors", self._errors)
