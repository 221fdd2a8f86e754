"""One root of several: opened on a thread of its own, left alone for a while when it fails.

    opening ---> open <-----------------------------+
       ^           | fails                          | works
       |           v          time is up            |
       |        left alone ---------------> one call tries, the others pass by
       |           ^                                | fails: twice as long
       +-- fails --+ (could not be opened)  <-------+

Reads and writes are left alone separately: a root that is full, or mounted read-only, still reads.
"""

from __future__ import annotations

import errno
import logging
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtier.errors import TierDeniedError, TierFullError, TierUnreachableError

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtier.tiers.base import Tier

logger = logging.getLogger(__name__)

FIRST_BACKOFF_S = 1.0
LAST_BACKOFF_S = 60.0

_BROKEN = frozenset(
    (
        *(errno.EIO, errno.ENODEV, errno.ENXIO, errno.ESTALE, errno.EUCLEAN),
        *(errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM),
        *(errno.ENOTCONN, errno.ESHUTDOWN, errno.ETIMEDOUT, errno.ECONNRESET, errno.ECONNREFUSED),
        *(errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETUNREACH),
    )
)
_UNWRITABLE = frozenset((errno.EROFS, errno.ENOSPC, errno.EDQUOT))


def is_broken(error: BaseException) -> bool:
    """Whether an error is of the root, not of one block or of this process."""
    if isinstance(error, OSError):
        return error.errno in _BROKEN
    return isinstance(error, TierUnreachableError | TierDeniedError)


def is_unwritable(error: BaseException) -> bool:
    """Whether an error means that the root takes no writes now."""
    if isinstance(error, OSError):
        return error.errno in _UNWRITABLE
    return isinstance(error, TierFullError)


@dataclass(frozen=True, slots=True)
class Root:
    """A place that blocks can be kept in.

    Attributes:
        identity: the same for the same place on every host and after every restart; decides which
            keys it gets.
        open: opens its tier; may fail, or hang.
    """

    identity: str
    open: Callable[[], Tier]


class Backoff:
    """How long something is left alone. Not thread safe."""

    def __init__(self) -> None:
        self.failed = 0  # in a row
        self._retry_at = 0.0
        self._trying = False

    def admits(self, now: float) -> bool:
        """Whether it may be used. After a failure one caller is let through to try it, and must
        say how that ended: `work`, `fail` or `pass_by`.
        """
        if not self.failed:
            return True
        if self._trying or now < self._retry_at:
            return False
        self._trying = True
        return True

    def work(self) -> bool:
        """It worked; True if it had failed before."""
        recovered = self.failed > 0
        self.failed = 0
        self._trying = False
        return recovered

    def fail(self, now: float, doubling: bool) -> bool:
        """It failed; True if it had worked before. Whoever began before the first failure and
        reports late does not make the wait longer.
        """
        first = self.failed == 0
        if not first and not self._trying:
            return False
        self.failed = self.failed + 1 if doubling else 1
        self._retry_at = now + min(LAST_BACKOFF_S, FIRST_BACKOFF_S * 2.0 ** (self.failed - 1))
        self._trying = False
        return first

    def pass_by(self) -> None:
        """Whoever was let through did not need it."""
        self._trying = False


class Place:
    """A root and its state. Thread safe.

    Args:
        root: what to open.
        clock: seconds, monotonic.
        opened: called whenever opening ended, either way.
    """

    def __init__(self, root: Root, clock: Callable[[], float], opened: Callable[[], None]) -> None:
        self.identity = root.identity
        self.tier: Tier | None = None
        self.error: BaseException | None = None  # the last that was the root's
        self.failed_at = 0.0
        self.failures = 0
        self._open = root.open
        self._clock = clock
        self._opened = opened
        self._lock = threading.Lock()
        self._closed = False
        self._opening = False
        self._to_open = Backoff()
        self._reads = Backoff()
        self._writes = Backoff()

    def start_opening(self) -> None:
        """Open the tier on a thread, unless it is open, being opened, or failed just now."""
        with self._lock:
            if self._closed or self._opening or self.tier is not None:
                return
            if not self._to_open.admits(self._clock()):
                return
            self._opening = True
        # a daemon: one that hangs must not keep the process alive
        threading.Thread(target=self._run_open, name="kvtier-fs-open", daemon=True).start()

    @property
    def is_opening(self) -> bool:
        """Whether a thread is opening it."""
        return self._opening

    @property
    def is_failing(self) -> bool:
        """Whether it is left alone, by writes at least."""
        return self.tier is None or self._reads.failed > 0 or self._writes.failed > 0

    def admits(self, writing: bool) -> bool:
        """Whether it may be used; see `Backoff.admits` for what follows from True."""
        if self.tier is None:
            self.start_opening()
            return False
        with self._lock:
            return (self._writes if writing else self._reads).admits(self._clock())

    def work(self, writing: bool) -> None:
        """A call did what it should."""
        with self._lock:
            recovered = (self._writes if writing else self._reads).work()
        if recovered:
            logger.info("%s is %s again", self.identity, "written" if writing else "read")

    def fail(self, error: BaseException, writing: bool) -> None:
        """A call failed with an error that `is_broken`, or `is_unwritable` of a write."""
        broken = is_broken(error)
        with self._lock:
            now = self._clock()
            first = (self._writes if writing else self._reads).fail(now, doubling=broken)
            if broken:
                other = self._reads if writing else self._writes
                if not other.failed:
                    other.fail(now, doubling=True)
            self._count(error)
        if first:
            logger.warning(
                "%s is left alone by %s for a while: %s: %s",
                self.identity,
                "reads and writes" if broken else "writes",
                type(error).__name__,
                error,
            )

    def pass_by(self, writing: bool) -> None:
        """A call did not need it after all."""
        with self._lock:
            (self._writes if writing else self._reads).pass_by()

    def close(self) -> None:
        """Close the tier; one that is still being opened is closed once it is open."""
        with self._lock:
            self._closed = True
            tier = self.tier
        if tier is not None:
            tier.close()

    def _count(self, error: BaseException) -> None:
        self.error = error
        self.failed_at = self._clock()
        self.failures += 1

    def _run_open(self) -> None:
        try:
            tier = self._open()
        except BaseException as error:  # noqa: BLE001 - whatever it is, the root is left alone
            with self._lock:
                first = self._to_open.fail(self._clock(), doubling=True)
                self._count(error)
                self._opening = False
            if first:
                logger.warning(
                    "%s cannot be opened: %s: %s", self.identity, type(error).__name__, error
                )
        else:
            with self._lock:
                self._opening = False
                self._to_open.work()
                closed = self._closed
                if not closed:
                    self.tier = tier
            if closed:
                tier.close()
        self._opened()
