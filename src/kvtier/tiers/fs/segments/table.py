"""What the records of a log add up to: which block lies in which slot.

Kept small, since there may be 10^7 blocks: per block one entry of a dictionary, its key, one
integer, and 32 bytes in arrays. A *location* is `handle << 32 | slot`; the handle of a segment is
unique in this process, so that the tables of several stores can be joined.
"""

from __future__ import annotations

import itertools
from array import array
from typing import TYPE_CHECKING

from kvtier.tiers.fs.segments.records import EVICT, PUT, TOUCH, Record

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvtier.core.types import BlockKey

PAGE_BYTES = 4096
"""Slots begin and end at pages: direct I/O needs it."""

SLOT_BITS = 32
_SLOT_MASK = (1 << SLOT_BITS) - 1

NEVER_USED = (1 << 64) - 1
"""Last use of a slot without a block: it is never the coldest."""

_FIRST_SLOTS = 64

_handles = itertools.count(1)


def slot_bytes_of(length: int) -> int:
    """Size of the slots that blocks of `length` bytes lie in."""
    return max(1, -(-length // PAGE_BYTES)) * PAGE_BYTES


class SegmentTable:
    """The slots of one segment, by position.

    Attributes:
        number: of its file.
        slot_bytes: size of each slot.
        handle: unique in this process.
        keys: of the block in each slot; None without one.
        lengths: of the blocks, bytes.
        created: nanoseconds since the epoch.
        used: likewise; `NEVER_USED` without a block.
        live: number of blocks.
    """

    __slots__ = ("created", "handle", "keys", "lengths", "live", "number", "slot_bytes", "used")

    def __init__(self, number: int, slot_bytes: int, num_slots: int = 0) -> None:
        self.number = number
        self.slot_bytes = slot_bytes
        self.handle = next(_handles)
        self.keys: list[BlockKey | None] = []
        self.lengths = array("Q")
        self.created = array("Q")
        self.used = array("Q")
        self.live = 0
        self.resize(num_slots)

    def resize(self, num_slots: int) -> None:
        """Add empty slots, or cut off the last ones, which must be empty."""
        assert not any(self.keys[num_slots:]), "a block would be cut off"
        del self.keys[num_slots:], self.lengths[num_slots:]
        del self.created[num_slots:], self.used[num_slots:]
        more = num_slots - len(self.keys)
        self.keys += [None] * more
        self.lengths.extend([0] * more)
        self.created.extend([0] * more)
        self.used.extend([NEVER_USED] * more)

    def copy(self) -> SegmentTable:
        """The same slots as they are now."""
        twin = SegmentTable(self.number, self.slot_bytes)
        twin.handle = self.handle
        twin.keys = self.keys[:]
        twin.lengths, twin.created, twin.used = self.lengths[:], self.created[:], self.used[:]
        twin.live = self.live
        return twin

    def records(self) -> Iterator[Record]:
        """One `PUT` per block, in order of the slots."""
        for slot, key in enumerate(self.keys):
            if key is not None:
                yield Record(
                    PUT,
                    key,
                    self.number,
                    slot,
                    self.lengths[slot],
                    self.created[slot],
                    self.used[slot],
                )


class Table:
    """Blocks by key. The caller guards it against two writers; looking a key up needs no guard.

    Attributes:
        places: location per key.
        segments: tables of the segments, by handle.
        next_segment: a number that no segment named so far has had.
        last_ns: the latest time in any record.
    """

    __slots__ = ("_numbers", "last_ns", "next_segment", "places", "segments")

    def __init__(self, next_segment: int = 0) -> None:
        self.places: dict[BlockKey, int] = {}
        self.segments: dict[int, SegmentTable] = {}
        self._numbers: dict[int, SegmentTable] = {}
        self.next_segment = next_segment
        self.last_ns = 0

    def __len__(self) -> int:
        return len(self.places)

    def find(self, key: BlockKey) -> tuple[SegmentTable, int] | None:
        """Segment and slot of a block."""
        location = self.places.get(key)
        if location is None:
            return None
        return self.segments[location >> SLOT_BITS], location & _SLOT_MASK

    def put(
        self,
        segment: SegmentTable,
        slot: int,
        key: BlockKey,
        length: int,
        created_ns: int,
        used_ns: int,
    ) -> None:
        """A block lies in a slot: what lay there is gone, and so is the key's old place."""
        if segment.keys[slot] is not None:
            self.clear(segment, slot)
        former = self.find(key)
        if former is not None:
            self.clear(*former)
        self.places[key] = segment.handle << SLOT_BITS | slot
        segment.keys[slot] = key
        segment.lengths[slot] = length
        segment.created[slot] = created_ns
        segment.used[slot] = used_ns
        segment.live += 1

    def clear(self, segment: SegmentTable, slot: int) -> BlockKey | None:
        """Say that no block lies in a slot; the key of the one that did."""
        key = segment.keys[slot]
        if key is not None:
            del self.places[key]
            segment.keys[slot] = None
            segment.used[slot] = NEVER_USED
            segment.live -= 1
        return key

    def apply(self, record: Record) -> BlockKey | None:
        """Follow one record of a log; the key of a block that is gone by it."""
        kind, key, number, slot, length, created_ns, used_ns = record
        self.last_ns = max(self.last_ns, used_ns)
        self.next_segment = max(self.next_segment, number + 1)
        segment = self._numbers.get(number)
        if kind == PUT:
            if segment is None:
                segment = self.add(SegmentTable(number, slot_bytes_of(length)))
            elif segment.slot_bytes != slot_bytes_of(length):
                return None  # no release of ours writes that
            if slot >= len(segment.keys):
                segment.resize(max(slot + 1, 2 * len(segment.keys), _FIRST_SLOTS))
            gone = segment.keys[slot]
            self.put(segment, slot, key, length, created_ns, used_ns)
            return None if gone == key else gone
        if segment is None or slot >= len(segment.keys) or segment.keys[slot] != key:
            return None  # it has left this slot since
        if kind == EVICT:
            return self.clear(segment, slot)
        if kind == TOUCH:
            segment.used[slot] = max(used_ns, segment.used[slot])
        return None

    def add(self, segment: SegmentTable) -> SegmentTable:
        """Take in a segment, which may hold blocks whose places the caller adds."""
        self.segments[segment.handle] = segment
        self._numbers[segment.number] = segment
        return segment

    def remove(self, segment: SegmentTable) -> list[BlockKey]:
        """Forget a segment; the keys of the blocks in it."""
        keys = [key for key in segment.keys if key is not None]
        for key in keys:
            del self.places[key]
        segment.keys = [None] * len(segment.keys)
        segment.used = array("Q", [NEVER_USED]) * len(segment.keys)
        segment.live = 0
        del self.segments[segment.handle]
        if self._numbers.get(segment.number) is segment:
            del self._numbers[segment.number]
        return keys
