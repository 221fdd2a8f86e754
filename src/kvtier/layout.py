"""What a row of the primary region holds: canonical, tensor-parallel-size-1 bytes.

A row is the bytes of one block: for each layer of its cache group, in order, the canonical pages
of its `blocks_per_chunk` GPU blocks.

    row of a group:  | layer 0: page 0 .. page n-1 | layer 1: page 0 .. page n-1 | ... | padding |

A *canonical page* holds what one GPU block of one layer holds without tensor parallelism: all KV
heads, once. A worker's own page maps into it by *runs*, which vLLM derives and certifies; ranks
that hold identical bytes take turns in writing them. So the row size depends on the model, not on
the number of ranks, and what TP=2 wrote TP=1 reads.

Where vLLM certifies nothing, every rank has a part of the row to itself; such rows are not
*portable*, and belong under a namespace that names the whole topology.

Pure arithmetic; no memory is touched here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from kvtier.errors import LayoutError

PAGE = 4096
"""Rows are a multiple of this, so that they suit direct I/O."""

CANONICAL_FORMAT = 1
"""Version of the row layout described in this module."""


@dataclass(frozen=True, slots=True)
class Fragment:
    """`size` bytes at `local` in a worker's page are those at `canonical` in the canonical page."""

    local: int
    canonical: int
    size: int


@dataclass(frozen=True)
class PageMapping:
    """How one worker's page of one layer lies in the canonical page.

    Attributes:
        canonical_bytes: size of the canonical page.
        local_bytes: size of the worker's page, without padding.
        fragments: byte ranges that correspond; they cover the local page exactly once.
        num_writers: ranks that hold these very bytes.
        writer_index: this worker's place among them.
        portable: the canonical bytes do not depend on how the model is parallelised.
    """

    canonical_bytes: int
    local_bytes: int
    fragments: tuple[Fragment, ...]
    num_writers: int = 1
    writer_index: int = 0
    portable: bool = True

    def __post_init__(self) -> None:
        end = 0
        for fragment in sorted(self.fragments, key=lambda f: f.local):
            if fragment.local != end or fragment.size <= 0:
                raise LayoutError(f"the mapping leaves a hole in the worker's page at byte {end}")
            end += fragment.size
        if end != self.local_bytes:
            raise LayoutError(f"the mapping covers {end} of {self.local_bytes} local bytes")
        end = 0
        for fragment in sorted(self.fragments, key=lambda f: f.canonical):
            if fragment.canonical < end:
                raise LayoutError(f"two fragments of the mapping share canonical byte {end - 1}")
            end = fragment.canonical + fragment.size
        if end > self.canonical_bytes:
            raise LayoutError(
                f"the mapping ends at byte {end} of a canonical page of {self.canonical_bytes}"
            )
        if not 0 <= self.writer_index < self.num_writers:
            raise LayoutError(f"writer {self.writer_index} of {self.num_writers} does not exist")

    @classmethod
    def exclusive(cls, page_bytes: int, rank: int, num_ranks: int) -> PageMapping:
        """The mapping of what nobody certifies: each rank's page whole, in a place of its own."""
        fragment = Fragment(0, rank * page_bytes, page_bytes)
        return cls(num_ranks * page_bytes, page_bytes, (fragment,), portable=False)


def coalesce(fragments: Sequence[Fragment]) -> tuple[Fragment, ...]:
    """Join neighbours that touch on both sides."""
    joined: list[Fragment] = []
    for fragment in sorted(fragments, key=lambda f: f.local):
        last = joined[-1] if joined else None
        if (
            last is not None
            and last.local + last.size == fragment.local
            and last.canonical + last.size == fragment.canonical
        ):
            joined[-1] = Fragment(last.local, last.canonical, last.size + fragment.size)
        else:
            joined.append(fragment)
    return tuple(joined)


@dataclass(frozen=True, slots=True)
class LayerPages:
    """One layer of a cache group on one worker.

    Attributes:
        tensor: which of the worker's KV tensors holds it.
        mapping: how its pages lie in canonical pages.
    """

    tensor: int
    mapping: PageMapping


@dataclass(frozen=True)
class RowLayout:
    """Layout of the rows of one engine, as one worker sees it.

    Attributes:
        groups: the layers of each cache group that is offloaded, in the engine's order.
        blocks_per_chunk: GPU blocks per block.
    """

    groups: tuple[tuple[LayerPages, ...], ...]
    blocks_per_chunk: int

    def __post_init__(self) -> None:
        if self.blocks_per_chunk <= 0:
            raise LayoutError(f"blocks_per_chunk is {self.blocks_per_chunk}; it must be positive")
        if not self.groups or not all(self.groups):
            raise LayoutError("a cache group without layers cannot be offloaded")

    @cached_property
    def layer_offsets(self) -> tuple[tuple[int, ...], ...]:
        """Per group and layer: where in the row the layer's pages start, in bytes."""
        offsets = []
        for layers in self.groups:
            at, starts = 0, []
            for layer in layers:
                starts.append(at)
                at += layer.mapping.canonical_bytes * self.blocks_per_chunk
            offsets.append(tuple(starts))
        return tuple(offsets)

    @cached_property
    def group_bytes(self) -> tuple[int, ...]:
        """Per group: bytes of a row that are in use."""
        return tuple(
            sum(layer.mapping.canonical_bytes for layer in layers) * self.blocks_per_chunk
            for layers in self.groups
        )

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of a row: those of the largest group, rounded up to whole pages."""
        return -(-max(self.group_bytes) // PAGE) * PAGE

    @cached_property
    def portable(self) -> bool:
        """Whether rows may be read under another parallel configuration."""
        return all(layer.mapping.portable for layers in self.groups for layer in layers)

    def describe(self) -> list[list[int]]:
        """Canonical page bytes per group and layer: the part of the identity that is layout."""
        return [[layer.mapping.canonical_bytes for layer in layers] for layers in self.groups]
