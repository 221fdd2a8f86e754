"""An engine in virtual time that drives a cache as vLLM's scheduler and connector do.

    engine = SimulatedEngine(cache, clock, memory, Shape(device_blocks=64))
    engine.add("a", prompt=range(20))
    while engine.step(0.01):
        ...

One step: running requests get device blocks for their next chunk (or are preempted), waiting ones
are looked up in the order of arrival; those that hit are loaded first, which takes steps. Then the
schedule ends, blocks computed in this step are offered for storing, finished requests are told, the
device copies (a store one step late), and what it has copied is completed.

Every load is checked: the bytes must be those that this prompt has under these weights.
"""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from collections.abc import Iterable, Sequence

from kvtier.core.types import BlockKey
from kvtier.testing.engine import key_of, scan
from kvtier.testing.simulated_caches import Cache, Clock
from kvtier.testing.simulated_requests import DeviceCopy, Phase, Shape, SimulatedRequest
from kvtier.testing.simulated_tiers import Content, Memory


class WrongBytesError(AssertionError):
    """The engine was given bytes of another block, of other weights, or garbage."""


class SimulatedEngine:
    """See the module.

    Args:
        cache: what it drives.
        clock: virtual time; moved by `step`.
        memory: of the primary tier, shared with the tiers.
        shape: of the engine.
        traced: keep every line of the trace, not only its digest.

    Attributes:
        epoch: counts new weights.
        loaded: how often each key was loaded into the device.
        offered_blocks, stored_blocks: blocks offered for storing, and those that got a slot or had
            one.
        preemptions, deferrals: totals.
    """

    def __init__(
        self, cache: Cache, clock: Clock, memory: Memory, shape: Shape, traced: bool = False
    ) -> None:
        self.cache = cache
        self.shape = shape
        self.memory = memory
        self.epoch = 0
        self.steps = 0
        self.loaded: Counter[BlockKey] = Counter()
        self.offered_blocks = 0
        self.stored_blocks = 0
        self.preemptions = 0
        self.deferrals = 0
        self.requests: dict[str, SimulatedRequest] = {}
        self.waiting: deque[SimulatedRequest] = deque()
        self.running: list[SimulatedRequest] = []
        self.loads: list[DeviceCopy] = []
        self.stores: list[DeviceCopy] = []
        self.trace: list[str] = []
        self._traced = traced
        self._digest = hashlib.sha256()
        self._clock = clock
        self._free_blocks = shape.device_blocks
        self._finished: list[SimulatedRequest] = []  # to be told to the cache
        self._being_loaded: Counter[BlockKey] = Counter()
        self._windows = frozenset(shape.groups.windows or ())
        self._next_output = 1 << 40

    # -- what a user does -------------------------------------------------

    def add(self, name: str, prompt: Iterable[int], output_blocks: int = 0) -> SimulatedRequest:
        """A request arrives."""
        blocks = list(prompt)
        request = SimulatedRequest(name, blocks, len(blocks), output_blocks, added_at=self.steps)
        assert name not in self.requests, "names are unique among those that run"
        self.requests[name] = request
        self.waiting.append(request)
        self.cache.open(name, self._keys(blocks))
        self._note(f"add {name} {len(blocks)}+{output_blocks}")
        return request

    def abort(self, name: str) -> None:
        """The user goes away, whatever the request is doing."""
        request = self.requests[name]
        self._note(f"abort {name} {request.phase.value}")
        self._end(request)

    def reset(self, new_weights: bool = False) -> None:
        """The cache is reset between two steps: running requests start again."""
        self._note(f"reset {new_weights}")
        for request in (*self.running, *(load.request for load in self.loads)):
            if request.phase is not Phase.FINISHED:
                self._back_to_waiting(request)
        for copy in (*self.loads, *self.stores):
            copy.stale = True
            copy.ends_at = self.steps + 1  # flushed with the next step
        for request in self._finished:
            self.cache.finish(request.name)
        self._finished.clear()
        self._being_loaded.clear()
        for request in self.waiting:  # what they had loaded is gone from the device as well
            self._free(request)
            request.computed = request.offered = 0
            request.asked_at = None
        self.epoch += new_weights
        self.cache.reset(new_weights)

    @property
    def idle(self) -> bool:
        """Nothing is left to do."""
        return not (
            self.requests or self.loads or self.stores or self._finished or self.cache.pending
        )

    @property
    def digest(self) -> str:
        """Of everything that happened: equal for equal runs."""
        return self._digest.hexdigest()

    # -- a step -----------------------------------------------------------

    def step(self, seconds: float = 0.01) -> bool:
        """Run one step; False if there was, and is, nothing to do."""
        self._clock.now += seconds
        self.steps += 1
        preempted = self._schedule_running()
        started = [] if preempted else self._schedule_waiting()
        self.cache.end_schedule(started, preempted)
        for copy in self.stores:
            if copy.request.name in preempted:
                copy.ends_at = min(copy.ends_at, self.steps)
        finished, self._finished = self._finished, []
        for request in (*self.running, *finished):
            self._offer(request)
        for request in finished:
            self.cache.finish(request.name)
        self._run_copies()
        for request in tuple(self.running):
            if request.computed == request.prompt_blocks + request.output_blocks:
                self._end(request)
        self.cache.end_step()
        return not self.idle

    def _schedule_running(self) -> list[str]:
        preempted: list[str] = []
        for request in tuple(self.running):
            if request.phase is not Phase.RUNNING:
                continue  # preempted for one before it
            need = self._next_computed(request) - request.allocated
            while need > self._free_blocks and request.phase is Phase.RUNNING:
                victim = self.running[-1]
                self._back_to_waiting(victim)
                self.preemptions += 1
                preempted.append(victim.name)
                self._note(f"preempt {victim.name}")
            if request.phase is Phase.RUNNING:
                self._allocate(request, need)
                self._compute(request)
        return preempted

    def _schedule_waiting(self) -> list[str]:
        started: list[str] = []
        skipped: list[SimulatedRequest] = []
        while self.waiting and len(self.running) < self.shape.running_max:
            request = self.waiting[0]
            hit = 0
            if request.computed == 0:
                answer = self._lookup(request)
                if answer is None:
                    skipped.append(self.waiting.popleft())
                    continue
                hit = answer
            first = max(hit, request.computed) + self.shape.chunk_blocks
            need = min(first, request.prompt_blocks) - request.allocated
            if need > self._free_blocks:
                self._take_back(request)
                break
            self.waiting.popleft()
            self._allocate(request, need)
            if request.answered_at is None:
                request.answered_at = self.steps
            request.asked_at = None
            if hit:
                self._load(request, hit)
            else:
                if not request.started:
                    request.started = True
                    started.append(request.name)
                request.phase = Phase.RUNNING
                self.running.append(request)
                self._compute(request)
        self.waiting.extendleft(reversed(skipped))
        return started

    def _take_back(self, first: SimulatedRequest) -> None:
        """Requests that have loaded, and cannot run, must not keep each other from running."""
        if not self.running and not self.loads:
            for request in self.waiting:
                if request is not first and request.allocated:
                    self._free(request)
                    request.computed = request.offered = 0

    def _lookup(self, request: SimulatedRequest) -> int | None:
        if request.asked_at is None:
            request.asked_at = self.steps
        name, lookup = request.name, self.cache.lookup
        hit = scan(
            lambda key: lookup(name, key),
            request.prompt[: request.prompt_blocks],
            self.shape.groups,
        )
        if hit and any(
            self._being_loaded[k] for k in self.shape.groups.needed(request.prompt, hit)
        ):
            hit = None  # another request loads them: they will be on the device
        if hit is None:
            self.deferrals += 1
        self._note(f"lookup {name} {hit}")
        return hit

    def _load(self, request: SimulatedRequest, hit: int) -> None:
        keys = self.shape.groups.needed(request.prompt, hit)
        slots = self.cache.prepare_load(request.name, keys)
        found = {k: s for k, s in zip(keys, slots, strict=True) if s is not None}
        assert len(found) == len(keys), "a hit that is gone before it is loaded"
        request.phase = Phase.LOADING
        request.hits.append(hit)
        self._being_loaded.update(keys)
        contents = [self.memory[slot] for slot in found.values()]
        ends_at = self.steps + self.shape.load_steps
        self.loads.append(DeviceCopy(request, keys, found, contents, self.steps, ends_at, hit))
        self._note(f"load {request.name} {list(found.values())}")

    def _offer(self, request: SimulatedRequest) -> None:
        most = request.computed
        if not self.shape.store_decoded:
            most = min(most, request.prompt_blocks)
        blocks = request.prompt[request.offered : most]
        if not blocks:
            return
        keys = self._keys(blocks)
        slots = self.cache.prepare_store(request.name, keys)
        self.offered_blocks += len(keys)
        if slots is None:
            return  # offered again in the next step
        request.offered = most
        self.stored_blocks += len(slots)
        self._note(f"store {request.name} {len(keys)} {list(slots.values())}")
        if not slots:
            return
        for slot in slots.values():
            self.memory[slot] = None
        contents: list[Content | None] = [(self.epoch, key) for key in slots]
        starts_at = self.steps + 1
        ends_at = starts_at + self.shape.store_steps - 1
        self.stores.append(DeviceCopy(request, list(slots), slots, contents, starts_at, ends_at))

    def _run_copies(self) -> None:
        """The device copies; what it has copied is completed, loads and stores in any order."""
        for store in [s for s in self.stores if s.ends_at <= self.steps]:
            self.stores.remove(store)
            for slot, content in zip(store.slots.values(), store.contents, strict=True):
                self.memory[slot] = content
            if not store.stale:
                self.cache.complete_store(store.request.name, store.slots)
        for load in [load for load in self.loads if load.ends_at <= self.steps]:
            self.loads.remove(load)
            if not load.stale:
                self._loaded(load)
            elif load.request.phase is Phase.FINISHED:
                self._free(load.request)

    def _loaded(self, load: DeviceCopy) -> None:
        for (key, slot), before in zip(load.slots.items(), load.contents, strict=True):
            right = (self.epoch, key)
            if before != right or self.memory[slot] != right:
                raise WrongBytesError(
                    f"step {self.steps}: {load.request.name} loaded {self.memory[slot]} "
                    f"(at first {before}) for {right} from slot {slot}"
                )
        self.loaded.update(load.keys)
        self._being_loaded.subtract(load.keys)
        self._being_loaded = +self._being_loaded
        self.cache.complete_load(load.request.name, load.keys)
        request = load.request
        if request.phase is Phase.FINISHED:
            self._free(request)  # aborted while it was loading
            return
        request.phase = Phase.WAITING
        request.computed = request.offered = load.hit
        self.waiting.appendleft(request)

    # -- the device -------------------------------------------------------

    def _keys(self, blocks: Sequence[int]) -> list[BlockKey]:
        return [key_of(block, group) for group in self.shape.groups.order for block in blocks]

    def _next_computed(self, request: SimulatedRequest) -> int:
        if request.computed < request.prompt_blocks:
            return min(request.computed + self.shape.chunk_blocks, request.prompt_blocks)
        return min(request.computed + 1, request.prompt_blocks + request.output_blocks)

    def _compute(self, request: SimulatedRequest) -> None:
        if request.computed < request.prompt_blocks:
            request.computed = self._next_computed(request)
            return
        request.decoding += 1
        if request.decoding % self.shape.steps_per_block == 0 and request.output_blocks:
            self._next_output += 1
            place = request.computed
            if place == len(request.prompt):
                request.prompt.append(self._next_output)
            request.computed += 1

    def _allocate(self, request: SimulatedRequest, blocks: int) -> None:
        blocks = max(blocks, 0)
        assert blocks <= self._free_blocks, "the device is full"
        self._free_blocks -= blocks
        request.allocated += blocks

    def _free(self, request: SimulatedRequest) -> None:
        self._free_blocks += request.allocated
        request.allocated = 0

    def _back_to_waiting(self, request: SimulatedRequest) -> None:
        if request in self.running:
            self.running.remove(request)
        self._free(request)
        request.phase = Phase.WAITING
        request.asked_at = None
        request.computed = request.offered = request.decoding = 0
        if request not in self.waiting:
            self.waiting.appendleft(request)

    def _end(self, request: SimulatedRequest) -> None:
        loading = request.phase is Phase.LOADING
        request.phase = Phase.FINISHED
        del self.requests[request.name]
        if request in self.running:
            self.running.remove(request)
        if request in self.waiting:
            self.waiting.remove(request)
        if not loading:
            self._free(request)  # else when its load has ended: the device still writes them
        self._finished.append(request)
        self._note(f"end {request.name} {request.computed}")

    def _note(self, line: str) -> None:
        line = f"{self.steps} {line}"
        self._digest.update(line.encode())
        if self._traced:
            self.trace.append(line)
