"""The program of an I/O process: runs one tier for the engine that started it.

    python -P -m kvtier.drivers.process.serve NAME TYPE --parent PID --socket FD --region FD

The main thread takes jobs, a `ThreadedDriver` runs them, a sender reports several at a time, and of
a job alone the thread that ended it. The process lives as long as its parent: it ends when the
socket does, or, if somebody else holds the socket's other end, when the parent's pidfd says so.
Blocks that run then may end within `LAST_S`. Signals that are meant for all processes of a terminal
or a service do not end it before the engine is done with it.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import select
import signal
import socket
import sys
import threading
import time
from typing import TYPE_CHECKING

from kvtier.affinity import use_all_cores
from kvtier.core.types import BlockKey, Done, Dropped, JobId, Slot, TierId
from kvtier.drivers.base import JobMetadata, SlotViews, TierCounters
from kvtier.drivers.process import pidfd
from kvtier.drivers.process.logs import Forwarding
from kvtier.drivers.process.wire import (
    DROPPED_MAX,
    LOGS_MAX,
    OPERATIONS,
    PROTOCOL,
    Close,
    Ended,
    FromProcess,
    Inbox,
    Job,
    Named,
    Ready,
    Refused,
    Report,
    Start,
    bits_of,
    frame_of,
    to_process,
    totals_of,
)
from kvtier.drivers.threaded import ThreadedDriver
from kvtier.errors import ConfigError, KVTierError
from kvtier.region import Region
from kvtier.tiers.registry import decode_settings, load_tier_type

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvtier.core.types import Completion
    from kvtier.tiers.base import Tier

BEAT_S = 0.5
"""A process that has jobs says at least so often that it lives."""

LAST_S = 2.0
"""What running blocks are given when the engine is gone."""

_RECEIVE_BYTES = 1 << 18
_COMM_BYTES = 15  # of a name that ps and top show


class Orphan:
    """Ends this process once its parent is gone.

    Args:
        parent: pid that the parent told of itself.
        sock: shut down then, so that the main thread ends what it does.
    """

    def __init__(self, parent: int, sock: socket.socket) -> None:
        try:
            self._pidfd = pidfd.open_pidfd(parent)
        except ProcessLookupError:
            os._exit(1)
        # A parent that ends is replaced at once; so if it is the parent still, no other process
        # can have had its pid when the descriptor was made.
        if os.getppid() != parent:
            os._exit(1)
        self._sock = sock
        threading.Thread(target=self._watch, name="kvtier-orphan", daemon=True).start()

    def _watch(self) -> None:
        pidfd.ended(self._pidfd, None)
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        time.sleep(2 * LAST_S)
        os._exit(1)


class Server:
    """One tier.

    Args:
        sock: to the parent.
        inbox: what was received of it.
    """

    def __init__(self, sock: socket.socket, inbox: Inbox) -> None:
        self._sock = sock
        self._inbox = inbox
        self._news = threading.Event()
        self._closing = threading.Event()
        self._namespaces: list[Named] = []
        self._keys: dict[JobId, tuple[BlockKey, ...]] = {}  # of jobs in flight
        self._dropped: list[BlockKey] = []
        self._logs = Forwarding(self._news.set)
        self._driver: ThreadedDriver | None = None
        self._sending = threading.Lock()
        self._writable = select.poll()
        self._writable.register(sock, select.POLLOUT)
        self._told = TierCounters()  # by the last report

    def start(self, start: Start, region_fd: int) -> None:
        """Prepare for jobs.

        Raises:
            KVTierError: this can never work.
        """
        if start.protocol != PROTOCOL:
            raise ConfigError(
                f"the engine speaks protocol {start.protocol} and the kvtier that is installed now "
                f"{PROTOCOL}: restart the engine"
            )
        sys.path[:] = start.path
        root = logging.getLogger()
        root.addHandler(self._logs)
        root.setLevel(start.log_level)
        region = Region.from_fd(region_fd)
        shape = (region.geometry.num_slots, region.geometry.row_bytes, region.geometry.num_ranks)
        if shape != start.geometry:
            raise ConfigError(f"the region has shape {shape}, not {start.geometry}")
        setting = f"secondary_tiers[{start.tier}]"
        tier_type = load_tier_type(start.tier_type, f"{setting}.type")
        settings = decode_settings(tier_type, start.options, setting)

        def open_tier(digest: str) -> Tier:
            facts = next(each.facts for each in self._namespaces if each.digest == digest)
            return tier_type.open(settings, digest, facts)

        self._region = region
        self._driver = ThreadedDriver(
            start.name,
            open_tier,
            tier_type.num_threads(settings),
            TierId(start.tier),
            self._report_at_once,
        )

    def serve(self) -> None:
        """Take jobs until the parent wants no more of them, or is gone."""
        assert self._driver is not None, "started"
        self._send(Ready())
        sender = threading.Thread(target=self._report, name="kvtier-sender", daemon=True)
        sender.start()
        timeout_s = LAST_S
        for message in receive(self._sock, self._inbox):
            match message:
                case Job():
                    self._submit(message)
                case Named():
                    self._namespaces.append(message)
                case Close():
                    timeout_s = message.timeout_s
                    break
                case Start():
                    raise AssertionError("it is started once")
        self._driver.close(timeout_s)
        self._closing.set()
        self._news.set()
        sender.join(timeout_s)

    def _submit(self, job: Job) -> None:
        driver = self._driver
        assert driver is not None, "started"
        operation = OPERATIONS[job.operation]
        keys = tuple(map(BlockKey, job.keys))
        slots = [Slot(slot) for slot in job.slots]
        spec = SlotViews(self._region, slots, operation == "store") if slots else ()
        job_id = JobId(job.job_id)
        metadata = JobMetadata(job_id, keys, spec, self._namespaces[job.namespace].digest)
        self._keys[job_id] = keys
        if operation == "lookup":
            driver.submit_lookup(metadata)
        elif operation == "load":
            driver.submit_load(metadata)
        else:
            driver.submit_store(metadata)

    def _report_at_once(self) -> None:
        """Report the end of the only job on the thread that ended it, which saves a change of
        threads. Of several jobs, and where the socket is full, the sender reports.
        """
        if len(self._keys) > 1 or self._driver is None or not self._sending.acquire(blocking=False):
            self._news.set()
            return
        try:
            if self._writable.poll(0):
                self._send(self._news_of(self._driver.get_finished()))
            else:
                self._news.set()
        except OSError:
            pass  # the main thread notices as well
        finally:
            self._sending.release()

    def _report(self) -> None:
        """Body of the sender: what nobody else reported, and a beat while there are jobs."""
        driver = self._driver
        assert driver is not None, "started"
        while True:
            news = self._news.wait(BEAT_S)
            self._news.clear()
            closing = self._closing.is_set()
            try:
                with self._sending:
                    # a beat that nobody reads is not worth waiting for
                    if news or (self._keys and self._writable.poll(0)):
                        self._send(self._news_of(driver.get_finished()))
            except OSError:
                return  # the main thread notices as well
            if closing:
                return

    def _news_of(self, finished: list[Completion]) -> Report:
        ended = []
        for completion in finished:
            if isinstance(completion, Done):
                bits = bits_of(self._keys.pop(completion.job), completion.ok)
                fault = completion.fault.value if completion.fault else ""
                ended.append(Ended(completion.job, bits, fault))
            elif isinstance(completion, Dropped):
                self._dropped += completion.keys
        dropped, self._dropped = self._dropped[:DROPPED_MAX], self._dropped[DROPPED_MAX:]
        logs = self._logs.take()
        if self._dropped or len(logs) == LOGS_MAX:
            self._news.set()  # there may be more
        assert self._driver is not None, "started"
        # taken after what is finished, so that they include it
        counters = self._driver.counters()
        faults = counters.faults if counters.faults != self._told.faults else None
        figures = counters.figures if counters.figures != self._told.figures else None
        self._told = counters
        return Report(
            ended,
            [bytes(key) for key in dropped],
            totals_of(counters),
            faults,
            figures,
            self._driver.oldest_running_s(),
            logs,
        )

    def _send(self, message: FromProcess) -> None:
        self._sock.sendall(frame_of(message))


def receive(sock: socket.socket, inbox: Inbox) -> Iterator[Start | Named | Job | Close]:
    """Messages from the parent, until the socket ends."""
    while True:
        yield from map(to_process, inbox.frames())
        try:
            data = sock.recv(_RECEIVE_BYTES)
        except ConnectionError:
            return
        if not data:
            return
        inbox.feed(data)


def main() -> None:
    """Entry point of the process."""
    parser = argparse.ArgumentParser(prog="kvtier.drivers.process.serve")
    parser.add_argument("name")
    parser.add_argument("type")
    for option in ("--parent", "--socket", "--region"):
        parser.add_argument(option, type=int, required=True)
    options = parser.parse_args()
    for descriptor in (options.socket, options.region):
        os.set_inheritable(descriptor, False)
    sock = socket.socket(fileno=options.socket)
    Orphan(options.parent, sock)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError), open("/proc/self/comm", "w") as comm:
        comm.write(f"kvtier-{options.name}"[:_COMM_BYTES])
    use_all_cores()
    inbox = Inbox()
    server = Server(sock, inbox)
    start = next(receive(sock, inbox), None)
    if isinstance(start, Start):
        try:
            server.start(start, options.region)
        except KVTierError as error:
            sock.sendall(frame_of(Refused(str(error))))
        except Exception as error:  # noqa: BLE001 - the import of somebody's module
            sock.sendall(frame_of(Refused(f"{type(error).__name__}: {error}")))
        else:
            server.serve()
    # threads of the tier, or of libraries that it uses, may hang: nothing waits for them
    logging.shutdown()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
