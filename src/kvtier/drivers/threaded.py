"""Runs a blocking tier on threads, behind the interface that never blocks.

    submit_* --> urgent: lookups, loads --+--> threads 1..n-1: urgent first   --+--> get_finished
             --> bulk:   stores ----------+--> thread 0:       bulk first     --+

1. A job is cut into tasks, one per block, or per `LOOKUP_BATCH` keys of a lookup. Threads take them
   one at a time, so the blocks of a job move in parallel and a job costs O(1) to submit.
2. Whatever a task raises, it ends; the job ends with its last task. So each job has one `Done`.
3. Bytes are verified here, on the tier's thread, before their key counts as ok.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from kvtier.affinity import use_all_cores
from kvtier.core.types import BlockKey, Completion, Done, Fault
from kvtier.drivers.base import JobMetadata, SecondaryTierManager, TierCounters
from kvtier.drivers.faults import fault_of, worse
from kvtier.envelope import HEADER_BYTES, seal, verify
from kvtier.errors import EnvelopeError, MissingBlockError, TierError
from kvtier.tiers.base import SupportsDelete, Tier

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)

LOOKUP_BATCH = 256
"""Keys per `exists`: a long prompt's lookup is spread over the threads."""

OPEN_TIERS_MAX = 4
"""Namespaces kept open. A reset starts a new one, and jobs of the last few may still arrive."""

_FIRST_BACKOFF_S = 1.0
_LAST_BACKOFF_S = 60.0


class _Operation(Enum):
    LOOKUP = "lookup"
    LOAD = "load"
    STORE = "store"


