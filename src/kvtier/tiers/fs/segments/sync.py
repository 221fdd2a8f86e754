"""One sync for many threads that wait for the same file."""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_FAILURES_KEPT = 16  # rounds; a waiter looks as soon as its own has ended


class GroupSync:
    """Calls `sync` so that it begins after each caller came, but once for all that came meanwhile.

    Args:
        sync: blocks until what was written before it is safe; may raise.
    """

    def __init__(self, sync: Callable[[], None]) -> None:
        self._call = sync
        self._condition = threading.Condition()
        self._asked = 0
        self._ended = 0
        self._running = False
        # the kernel tells of a lost page once: who shared that sync must not try again and be glad
        self._failures: deque[tuple[int, int, OSError]] = deque(maxlen=_FAILURES_KEPT)

    def sync(self) -> None:
        """Return when a sync that began after this call has ended.

        Raises:
            OSError: that sync failed, in this thread or another; what was written may be lost.
        """
        with self._condition:
            self._asked += 1
            ticket = self._asked
            while self._running and self._ended < ticket:
                self._condition.wait()
            if self._ended >= ticket:
                for first, last, failure in self._failures:
                    if first < ticket <= last:
                        raise OSError(failure.errno, failure.strerror)
                return
            self._running = True
            before, covered = self._ended, self._asked
        try:
            self._call()
        except OSError as error:
            with self._condition:
                self._failures.append((before, covered, error))
            raise
        finally:
            with self._condition:
                self._running = False
                self._ended = covered
                self._condition.notify_all()
