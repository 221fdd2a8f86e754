"""Runs a tier in a process of its own, behind the interface that never blocks.

    scheduler thread: submit_* --> socket --> I/O process: ThreadedDriver --> Tier
                  get_finished <-- socket <--      |
                                                region (shared memory)

1. A job's slots are its process's until it says that the job ended, or is confirmed gone. A process
   that hangs, or sends nonsense, is killed; only when its pidfd says so its jobs end, with
   `Fault.UNREACHABLE`. One in uninterruptible sleep keeps them for as long as it sleeps.
2. There is a process whenever there can be: the next one is started after 1 s, doubling to 60 s;
   the delay falls back once one has worked for a while. Meanwhile jobs end at once. While one is
   dying, one more may run: what the first one hangs in may concern a few blocks only. No third one
   is started, or a dead mount would collect processes that cannot be killed.
3. It hangs when it says so (a task runs for longer than `hang_s`), or when it says nothing for
   `hang_s` while it has jobs. Only time between polls that are close to each other counts: an
   engine without requests does not poll, and what was said meanwhile is read first.
"""

from __future__ import annotations

import logging
import sys
import time
from typing import TYPE_CHECKING

from kvtier.core.types import BlockKey, Completion, Done, Dropped, Fault, JobId, TierId
from kvtier.drivers.base import (
    TOTALS,
    JobMetadata,
    SecondaryTierManager,
    SlotViews,
    TierCounters,
)
from kvtier.drivers.causes import Causes
from kvtier.drivers.faults import Cause
from kvtier.drivers.process.logs import emit
from kvtier.drivers.process.process import InFlight, Launch, TierProcess
from kvtier.drivers.process.wire import (
    LOGS_MAX,
    OPERATIONS,
    PROTOCOL,
    Close,
    Ended,
    Job,
    Named,
    Ready,
    Refused,
    Report,
    Start,
    WireError,
    keys_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvtier.drivers.process.wire import FromProcess, LogRecord
    from kvtier.region import Region

logger = logging.getLogger(__name__)

START_S = 60.0
"""A process that has not begun to work after so long never will."""

DYING_MAX = 2
"""Processes that are killed but not gone, at most; until then no other one is started."""

FIRST_BACKOFF_S = 1.0
LAST_BACKOFF_S = 60.0

STEADY_S = 10.0
"""A process that ends jobs so long after it was ready has worked."""

LAST_WORD_S = 1.0
"""A process that closed its socket may take so long to end by itself."""

POLL_GAP_S = 1.0
"""Of the time between two polls no more counts as silence."""

AGAIN_S = 1.0
"""What runs for too long is told twice, so far apart: the first report may be an old one."""

_FAULTS = {fault.value: fault for fault in Fault} | {"": None}


class ProcessDriver(SecondaryTierManager):
    """See the module. Everything is called on one thread, returns at once and raises nothing.

    Args:
        launch: the tier.
        region: slots of all jobs.
        facts_of: what a namespace's digest stands for.
        hang_s: how long a task may run, or the process be silent while it has jobs.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        launch: Launch,
        region: Region,
        facts_of: Callable[[str], Mapping[str, object]],
        hang_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._launch = launch
        self._region = region
        self._facts_of = facts_of
        self._hang_s = hang_s
        self._clock = clock
        self._causes = Causes(logger, clock)
        self._process: TierProcess | None = None
        self._dying: list[TierProcess] = []
        self._backoff_s = FIRST_BACKOFF_S
        self._retry_at = clock()
        self._polled_at = clock()
        self._closed = False
        self._finished: list[Completion] = []
        self._past = TierCounters()  # of processes that ended, and what no process did
        self._start(clock())

    @property
    def pid(self) -> int | None:
        """Of the process that takes jobs now."""
        return self._process.pid if self._process else None

    def submit_store(self, job: JobMetadata) -> None:
        """Send a store."""
        self._submit("store", job)

    def submit_load(self, job: JobMetadata) -> None:
        """Send a load."""
        self._submit("load", job)

    def submit_lookup(self, job: JobMetadata) -> None:
        """Send a lookup."""
        self._submit("lookup", job)

    def get_finished(self) -> list[Completion]:
        """Completions since the last call. Looks after the process as well."""
        now = self._clock()
        if self._process is not None:
            self._process.flush()
            self._listen(self._process, now)
        self._polled_at = now
        if self._dying:
            self._reap(now)
        may_start = self._process is None and not self._closed and len(self._dying) < DYING_MAX
        if may_start and now >= self._retry_at:
            self._start(now)
        finished, self._finished = self._finished, []
        return finished

    def counters(self) -> TierCounters:
        """Totals over all processes so far; the tier's own figures are the latest."""
        totals = self._past.copy()
        for process in (*self._dying, self._process):
            if process is not None:
                totals.add(process.counters)
        return totals

    def close(self, timeout_s: float = 5.0) -> bool:
        """End the process: half of the time in an orderly way, then with SIGKILL.

        Returns:
            True if it is confirmed gone, and with it every touch of a slot.
        """
        self._closed = True
        until = time.monotonic() + timeout_s
        process = self._process
        if process is not None:
            process.send(Close(timeout_s / 4))
            while self._process is not None and (left := until - time.monotonic()) > timeout_s / 2:
                process.wait(left - timeout_s / 2)
                process.flush()
                self._listen(process, self._clock())
            if self._process is not None:
                self._give_up(process, self._clock())
        for dying in self._dying:
            if not dying.gone():
                dying.kill()
            dying.gone(max(0.0, until - time.monotonic()))
        self._reap(self._clock())
        return not self._dying

    def _submit(self, operation: str, job: JobMetadata) -> None:
        process = self._process
        if self._closed or not job.block_hashes:
            self._finished.append(Done(job.job_id))
            return
        if process is None:
            self._fail(operation, len(job.block_hashes), Cause.UNREACHABLE)
            self._finished.append(Done(job.job_id, frozenset(), Fault.UNREACHABLE))
            return
        slots = tuple(job.spec.slots) if isinstance(job.spec, SlotViews) else ()
        if len(slots) != (0 if operation == "lookup" else len(job.block_hashes)):
            self._fail(operation, len(job.block_hashes), Cause.OTHER)
            self._finished.append(Done(job.job_id, frozenset(), Fault.ERROR))
            return
        namespace = process.namespaces.get(job.namespace)
        if namespace is None:
            facts = dict(self._facts_of(job.namespace))
            namespace = process.namespaces[job.namespace] = len(process.namespaces)
            process.send(Named(namespace, job.namespace, facts))
        if not process.in_flight:
            process.silent_s = 0.0
        process.in_flight[job.job_id] = InFlight(operation, job.block_hashes)
        number = OPERATIONS.index(operation)
        process.send(Job(number, job.job_id, namespace, job.block_hashes, slots))

    def _start(self, now: float) -> None:
        try:
            process = TierProcess(self._launch, self._region.fd, now)
        except OSError as error:
            self._causes.warn_of(self._launch.name, "start of its I/O process", error)
            self._back_off(now)
            return
        self._past.process_starts += 1
        self._process = process
        geometry = self._region.geometry
        process.send(
            Start(
                PROTOCOL,
                list(sys.path),
                self._launch.tier_type,
                dict(self._launch.options),
                self._launch.name,
                logging.getLogger("kvtier").getEffectiveLevel(),
                (geometry.num_slots, geometry.row_bytes, geometry.num_ranks),
                self._launch.tier,
            )
        )

    def _listen(self, process: TierProcess, now: float) -> None:
        """Take in what a process said, and judge it."""
        try:
            messages, drained, ended = process.receive()
            logs: list[LogRecord] = []
            for message in messages:
                self._take(process, message, now)
                if isinstance(message, Report):
                    logs += message.logs
            emit(logs[:LOGS_MAX])  # a tier that logs without end does not hold the scheduler up
        except WireError as error:
            self._kill(process, now, Cause.UNREACHABLE, f"sent nonsense ({error})")
            return
        if messages or not process.in_flight:
            process.silent_s = 0.0
        elif drained:
            process.silent_s += min(now - self._polled_at, POLL_GAP_S)
        if ended:
            self._past.process_crashes += process.refusal is None and not self._closed
            self._give_up(process, now, kill_at=now + LAST_WORD_S)
        elif process.ready_at is None:
            if drained and now - process.started_at > START_S:
                self._kill(process, now, Cause.STALLED, f"has not begun to work in {START_S:g} s")
        elif process.silent_s > self._hang_s:
            self._kill(process, now, Cause.STALLED, f"has said nothing for {self._hang_s:g} s")
        elif process.stuck:
            self._kill(process, now, Cause.STALLED, f"hangs for more than {self._hang_s:g} s")

    def _take(self, process: TierProcess, message: FromProcess, now: float) -> None:
        """Take in one message.

        Raises:
            WireError: it makes no sense.
        """
        match message:
            case Report():
                self._count(process, message)
                for ended in message.ended:
                    self._finish(process, ended)
                worked_s = now - process.ready_at if process.ready_at is not None else 0.0
                if message.ended and worked_s >= STEADY_S:
                    self._backoff_s = FIRST_BACKOFF_S
                if message.dropped:
                    keys = tuple(map(BlockKey, message.dropped))
                    self._finished.append(Dropped(TierId(self._launch.tier), keys))
                if message.oldest_s <= self._hang_s:
                    process.stuck_at = None
                elif process.stuck_at is None:
                    process.stuck_at = now
                process.stuck = process.stuck_at is not None and now - process.stuck_at >= AGAIN_S
            case Ready():
                process.ready_at = now
            case Refused(reason=reason):
                process.refusal = reason

    def _count(self, process: TierProcess, report: Report) -> None:
        if len(report.totals) != len(TOTALS):
            raise WireError(f"{len(report.totals)} totals")
        process.totals = report.totals
        if report.faults is not None:
            process.faults = report.faults
        if report.figures is not None:
            process.figures = report.figures

    def _finish(self, process: TierProcess, ended: Ended) -> None:
        """One job ended, if it is one that this process has, and its answer makes sense."""
        job_id = JobId(ended.job_id)
        job = process.in_flight.get(job_id)
        if job is None or ended.fault not in _FAULTS:
            raise WireError(f"job {ended.job_id} with fault {ended.fault[:20]!r}")
        ok = keys_of(job.keys, ended.ok)
        del process.in_flight[job_id]
        self._finished.append(Done(job_id, ok, _FAULTS[ended.fault]))

    def _kill(self, process: TierProcess, now: float, cause: Cause, what: str) -> None:
        """Have a process end that does not do as it should."""
        name = self._launch.name
        self._causes.warn(what, "The I/O process of tier %s %s and is killed", name, what)
        self._past.process_kills += 1
        process.cause = cause
        process.told = True
        self._give_up(process, now)

    def _give_up(self, process: TierProcess, now: float, kill_at: float | None = None) -> None:
        """Send a process no more jobs, and see to it that it ends: now, or by `kill_at`."""
        process.kill_at = kill_at
        if kill_at is None:
            process.kill()
        self._process = None
        self._dying.append(process)
        self._back_off(now)

    def _back_off(self, now: float) -> None:
        self._retry_at = now + self._backoff_s
        self._backoff_s = min(LAST_BACKOFF_S, 2 * self._backoff_s)

    def _reap(self, now: float) -> None:
        """End the jobs of the processes that are gone."""
        for process in tuple(self._dying):
            if not process.gone():
                if process.kill_at is not None and now >= process.kill_at:
                    process.kill()
                continue
            self._dying.remove(process)
            self._past.add(process.counters)
            for job_id, job in process.in_flight.items():
                self._fail(job.operation, len(job.keys), process.cause)
                self._finished.append(Done(job_id, frozenset(), Fault.UNREACHABLE))
            process.in_flight.clear()
            if not process.told and not self._closed:
                what = process.refusal or f"ended by itself ({process.exit_status})"
                name = self._launch.name
                self._causes.warn(what, "The I/O process of tier %s %s", name, what)

    def _fail(self, operation: str, blocks: int, cause: Cause) -> None:
        """Count a job that no process did; of a lookup, as one failure."""
        if operation == "lookup":
            blocks = 1
            self._past.lookup_failures += 1
        elif operation == "load":
            self._past.read_failures += blocks
        else:
            self._past.write_failures += blocks
        self._past.count_faults(cause, blocks)
