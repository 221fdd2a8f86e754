"""Whether, and how fast, a tier answers: one circuit per direction, and its measured speed.

            k failures, a stall, or a fault that will repeat
    CLOSED ---------------------------------------------------> OPEN
      ^                                                          | backoff passed
      | the trial succeeded                                      v
      +----------------------------------------------------- HALF_OPEN --> OPEN, twice the backoff
                                                                 the trial failed

Probes and reads share a circuit, writes have their own: a full disk still serves what it holds.
While a circuit is open nothing is asked of the tier in that direction, and nobody waits for what
was asked before. One trial at a time closes it again: after the backoff, or as soon as something
that was given up comes back after all.
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
        trial_max: blocks that a trial moves at most.
    """

    failures_max: int = 3
    stall_s: float = 10.0
    backoff_s: float = 1.0
    backoff_max_s: float = 60.0
    trial_max: int = 64

    def __post_init__(self) -> None:
        assert self.failures_max > 0, "a circuit opens after a failure, not before"
        assert self.stall_s > 0, "a tier needs time to answer"
        assert 0 < self.backoff_s <= self.backoff_max_s, "a backoff that grows to its bound"
        assert self.trial_max > 0, "a trial moves a block"


REPEATING = frozenset({Fault.FULL, Fault.UNREACHABLE, Fault.DENIED, Fault.THROTTLED})
"""Faults that the next job would meet as well: they open a circuit at once."""


class Circuit:
    """One direction of one tier. `now` is always given; it never runs backwards.

    It knows the jobs that somebody waits for. Whoever is told that it opened gives up all of them:
    what comes of those later is told with `late`. So while it is half open, the only job is the
    trial.

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
        self._moves_fail = False  # the latest job that was to move bytes failed
        self._backoff_s = patience.backoff_s
        self._retry_at = 0.0
        # Probes, and jobs that move bytes: each kind makes its own progress.
        self._running = [0, 0]
        self._progress_at = [now, now]  # the last completion, or the first job after quiet

    def allows(self, now: float) -> bool:
        """Whether a job may be submitted now. An open circuit whose time has come takes one."""
        if self.state is State.CLOSED:
            return True
        if self.state is State.OPEN and now >= self._retry_at:
            self.state = State.HALF_OPEN
        return self.state is State.HALF_OPEN and not any(self._running)

    def takes(self, blocks: int, now: float) -> int:
        """How many of so many blocks one job may move now: a trial is small."""
        if not self.allows(now):
            return 0
        return blocks if self.state is State.CLOSED else min(blocks, self._patience.trial_max)

    def submitted(self, now: float, *, moves: bool) -> None:
        """A job was submitted; `moves` if it moves bytes."""
        if self._running[moves] == 0:
            self._progress_at[moves] = now
        self._running[moves] += 1

    def withdrawn(self, *, moves: bool) -> None:
        """A job was never sent after all."""
        self._running[moves] -= 1

    def ended(self, now: float, fault: Fault | None, *, moves: bool, moved: bool) -> bool:
        """A job ended. Returns whether the circuit opened.

        A probe that is answered tells nothing about reads that fail: only bytes that moved do.
        """
        self._running[moves] -= 1
        self._progress_at[moves] = now
        if fault is not None:
            self.fault = fault
            return self._failed(now, moves=moves, at_once=fault in REPEATING)
        if moved or not self._moves_fail:
            self._moves_fail = False
            self._failures = 0
            self._backoff_s = self._patience.backoff_s
            self.state = State.CLOSED
        return False

    def missed(self, now: float, *, moves: bool) -> bool:
        """A job was given up at its deadline. Returns whether the circuit opened."""
        self._running[moves] -= 1
        opens = self._failed(now, moves=moves)
        if opens:
            self.fault = Fault.STALLED
        return opens

    def late(self, now: float, *, alive: bool) -> None:
        """A job that had been given up ended: a tier that answers may have its trial now."""
        if alive:
            self._progress_at = [now, now]
            self._retry_at = min(self._retry_at, now)

    def stalled(self, now: float) -> bool:
        """Whether it opens now since nothing has come back for too long. Ask once a step."""
        for moves in (False, True):
            if self._running[moves] and now >= self._progress_at[moves] + self._patience.stall_s:
                self.fault = Fault.STALLED
                return self._failed(now, moves=moves, at_once=True)
        return False

    def _failed(self, now: float, *, moves: bool, at_once: bool = False) -> bool:
        self._failures += 1
        self._moves_fail |= moves
        trial = self.state is State.HALF_OPEN
        if not (trial or at_once or self._failures >= self._patience.failures_max):
            return False
        if trial:
            self._backoff_s = min(2 * self._backoff_s, self._patience.backoff_max_s)
        self.state = State.OPEN
        self.opened += 1
        self._failures = 0
        self._running = [0, 0]
        self._retry_at = now + self._backoff_s
        return True


class Speed:
    """Measured seconds per block of one tier's reads, queueing included.

    Sums over jobs, the older the less: each job counts the time since the later of its submission
    and the end before it, so that queued jobs are not counted twice. What is not measured again is
    believed less and less, so that a tier that was slow once is tried again.

    Attributes:
        queued: blocks asked for whose job has neither ended nor been given up.
    """

    _KEPT = 0.75
    _HALF_LIFE_S = 60.0

    def __init__(self) -> None:
        self.queued = 0
        self._seconds = 0.0
        self._blocks = 0.0
        self._last_end = 0.0

    @property
    def seconds_per_block(self) -> float:
        """The mean; 0 until something was measured, so that a new tier is tried."""
        return self._seconds / self._blocks if self._blocks else 0.0

    def submitted(self, blocks: int) -> None:
        """A read was submitted."""
        self.queued += blocks

    def given_up(self, blocks: int) -> None:
        """A read is waited for no more. Whether the tier still serves is for its circuit."""
        self.queued -= blocks

    def ended(self, blocks: int, brought: int, submitted_at: float, now: float) -> None:
        """A read ended; what brought nothing measures nothing."""
        self.queued -= blocks
        if brought:
            spent = now - max(submitted_at, self._last_end)
            self._seconds = self._seconds * self._KEPT + spent
            self._blocks = self._blocks * self._KEPT + brought
            self._last_end = now

    def expect(self, blocks: int, now: float) -> float:
        """Seconds until that many more blocks are here."""
        known = (self.queued + blocks) * self.seconds_per_block
        if self.queued:
            return known
        return float(known * 0.5 ** ((now - self._last_end) / self._HALF_LIFE_S))
