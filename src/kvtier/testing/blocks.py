"""Keys, contents and slots for tests: the bytes of a block are a function of its key, so that every
load can be checked.
"""

from __future__ import annotations

import hashlib

from kvtier.core.types import BlockKey, Slot

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

    def content(self, slot: int) -> bytes:
        """A copy of one slot."""
        return bytes(self.slot(Slot(slot)))

    def fill(self, slot: int, content: bytes) -> None:
        """Overwrite one slot."""
        self.slot(Slot(slot))[:] = content
