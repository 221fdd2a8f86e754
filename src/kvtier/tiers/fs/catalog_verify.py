"""Reads stored blocks and tells which are damaged, beside engines that write and evict them.

A block that is gone when it is read, or that is whole when it is read once more, was evicted or
rewritten meanwhile: that is no damage.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvtier.envelope import HEADER_BYTES, Envelope, open_envelope, verify
from kvtier.errors import EnvelopeError, MissingBlockError
from kvtier.tiers.catalog_threads import look_at_all
from kvtier.tiers.fs.page_buffer import PageBuffer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvtier.tiers.fs.catalog import LayoutBlocks, NamespaceEntry
    from kvtier.tiers.fs.catalog_findings import BlockEntry

_ATTEMPTS = 3
"""Reads of a block before it counts as damaged."""

Stored = tuple["NamespaceEntry", "LayoutBlocks", "BlockEntry"]
"""One block and where it is."""


@dataclass(frozen=True, slots=True)
class Damage:
    """A block that is not what its key says, or cannot be read.

    Attributes:
        namespace: where.
        layout: `files` or `segments`.
        entry: the block.
        reason: what is wrong.
        readable: False if the medium failed; such a block is not removed.
        removed: whether it is gone now.
    """

    namespace: NamespaceEntry
    layout: str
    entry: BlockEntry
    reason: str
    readable: bool
    removed: bool


@dataclass(slots=True)
class Verification:
    """What a verification found.

    Attributes:
        blocks: read and found whole.
        nbytes: of them.
        vanished: gone before they could be read.
        damages: what is not whole.
    """

    blocks: int = 0
    nbytes: int = 0
    vanished: int = 0
    damages: list[Damage] = field(default_factory=list)


def read_verified(
    namespace: str, layout: LayoutBlocks, entry: BlockEntry, buffer: PageBuffer
) -> memoryview:
    """Header and row of one block, known to be whole; they lie in `buffer`.

    Raises:
        MissingBlockError: gone meanwhile.
        EnvelopeError: damaged, every time that it was read.
        OSError: the medium failed.
    """
    for attempt in range(_ATTEMPTS):
        try:
            data = layout.read(entry, buffer)
            verify(data[:HEADER_BYTES], namespace, entry.key, data[HEADER_BYTES:])
        except EnvelopeError:
            if attempt == _ATTEMPTS - 1:
                raise
        else:
            return data
    raise AssertionError("the last attempt returns or raises")


def envelope_of(layout: LayoutBlocks, entry: BlockEntry, buffer: PageBuffer) -> Envelope:
    """What a block's header says; the row is not read. Raises what `read_verified` does."""
    return open_envelope(layout.read(entry, buffer, HEADER_BYTES))


def verify_blocks(
    stored: Iterable[Stored],
    repair: bool,
    num_threads: int,
    progress: Callable[[int], None],
) -> Verification:
    """Read blocks on several threads and verify each.

    Args:
        stored: the blocks.
        repair: remove what is damaged.
        num_threads: at least 1.
        progress: told the bytes of each block that was looked at; called on the threads.

    Raises:
        BaseException: what interrupted it; the threads have ended then.
    """
    verifier = _Verifier(repair)

    def make_look() -> Callable[[Stored], None]:
        buffer = PageBuffer()

        def look(one: Stored) -> None:
            verifier.look_at(*one, buffer)
            progress(one[2].nbytes)

        return look

    look_at_all(stored, num_threads, make_look)
    return verifier.found


class _Verifier:
    """Judges blocks, on any thread."""

    def __init__(self, repair: bool) -> None:
        self._repair = repair
        self._lock = threading.Lock()  # guards what follows
        self.found = Verification()

    def look_at(
        self, namespace: NamespaceEntry, layout: LayoutBlocks, entry: BlockEntry, buffer: PageBuffer
    ) -> None:
        try:
            data = read_verified(namespace.digest, layout, entry, buffer)
        except MissingBlockError:
            with self._lock:
                self.found.vanished += 1
        except EnvelopeError as error:
            removed = self._repair and layout.delete([entry]).blocks == 1
            self._add(Damage(namespace, layout.layout, entry, str(error), True, removed))
        except OSError as error:
            reason = error.strerror or str(error)
            self._add(Damage(namespace, layout.layout, entry, reason, False, False))
        else:
            with self._lock:
                self.found.blocks += 1
                self.found.nbytes += data.nbytes

    def _add(self, damage: Damage) -> None:
        with self._lock:
            self.found.damages.append(damage)
