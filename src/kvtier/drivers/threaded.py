"""Runs a blocking tier on threads, behind the interface that never blocks.

    submit_* --> urgent: lookups, loads --+--> n + 1 threads: urgent first, at  --+--> get_finished
             --> bulk:   stores ----------+    most n at once of either           --+

1. A job is cut into tasks when threads take them: one block each, or a run of blocks if the tier
   takes batches, or a share of the keys of a lookup. So the blocks of a job move in parallel and a
   job costs O(1) to submit.
2. Whatever a task raises, it ends; the job ends with its last task. So each job has one `Done`.
3. Bytes are verified here, on the tier's thread, before their key counts as ok.
4. So loads never keep all threads from stores, and stores that hang leave one to loads.
5. What a task did is counted before its job ends: who sees a `Done` sees its figures.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

from kvtier.affinity import use_all_cores
from kvtier.core.types import BlockKey, Completion, Done, Dropped, Fault, TierId
from kvtier.drivers.base import JobMetadata, SecondaryTierManager, TierCounters
from kvtier.drivers.causes import Causes
from kvtier.drivers.faults import cause_of, fault_of, worse
from kvtier.drivers.moving import Headers, load, lookup_length, run_length, store
from kvtier.drivers.places import Place, Places
from kvtier.drivers.tally import Operation, Tally
from kvtier.tiers.base import (
    SupportsBatch,
    SupportsBatchBytes,
    SupportsDelete,
    SupportsDropped,
    SupportsFigures,
    Tier,
)

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)

QUEUE_SEEN_MAX = 64
"""Jobs that are looked at to tell how much is queued."""

COLLECT_S = 1.0
"""How often a tier is asked what it dropped and how full it is."""


class ThreadedDriver(SecondaryTierManager):
    """Moves blocks between slots and a `Tier` on threads.

    Args:
        name: of the tier, for logs and thread names.
        open_tier: namespace -> tier. Called on a tier thread at the first job of a namespace; while
            it fails, that namespace's jobs fail, and it is tried again after 1 s, doubling to 60 s.
        num_threads: tasks of loads and lookups that run at once, and of stores; one more thread
            is there, so that neither waits for the other.
        tier: named by what the tier drops.
        on_finished: called on any thread whenever `get_finished` has something new; must be quick.
        clock: seconds, monotonic.
        wall_clock_ns: nanoseconds since the epoch, for the envelopes' creation time.
    """

    def __init__(
        self,
        name: str,
        open_tier: Callable[[str], Tier],
        num_threads: int = 8,
        tier: TierId = TierId(0),  # noqa: B008 - an int
        on_finished: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._name = name
        self._open_tier = open_tier
        self._tier = tier
        self._on_finished = on_finished
        self._clock = clock
        self._wall_clock_ns = wall_clock_ns
        self._causes = Causes(logger)
        self._tally = Tally()
        self._condition = threading.Condition()  # guards all below but `_finished`
        self._urgent = _Queue()
        self._bulk = _Queue()
        self._closing = False
        self._num_threads = num_threads
        self._running = num_threads + 1
        self._places = Places()
        self._namespace = ""  # of the last job: what the others drop is no news any more
        self._collect_at: float | None = None  # None while no open tier has anything to tell
        self._running_since: dict[int, float] = {}  # by thread
        self._finished: deque[Completion] = deque()  # append and popleft are atomic
        self._threads = [
            threading.Thread(target=self._serve, args=(i,), name=f"kvtier-{name}-{i}", daemon=True)
            for i in range(num_threads + 1)
        ]
        for thread in self._threads:
            thread.start()

    def submit_store(self, job: JobMetadata) -> None:
        """Queue a store, behind all loads and lookups as far as they find threads."""
        self._submit(_Job(Operation.STORE, job), self._bulk)

    def submit_load(self, job: JobMetadata) -> None:
        """Queue a load."""
        self._submit(_Job(Operation.LOAD, job), self._urgent)

    def submit_lookup(self, job: JobMetadata) -> None:
        """Queue a lookup."""
        self._submit(_Job(Operation.LOOKUP, job), self._urgent)

    def get_finished(self) -> list[Completion]:
        """Completions since the last call, oldest first."""
        finished: list[Completion] = []
        while self._finished:
            finished.append(self._finished.popleft())
        return finished

    def counters(self) -> TierCounters:
        """A copy of the totals. Seconds are summed over the threads."""
        return self._tally.counters()

    def oldest_running_s(self) -> float:
        """For how long the oldest running task has been running, in seconds; 0 if none is."""
        with self._condition:
            since = min(self._running_since.values(), default=None)
        return 0.0 if since is None else max(0.0, self._clock() - since)

    def close(self, timeout_s: float = 5.0) -> bool:
        """End queued jobs with what they have, wait for running tasks up to `timeout_s` seconds.

        The tiers are closed by the last thread that ends. A thread that never ends is a daemon.

        Returns:
            True if every thread has ended.
        """
        with self._condition:
            self._closing = True
            for queue in (self._urgent, self._bulk):
                for job in queue.jobs:
                    self._end(job, job.num_keys - job.taken)
                queue.jobs.clear()
            self._condition.notify_all()
        self._on_finished()
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _submit(self, job: _Job, queue: _Queue) -> None:
        with self._condition:
            if not self._closing and job.num_keys:
                self._namespace = job.metadata.namespace
                queue.jobs.append(job)
                self._condition.notify(job.num_keys)
                return
            self._finished.append(Done(job.metadata.job_id))
        self._on_finished()

    def _end(
        self, job: _Job, count: int, ok: list[BlockKey] | None = None, fault: Fault | None = None
    ) -> bool:
        """Count keys of a job as done with; True if they were the last ones, so that the job ended.
        Called under the lock.
        """
        job.ok += ok or []
        job.ended += count
        job.fault = worse(job.fault, fault)
        if job.ended < job.num_keys:
            return False
        self._finished.append(Done(job.metadata.job_id, frozenset(job.ok), job.fault))
        return True

    def _serve(self, number: int) -> None:
        """Body of every thread."""
        use_all_cores()
        headers = Headers()
        while True:
            with self._condition:
                while (task := self._take()) is None and not self._closing:
                    if not self._condition.wait(COLLECT_S if self._collect_at else None):
                        break
                if self._closing and task is None:
                    self._running -= 1
                    last = self._running == 0
                    break
                self._running_since[number] = self._clock()
                surplus = self._places.enter(task.place) if task else []
            for place in surplus:
                self._close_place(place)
            if task is not None:
                self._run(task, headers)
            self._collect()
            with self._condition:
                del self._running_since[number]
        if last:
            for place in self._places:
                self._close_place(place)

    def _take(self) -> _Task | None:
        """The next task, unless all that is queued waits for a place to open, or for one of its
        kind to end. Called under the lock.
        """
        for queue in (self._urgent, self._bulk):
            if queue.running == self._num_threads:
                continue
            for job in queue.jobs:
                place = self._places.get(job.metadata.namespace)
                if place.opening:
                    continue
                if place.tier is None:
                    place.opening = True
                start = job.taken
                job.taken += min(self._length(job, place, queue), job.num_keys - start)
                if job.taken == job.num_keys:
                    queue.jobs.remove(job)
                queue.running += 1
                return _Task(job, place, queue, start, job.taken)
        return None

    def _length(self, job: _Job, place: Place, queue: _Queue) -> int:
        """Keys of the next task of a job: more of them if other jobs keep the threads busy too."""
        if job.operation is Operation.LOOKUP:
            return lookup_length(job.num_keys, self._num_threads)
        tier = place.tier
        if tier is None or not isinstance(tier, SupportsBatch) or not job.metadata.spec:
            return 1
        if not job.block_bytes:
            job.block_bytes = job.metadata.spec[0].nbytes
        others = sum(each.num_keys - each.taken for each in islice(queue.jobs, QUEUE_SEEN_MAX))
        num_blocks = max(job.num_keys, others)
        bytes_min = 0
        if job.operation is Operation.STORE and isinstance(tier, SupportsBatchBytes):
            bytes_min = tier.write_batch_bytes_min
        return run_length(num_blocks, job.block_bytes, self._num_threads, bytes_min)

    def _run(self, task: _Task, headers: Headers) -> None:
        """Do a task, and count what it did. Raises nothing."""
        job, place = task.job, task.place
        count = task.stop - task.start
        ok: list[BlockKey] = []
        fault: Fault | None = None
        tier = place.tier if place.tier is not None else self._open(place)
        if tier is None:
            fault = place.fault  # its cause was logged when opening failed
            self._tally.failed(job.operation, place.cause, count)
        else:
            try:
                if job.operation is Operation.LOOKUP:
                    ok = self._look_up(tier, task)
                else:
                    ok, fault = self._move(tier, task, headers)
            # also what is not an Exception: extension modules raise panics as such, and every job
            # must end
            except BaseException as error:  # noqa: BLE001
                fault = fault_of(error)
                self._causes.warn_of(self._name, job.operation.value, error)
                self._tally.failed(job.operation, cause_of(error), count)
        with self._condition:
            place.users -= 1
            task.queue.running -= 1
            ended = self._end(job, count, ok, fault)
        if ended:
            self._on_finished()

    def _look_up(self, tier: Tier, task: _Task) -> list[BlockKey]:
        keys = task.job.metadata.block_hashes[task.start : task.stop]
        answers = tier.exists(keys)
        found = [key for key, there in zip(keys, answers, strict=True) if there]
        self._tally.looked_up(len(keys), len(found))
        return found

    def _move(
        self, tier: Tier, task: _Task, headers: Headers
    ) -> tuple[list[BlockKey], Fault | None]:
        """The keys of a load or a store that succeeded, and what failed besides."""
        operation, metadata = task.job.operation, task.job.metadata
        keys = metadata.block_hashes[task.start : task.stop]
        slots = [metadata.spec[i] for i in range(task.start, task.stop)]
        started = self._clock()
        if operation is Operation.LOAD:
            moved = load(tier, metadata.namespace, keys, slots, headers)
        else:
            created_ns = self._wall_clock_ns()
            moved = store(tier, metadata.namespace, keys, slots, headers, created_ns)
        seconds = self._clock() - started
        for key, error in moved.corrupt:
            self._causes.warn_of(self._name, "verify", error)
            self._drop(tier, key)
        fault: Fault | None = None
        for failure in moved.failed:
            fault = worse(fault, fault_of(failure))
            self._causes.warn_of(self._name, operation.value, failure)
            self._tally.failed(operation, cause_of(failure), 1)
        self._tally.moved(operation, moved, sum(slot.nbytes for slot in slots[:1]), seconds)
        return moved.ok, fault

    def _drop(self, tier: Tier, key: BlockKey) -> None:
        """Have a damaged block forgotten, so that it is not found and read again."""
        if isinstance(tier, SupportsDelete):
            try:
                tier.delete(key)
            except BaseException as error:  # noqa: BLE001 - as in _run
                self._causes.warn_of(self._name, "delete", error)

    def _open(self, place: Place) -> Tier | None:
        """Open a place, unless that failed a moment ago. Called by the one thread that took it."""
        now = self._clock()
        with self._condition:
            if not place.may_open(now):
                place.opening = False
                self._condition.notify_all()
                return None
        try:
            tier = self._open_tier(place.namespace)
        except BaseException as error:  # noqa: BLE001 - as in _run
            self._causes.warn_of(self._name, "open", error)
            with self._condition:
                place.failed(fault_of(error), cause_of(error), self._clock())
                self._condition.notify_all()
            return None
        with self._condition:
            place.opened(tier)
            if isinstance(tier, SupportsDropped | SupportsFigures) and self._collect_at is None:
                self._collect_at = self._clock()
            self._condition.notify_all()
        return tier

    def _collect(self) -> None:
        """Ask the open tiers what they have to tell, if that is due."""
        with self._condition:
            now = self._clock()
            if self._collect_at is None or now < self._collect_at:
                return
            self._collect_at = now + COLLECT_S
            places = [place for place in self._places if place.tier is not None]
            for place in places:
                place.users += 1
        for place in places:
            try:
                assert place.tier is not None, "only open ones"
                self._collect_of(place.namespace, place.tier)
            except BaseException as error:  # noqa: BLE001 - as in _run
                self._causes.warn_of(self._name, "figures", error)
        with self._condition:
            for place in places:
                place.users -= 1

    def _collect_of(self, namespace: str, tier: Tier) -> None:
        dropped = tuple(tier.take_dropped()) if isinstance(tier, SupportsDropped) else ()
        figures = dict(tier.figures()) if isinstance(tier, SupportsFigures) else {}
        with self._condition:
            if namespace != self._namespace:
                return
            changed = self._tally.told(figures)
            if dropped:
                self._finished.append(Dropped(self._tier, dropped))
        if dropped or changed:
            self._on_finished()

    def _close_place(self, place: Place) -> None:
        if place.tier is None:
            return
        try:
            place.tier.close()
        except BaseException as error:  # noqa: BLE001 - as in _run
            self._causes.warn_of(self._name, "close", error)


@dataclass(slots=True, eq=False)
class _Job:
    """A submitted job. Its numbers are guarded by the driver's lock."""

    operation: Operation
    metadata: JobMetadata
    num_keys: int = field(init=False)
    taken: int = 0
    ended: int = 0
    block_bytes: int = 0
    fault: Fault | None = None
    ok: list[BlockKey] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.num_keys = len(self.metadata.block_hashes)


@dataclass(slots=True, eq=False)
class _Queue:
    """Jobs with tasks that no thread has taken, and how many tasks run that were taken from it."""

    jobs: deque[_Job] = field(default_factory=deque)
    running: int = 0


@dataclass(frozen=True, slots=True)
class _Task:
    """The keys `start` to `stop` of a job, for one thread."""

    job: _Job
    place: Place
    queue: _Queue
    start: int
    stop: int
