"""What the author of a tier writes: four blocking methods over whole blocks.

Jobs, threads, deadlines, the envelope, retries, counters and events are the driver's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from kvtier.core.types import BlockKey

Buffers = Sequence[memoryview]
"""One block as the bytes that make it up, in order: a gather list for a write, a scatter list for
a read. Their total length is the same for every block of a tier."""


class Tier(Protocol):
    """A place that keeps immutable blocks by key, for one namespace.

    Methods are called from several threads at once and may block. Any exception fails that one
    block and is counted; only `MissingBlockError` is expected.
    """

    def exists(self, keys: Sequence[BlockKey]) -> Sequence[bool]:
        """Whether each key is held, in order. May be wrong in both directions; a read decides."""
        ...

    def read(self, key: BlockKey, into: Buffers) -> None:
        """Fill `into` with the block.

        Raises:
            MissingBlockError: absent, or not exactly as long as `into`.
        """
        ...

    def write(self, key: BlockKey, data: Buffers) -> None:
        """Keep a block. Atomic: readers see all of it or nothing. A second write of a key is
        harmless. `data` must not be kept after the return.
        """
        ...

    def close(self) -> None:
        """Let go of everything. Called once, when no other call is running."""
        ...


@runtime_checkable
class SupportsDelete(Protocol):
    """Optional: the driver drops a block that failed verification."""

    def delete(self, key: BlockKey) -> None:
        """Forget a block; absent is fine."""
        ...
