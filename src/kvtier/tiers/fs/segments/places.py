"""Where the blocks of this process lie."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

from kvtier.tiers.fs.segments.table import SLOT_BITS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from kvtier.core.types import BlockKey
    from kvtier.tiers.fs.segments.segment import SegmentFile
    from kvtier.tiers.fs.segments.store import Store
    from kvtier.tiers.fs.segments.table import SegmentTable


class OwnedSegment:
    """A segment of a store of this process.

    Attributes:
        table: what lies in its slots.
        file: of the slots.
        store: that it belongs to.
        free: one byte per slot, 1 if it is free.
        num_free: how many are.
        gone: it was given up; slots that still are pinned or reserved go nowhere.
    """

    __slots__ = ("file", "free", "gone", "num_free", "store", "table")

    def __init__(self, table: SegmentTable, file: SegmentFile, store: Store) -> None:
        self.table = table
        self.file = file
        self.store = store
        self.free = bytearray(key is None for key in table.keys)
        self.num_free = len(self.free) - table.live
        self.gone = False

    @property
    def nbytes(self) -> int:
        """Length of the file."""
        return len(self.free) * self.table.slot_bytes


class Place(NamedTuple):
    """One slot."""

    segment: OwnedSegment
    slot: int

    @property
    def location(self) -> int:
        """The number that stands for it."""
        return self.segment.table.handle << SLOT_BITS | self.slot


class Block(NamedTuple):
    """A block and where it lies, or lay; times are nanoseconds since the epoch."""

    key: BlockKey
    place: Place
    length: int
    created_ns: int
    used_ns: int


def by_store(blocks: Iterable[Block]) -> Mapping[Store, list[Block]]:
    """Blocks grouped by the store that they lie in."""
    grouped: defaultdict[Store, list[Block]] = defaultdict(list)
    for block in blocks:
        grouped[block.place.segment.store].append(block)
    return grouped
