"""vLLM's side in small: calls the manager and the workers in the order in which vLLM does.

Everything else is real: the manager, its tiers and their threads, the region, the workers.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from kv_caches import Model, Rank, device_spec, pages_of, region_of
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
)
from vllm.v1.kv_offload.base import (
    LoadStoreSpec,
    LookupResult,
    OffloadingEvent,
    OffloadKey,
    ReqContext,
    ScheduleEndContext,
    TierFilter,
    make_offload_key,
)

from kvtier.config import Settings
from kvtier.namespace import Namespace
from kvtier.offloader import Offloader, configure_tiers
from kvtier.vllm.manager import KVTierManager

MODEL = Model(heads=4, block_size=4, head_bytes=8, layers=2)
NUM_BLOCKS = 512
TOKENS = 16


def keys_of(prompt: int, count: int) -> list[OffloadKey]:
    """The keys of a prompt of its own."""
    return [make_offload_key(f"{prompt:016d}{i:016d}".encode(), 0) for i in range(count)]


def content_of(key: OffloadKey) -> np.ndarray:
    """The only right content for a key."""
    return pages_of(MODEL, zlib.crc32(key))


@dataclass
class Asked:
    """One request.

    Attributes:
        hits: blocks loaded instead of computed, once that is known.
        sources: where vLLM was told that they came from.
    """

    context: ReqContext
    keys: list[OffloadKey]
    state: str = "waiting"  # -> loading -> ready -> finished -> gone
    hits: int | None = None
    deferred: int = 0
    blocks: dict[OffloadKey, int] = field(default_factory=dict)
    sources: list[str] = field(default_factory=list)


@dataclass
class Transfer:
    """One job of the device."""

    request: Asked
    keys: list[OffloadKey]
    spec: LoadStoreSpec
    is_store: bool
    left: int


class LoadFailed(AssertionError):
    """The connector of vLLM 0.32 dies of this."""


class Engine:
    """A scheduler and its workers.

    Attributes:
        newest: order of calls of vLLM 0.33; else that of 0.32.
        events, metrics: everything that the manager told.
    """

    def __init__(
        self,
        *,
        num_slots: int,
        tiers: Sequence[Mapping[str, Any]] = (),
        tp: int = 1,
        newest: bool = False,
        emit_events: bool = True,
        **settings: Any,
    ) -> None:
        self.newest = newest
        decoded = Settings.decode(
            {"cpu_bytes_to_use": 1 << 20, "secondary_tiers": list(tiers), **settings}
        )
        self.region = region_of(MODEL, tp, num_slots, 1)
        self.ranks = [Rank(MODEL, tp, r, self.region, num_blocks=NUM_BLOCKS) for r in range(tp)]
        self.offloader = Offloader(
            decoded,
            configure_tiers(decoded.secondary_tiers),
            self.region,
            Namespace.of({"weights": "of the tests"}) if tiers else None,
        )
        self.manager = KVTierManager(self.offloader, {0: TOKENS}, emit_events=emit_events)
        self.requests: dict[str, Asked] = {}
        self.jobs: dict[int, Transfer] = {}
        self.events: list[OffloadingEvent] = []
        self.metrics = OffloadingConnectorStats()
        self.gates: list[threading.Event] = []  # that hold copies; opened at the end
        self._queued: list[int] = []
        self._transfers: dict[int, Transfer] = {}  # of all jobs, stale ones too
        self._flush: set[int] = set()
        self._last_job = 0
        self._last_block = 0
        self._stale_below = 0

    # -- the engine's life ------------------------------------------------

    def ask(self, name: str, keys: list[OffloadKey], tiers: TierFilter = TierFilter.ALL) -> Asked:
        """Add a request."""
        context = ReqContext(name, load_tier_filter=tiers)
        for place, key in enumerate(keys):
            context.set_offload_key_position(key, (place + 1) * TOKENS)
        self.manager.on_new_request(context)
        request = self.requests[name] = Asked(context, keys)
        return request

    def run(self, name: str, keys: list[OffloadKey], **more: Any) -> Asked:
        """Add a request and step until nothing is left to do."""
        request = self.ask(name, keys, **more)
        self.settle()
        assert request.state == "gone"
        return request

    def settle(self) -> None:
        """Step until nothing is left to do."""
        deadline = time.monotonic() + 5
        while self.busy:
            self.step()
            assert time.monotonic() < deadline, "the engine never comes to rest"
            time.sleep(0.0005)  # as vLLM's own loop when it has nothing to run

    @property
    def busy(self) -> bool:
        alive = any(request.state != "gone" for request in self.requests.values())
        return alive or bool(self.jobs or self._flush) or self.manager.has_pending_work()

    def step(self) -> None:
        """Schedule, run, update."""
        self.schedule()
        done = self.execute()
        self.update(done)

    # -- the three parts of a step ----------------------------------------

    def schedule(self) -> None:
        loads: list[int] = []
        for request in self.requests.values():
            if request.state == "waiting":
                hits = self.maximal_prefix(request)
                if hits is None:
                    request.deferred += 1
                    continue
                request.hits = hits
                request.state = "loading" if hits else "ready"
                if hits:
                    loads.append(self._prepare_load(request, request.keys[:hits]))
        ready = [r for r in self.requests.values() if r.state == "ready"]
        finished = [r for r in self.requests.values() if r.state == "finished"]
        context = ScheduleEndContext([r.context.req_id for r in ready], [])
        if not self.newest:
            self.manager.on_schedule_end(context)
        self._new_stores = [job for r in ready for job in self._prepare_store(r)]
        for request in finished:
            self.manager.on_request_finished(request.context)
            request.state = "gone"
        if self.newest:
            self.manager.on_schedule_end(context)
        self._loads = loads

    def maximal_prefix(self, request: Asked) -> int | None:
        """The scan of vLLM: past what is pending or unknown, up to the first miss."""
        hits, deferred = 0, False
        for key in request.keys:
            answer = self.manager.lookup(key, request.context)
            assert isinstance(answer, LookupResult)
            if answer is LookupResult.MISS:
                break
            hits += answer is not LookupResult.RETRY
            deferred |= answer is not LookupResult.HIT
        return None if deferred else hits

    def execute(self) -> list[tuple[int, bool]]:
        """The workers' part; returns (job, success) per worker."""
        finished: list[tuple[int, bool]] = []
        for rank in self.ranks:
            for job in self._queued:
                self._submit_store(rank, job)
            if self._flush:
                rank.worker.wait(self._flush)
            for job in self._loads:
                transfer = self._transfers[job]
                blocks = [transfer.request.blocks[key] for key in transfer.keys]
                rank.worker.submit_load(job, transfer.spec, device_spec(blocks))
            finished += [(r.job_id, r.success) for r in rank.worker.get_finished()]
        self._queued = self._new_stores
        self._flush = set()
        return finished

    def update(self, finished: list[tuple[int, bool]]) -> None:
        for job, success in finished:
            if job <= self._stale_below:
                continue
            transfer = self.jobs[job]
            if not success:
                raise LoadFailed(job)
            transfer.left -= 1
            if transfer.left:
                continue
            del self.jobs[job]
            request = transfer.request
            if transfer.is_store:
                self.manager.complete_store(set(transfer.keys), request.context)
            else:
                self.manager.complete_load(set(transfer.keys), request.context)
                self.check_loaded(request, transfer.keys)
                request.state = "ready"
        if (stats := self.manager.get_stats()) is not None:
            self.metrics.aggregate(stats)
        self.events += self.manager.take_events()

    def reset_cache(self) -> None:
        """As vLLM does it between two steps."""
        self._flush = set(self.jobs)
        self.manager.reset_cache()
        self._stale_below = self._last_job
        for transfer in self.jobs.values():
            if not transfer.is_store:
                transfer.request.state = "ready"
        self.jobs.clear()

    def close(self) -> None:
        for gate in self.gates:
            gate.set()
        self.manager.shutdown()
        for rank in self.ranks:
            rank.worker.shutdown()

    # -- inside -----------------------------------------------------------

    def _job(self, request: Asked, keys: list[OffloadKey], spec: Any, *, is_store: bool) -> int:
        self._last_job += 1
        transfer = Transfer(request, keys, spec, is_store, len(self.ranks))
        self.jobs[self._last_job] = self._transfers[self._last_job] = transfer
        return self._last_job

    def _block(self) -> int:
        self._last_block = self._last_block % (NUM_BLOCKS - 1) + 1
        return self._last_block

    def _prepare_load(self, request: Asked, keys: list[OffloadKey]) -> int:
        spec = self.manager.prepare_load(keys, request.context)
        for key in keys:
            request.blocks[key] = self._block()
            source = self.manager.get_load_source(key, request.context)
            request.sources.append(source.name)
        return self._job(request, keys, spec, is_store=False)

    def _prepare_store(self, request: Asked) -> list[int]:
        """Compute what was not loaded, and offer it."""
        request.state = "finished"
        computed = request.keys[request.hits or 0 :]
        for key in computed:
            request.blocks[key] = self._block()
            for rank in self.ranks:
                rank.put(request.blocks[key], content_of(key))
        if not computed:
            return []
        output = self.manager.prepare_store(computed, request.context)
        if output is None or not output.keys_to_store:
            return []
        assert not set(output.keys_to_store) - set(computed)
        return [self._job(request, output.keys_to_store, output.store_spec, is_store=True)]

    def _submit_store(self, rank: Rank, job: int) -> None:
        transfer = self._transfers[job]
        blocks = [transfer.request.blocks[key] for key in transfer.keys]
        rank.worker.submit_store(job, device_spec(blocks), transfer.spec)

    def check_loaded(self, request: Asked, keys: Sequence[OffloadKey]) -> None:
        """What was loaded is what was computed, on every rank."""
        for key in keys:
            for rank in self.ranks:
                wanted = rank.part_of(content_of(key))
                assert (rank.get(request.blocks[key]) == wanted).all(), "a wrong block was loaded"
