"""Log records of an I/O process, emitted by the scheduler's process under the same name."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from kvtier.drivers.process.wire import LOGS_MAX, TEXT_MAX, LogRecord

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_WAITING_MAX = 1_000


class Forwarding(logging.Handler):
    """Keeps records until `take`; those beyond a bound are counted instead.

    Args:
        on_record: called when there is something to take.
    """

    def __init__(self, on_record: Callable[[], None]) -> None:
        super().__init__()
        self._on_record = on_record
        self._guard = threading.Lock()
        self._waiting: list[LogRecord] = []
        self._lost = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record as text."""
        try:
            text = self.format(record)[:TEXT_MAX].encode(errors="replace").decode()
        except Exception:  # noqa: BLE001 - a wrong format string is told of on stderr
            self.handleError(record)
            return
        level = min(max(record.levelno, 0), 100)
        with self._guard:
            if len(self._waiting) >= _WAITING_MAX:
                self._lost += 1
                return
            self._waiting.append(LogRecord(record.name, level, text))
        self._on_record()

    def take(self) -> list[LogRecord]:
        """The oldest records, `LOGS_MAX` of them at most."""
        with self._guard:
            taken, self._waiting = self._waiting[:LOGS_MAX], self._waiting[LOGS_MAX:]
            if self._lost and len(taken) < LOGS_MAX:
                text = f"{self._lost} log records of the I/O process were lost"
                taken.append(LogRecord(__name__, logging.WARNING, text))
                self._lost = 0
        return taken


def emit(records: Iterable[LogRecord]) -> None:
    """Log what an I/O process logged."""
    for record in records:
        logger = logging.getLogger(record.logger)
        if logger.isEnabledFor(record.level):
            logger.log(record.level, "%s", record.text[:TEXT_MAX])
