"""The life of one I/O process, as its parent sees it: start, socket, kill, confirmed end.

It is started as a program, with the socket and the region as inherited descriptors. Not with
multiprocessing: vLLM's processes are daemonic there and may have no such children. Not forked:
client libraries and CUDA break. The vfork behind it holds the GIL until the new program runs, about
0.2 ms whatever the memory of the engine.

A process group of its own keeps away what a terminal sends to the engine's. Not a session: Linux
schedules sessions as groups, and beside an engine that spins one of its own got no processor.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import site
import socket
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import kvtier
from kvtier.drivers.base import TOTALS, TierCounters
from kvtier.drivers.faults import Cause
from kvtier.drivers.process import pidfd
from kvtier.drivers.process.wire import (
    REPORT_BYTES_MAX,
    Inbox,
    ToProcess,
    counters_of,
    frame_of,
    from_process,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvtier.core.types import BlockKey, JobId
    from kvtier.drivers.process.wire import FromProcess

PROGRAM = "kvtier.drivers.process.serve"

POLL_BYTES_MAX = 1 << 20
"""Read from a process at a time: one that floods costs the scheduler no more."""

POLL_FRAMES_MAX = 256

_STDERR = 2


@dataclass(frozen=True)
class Launch:
    """What is started.

    Attributes:
        name: of the tier.
        tier_type: `type` of its settings.
        options: its own options; may hold credentials, so they go through the socket.
        tier: position of the tier.
        executable: Python.
    """

    name: str
    tier_type: str
    options: Mapping[str, object] = field(repr=False)
    tier: int = 0
    executable: str = sys.executable


@dataclass(slots=True)
class InFlight:
    """A job that a process has not ended."""

    operation: str
    keys: tuple[BlockKey, ...]


class TierProcess:
    """One started process.

    Args:
        launch: what to start.
        region_fd: of the region; the process inherits it.
        now: seconds, by the clock of the caller.

    Attributes:
        started_at: `now`.
        ready_at: when it said that it is ready.
        in_flight: jobs that it has not ended.
        namespaces: their index by digest.
        totals: of its last report.
        faults: of the last report that had them.
        figures: of the last report that had them.
        silent_s: for how long it has said nothing while it had jobs.
        stuck_at: when it first said, of what runs there now, that it runs for too long.
        stuck: it said so again, a while later.
        refusal: why it will not serve.
        kill_at: when to kill it if it has not ended by itself.
        cause: why it was given up, for counters.
        told: why it was given up is in the log.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self, launch: Launch, region_fd: int, now: float) -> None:
        self.started_at = now
        self.ready_at: float | None = None
        self.in_flight: dict[JobId, InFlight] = {}
        self.namespaces: dict[str, int] = {}
        self.totals: tuple[int | float, ...] = (0,) * len(TOTALS)
        self.faults: dict[str, int] = {}
        self.figures: dict[str, float] = {}
        self.silent_s = 0.0
        self.stuck_at: float | None = None
        self.stuck = False
        self.refusal: str | None = None
        self.kill_at: float | None = None
        self.cause = Cause.UNREACHABLE
        self.told = False
        self._inbox = Inbox(REPORT_BYTES_MAX)
        self._outbox = bytearray()
        self._received = bytearray(1 << 16)
        self._gone = False
        self._socket, theirs = socket.socketpair()
        try:
            with theirs:
                self._popen = subprocess.Popen(  # noqa: S603 - the interpreter that runs this
                    [
                        *(launch.executable, "-P", "-m", PROGRAM, launch.name, launch.tier_type),
                        *("--parent", str(os.getpid())),
                        *("--socket", str(theirs.fileno()), "--region", str(region_fd)),
                    ],
                    stdin=subprocess.DEVNULL,
                    stdout=_STDERR,  # what a library prints must not mix with the engine's output
                    pass_fds=(theirs.fileno(), region_fd),
                    env=_environment(),
                    process_group=0,
                )
        except BaseException:
            self._socket.close()
            raise
        try:
            self._pidfd = pidfd.open_pidfd(self._popen.pid)
        except OSError:
            self._socket.close()
            self._popen.kill()
            self._popen.wait()
            raise
        self._socket.setblocking(False)

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._popen.pid

    @property
    def counters(self) -> TierCounters:
        """What it did, as far as it has told."""
        return counters_of(self.totals, self.faults, self.figures)

    @property
    def exit_status(self) -> str:
        """How it ended, once it is gone."""
        code = self._popen.returncode
        if code is not None and code < 0:
            with contextlib.suppress(ValueError):
                return signal.Signals(-code).name
        return f"exit status {code}"

    def send(self, message: ToProcess) -> None:
        """Send as much as the socket takes, keep the rest for `flush`."""
        self._outbox += frame_of(message)
        self.flush()

    def flush(self) -> None:
        """Send what was kept. A broken socket is noticed by `receive`."""
        if not self._outbox:
            return
        with contextlib.suppress(OSError):  # full, or broken
            while self._outbox:
                del self._outbox[: self._socket.send(self._outbox)]

    def receive(self) -> tuple[list[FromProcess], bool, bool]:
        """What has arrived, within bounds.

        Returns:
            Messages; whether everything that was sent was read; whether the other end is closed.

        Raises:
            WireError: something damaged.
        """
        messages = self._messages(POLL_FRAMES_MAX) if self._inbox else []
        budget = POLL_BYTES_MAX
        drained = ended = False
        while budget > 0 and not drained and len(messages) < POLL_FRAMES_MAX:
            try:
                count = self._socket.recv_into(self._received)
            except BlockingIOError:
                return messages, True, False
            except OSError:
                count = 0
            ended = count == 0
            drained = count < len(self._received)  # else there may be more
            budget -= count
            self._inbox.feed(memoryview(self._received)[:count])
            messages += self._messages(POLL_FRAMES_MAX - len(messages))
        return messages, drained and len(messages) < POLL_FRAMES_MAX, ended

    def _messages(self, count_max: int) -> list[FromProcess]:
        return [from_process(frame) for frame in self._inbox.frames(count_max)]

    def kill(self) -> None:
        """End it at once. Its slots may be touched until it is `gone`."""
        pidfd.kill(self._pidfd)
        self._socket.close()
        self._outbox.clear()

    def gone(self, wait_s: float = 0.0) -> bool:
        """Whether no thread of it runs any more, in any system call."""
        if not self._gone and pidfd.ended(self._pidfd, wait_s):
            self._gone = True
            self._popen.wait()
            os.close(self._pidfd)
            self._socket.close()
        return self._gone

    def wait(self, wait_s: float) -> None:
        """Until there is something to read or to send, or it is gone."""
        waiting = select.poll()
        waiting.register(self._pidfd, select.POLLIN)
        waiting.register(self._socket, select.POLLIN | (select.POLLOUT if self._outbox else 0))
        waiting.poll(wait_s * 1e3)


def _environment() -> dict[str, str]:
    """This one's, by which the program finds kvtier wherever this process has it from."""
    environment = dict(os.environ)
    environment.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy would start a thread per core
    root = str(Path(kvtier.__file__).parent.parent)
    paths = environment.get("PYTHONPATH", "").split(os.pathsep)
    if root not in (*site.getsitepackages(), site.getusersitepackages(), *paths):
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [*paths, root]))
    return environment