class ThreadedDriver(SecondaryTierManager):
    """Moves blocks between slots and a `Tier`, one task per block on `num_threads` threads.

    Args:
        name: of the tier, for logs and thread names.
        open_tier: namespace -> tier. Called on a tier thread at the first job of a namespace; while
            it fails, that namespace's jobs fail, and it is tried again after 1 s, doubling to 60 s.
        num_threads: at least 2, since one of them serves stores first.
        clock: seconds, monotonic.
        wall_clock_ns: nanoseconds since the epoch, for the envelopes' creation time.
    """

    def __init__(
        self,
        name: str,
        open_tier: Callable[[str], Tier],
        num_threads: int = 8,
        clock: Callable[[], float] = time.monotonic,
        wall_clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        assert num_threads >= 2, "with one thread either loads or stores would starve"
        self._name = name
        self._open_tier = open_tier
        self._clock = clock
        self._wall_clock_ns = wall_clock_ns
        self._condition = threading.Condition()  # guards all below but `_finished`
        self._urgent: deque[_Job] = deque()
        self._bulk: deque[_Job] = deque()
        self._closing = False
        self._running = num_threads
        self._counters = TierCounters()
        self._causes: set[tuple[str, str, int | None]] = set()
        self._places: dict[str, _Place] = {}
        self._finished: deque[Completion] = deque()  # append and popleft are atomic
        self._threads = [
            threading.Thread(
                target=self._serve, args=(i == 0,), name=f"kvtier-{name}-{i}", daemon=True
            )
            for i in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit_store(self, job: JobMetadata) -> None:
        """Queue a store behind all loads and lookups but for one thread."""
        self._submit(_Job(_Operation.STORE, job, len(job.block_hashes)), self._bulk)

    def submit_load(self, job: JobMetadata) -> None:
        """Queue a load."""
        self._submit(_Job(_Operation.LOAD, job, len(job.block_hashes)), self._urgent)

    def submit_lookup(self, job: JobMetadata) -> None:
        """Queue a lookup, in batches of `LOOKUP_BATCH` keys."""
        batches = -(-len(job.block_hashes) // LOOKUP_BATCH)
        self._submit(_Job(_Operation.LOOKUP, job, batches), self._urgent)

    def get_finished(self) -> list[Completion]:
        """Completions since the last call, oldest first."""
        finished: list[Completion] = []
        while self._finished:
            finished.append(self._finished.popleft())
        return finished

    def counters(self) -> TierCounters:
        """A copy of the totals. Seconds are summed over the threads."""
        with self._condition:
            return dataclasses.replace(self._counters)

    def close(self, timeout_s: float = 5.0) -> bool:
        """End queued jobs with what they have, wait for running tasks up to `timeout_s` seconds.

        The tiers are closed by the last thread that ends. A thread that never ends is a daemon.

        Returns:
            True if every thread has ended.
        """
        with self._condition:
            self._closing = True
            for queue in (self._urgent, self._bulk):
                for job in queue:
                    self._end_tasks(job, job.num_tasks - job.taken, [], None)
                queue.clear()
            self._condition.notify_all()
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _submit(self, job: _Job, queue: deque[_Job]) -> None:
        with self._condition:
            if self._closing or job.num_tasks == 0:
                self._finished.append(Done(job.metadata.job_id))
                return
            queue.append(job)
            self._condition.notify(job.num_tasks)

    def _end_tasks(self, job: _Job, count: int, ok: list[BlockKey], fault: Fault | None) -> None:
        """Count tasks of a job as ended; the last ones end the job. Called under the lock."""
        job.ok += ok
        job.ended += count
        job.fault = worse(job.fault, fault)
        if job.ended == job.num_tasks:
            self._finished.append(Done(job.metadata.job_id, frozenset(job.ok), job.fault))

    def _serve(self, bulk_first: bool) -> None:
        """Body of every thread."""
        use_all_cores()
        first, second = (self._bulk, self._urgent) if bulk_first else (self._urgent, self._bulk)
        header = memoryview(bytearray(HEADER_BYTES))  # of this thread's reads
        while True:
            with self._condition:
                while not (first or second or self._closing):
                    self._condition.wait()
                if self._closing:
                    self._running -= 1
                    last = self._running == 0
                    break
                queue = first or second
                job = queue[0]
                index = job.taken
                job.taken += 1
                if job.taken == job.num_tasks:
                    queue.popleft()
            ok, fault = self._run_task(job, index, header)
            with self._condition:
                self._end_tasks(job, 1, ok, fault)
        if last:
            for place in self._places.values():
                self._close_place(place)

    def _run_task(
        self, job: _Job, index: int, header: memoryview
    ) -> tuple[list[BlockKey], Fault | None]:
        """The keys of one task that succeeded, and what failed besides. Raises nothing."""
        namespace = job.metadata.namespace
        try:
            place = self._enter(namespace)
            try:
                tier = place.tier
                assert tier is not None, "an entered place is open"
                if job.operation is _Operation.LOOKUP:
                    return self._look_up(tier, job.metadata, index), None
                if job.operation is _Operation.LOAD:
                    return self._load(tier, job.metadata, index, header), None
                return self._store(tier, job.metadata, index), None
            finally:
                self._leave(place)
        except _NotOpenError as error:
            fault = error.fault  # its cause was logged when opening failed
        # also what is not an Exception: extension modules raise panics as such, and every job
        # must end
        except BaseException as error:  # noqa: BLE001
            fault = fault_of(error)
            self._log_once(job.operation.value, error)
        with self._condition:
            if job.operation is _Operation.LOOKUP:
                self._counters.lookup_failures += 1
            elif job.operation is _Operation.LOAD:
                self._counters.read_failures += 1
            else:
                self._counters.write_failures += 1
        return [], fault

    def _look_up(self, tier: Tier, job: JobMetadata, index: int) -> list[BlockKey]:
        keys = job.block_hashes[index * LOOKUP_BATCH : (index + 1) * LOOKUP_BATCH]
        answers = tier.exists(keys)
        found = [key for key, there in zip(keys, answers, strict=True) if there]
        with self._condition:
            self._counters.lookup_blocks += len(keys)
            self._counters.lookup_hits += len(found)
        return found

    def _load(self, tier: Tier, job: JobMetadata, index: int, header: memoryview) -> list[BlockKey]:
        key = job.block_hashes[index]
        slot = job.spec[index]
        started = self._clock()
        try:
            tier.read(key, (header, slot))
            verify(header, job.namespace, key, slot)
        except MissingBlockError:
            return []
        except EnvelopeError as error:
            self._log_once("verify", error)
            with self._condition:
                self._counters.corrupt_blocks += 1
            self._drop(tier, key)
            return []
        seconds = self._clock() - started
        with self._condition:
            self._counters.read_blocks += 1
            self._counters.read_bytes += slot.nbytes
            self._counters.read_seconds += seconds
        return [key]

    def _drop(self, tier: Tier, key: BlockKey) -> None:
        """Have a damaged block forgotten, so that it is not found and read again."""
        if isinstance(tier, SupportsDelete):
            try:
                tier.delete(key)
            except BaseException as error:  # noqa: BLE001 - as in _run_task
                self._log_once("delete", error)

    def _store(self, tier: Tier, job: JobMetadata, index: int) -> list[BlockKey]:
        key = job.block_hashes[index]
        slot = job.spec[index]
        started = self._clock()
        header = seal(job.namespace, key, slot, self._wall_clock_ns())
        tier.write(key, (memoryview(header), slot))
        seconds = self._clock() - started
        with self._condition:
            self._counters.write_blocks += 1
            self._counters.write_bytes += slot.nbytes
            self._counters.write_seconds += seconds
        return [key]

    def _enter(self, namespace: str) -> _Place:
        """The open tier of a namespace, kept open until `_leave`.

        Raises:
            _NotOpenError: it cannot be opened now.
        """
        with self._condition:
            # last used last
            place = self._places.pop(namespace, None) or _Place(namespace)
            self._places[namespace] = place
            place.users += 1
            surplus = self._take_surplus()
        for old in surplus:
            self._close_place(old)
        try:
            with place.opening:
                if place.tier is None:
                    self._open(place)
        except _NotOpenError:
            self._leave(place)
            raise
        return place

    def _leave(self, place: _Place) -> None:
        with self._condition:
            place.users -= 1

    def _take_surplus(self) -> list[_Place]:
        """Remove the places that were unused longest and are not in use. Called under the lock."""
        count = len(self._places) - OPEN_TIERS_MAX
        idle = [place for place in self._places.values() if place.users == 0]
        surplus = idle[: max(0, count)]
        for place in surplus:
            del self._places[place.namespace]
        return surplus

    def _open(self, place: _Place) -> None:
        """Open a place, unless that failed a moment ago. Called under the place's lock."""
        if place.failed and self._clock() < place.retry_at:
            raise _NotOpenError(place.fault)
        try:
            place.tier = self._open_tier(place.namespace)
        except BaseException as error:  # as in _run_task
            self._log_once("open", error)
            place.retry_at = self._clock() + min(
                _LAST_BACKOFF_S, _FIRST_BACKOFF_S * 2**place.failed
            )
            place.failed += 1
            place.fault = fault_of(error)
            raise _NotOpenError(place.fault) from error
        place.failed = 0

    def _close_place(self, place: _Place) -> None:
        if place.tier is None:
            return
        try:
            place.tier.close()
        except BaseException as error:  # noqa: BLE001 - as in _run_task
            self._log_once("close", error)

    def _log_once(self, operation: str, error: BaseException) -> None:
        """Log the first error of its cause; later ones are only counted."""
        number = error.errno if isinstance(error, OSError) else None
        cause = (operation, type(error).__name__, number)
        with self._condition:
            if cause in self._causes:
                return
            self._causes.add(cause)
        logger.warning(
            "Tier %s: %s failed: %s: %s (further ones are counted, not logged)",
            self._name,
            operation,
            type(error).__name__,
            error,
        )


class _NotOpenError(TierError):
    """The tier of a namespace could not be opened, now or a moment ago."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.value)
        self.fault = fault


@dataclass(slots=True)
class _Job:
    """A submitted job. Its numbers are guarded by the driver's lock."""

    operation: _Operation
    metadata: JobMetadata
    num_tasks: int
    taken: int = 0
    ended: int = 0
    fault: Fault | None = None
    ok: list[BlockKey] = field(default_factory=list)


@dataclass(slots=True)
class _Place:
    """The tier of one namespace, or why there is none."""

    namespace: str
    tier: Tier | None = None
    users: int = 0  # running tasks; guarded by the driver's lock
    opening: threading.Lock = field(default_factory=threading.Lock)  # guards what follows
    failed: int = 0  # attempts to open since the last success
    retry_at: float = 0.0
    fault: Fault = Fault.ERROR
