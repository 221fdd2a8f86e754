"""One sweeper per root: who holds `<root>/.kvtier/sweeper.lock`.

The winner renews the file's mtime about once a second. One whose file has not moved for
`takeover_s`, by the clock of the observer, is taken for stuck (stopped, or in a call to a hung
mount) and its file is replaced; it finds that out when it wakes up, and stands down. For a moment
two may sweep then. That is safe, only wasteful: a file is deleted, and its bytes are taken off the
books, by one of them, and `accounts.reconcile` holds for inventories of any age.
"""

from __future__ import annotations

import contextlib
import os
import time
from typing import TYPE_CHECKING

from kvtier.tiers.fs.locks import names_it, try_lock

if TYPE_CHECKING:
    from collections.abc import Callable

SWEEPER_FILE = "sweeper.lock"

TAKEOVER_S = 30.0

_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
_FILE_MODE = 0o600


class Election:
    """A candidate, and perhaps the winner. One thread.

    Args:
        control: the control directory.
        takeover_s: see above.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        control: str,
        takeover_s: float = TAKEOVER_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path = os.path.join(control, SWEEPER_FILE)
        self._takeover_s = takeover_s
        self._clock = clock
        self._descriptor: int | None = None
        self._seen: tuple[int, int] = (0, 0)  # inode and mtime of the winner's file
        self._seen_at = 0.0

    @property
    def won(self) -> bool:
        """Whether this candidate is the sweeper, as far as it knows."""
        return self._descriptor is not None

    def run(self) -> bool:
        """Try to become the sweeper; whether that worked.

        Raises:
            OSError: the medium failed.
        """
        assert self._descriptor is None, "the winner does not run again"
        descriptor = os.open(self._path, _FLAGS, _FILE_MODE)
        try:
            if try_lock(descriptor):
                if names_it(self._path, descriptor):
                    self._descriptor, descriptor = descriptor, -1
                    return True
                return False
            self._watch(os.fstat(descriptor))
            return False
        finally:
            if descriptor >= 0:
                os.close(descriptor)

    def _watch(self, found: os.stat_result) -> None:
        """Replace the file of a winner that does not move."""
        sign = (found.st_ino, found.st_mtime_ns)
        if sign != self._seen:
            self._seen, self._seen_at = sign, self._clock()
        elif self._clock() - self._seen_at >= self._takeover_s:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)

    def beat(self) -> int | None:
        """Show that the sweeper lives.

        Returns:
            Now, by the clock of the file system, ns; None if somebody has taken over.

        Raises:
            OSError: the medium failed.
        """
        assert self._descriptor is not None, "only the winner beats"
        os.utime(self._descriptor)
        if not names_it(self._path, self._descriptor):
            self.stand_down()
            return None
        return os.fstat(self._descriptor).st_mtime_ns

    def stand_down(self) -> None:
        """Leave it to others."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
