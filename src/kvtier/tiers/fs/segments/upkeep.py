"""What is done about once a second, on a thread that nobody waits for."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
from typing import TYPE_CHECKING

from kvtier.tiers.fs.segments.follower import INLINE_BYTES
from kvtier.tiers.fs.segments.log import LOG_NAME
from kvtier.tiers.fs.segments.owned import FULL
from kvtier.tiers.fs.segments.records import (
    EVICT,
    EVICT_ALL,
    TOUCH,
    DamagedHeaderError,
    OtherVersionError,
)
from kvtier.tiers.fs.segments.store import (
    adopt_store,
    lock_store,
    remove_store_files,
    store_directories,
    sweep_unborn,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtier.tiers.fs.segments.follower import Followers
    from kvtier.tiers.fs.segments.owned import OwnedStores

logger = logging.getLogger(__name__)

LOG_SLACK_RECORDS = 4096
"""A log is rewritten when it has twice as many records as blocks, and these besides."""


class Upkeep:
    """Keeps the stores of a process in order, and takes over those of processes that are gone.

    One thread at a time may call it.

    Args:
        owned: the stores of this process.
        followers: the stores of others.
        direct: try direct I/O in stores that are taken over.
        durable: what is changed in them must survive a loss of power.
        wall_clock_ns: nanoseconds since the epoch.
    """

    def __init__(
        self,
        owned: OwnedStores,
        followers: Followers,
        direct: bool,
        durable: bool,
        wall_clock_ns: Callable[[], int],
    ) -> None:
        self._owned = owned
        self._followers = followers
        self._direct = direct
        self._durable = durable
        self._wall_clock_ns = wall_clock_ns
        self._locks: dict[str, int] = {}  # locked stores whose logs are still to be read
        self._caught_up = threading.Event()
        self._unreadable: set[str] = set()
        self._causes: set[tuple[str, str]] = set()

    def begin(self) -> None:
        """Take over orphan stores and follow the others, as far as their logs are short; for the
        rest, `catch_up` is needed.
        """
        self._guard(self._lock_orphans)
        left = INLINE_BYTES
        for directory in list(self._locks):
            try:
                left -= os.stat(os.path.join(directory, LOG_NAME)).st_size
            except OSError:
                left -= 0  # taking it over shows what is wrong
            if left >= 0:
                self._guard(self._adopt, directory)
        self._guard(self._followers.look)
        if not self._locks:
            self._caught_up.set()

    def catch_up(self) -> None:
        """Read the logs that are left, however long they are."""
        for directory in list(self._locks):
            self._guard(self._adopt, directory)
        self._guard(self._followers.tend)
        self._caught_up.set()

    def is_complete(self) -> bool:
        """Whether everything that was there at the start is known."""
        return self._caught_up.is_set()

    def round(self) -> None:
        """Do everything once. What fails is counted, and logged the first time."""
        for step in (
            self._check,
            self._owned.flush_uses,
            self._obey,
            self._owned.remove_left,
            self._pay,
            self._compact,
            self._lock_orphans,
            self.catch_up,
            self._tidy,
        ):
            self._guard(step)

    def end(self) -> None:
        """Write down what would be lost, and let go."""
        self._guard(self._owned.flush_uses)
        for lock in self._locks.values():
            os.close(lock)
        self._locks.clear()

    def _check(self) -> None:
        """Notice stores and segments that were removed or cut off by hand, or that lie on a file
        system that was unmounted since.
        """
        for store in self._owned.stores():
            if not store.is_whole():
                logger.warning(
                    "%s was removed, changed by hand or unmounted: its blocks are lost",
                    store.directory,
                )
                self._owned.abandon(store)
        for segment in self._owned.slots.segments():
            if segment.file.enter():
                try:
                    whole = segment.file.nbytes() == segment.nbytes
                finally:
                    segment.file.leave()
                if not whole:
                    logger.warning("%s was removed by hand: its blocks are lost", segment.file.path)
                    self._owned.totals["lost_segments"] += 1
                    self._owned.remove_segment(segment, "lost_blocks")

    def _obey(self) -> None:
        """Do what others ask for in `requests/`."""
        for store in self._owned.stores():
            records = store.take_requests(self._wall_clock_ns() / 1e9)
            for record in records:
                if record.kind == TOUCH:
                    self._owned.slots.touch(record.key)
            if any(record.kind == EVICT_ALL for record in records):
                self._owned.evict(store, None)
            keys = [record.key for record in records if record.kind == EVICT]
            if keys:
                self._owned.evict(store, keys)

    def _pay(self) -> None:
        """Give up the coldest segments while others wait for the space."""
        owed = self._owned.space.owed()
        while owed > 0:
            segment = self._owned.slots.coldest_segment()
            if segment is None:
                break
            owed -= max(1, self._owned.remove_segment(segment, "evicted_blocks"))

    def _compact(self) -> None:
        """Rewrite logs that have grown, or find no room to."""
        segments = self._owned.slots.segments()
        for store in self._owned.stores():
            live = sum(segment.table.live for segment in segments if segment.store is store)
            grown = store.log.num_records > 2 * live + LOG_SLACK_RECORDS
            if grown or (store.log.cramped and store.log.num_records > live):
                copy = functools.partial(self._owned.slots.copies, store)
                try:
                    store.log.rewrite(copy, store.next_segment)
                except OSError as error:
                    if error.errno not in FULL or not self._owned.shrink():
                        raise
                    store.log.rewrite(copy, store.next_segment)
                self._owned.totals["compactions"] += 1

    def _lock_orphans(self) -> None:
        """Lock the stores whose owners are gone."""
        mine = {store.name for store in self._owned.stores()}
        for directory in store_directories(self._owned.directory):
            known = directory in self._locks or directory in self._unreadable
            if not known and os.path.basename(directory) not in mine:
                lock = lock_store(directory)
                if lock is not None:
                    self._locks[directory] = lock

    def _adopt(self, directory: str) -> None:
        """Take over a locked store."""
        lock = self._locks.pop(directory)
        try:
            store, table = adopt_store(directory, lock, direct=self._direct, durable=self._durable)
        except OtherVersionError as error:
            logger.warning("Leaving %s alone: %s", directory, error)
            self._unreadable.add(directory)
            os.close(lock)
        except (DamagedHeaderError, FileNotFoundError) as error:
            logger.warning("Removing %s, whose log is lost: %s", directory, error)
            self._owned.totals["lost_stores"] += 1
            try:
                freed = remove_store_files(directory)
            finally:
                os.close(lock)
            self._owned.space.give_back(freed)
        except BaseException:
            os.close(lock)
            raise
        else:
            try:
                self._owned.adopt(store, table)
            except BaseException:
                if store not in self._owned.stores():
                    store.close()
                raise
            self._followers.scan(force=True)

    def _tidy(self) -> None:
        """Remove stores without blocks, and what is left of stores that were never finished; and
        hold the namespace, if somebody kept this process from it before.
        """
        namespace = self._owned.namespace_directory
        with contextlib.suppress(FileNotFoundError):  # made anew by the next block
            namespace.hold_again(os.stat(namespace.path))
        for store in self._owned.stores()[1:]:
            self._owned.drop_empty(store)
        if os.path.isdir(self._owned.directory):
            sweep_unborn(self._owned.directory, self._wall_clock_ns() / 1e9)

    def _guard(self, step: Callable[..., object], *arguments: object) -> None:
        """One step; what goes wrong in it does not keep the others from being done."""
        try:
            step(*arguments)
        except Exception as error:  # noqa: BLE001 - a mistake in one must not end them all
            self._owned.totals["upkeep_failures"] += 1
            # a medium that fails does so in every step, and that is one thing to tell
            where = str(error.errno) if isinstance(error, OSError) else step.__name__
            cause = (type(error).__name__, where)
            if cause not in self._causes:
                self._causes.add(cause)
                logger.warning(
                    "Upkeep of %s failed: %s (further failures are counted, not logged)",
                    self._owned.directory,
                    error,
                )
