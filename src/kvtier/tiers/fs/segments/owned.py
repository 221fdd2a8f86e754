"""Writing, reading and evicting in the stores of this process.

The order that makes it safe, whenever the process is killed and whoever reads meanwhile:

    a write     reserve slots -> bytes -> [sync] -> PUT records -> the index -> [sync]
    an eviction the index -> EVICT records -> [sync] -> the slots are free

So a slot that may be written has no block according to the log, and a block in the log is complete.
"""

from __future__ import annotations

import errno
import logging
import threading
from collections import Counter, deque
from typing import TYPE_CHECKING, NamedTuple

from kvtier.errors import MissingBlockError, TierFullError
from kvtier.tiers.fs.segments.records import EVICT, MAX_KEY_BYTES, PUT, TOUCH, Record
from kvtier.tiers.fs.segments.segment import Piece, move
from kvtier.tiers.fs.segments.slots import OwnedSegment, Place, Slots, by_store
from kvtier.tiers.fs.segments.store import Store, create_store, prepare_namespace
from kvtier.tiers.fs.segments.table import SegmentTable, Table, slot_bytes_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from kvtier.core.types import BlockKey
    from kvtier.tiers.base import Buffers
    from kvtier.tiers.fs.segments.slots import Block
    from kvtier.tiers.fs.space import Space

logger = logging.getLogger(__name__)

FIRST_SLOTS = 16
"""Slots of a store's first segment; each further one is as large as all before it together, up to
`segment_bytes`. So a store with little in it takes little, and a large one has few files."""

EVICT_SHARE = 64
"""One slot of so many is freed at a time when none is free."""

RETRY_S = 1.0
"""How long a refusal of space is believed before the next segment is asked for."""

_FULL = (errno.ENOSPC, errno.EDQUOT)


class _Item(NamedTuple):
    """One block to be written."""

    position: int
    key: BlockKey
    views: Buffers
    length: int


