"""What the author of a tier writes: four blocking methods over whole blocks.

Jobs, threads, deadlines, the envelope, retries, counters and events are the driver's business.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


@runtime_checkable
class SupportsBatch(Protocol):
    """Optional: the tier moves several blocks with fewer calls than one each."""

    def read_batch(
        self, keys: Sequence[BlockKey], into: Sequence[Buffers]
    ) -> Sequence[BaseException | None]:
        """Like `read` for each of several blocks.

        Returns:
            One entry per key, in order: None if the block was read, else what `read` would have
            raised for it. A failure of one block is no failure of another.
        """
        ...

    def write_batch(
        self, keys: Sequence[BlockKey], data: Sequence[Buffers]
    ) -> Sequence[BaseException | None]:
        """Like `write` for each of several blocks; entries as in `read_batch`."""
        ...


@runtime_checkable
class SupportsBatchBytes(Protocol):
    """Optional, beside `SupportsBatch`: the tier says how many bytes are worth a call."""

    @property
    def write_batch_bytes_min(self) -> int:
        """`write_batch` gets so many bytes if the job has them; 0 leaves it to the driver."""
        ...


@runtime_checkable
class SupportsDropped(Protocol):
    """Optional: the tier evicts, and tells what."""

    def take_dropped(self) -> Sequence[BlockKey]:
        """Keys that this tier gave up since the last call, each once."""
        ...


@runtime_checkable
class SupportsFigures(Protocol):
    """Optional: the tier knows how full it is and what went wrong in it."""

    def figures(self) -> Mapping[str, float]:
        """Levels and running totals by name, e.g. `used_bytes`; cheap, called every second."""
        ...
