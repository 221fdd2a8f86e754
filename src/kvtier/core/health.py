"""Whether, and how fast, a tier answers: one circuit per direction, and its measured speed.

            k failures, a stall, or a fault that will repeat
    CLOSED ---------------------------------------------------> OPEN
      ^                                                          | backoff passed
      | the trial succeeded                                      v
      +----------------------------------------------------- HALF_OPEN --> OPEN, twice the backoff
                                                                 the trial failed

Probes and reads share a circuit, writes have their own: a full disk still serves what it holds.
While a circuit is open nothing is asked of the tier in that direction, and nobody waits for what
was asked before. One trial at a time closes it again.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from kvtier.core.types import Fault


class State(Enum):
    """State of a circuit."""

    CLOSED = "closed"  # in use
    OPEN = "open"  # left alone
    HALF_OPEN = "half_open"  # one trial is running, or the next job will be one


@dataclass(frozen=True, slots=True)
class Patience:
    """When a circuit opens, and for how long.

    Attributes:
        failures_max: jobs in a row that may fail.
        stall_s: seconds without any completion while jobs are running.
        backoff_s: seconds before the first trial; doubles with each trial that fails.
        backoff_max_s: bound of that.
    """

    failures_max: int = 3
    stall_s: float = 10.0
    backoff_s: float = 1.0
    backoff_max_s: float = 60.0


REPEATING = frozenset({Fault.FULL, Fault.UNREACHABLE, Fault.DENIED, Fault.THROTTLED})
"""Faults that the next job would meet as well: they open a circuit at once."""


class Circuit:
    """One direction of one tier. `now` is always given; it never runs backwards.

    Attributes:
        state: see `State`.
        fault: why it is open, or was last; None if never.
        opened: how often it opened.
    """

    def __init__(self, patience: Patience, now: float) -> None:
        self.state = State.CLOSED
        self.fault: Fault | None = None
        self.opened = 0
        self._patience = patience
        self._failures = 0
        self._backoff_s = patience.backoff_s
        self._retry_at = 0.0
        self._running = 0
        self._trial = False  # half open, and the trial is out
        self._progress_at = now  # the last completion, or the first job after quiet

    def allows(self, now: float) -> bool:
        """Whether a job may be submitted now. An open circuit whose time has come takes one."""
        if self.state is State.CLOSED:
            return True
        if self.state is State.OPEN and now >= self._retry_at:
            self.state = State.HALF_OPEN
            self._trial = False
        return self.state is State.HALF_OPEN and not self._trial

    def submitted(self, now: float) -> None:
        """A job was submitted."""
        if self._running == 0:
            self._progress_at = now
        self._running += 1
        if self.state is State.HALF_OPEN:
            self._trial = True
            self._progress_at = now

    def withdrawn(self) -> None:
        """A job was never sent after all."""
        self._running -= 1
        self._trial = False

    def ended(self, now: float, fault: Fault | None) -> None:
        """A job ended. Late ones count too: a tier that answers is alive."""
        self._running -= 1
        self._progress_at = now
        if fault is None:
            self._failures = 0
            if self.state is not State.CLOSED:
                self.state = State.CLOSED
                self._trial = False
                self._backoff_s = self._patience.backoff_s
            return
        self._failures += 1
        self.fault = fault
        if self.state is State.HALF_OPEN or (
            self.state is State.CLOSED
            and (fault in REPEATING or self._failures >= self._patience.failures_max)
        ):
            self._open(now)

    def missed(self, now: float) -> None:
        """A job was given up at its deadline; its end is counted when it comes."""
        self._failures += 1
        if self.state is not State.OPEN and self._failures >= self._patience.failures_max:
            self.fault = Fault.STALLED
            self._open(now)

    def stalled(self, now: float) -> bool:
        """Whether it opens now since nothing has come back for too long. Ask once a step."""
        waiting = self._running > 0 and self.state is not State.OPEN
        if not waiting or now < self._progress_at + self._patience.stall_s:
            return False
        self.fault = Fault.STALLED
        self._open(now)
        return True

    def _open(self, now: float) -> None:
        if self.state is State.HALF_OPEN:
            self._backoff_s = min(2 * self._backoff_s, self._patience.backoff_max_s)
        self.state = State.OPEN
        self.opened += 1
        self._failures = 0
        self._trial = False
        self._retry_at = now + self._backoff_s


class Speed:
    """Measured seconds per block of one tier's reads, queueing included.

    An exponentially weighted mean over jobs: each counts the time since the later of its submission
    and the completion before it, so that queued jobs are not counted twice.

    Attributes:
        seconds_per_block: the mean; 0 until something was measured, so that a new tier is tried.
        queued: blocks asked for whose job has not ended.
    """

    _WEIGHT = 0.25

    def __init__(self) -> None:
        self.seconds_per_block = 0.0
        self.queued = 0
        self._last_end = 0.0

    def submitted(self, blocks: int) -> None:
        """A read was submitted."""
        self.queued += blocks

    def ended(self, blocks: int, submitted_at: float, now: float) -> None:
        """A read ended."""
        self.queued -= blocks
        sample = max(0.0, now - max(submitted_at, self._last_end)) / blocks
        self._last_end = now
        if self.seconds_per_block == 0.0:
            self.seconds_per_block = sample
        else:
            self.seconds_per_block += self._WEIGHT * (sample - self.seconds_per_block)

    def expect(self, blocks: int) -> float:
        """Seconds until that many more blocks are here."""
        return (self.queued + blocks) * self.seconds_per_block