class OwnedStores:
    """The blocks that this process keeps. Thread safe.

    Args:
        root: an existing directory.
        namespace: hex digest under which the blocks are kept.
        description: written to `namespace.json` unless that exists.
        space: where room for segments is asked for.
        segment_bytes: size of the largest segment.
        direct: try direct I/O.
        durable: blocks survive a loss of power once `write_batch` has returned.
        clock: seconds, monotonic.
        wall_clock_ns: nanoseconds since the epoch.

    Raises:
        OSError: the directory of the namespace cannot be made.

    Attributes:
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
        self._root = root
        self._namespace = namespace
        self._description = description
        self._segment_bytes = segment_bytes
        self._direct = direct
        self._durable = durable
        self._clock = clock
        self._stores: tuple[Store, ...] = ()  # replaced, never changed
        self._growing = threading.RLock()  # guards `_stores` and the making of segments
        self._refused_until = float("-inf")
        self._writing: set[BlockKey] = set()
        self._written = threading.Condition()  # guards `_writing`
        self.directory = prepare_namespace(root, namespace, description)

    # --- blocks

    def read(
        self, keys: Sequence[BlockKey], into: Sequence[Buffers], indices: Sequence[int]
    ) -> dict[int, Exception | None]:
        """Read those of the blocks that are here.

        Returns:
            By index: None if the block was read, what went wrong otherwise; nothing for blocks
            that are not here.
        """
        pinned = self.slots.pin(keys[i] for i in indices)
        outcome: dict[int, Exception | None] = {}
        pieces = []
        try:
            for i in indices:
                block = pinned.get(keys[i])
                if block is None:
                    continue
                length = sum(view.nbytes for view in into[i])
                if block.length != length:
                    outcome[i] = MissingBlockError(
                        f"the block has {block.length} bytes, not {length}"
                    )
                    continue
                outcome[i] = None
                segment, slot = block.place
                pieces.append(
                    Piece(i, segment.file, slot, segment.table.slot_bytes, into[i], length)
                )
            failures = move(pieces, write=False)
        finally:
            self.slots.unpin(pinned.values())
        for i, error in outcome.items():
            if error is not None:
                self.delete(keys[i])
        for i, failure in failures.items():
            if isinstance(failure, MissingBlockError) and self.delete(keys[i]):
                self.give_up([pinned[keys[i]]], "lost_blocks")
        return {**outcome, **failures}

    def write(
        self, keys: Sequence[BlockKey], data: Sequence[Buffers], indices: Sequence[int]
    ) -> dict[int, Exception]:
        """Keep blocks. One that is here is only used; one that another thread is writing is waited
        for.

        Returns:
            What went wrong, by index.
        """
        failures: dict[int, Exception] = {}
        left = [_Item(i, keys[i], data[i], sum(v.nbytes for v in data[i])) for i in indices]
        for item in left:
            if not 1 <= len(item.key) <= MAX_KEY_BYTES:
                failures[item.position] = ValueError(
                    f"a key has 1 to {MAX_KEY_BYTES} bytes, this one {len(item.key)}"
                )
        left = [item for item in left if item.position not in failures]
        while left:
            mine, others = [], []
            with self._written:
                for item in left:
                    if self.slots.touch(item.key, item.length):
                        continue
                    if item.key in self._writing:
                        others.append(item)
                    else:
                        self._writing.add(item.key)
                        mine.append(item)
            try:
                self._write_mine(mine, failures)
            finally:
                with self._written:
                    self._writing.difference_update(item.key for item in mine)
                    self._written.notify_all()
            with self._written:
                for item in others:
                    while item.key in self._writing:
                        self._written.wait()
            left = others
        return failures

    def delete(self, key: BlockKey) -> bool:
        """Forget a block; False if it is not here."""
        block = self.slots.forget(key)
        if block is None:
            return False
        self.release([block])
        return True

    def give_up(self, blocks: Iterable[Block], total: str) -> None:
        """Say that blocks went without being asked to; they are counted under `total`."""
        for block in blocks:
            self.dropped.append(block.key)
            self.totals[total] += 1

    def release(self, blocks: Sequence[Block]) -> list[Block]:
        """Say in the logs that blocks are gone, then free their slots.

        Returns:
            Those that are gone. If the disk was too full to say so of all, the segments of the
            others were given up, with all blocks in them.

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
                if error.errno not in _FULL:
                    self.slots.restore(group)
                    failure = error
                    continue
                count = 0
            self.slots.free(group[:count])
            gone += group[:count]
            self.slots.restore(group[count:])
            for segment in {block.place.segment for block in group[count:]}:
                self.remove_segment(segment, "evicted_blocks")
        if failure is not None:
            raise failure
        return gone

    def _write_mine(self, items: Sequence[_Item], failures: dict[int, Exception]) -> None:
        by_size: dict[int, list[_Item]] = {}
        for item in items:
            by_size.setdefault(slot_bytes_of(item.length), []).append(item)
        for slot_bytes, group in by_size.items():
            try:
                for item in group:
                    self.delete(item.key)  # it has another length
                places = self._room(slot_bytes, len(group))
            except OSError as error:
                failures.update((item.position, error) for item in group)
                continue
            for item in group[len(places) :]:
                self.totals["full_blocks"] += 1
                failures[item.position] = TierFullError(
                    "no space for another segment, and no block that could make room"
                )
            self._write_to(list(zip(group, places, strict=False)), failures)

    def _write_to(
        self, targets: Sequence[tuple[_Item, Place]], failures: dict[int, Exception]
    ) -> None:
        """Write blocks into reserved slots, then say so in the logs, then in the index."""
        unused = {place.location: place for _, place in targets}
        try:
            pieces = [
                Piece(
                    item.position,
                    place.segment.file,
                    place.slot,
                    place.segment.table.slot_bytes,
                    item.views,
                    item.length,
                )
                for item, place in targets
            ]
            failed = move(pieces, write=True)
            if self._durable:
                for file in {piece.file for piece in pieces if piece.position not in failed}:
                    try:
                        file.sync()
                    except OSError as error:
                        failed.update((p.position, error) for p in pieces if p.file is file)
            failures.update(failed)
            good: dict[Store, list[tuple[_Item, Place]]] = {}
            for item, place in targets:
                if item.position not in failed:
                    good.setdefault(place.segment.store, []).append((item, place))
            for store, group in good.items():
                try:
                    self._publish(store, group, unused, failures)
                except OSError as error:
                    failures.update((item.position, error) for item, _ in group)
        finally:
            self.slots.abandon(unused.values())

    def _publish(
        self,
        store: Store,
        group: Sequence[tuple[_Item, Place]],
        unused: dict[int, Place],
        failures: dict[int, Exception],
    ) -> None:
        records = []
        for item, place in group:
            now = self.slots.stamp()
            number = place.segment.table.number
            records.append(Record(PUT, item.key, number, place.slot, item.length, now, now))
        former = []
        with store.log.lock:
            count = store.log.append(records)
            for (item, place), record in zip(group[:count], records, strict=False):
                del unused[place.location]
                block = self.slots.publish(item.key, place, item.length, record.created_ns)
                if block is not None:
                    former.append(block)
        for item, _ in group[count:]:
            failures[item.position] = OSError(errno.ENOSPC, "no space left for the log")
        self.release(former)
        store.log.sync()

    # --- room

    def _room(self, slot_bytes: int, count: int) -> list[Place]:
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
            while not self.space.take(wanted * slot_bytes):
                if wanted == least:
                    self._refused_until = self._clock() + RETRY_S
                    return False
                wanted = max(least, wanted // 2)
            store = None
            try:
                store = self._home()
                number, file = store.create_segment(wanted * slot_bytes)
            except OSError as error:
                self.space.give_back(wanted * slot_bytes)
                if error.errno in _FULL:
                    self.totals["full_disk"] += 1
                    self._refused_until = self._clock() + RETRY_S
                    return False
                if store is not None and not store.is_whole():
                    self.abandon(store)
                    return True  # the next attempt makes another store
                raise
            table = SegmentTable(number, slot_bytes, wanted)
            self.slots.add(OwnedSegment(table, file, store))
            return True

    def _evict(self, slot_bytes: int, count: int) -> bool:
        """Whether there is a hope of more free slots now, by giving up blocks."""
        num_slots = self.slots.counts().get(slot_bytes, (0, 0))[0]
        blocks = self.slots.forget_coldest(slot_bytes, max(count, num_slots // EVICT_SHARE))
        if blocks:
            self.give_up(self.release(blocks), "evicted_blocks")
            return True
        segment = self.slots.coldest_segment(but_of=slot_bytes)
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
        segments: list[OwnedSegment] = []
        lost = 0
        numbers = set(store.segment_numbers())
        for segment_table in list(table.segments.values()):
            if segment_table.live == 0:
                table.remove(segment_table)
                continue
            try:
                file = store.open_segment(segment_table.number)
            except OSError:
                lost += len(table.remove(segment_table))
                continue
            num_slots = max(0, file.nbytes()) // segment_table.slot_bytes
            for slot in range(num_slots, len(segment_table.keys)):
                lost += table.clear(segment_table, slot) is not None
            segment_table.resize(num_slots)
            segments.append(OwnedSegment(segment_table, file, store))
            numbers.discard(segment_table.number)
        self.totals["lost_blocks"] += lost
        count = len(table)
        double = self.slots.join(segments, table)
        for number in numbers:  # nothing lies in them
            self.space.give_back(store.remove_segment(number))
        with self._growing:
            self._stores += (store,)
        self.totals["adopted_stores"] += 1
        self.totals["adopted_blocks"] += count - len(double)
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

    def _home(self) -> Store:
        """The store that takes new segments. The caller holds `_growing`."""
        if not self._stores:
            stores = prepare_namespace(self._root, self._namespace, self._description)
            self._stores = (
                create_store(stores, self._namespace, direct=self._direct, durable=self._durable),
            )
        return self._stores[0]
