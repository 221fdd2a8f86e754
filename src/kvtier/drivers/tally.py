"""Counts what the threads of a driver did, each operation apart, for all of them together."""

from __future__ import annotations

import threading
from enum import Enum
from typing import TYPE_CHECKING

from kvtier.drivers.base import TierCounters

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvtier.drivers.faults import Cause
    from kvtier.drivers.moving import Moved


class Operation(Enum):
    """What a job does."""

    LOOKUP = "lookup"
    LOAD = "load"
    STORE = "store"


class Tally:
    """See the module. Thread safe; its lock is held for counting alone."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counters = TierCounters()

    def counters(self) -> TierCounters:
        """A copy of the totals. Seconds are summed over the threads."""
        with self._lock:
            return self._counters.copy()

    def looked_up(self, blocks: int, hits: int) -> None:
        """A tier was asked for so many blocks, and had so many."""
        with self._lock:
            self._counters.lookup_blocks += blocks
            self._counters.lookup_hits += hits

    def moved(self, operation: Operation, moved: Moved, block_bytes: int, seconds: float) -> None:
        """Blocks of `block_bytes` were loaded or stored; those that failed are counted apart."""
        blocks = len(moved.ok)
        with self._lock:
            counters = self._counters
            counters.corrupt_blocks += len(moved.corrupt)
            if operation is Operation.LOAD and blocks:
                counters.read_blocks += blocks
                counters.read_bytes += blocks * block_bytes
                counters.read_seconds += seconds
            elif blocks:
                counters.write_blocks += blocks
                counters.write_bytes += blocks * block_bytes
                counters.write_seconds += seconds

    def failed(self, operation: Operation, cause: Cause, blocks: int) -> None:
        """Blocks failed. Of a lookup, a whole batch counts as one failure."""
        with self._lock:
            if operation is Operation.LOOKUP:
                blocks = 1
                self._counters.lookup_failures += 1
            elif operation is Operation.LOAD:
                self._counters.read_failures += blocks
            else:
                self._counters.write_failures += blocks
            self._counters.count_faults(cause, blocks)

    def told(self, figures: Mapping[str, float]) -> bool:
        """A tier told its figures; True if one of them changed."""
        with self._lock:
            known = self._counters.figures
            changed = any(known.get(name) != figures[name] for name in figures)
            known.update(figures)
        return changed
