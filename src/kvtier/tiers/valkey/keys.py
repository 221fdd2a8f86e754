"""How a block is kept: under several keys of the server, each with a part of its bytes.

    <prefix><16 hex of the namespace>:{<key hex>}h      the header
    <prefix><16 hex of the namespace>:{<key hex>}0      the row, or its first part
    <prefix><16 hex of the namespace>:{<key hex>}1      ... what is beyond the server's limit
    <prefix><16 hex of the namespace>:namespace         what the namespace stands for, JSON

1. Header and row lie apart in memory, and a client sends and fills one buffer per key: so nothing
   is copied to bring them together.
2. They are written and read by one command, which a server carries out as a whole. What stands in
   braces decides the node of a cluster: the parts of a block are on one node, and the blocks of a
   namespace on all of them.
3. Sixteen digits tell namespaces apart in listings; the envelope of a block holds all of them.
4. What has another form is nobody's here, also below the prefix.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvtier.core.types import BlockKey
from kvtier.envelope import HEADER_BYTES, MAX_KEY_BYTES
from kvtier.errors import TierError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtier.tiers.base import Buffers

BULK_BYTES_MAX = 512 << 20
"""The longest value that a server takes unless it is told otherwise (`proto-max-bulk-len`)."""

BLOCK_BYTES_MAX = 900 << 20
"""A command may not be longer than `client-query-buffer-limit`, 1 GiB."""

SHORT_DIGITS = 16
"""Digits of a namespace's digest that its keys have."""

TRIAL_NAMESPACE = "start"
"""In place of a namespace while a start tries what it may do; such keys live for moments."""

HEADER_PART = -1
"""In place of the number of a part of the row."""


_DESCRIPTION = b"namespace"

_NAME = (
    rb"(?P<namespace>[0-9a-f]{%d}):(?:%s|\{(?P<key>(?:[0-9a-f]{2}){1,%d})\}(?P<part>h|0|[1-9]\d{0,3}))"
    % (SHORT_DIGITS, _DESCRIPTION, MAX_KEY_BYTES)
)


class Names:
    """Keys of the server for the blocks of one namespace.

    Args:
        prefix: what every key begins with.
        namespace: hex digest.
    """

    def __init__(self, prefix: str, namespace: str) -> None:
        self._head = f"{prefix}{namespace[:SHORT_DIGITS]}:{{".encode()

    @property
    def description(self) -> bytes:
        """The name of the namespace's description."""
        return self._head.removesuffix(b"{") + _DESCRIPTION

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


class Name(NamedTuple):
    """What a name of the server says.

    Attributes:
        namespace: the first `SHORT_DIGITS` digits of its digest.
        key: of the block; None for the description of the namespace.
        part: of the row, from 0; or `HEADER_PART`.
    """

    namespace: str
    key: BlockKey | None
    part: int


class NameForms:
    """Tells names that the tier makes from those that it does not.

    Args:
        prefix: what every key begins with.
    """

    def __init__(self, prefix: str) -> None:
        self._form = re.compile(re.escape(prefix.encode()) + _NAME)

    def parse(self, name: bytes) -> Name | None:
        """What a name says; None if it has none of the forms above."""
        match = self._form.fullmatch(name)
        if match is None:
            return None
        namespace = match["namespace"].decode()
        if match["key"] is None:
            return Name(namespace, None, HEADER_PART)
        part = match["part"]
        key = BlockKey(bytes.fromhex(match["key"].decode()))
        return Name(namespace, key, HEADER_PART if part == b"h" else int(part))


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
