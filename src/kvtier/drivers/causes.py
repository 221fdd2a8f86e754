"""Logs a cause of failure when it appears, not each time it strikes."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import logging
    from collections.abc import Callable, Hashable

QUIET_S = 600.0
"""A cause that has not struck for so long is news again."""


class Causes:
    """See the module. Called from any thread.

    Args:
        logger: gets a warning per cause.
        clock: seconds, monotonic.
    """

    def __init__(self, logger: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._logger = logger
        self._clock = clock
        self._lock = threading.Lock()
        self._last: dict[Hashable, float] = {}

    def warn(self, cause: Hashable, message: str, *arguments: object) -> None:
        """Log, unless this cause has struck within the last `QUIET_S`."""
        now = self._clock()
        with self._lock:
            last = self._last.get(cause)
            self._last[cause] = now
        if last is None or now - last > QUIET_S:
            self._logger.warning(message, *arguments)

    def warn_of(self, name: str, operation: str, error: BaseException) -> None:
        """Log what an operation of a tier raised; its type and errno are the cause."""
        number = error.errno if isinstance(error, OSError) else None
        self.warn(
            (operation, type(error).__name__, number),
            "Tier %s: %s failed: %s: %s (more are counted, not logged)",
            *(name, operation, type(error).__name__, error),
        )
