"""Keeps the blocks below a prefix within a capacity: one process lists, and deletes the oldest.

Object stores know no access times and no totals. So a sweep lists everything once and counts bytes
by the second in which an object was written; if they are too many, it lists again and deletes what
was written before the second that follows from the counts. Memory does not grow with the number of
objects. A block that is still wanted is written again by whoever computes it next.

Between two sweeps the prefix may grow beyond the capacity by what is written meanwhile.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import obstore

from kvtier.errors import KVTierError, MissingBlockError
from kvtier.tiers.object.existence import PAGE_KEYS, key_of
from kvtier.tiers.object.lease import Lease

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from obstore import ObjectMeta

    from kvtier.core.types import BlockKey
    from kvtier.tiers.object.parallel import Parallel
    from kvtier.tiers.object.store import AnyStore, ObjectStore

logger = logging.getLogger(__name__)

LOW_SHARE = 0.9
"""A sweep that deletes goes down to this share of the capacity, so that the next need not."""

SWEEP_EVERY_S = 60.0

SECONDS_PER_PAGE = 1.0
"""Listing costs money and requests: on average no more than a page in so many seconds."""

LEASE_S = 60.0

STALE_TRY_S = 3600.0
"""Age at which an object that a start tried the store with is nobody's any more."""

_BLOCK = re.compile(r"[0-9a-f]{64}/[0-9a-f]{2}/[0-9a-f]+")
TRY_PREFIX = ".kvtier-try-"


@dataclass(slots=True)
class Swept:
    """Totals, and what the last sweep found.

    Attributes:
        used_bytes: blocks below the prefix, of all namespaces, when the last sweep ended.
        evicted_blocks: deleted so far.
        sweeps: ended so far.
        failures: sweeps that the store ended.
        pages: of listings.
        holds: 1 while this process is the one that sweeps.
    """

    used_bytes: int = 0
    evicted_blocks: int = 0
    sweeps: int = 0
    failures: int = 0
    pages: int = 0
    holds: int = 0


class Sweeper:
    """Sweeps a prefix on a thread of its own whenever it holds the lease.

    Args:
        store: client and place.
        capacity: bytes that blocks may take.
        dropped: told of keys that were deleted, with their namespace.
        parallel: runs deletes.
        clock: seconds, monotonic.

    Attributes:
        swept: may be read at any time.
    """

    def __init__(
        self,
        store: ObjectStore,
        capacity: int,
        dropped: Callable[[str, BlockKey], None],
        parallel: Parallel,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.swept = Swept()
        self._store = store
        self._capacity = capacity
        self._dropped = dropped
        self._parallel = parallel
        self._clock = clock
        self._lease = Lease(store, LEASE_S, clock)
        self._next_sweep = float("-inf")
        self._stopping = threading.Event()
        self._causes: set[str] = set()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin. Called once."""
        self._thread = threading.Thread(target=self._run, name="kvtier-object-sweep", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End after the request that runs, and let another process sweep."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()

    def step(self) -> None:
        """Hold the lease, and sweep if it is time; errors of the store are counted."""
        try:
            self.swept.holds = int(self._lease.hold())
            if self.swept.holds and self._clock() >= self._next_sweep:
                self.sweep()
        except _InterruptedError:
            pass
        except KVTierError as error:
            self.swept.failures += 1
            if type(error).__name__ not in self._causes:
                self._causes.add(type(error).__name__)
                logger.warning("Sweeping failed, further failures are counted: %s", error)

    def sweep(self) -> None:
        """Delete the oldest blocks if there are too many bytes, while the lease is held.

        Raises:
            KVTierError: the store failed.
        """
        pages_before = self.swept.pages
        started = self._clock()
        bytes_by_second: Counter[int] = Counter()
        now = time.time()
        for page in self._pages():
            for entry in page:
                written = int(entry["last_modified"].timestamp())
                if _BLOCK.fullmatch(entry["path"]):
                    bytes_by_second[written] += entry["size"]
                elif entry["path"].startswith(TRY_PREFIX) and now - written > STALE_TRY_S:
                    self._delete(entry)
        used = bytes_by_second.total()
        if used > self._capacity:
            surplus = used - int(self._capacity * LOW_SHARE)
            used -= self._evict(_cut(bytes_by_second, surplus), surplus)
        self.swept.used_bytes = used
        self.swept.sweeps += 1
        pages = self.swept.pages - pages_before
        self._next_sweep = started + max(SWEEP_EVERY_S, pages * SECONDS_PER_PAGE)

    def _evict(self, newest: int, surplus: int) -> int:
        """Delete blocks written in the second `newest` or before, up to `surplus` bytes; how many
        bytes were deleted.
        """
        freed = 0
        for page in self._pages():
            chosen: list[ObjectMeta] = []
            for entry in page:
                is_old = entry["last_modified"].timestamp() < newest + 1
                if is_old and freed < surplus and _BLOCK.fullmatch(entry["path"]):
                    freed += entry["size"]
                    chosen.append(entry)
            self._parallel.run(self._delete, chosen, stop_at_error=True)
            for entry in chosen:
                key = key_of(entry["path"])
                assert key is not None, "the pattern is that of a block"
                self._dropped(entry["path"].partition("/")[0], key)
            self.swept.evicted_blocks += len(chosen)
            if freed >= surplus:
                break
        return freed

    def _delete(self, entry: ObjectMeta) -> None:
        try:
            path = entry["path"]
            self._store.ask("evicting a block", lambda client: obstore.delete(client, path))
        except MissingBlockError:
            pass  # somebody else did

    def _pages(self) -> Iterator[Sequence[ObjectMeta]]:
        """Pages of all objects, as long as the lease is held and nobody closes."""

        def following(_: AnyStore) -> Sequence[ObjectMeta] | None:
            return next(stream, None)

        stream = self._store.ask(
            "listing blocks", lambda client: obstore.list(client, chunk_size=PAGE_KEYS)
        )
        renewed_at = self._clock()
        while not self._stopping.is_set():
            page = self._store.ask("listing blocks", following)
            if page is None:
                return
            self.swept.pages += 1
            yield page
            if self._clock() - renewed_at > LEASE_S / 3:
                renewed_at = self._clock()
                if not self._lease.hold():
                    break
        raise _InterruptedError("the sweep was ended before it was through")

    def _run(self) -> None:
        while not self._stopping.is_set():
            self.step()
            self._stopping.wait(LEASE_S / 3)
        try:
            self._lease.release()
        except KVTierError as error:
            logger.debug("The lease of the sweeper runs out by itself: %s", error)


class _InterruptedError(KVTierError):
    """Whoever sweeps next begins anew."""


def _cut(bytes_by_second: Counter[int], surplus: int) -> int:
    """The second up to which all blocks together have at least `surplus` bytes."""
    counted = 0
    for second in sorted(bytes_by_second):
        counted += bytes_by_second[second]
        if counted >= surplus:
            return second
    return max(bytes_by_second)
