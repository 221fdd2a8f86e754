"""The stores of this process: making room in them, taking over those of others, letting go.

The order that makes it safe, whenever the process is killed and whoever reads meanwhile:

    a write     reserve slots -> bytes -> [sync] -> PUT records -> the index -> [sync]
    an eviction the index -> EVICT records -> [sync] -> the slots are free

So a slot that may be written has no block according to the log, and a block in the log is complete.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections import Counter, deque
from typing import TYPE_CHECKING

from kvtier.tiers.fs.namespace_directory import NamespaceDirectory
from kvtier.tiers.fs.segments.places import OwnedSegment, by_store
from kvtier.tiers.fs.segments.records import EVICT, TOUCH, Record
from kvtier.tiers.fs.segments.slots import Slots
from kvtier.tiers.fs.segments.store import STORES_NAME, Store, create_store
from kvtier.tiers.fs.segments.table import SegmentTable, Table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from kvtier.core.types import BlockKey
    from kvtier.tiers.fs.segments.places import Block, Place
    from kvtier.tiers.fs.space import Space

logger = logging.getLogger(__name__)

FIRST_SLOTS = 16
"""Slots of a store's first segment; each further one is as large as all before it together, up to
`segment_bytes`. So a store with little in it takes little, and a large one has few files."""

EVICT_SHARE = 64
"""One slot of so many is freed at a time when none is free, ..."""

EVICT_MAX = 2048
"""... but no more than this many, so that no reader waits for long."""

RETRY_S = 1.0
"""How long a refusal of space is believed before the next segment is asked for."""

FULL = (errno.ENOSPC, errno.EDQUOT)


class OwnedStores:
    """What this process keeps. Thread safe.

    Args:
        root: an existing directory.
        namespace: hex digest under which the blocks are kept.
        description: written to `namespace.json` unless that exists.
        space: where room for segments is asked for.
        segment_bytes: size of the largest segment.
        direct: try direct I/O.
        durable: blocks survive a loss of power once their write has returned.
        clock: seconds, monotonic.
        wall_clock_ns: nanoseconds since the epoch.

    Raises:
        OSError: the directory of the namespace cannot be made.

    Attributes:
        namespace_directory: held while this is open.
        directory: that the stores of the namespace lie in.
        slots: the index.
        totals: running totals by name.
        dropped: keys given up, for `take_dropped`.
    """

    def __init__(
        self,
        root: Path,
        namespace: str,
        description: Mapping[str, object] | None,
        space: Space,
        segment_bytes: int,
        direct: bool,
        durable: bool,
        clock: Callable[[], float],
        wall_clock_ns: Callable[[], int],
    ) -> None:
        self.slots = Slots(wall_clock_ns)
        self.totals: Counter[str] = Counter()
        self.dropped: deque[BlockKey] = deque()
        self.space = space
        self._namespace = namespace
        self._segment_bytes = segment_bytes
        self._direct = direct
        self._durable = durable
        self._clock = clock
        self._stores: tuple[Store, ...] = ()  # replaced, never changed
        self._growing = threading.RLock()  # guards `_stores` and the making of segments
        self._refused_until = float("-inf")
        self.namespace_directory = NamespaceDirectory(root, namespace, description, durable)
        self.directory = os.path.join(self.namespace_directory.path, STORES_NAME)

    def give_up(self, blocks: Iterable[Block], total: str) -> None:
        """Say that blocks went without being asked to; they are counted under `total`."""
        for block in blocks:
            self.dropped.append(block.key)
            self.totals[total] += 1

    def release(self, blocks: Sequence[Block]) -> list[Block]:
        """Say in the logs that blocks are gone, then free their slots.

        Returns:
            Those that are gone. The others are back, since a log takes no more: the disk is full.

        Raises:
            OSError: a log cannot be written for another reason; its blocks are back.
        """
        gone: list[Block] = []
        failure: OSError | None = None
        for store, group in by_store(blocks).items():
            records = [
                Record(EVICT, block.key, block.place.segment.table.number, block.place.slot)
                for block in group
            ]
            try:
                with store.log.lock:
                    count = store.log.append(records)
                store.log.sync()
            except OSError as error:
                if error.errno not in FULL:
                    self.slots.restore(group)
                    failure = error
                    continue
                count = 0
            self.slots.free(group[:count])
            gone += group[:count]
            self.slots.restore(group[count:])
        if failure is not None:
            raise failure
        return gone

    def room(self, slot_bytes: int, count: int) -> list[Place]:
        """Up to `count` slots to write to: free ones, of a new segment, of evicted blocks."""
        places = self.slots.reserve(slot_bytes, count)
        try:
            while len(places) < count:
                missing = count - len(places)
                if not (self._grow(slot_bytes) or self._evict(slot_bytes, missing)):
                    break
                places += self.slots.reserve(slot_bytes, missing)
        except BaseException:
            self.slots.abandon(places)
            raise
        return places

    def _grow(self, slot_bytes: int) -> bool:
        """Whether there are more free slots now, by a new segment."""
        with self._growing:
            num_slots, num_free = self.slots.counts().get(slot_bytes, (0, 0))
            if num_free:
                return True  # another thread was here
            if self._clock() < self._refused_until:
                return False
            largest = max(FIRST_SLOTS, self._segment_bytes // slot_bytes)
            wanted = min(max(FIRST_SLOTS, num_slots), largest)
            least = FIRST_SLOTS if num_slots else 1
            while not self._create_segment(slot_bytes, wanted):
                if wanted == least:
                    self._refused_until = self._clock() + RETRY_S
                    return False
                wanted = max(least, wanted // 2)
            return True

    def _create_segment(self, slot_bytes: int, num_slots: int) -> bool:
        """Make a segment; False if there is no space for it. The caller holds `_growing`."""
        nbytes = slot_bytes * num_slots
        if not self.space.take(nbytes):
            return False
        try:
            store = self._home()
            try:
                number, file = store.create_segment(nbytes)
            except FileNotFoundError:
                if store.is_whole():
                    raise
                self.abandon(store)  # it was wiped
                store = self._home()
                number, file = store.create_segment(nbytes)
        except OSError as error:
            self.space.give_back(nbytes)
            if error.errno in FULL:
                self.totals["full_disk"] += 1
                return False
            raise
        self.slots.add(OwnedSegment(SegmentTable(number, slot_bytes, num_slots), file, store))
        return True

    def _evict(self, slot_bytes: int, count: int) -> bool:
        """Whether there is a hope of more free slots now, by giving up blocks."""
        num_slots = self.slots.counts().get(slot_bytes, (0, 0))[0]
        share = min(num_slots // EVICT_SHARE, EVICT_MAX)
        blocks = self.slots.forget_coldest(slot_bytes, max(count, share))
        if blocks:
            gone = self.release(blocks)
            self.give_up(gone, "evicted_blocks")
            # a log that takes no more does when the disk has room again
            return bool(gone) or self.shrink()
        return self.shrink(but_of=slot_bytes)

    def shrink(self, but_of: int = -1) -> bool:
        """Give up the coldest segment, not one with slots of `but_of` bytes; False without one."""
        segment = self.slots.coldest_segment(but_of)
        if segment is None:
            return False
        self.remove_segment(segment, "evicted_blocks")
        return True

    def remove_segment(self, segment: OwnedSegment, total: str) -> int:
        """Give up a segment and the blocks in it; they are counted under `total`.

        Returns:
            The bytes that were given back; 0 if the file was gone already.
        """
        blocks = self.slots.remove(segment)
        self.give_up(blocks, total)
        number = segment.table.number
        records = [Record(EVICT, block.key, number, block.place.slot) for block in blocks]
        try:
            with segment.store.log.lock:
                segment.store.log.append(records)
        except OSError as error:  # a reader keeps the old bytes, a restart misses the file
            logger.debug("Segment %s goes without a record: %s", segment.file.path, error)
        freed = segment.store.remove_segment(number)
        if freed:
            self.space.give_back(freed)
            self._refused_until = float("-inf")
        return freed

    # --- stores

    def stores(self) -> tuple[Store, ...]:
        """The stores of this process; the first takes new segments."""
        return self._stores

    def adopt(self, store: Store, table: Table) -> None:
        """Take in a store of a process that is gone.

        Raises:
            OSError: the medium failed.
        """
        store.sweep()
        numbers = set(store.segment_numbers())
        segments: list[OwnedSegment] = []
        lost = 0
        for segment_table in list(table.segments.values()):
            file = None
            if segment_table.live and segment_table.number in numbers:
                try:
                    file = store.open_segment(segment_table.number)
                except OSError as error:
                    logger.warning("A segment of %s is lost: %s", store.directory, error)
            if file is None:
                lost += len(table.remove(segment_table))
                continue
            num_slots = max(0, file.nbytes()) // segment_table.slot_bytes
            for slot in range(num_slots, len(segment_table.keys)):
                lost += table.clear(segment_table, slot) is not None
            segment_table.resize(num_slots)
            segments.append(OwnedSegment(segment_table, file, store))
            numbers.remove(segment_table.number)
        num_blocks = len(table)
        double = self.slots.join(segments, table)
        with self._growing:
            self._stores += (store,)
        self.totals["adopted_stores"] += 1
        self.totals["adopted_blocks"] += num_blocks - len(double)
        self.totals["lost_blocks"] += lost
        for number in numbers:  # nothing lies in them
            freed = store.remove_segment(number)
            self.space.give_back(freed)
        self.release(double)

    def abandon(self, store: Store) -> None:
        """A store was wiped, or its log was: its blocks are lost, and what is left of it goes."""
        with self._growing:
            if store not in self._stores:
                return
            self._stores = tuple(other for other in self._stores if other is not store)
        for segment in self.slots.segments():
            if segment.store is store:
                self.give_up(self.slots.remove(segment), "lost_blocks")
        self.totals["lost_stores"] += 1
        with store.log.lock:
            freed = store.destroy()
        if freed:
            self.space.give_back(freed)

    def evict(self, store: Store, keys: Sequence[BlockKey] | None) -> None:
        """Forget blocks of a store, or all of them, because somebody asks for it. Segments that
        are empty then are given up.

        Raises:
            OSError: the medium failed.
        """
        mine = [segment for segment in self.slots.segments() if segment.store is store]
        if keys is None:
            for segment in mine:
                self.remove_segment(segment, "requested_blocks")
            return
        blocks = [block for block in map(self.slots.forget, keys) if block is not None]
        self.give_up(self.release(blocks), "requested_blocks")
        for segment in mine:
            if segment.num_free == len(segment.free):
                self.remove_segment(segment, "requested_blocks")

    def drop_empty(self, store: Store) -> None:
        """Remove a store without segments, unless it is the one that takes new ones."""
        with self._growing:
            if store is self._stores[0] or any(
                segment.store is store for segment in self.slots.segments()
            ):
                return
            self._stores = tuple(other for other in self._stores if other is not store)
        store.destroy()

    def flush_uses(self) -> None:
        """Write to the logs which blocks were used since the last time.

        Raises:
            OSError: the disk is full, say; the uses are lost.
        """
        for store, group in by_store(self.slots.take_touched()).items():
            records = [
                Record(
                    TOUCH,
                    block.key,
                    block.place.segment.table.number,
                    block.place.slot,
                    used_ns=block.used_ns,
                )
                for block in group
            ]
            with store.log.lock:
                store.log.append(records)

    def close(self) -> None:
        """Let go of all stores; one without a block is removed."""
        segments = self.slots.segments()
        for store in self.stores():
            mine = [segment for segment in segments if segment.store is store]
            empty = not any(segment.table.live for segment in mine)
            for segment in mine:
                segment.file.retire()
            if empty:
                self.space.give_back(store.destroy())
            else:
                store.close()
        self.namespace_directory.close()

    def _home(self) -> Store:
        """The store that takes new segments. The caller holds `_growing`."""
        if not self._stores:
            self.namespace_directory.make()  # it may have been wiped
            store = create_store(
                self.directory, self._namespace, direct=self._direct, durable=self._durable
            )
            self._stores = (store,)
        return self._stores[0]
