"""Keys, contents and slots for tests: the bytes of a block are a function of its key, so that every
load can be checked.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Protocol

from kvtier.core.types import BlockKey, Slot
from kvtier.drivers.base import SlotViews
from kvtier.region import Geometry, Region

BLOCK_BYTES = 64 * 1024
"""Length of the blocks in these tests, without a header."""

NAMESPACE = hashlib.sha256(b"namespace of the contract").hexdigest()

UNTOUCHED = 0xA5
"""What slots hold that nothing was loaded into."""


def key_of(i: int) -> BlockKey:
    """A key as vLLM makes them: a hash and a group."""
    return BlockKey(hashlib.sha256(i.to_bytes(8, "big")).digest() + bytes(4))


def block_of(key: BlockKey, block_bytes: int = BLOCK_BYTES) -> bytes:
    """The only right content for a key."""
    return hashlib.shake_128(key).digest(block_bytes)


class Slots(Protocol):
    """Slots of a test, counted from 0."""

    def views(self, count: int, readonly: bool) -> Sequence[memoryview]:
        """Of the first `count` of them, as a job has them."""
        ...

    def content(self, slot: int) -> bytes:
        """A copy of one slot."""
        ...

    def fill(self, slot: int, content: bytes) -> None:
        """Overwrite one slot."""
        ...


class ArraySlots:
    """Slots in a bytearray, in place of the primary region."""

    def __init__(self, num_slots: int, slot_bytes: int = BLOCK_BYTES) -> None:
        self._memory = bytearray([UNTOUCHED]) * (num_slots * slot_bytes)
        self._slot_bytes = slot_bytes

    @property
    def slot_bytes(self) -> int:
        """Bytes per slot."""
        return self._slot_bytes

    def slot(self, slot: Slot) -> memoryview:
        """Writable view of one slot."""
        start = slot * self._slot_bytes
        return memoryview(self._memory)[start : start + self._slot_bytes]

    def views(self, count: int, readonly: bool) -> Sequence[memoryview]:
        """Of the first `count` of them, as a job has them."""
        return SlotViews(self, [Slot(i) for i in range(count)], readonly)

    def content(self, slot: int) -> bytes:
        """A copy of one slot."""
        return bytes(self.slot(Slot(slot)))

    def fill(self, slot: int, content: bytes) -> None:
        """Overwrite one slot."""
        self.slot(Slot(slot))[:] = content


class SlotsOfRegion:
    """A region whose slots are handed out to jobs, each once."""

    def __init__(self, num_slots: int = 1024, slot_bytes: int = BLOCK_BYTES) -> None:
        self.region = Region.create(Geometry(num_slots, slot_bytes, 1))
        self._used = 0

    def take(self, num_slots: int) -> RegionSlots:
        """The next slots, untouched."""
        first = self._used
        self._used += num_slots
        assert self._used <= self.region.geometry.num_slots, "the test needs a larger region"
        self.region.rows[first : self._used] = UNTOUCHED
        return RegionSlots(self.region, first)


class RegionSlots:
    """Slots `first` and on of a region."""

    def __init__(self, region: Region, first: int) -> None:
        self._region = region
        self._first = first

    def views(self, count: int, readonly: bool) -> Sequence[memoryview]:
        """Of the first `count` of them, as a job has them."""
        return SlotViews(self._region, [Slot(self._first + i) for i in range(count)], readonly)

    def content(self, slot: int) -> bytes:
        """A copy of one slot."""
        return bytes(self._region.slot(Slot(self._first + slot)))

    def fill(self, slot: int, content: bytes) -> None:
        """Overwrite one slot."""
        self._region.slot(Slot(self._first + slot))[:] = content
