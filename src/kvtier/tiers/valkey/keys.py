"""How a block is kept: under several keys of the server, each with a part of its bytes.

    <prefix><16 hex of the namespace>:{<key hex>}h      the header
    <prefix><16 hex of the namespace>:{<key hex>}0      the row, or its first part
    <prefix><16 hex of the namespace>:{<key hex>}1      ... what is beyond the server's limit

1. Header and row lie apart in memory, and a client sends and fills one buffer per key: so nothing
   is copied to bring them together.
2. They are written and read by one command, which a server carries out as a whole. What stands in
   braces decides the node of a cluster: the parts of a block are on one node, and the blocks of a
   namespace on all of them.
3. Sixteen digits tell namespaces apart in listings; the envelope of a block holds all of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvtier.core.types import BlockKey
from kvtier.envelope import HEADER_BYTES
from kvtier.errors import TierError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtier.tiers.base import Buffers

BULK_BYTES_MAX = 512 << 20
"""The longest value that a server takes unless it is told otherwise (`proto-max-bulk-len`)."""

BLOCK_BYTES_MAX = 900 << 20
"""A command may not be longer than `client-query-buffer-limit`, 1 GiB."""

_SHORT = 16


class Names:
    """Keys of the server for the blocks of one namespace.

    Args:
        prefix: what every key begins with.
        namespace: hex digest.
    """

    def __init__(self, prefix: str, namespace: str) -> None:
        self._head = f"{prefix}{namespace[:_SHORT]}:{{".encode()

    def of(self, key: BlockKey, num_parts: int = 2) -> list[bytes]:
        """The names of a block's parts, the header first."""
        stem = b"%s%s}" % (self._head, key.hex().encode())
        return [stem + b"h", *(b"%s%d" % (stem, i) for i in range(num_parts - 1))]

    def block_of(self, name: bytes) -> BlockKey | None:
        """The block that a name belongs to; None if it is no name of this namespace."""
        if not name.startswith(self._head):
            return None
        digits, brace, _ = name[len(self._head) :].partition(b"}")
        try:
            return BlockKey(bytes.fromhex(digits.decode())) if brace else None
        except ValueError:
            return None


class Parts:
    """The bytes of one block as the server keeps them: header, row, and what the row is cut into.

    Args:
        buffers: the block. Those of a driver are taken as they are; of others, a copy is made.
        part_max: the longest value that the server takes.

    Raises:
        TierError: the block is longer than a command may be.
    """

    def __init__(self, buffers: Buffers, part_max: int) -> None:
        self.nbytes = sum(view.nbytes for view in buffers)
        if self.nbytes > BLOCK_BYTES_MAX:
            raise TierError(
                f"a block of {self.nbytes} bytes is too long for one command of the server, which "
                f"takes {BLOCK_BYTES_MAX}: make blocks smaller (block_size, blocks_per_chunk)"
            )
        self._buffers = buffers
        self._copy: memoryview | None = None
        if [view.nbytes for view in buffers[:-1]] == [HEADER_BYTES] and buffers[-1].nbytes:
            header, row = buffers
        else:
            self._copy = memoryview(bytearray(self.nbytes))
            header, row = self._copy[:HEADER_BYTES], self._copy[HEADER_BYTES:]
        self.views = [header, *_cut(row.cast("B"), part_max)]

    def fill(self) -> Parts:
        """Have the block's bytes in `views`, to be written."""
        if self._copy is not None:
            _move(self._buffers, [self._copy])
        return self

    def deliver(self) -> None:
        """Have what was read into `views` in the block's buffers."""
        if self._copy is not None:
            _move([self._copy], self._buffers)

    def whole(self, lengths: Sequence[int | None]) -> bool:
        """Whether the parts that were read have the lengths of this block's."""
        return list(lengths) == [view.nbytes for view in self.views]


def _cut(row: memoryview, part_max: int) -> list[memoryview]:
    """A row in parts of at most `part_max` bytes; one part, if it is empty."""
    return [row[i : i + part_max] for i in range(0, max(row.nbytes, 1), part_max)]


def _move(sources: Buffers, targets: Buffers) -> None:
    """Copy buffers into buffers that are cut elsewhere; one side is a single one."""
    start = 0
    for view in sources if len(targets) == 1 else targets:
        length = view.nbytes
        whole = (targets if len(targets) == 1 else sources)[0][start : start + length]
        source, target = (view, whole) if len(targets) == 1 else (whole, view)
        # np.copyto, unlike the assignment of a memoryview slice, releases the GIL
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))
        start += length
