"""The index of the blocks in the segments that this process owns, of all its stores.

A slot is *free*, or *reserved* by a write that runs, or holds a block, or is *leaving*: its block
was forgotten, but its log does not say so yet, or a reader still has it pinned.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import numpy as np

from kvtier.tiers.fs.segments.places import Block, OwnedSegment, Place
from kvtier.tiers.fs.segments.table import NEVER_USED, SLOT_BITS, Table

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from kvtier.core.types import BlockKey
    from kvtier.tiers.fs.segments.store import Store
    from kvtier.tiers.fs.segments.table import SegmentTable


class Slots:
    """Which block lies where, in what order they were used, which slots are free. Thread safe; no
    method does I/O.

    Args:
        wall_clock_ns: nanoseconds since the epoch.
    """

    def __init__(self, wall_clock_ns: Callable[[], int]) -> None:
        self._wall_clock_ns = wall_clock_ns
        self._lock = threading.RLock()
        self._table = Table()
        self._segments: dict[int, OwnedSegment] = {}  # by handle
        self._pins: dict[int, int] = {}  # by location
        self._freed_at_unpin: set[int] = set()
        self._touched: dict[int, None] = {}  # locations, since the last `take_touched`
        self._last_ns = 0

    @property
    def keys(self) -> Collection[BlockKey]:
        """All blocks, to look keys up in without a lock."""
        return self._table.places

    def __len__(self) -> int:
        return len(self._table)

    def segments(self) -> list[OwnedSegment]:
        """All segments, oldest first."""
        with self._lock:
            return list(self._segments.values())

    def add(self, segment: OwnedSegment) -> None:
        """Take in a segment without blocks."""
        with self._lock:
            self._table.add(segment.table)
            self._segments[segment.table.handle] = segment

    def join(self, segments: Sequence[OwnedSegment], table: Table) -> list[Block]:
        """Take in the segments of a store and the blocks in them.

        Returns:
            Blocks of the store that are here already, in another: leaving, see `free`.
        """
        with self._lock:
            self._last_ns = max(self._last_ns, table.last_ns)
            double = [] if not self._table.places else table.places.keys() & self._table.places
            handles = {segment.table.handle: segment for segment in segments}
            leaving = []
            for key in double:
                found = table.find(key)
                assert found is not None, "it was looked up a moment ago"
                place = Place(handles[found[0].handle], found[1])
                leaving.append(self._block(key, place))
                table.clear(*found)
            for segment in segments:
                self._table.add(segment.table)
                self._segments[segment.table.handle] = segment
            if self._table.places:
                self._table.places.update(table.places)
            else:
                self._table.places = table.places
            return leaving

    def touch(self, key: BlockKey, length: int | None = None) -> bool:
        """Count a use of a block; False if it is not here, or has another length than `length`."""
        with self._lock:
            found = self._find(key)
            if found is None or length not in (None, found.segment.table.lengths[found.slot]):
                return False
            self._use(found)
            return True

    def pin(self, keys: Iterable[BlockKey]) -> dict[BlockKey, Block]:
        """Keep those of the blocks that are here from leaving their slots until `unpin`; a use."""
        pinned: dict[BlockKey, Block] = {}
        with self._lock:
            for key in keys:
                if key in pinned:
                    continue
                place = self._find(key)
                if place is not None and place.segment.file.enter():
                    self._pins[place.location] = self._pins.get(place.location, 0) + 1
                    self._use(place)
                    pinned[key] = self._block(key, place)
        return pinned

    def unpin(self, blocks: Iterable[Block]) -> None:
        """Undo `pin`."""
        with self._lock:
            for block in blocks:
                location = block.place.location
                self._pins[location] -= 1
                if self._pins[location] == 0:
                    del self._pins[location]
                    if location in self._freed_at_unpin:
                        self._freed_at_unpin.remove(location)
                        self._free(block.place)
                block.place.segment.file.leave()

    def reserve(self, slot_bytes: int, count: int) -> list[Place]:
        """Up to `count` free slots, as many of them adjacent as can be had. Their files stay open
        until `publish` or `abandon`.
        """
        places: list[Place] = []
        with self._lock:
            segments = [
                segment
                for segment in self._segments.values()
                if segment.num_free and segment.table.slot_bytes == slot_bytes
            ]
            segments.sort(key=lambda segment: segment.num_free < count)  # all in one, if possible
            for segment in segments:
                while segment.num_free and len(places) < count:
                    run = min(segment.num_free, count - len(places))
                    while (first := segment.free.find(b"\1" * run)) < 0:
                        run //= 2
                    segment.free[first : first + run] = bytes(run)
                    segment.num_free -= run
                    for slot in range(first, first + run):
                        assert segment.file.enter(), "a segment in use was retired"
                        places.append(Place(segment, slot))
        return places

    def publish(self, key: BlockKey, place: Place, length: int, created_ns: int) -> list[Block]:
        """The block lies complete in a slot that was reserved, and its log says so.

        Returns:
            What its log still has to say is gone, see `free`: the same block as it lay elsewhere,
            or this one, if its segment was given up meanwhile.
        """
        with self._lock:
            segment, slot = place
            if segment.gone:
                leaving = [Block(key, place, length, created_ns, created_ns)]
            else:
                former = self.forget(key)
                leaving = [] if former is None else [former]
                self._table.put(segment.table, slot, key, length, created_ns, created_ns)
            segment.file.leave()
            return leaving

    def abandon(self, places: Iterable[Place]) -> None:
        """Slots that were reserved hold nothing after all."""
        with self._lock:
            for place in places:
                self._free(place)
                place.segment.file.leave()

    def stamp(self) -> int:
        """A time that is later than all others given out."""
        with self._lock:
            self._last_ns = max(self._wall_clock_ns(), self._last_ns + 1)
            return self._last_ns

    def forget(self, key: BlockKey) -> Block | None:
        """Let a block go; its slot is leaving until `free`."""
        with self._lock:
            place = self._find(key)
            return None if place is None else self._leave(key, place)

    def forget_coldest(self, slot_bytes: int, count: int) -> list[Block]:
        """Let the `count` blocks go that were not used for longest and that nobody reads."""
        with self._lock:
            owned = [
                segment
                for segment in self._segments.values()
                if segment.table.live and segment.table.slot_bytes == slot_bytes
            ]
            if not owned:
                return []
            used = np.concatenate([np.frombuffer(s.table.used, np.uint64) for s in owned])
            wanted = count + len(self._pins)
            if wanted < len(used):
                coldest = np.argpartition(used, wanted - 1)[:wanted]
                coldest = coldest[np.argsort(used[coldest], kind="stable")]
            else:
                coldest = np.argsort(used, kind="stable")
            starts = np.cumsum([0] + [len(s.table.keys) for s in owned])
            leaving: list[Block] = []
            for flat in coldest:
                if len(leaving) == count or used[flat] == NEVER_USED:
                    break
                index = int(np.searchsorted(starts, flat, side="right")) - 1
                place = Place(owned[index], int(flat - starts[index]))
                key = place.segment.table.keys[place.slot]
                if key is not None and place.location not in self._pins:
                    leaving.append(self._leave(key, place))
            return leaving

    def restore(self, blocks: Iterable[Block]) -> None:
        """Take back blocks that were forgotten but not freed: they still lie where they lay."""
        with self._lock:
            for block in blocks:
                segment, slot = block.place
                if segment.gone:
                    continue
                if block.key in self._table.places:  # written again meanwhile
                    self.free([block])
                else:
                    self._table.put(
                        segment.table,
                        slot,
                        block.key,
                        block.length,
                        block.created_ns,
                        block.used_ns,
                    )

    def free(self, blocks: Iterable[Block]) -> None:
        """The logs say that these blocks are gone: their slots can be written once unpinned."""
        with self._lock:
            for block in blocks:
                if block.place.location in self._pins:
                    self._freed_at_unpin.add(block.place.location)
                else:
                    self._free(block.place)

    def coldest_segment(self, but_of: int = -1) -> OwnedSegment | None:
        """The segment whose blocks, on average, were not used for longest; one without blocks goes
        first, one that is being written to does not go. Segments with slots of `but_of` bytes are
        passed over.
        """
        with self._lock:
            coldest, least = None, float("inf")
            for segment in self._segments.values():
                table = segment.table
                busy = segment.num_free + table.live < len(segment.free)
                if busy or table.slot_bytes == but_of:
                    continue
                used = np.frombuffer(table.used, np.uint64)
                used = used[used != NEVER_USED]
                heat = float(used.mean()) if len(used) else 0.0
                if heat < least:
                    coldest, least = segment, heat
            return coldest

    def remove(self, segment: OwnedSegment) -> list[Block]:
        """Forget a segment and the blocks in it. Its file is retired: it closes after its readers
        and writers.
        """
        with self._lock:
            if segment.gone:
                return []
            segment.gone = True
            blocks = [
                self._block(key, Place(segment, slot))
                for slot, key in enumerate(segment.table.keys)
                if key is not None
            ]
            self._table.remove(segment.table)
            del self._segments[segment.table.handle]
            segment.file.retire()
            return blocks

    def take_touched(self) -> list[Block]:
        """Blocks that were used since the last call and are still here."""
        with self._lock:
            touched = []
            for location in self._touched:
                segment = self._segments.get(location >> SLOT_BITS)
                if segment is not None:
                    slot = location & ((1 << SLOT_BITS) - 1)
                    key = segment.table.keys[slot]
                    if key is not None:
                        touched.append(self._block(key, Place(segment, slot)))
            self._touched.clear()
            return touched

    def count_free(self, slot_bytes: int) -> int:
        """Free slots of a size."""
        return self.counts().get(slot_bytes, (0, 0))[1]

    def counts(self) -> Mapping[int, tuple[int, int]]:
        """Slots, and free ones of them, per size of a slot."""
        counts: dict[int, tuple[int, int]] = {}
        with self._lock:
            for segment in self._segments.values():
                slots, free = counts.get(segment.table.slot_bytes, (0, 0))
                counts[segment.table.slot_bytes] = (
                    slots + len(segment.free),
                    free + segment.num_free,
                )
        return counts

    def copies(self, store: Store) -> list[SegmentTable]:
        """Copies of the tables of a store, all of one moment."""
        with self._lock:
            return [s.table.copy() for s in self._segments.values() if s.store is store]

    def check(self) -> None:
        """Assert what always holds: no slot has two owners, no block two places."""
        with self._lock:
            seen = 0
            for segment in self._segments.values():
                table = segment.table
                assert segment.num_free == sum(segment.free)
                assert table.live == sum(key is not None for key in table.keys)
                for slot, key in enumerate(table.keys):
                    assert (key is None) == (table.used[slot] == NEVER_USED)
                    if key is not None:
                        seen += 1
                        assert not segment.free[slot], "a slot with a block is free"
                        place = Place(segment, slot)
                        assert self._table.places[key] == place.location, "a block has two places"
            assert seen == len(self._table.places)

    def _find(self, key: BlockKey) -> Place | None:
        location = self._table.places.get(key)
        if location is None:
            return None
        return Place(self._segments[location >> SLOT_BITS], location & ((1 << SLOT_BITS) - 1))

    def _use(self, place: Place) -> None:
        self._last_ns = max(self._wall_clock_ns(), self._last_ns + 1)
        place.segment.table.used[place.slot] = self._last_ns
        self._touched[place.location] = None

    def _leave(self, key: BlockKey, place: Place) -> Block:
        block = self._block(key, place)
        self._table.clear(place.segment.table, place.slot)
        return block

    def _free(self, place: Place) -> None:
        segment, slot = place
        if not segment.gone:
            assert not segment.free[slot], "a slot was freed twice"
            segment.free[slot] = 1
            segment.num_free += 1

    @staticmethod
    def _block(key: BlockKey, place: Place) -> Block:
        table, slot = place.segment.table, place.slot
        return Block(key, place, table.lengths[slot], table.created[slot], table.used[slot])
