"""From a job to the bytes it moves: pure arithmetic over arrays.

A job names GPU blocks per cache group and the primary slots of the blocks that they belong to. Its
plan is three arrays (source address, destination address, size), one entry per contiguous piece;
pieces that touch on both sides are joined, since few large copies beat many small ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier.errors import LayoutError
from kvtier.layout import RowLayout

Addresses = npt.NDArray[np.int64]


class CopyPlan(NamedTuple):
    """What to copy.

    Attributes:
        source, destination: addresses, int64, shape (n,).
        size: bytes, int64, shape (n,).
        complete: per slot of the job, bool: all GPU blocks of the block are part of it.
    """

    source: Addresses
    destination: Addresses
    size: Addresses
    complete: npt.NDArray[np.bool_]

    @property
    def num_bytes(self) -> int:
        """Bytes in all."""
        return int(self.size.sum())


@dataclass(frozen=True, slots=True)
class DeviceTensor:
    """One KV tensor of a worker.

    Attributes:
        address: of block 0, in bytes.
        block_stride: bytes from one GPU block to the next.
        num_blocks: GPU blocks.
    """

    address: int
    block_stride: int
    num_blocks: int


class _GroupPieces(NamedTuple):
    """The pieces of one GPU block of one group; arrays of shape (pieces,)."""

    device: Addresses  # address of the piece in GPU block 0
    device_stride: Addresses  # per GPU block
    row: Addresses  # offset in the row, for the first GPU block of the block
    row_stride: Addresses  # per GPU block of the block
    size: Addresses
    num_writers: Addresses
    writer_index: Addresses


class CopyPlanner:
    """Makes the plans of one worker.

    Args:
        layout: how this worker's pages lie in a row.
        tensors: the worker's KV tensors.
        rows_address: address of the first row.
        num_slots: rows.
    """

    def __init__(
        self,
        layout: RowLayout,
        tensors: Sequence[DeviceTensor],
        rows_address: int,
        num_slots: int,
    ) -> None:
        self._blocks_per_chunk = layout.blocks_per_chunk
        self._row_bytes = layout.row_bytes
        self._rows_address = rows_address
        self._num_slots = num_slots
        self._num_blocks = min(tensor.num_blocks for tensor in tensors)
        self._groups = [_pieces(layout, group, tensors) for group in range(len(layout.groups))]

    def plan(
        self,
        block_ids: npt.NDArray[np.integer],
        group_sizes: Sequence[int],
        block_indices: Sequence[int],
        slots: npt.NDArray[np.integer],
        *,
        store: bool,
    ) -> CopyPlan:
        """Plan one job.

        Args:
            block_ids: GPU blocks, ordered by group.
            group_sizes: of these, how many belong to each group.
            block_indices: per group, index in the request of its first GPU block; what it leaves
                over a multiple of `blocks_per_chunk` is skipped in the first block's row.
            slots: primary slots, ordered as the blocks are.
            store: from the device to the rows, written by the ranks whose turn it is; else from
                the rows to the device.

        Raises:
            LayoutError: slots and GPU blocks do not match, or one of them does not exist.
        """
        if len(group_sizes) != len(self._groups):
            raise LayoutError(f"a job with {len(group_sizes)} groups, not {len(self._groups)}")
        if len(slots) and not 0 <= slots.min() <= slots.max() < self._num_slots:
            raise LayoutError(f"a job names a slot outside 0..{self._num_slots - 1}")
        parts: list[tuple[Addresses, Addresses, Addresses]] = []
        complete: list[npt.NDArray[np.bool_]] = []
        per_chunk = self._blocks_per_chunk
        block_at = slot_at = 0
        for pieces, count, index in zip(self._groups, group_sizes, block_indices, strict=True):
            if count == 0:
                continue
            place = np.arange(count) + index % per_chunk
            chunk, sub = place // per_chunk, place % per_chunk
            num_slots = int(chunk[-1]) + 1
            group_slots = slots[slot_at : slot_at + num_slots].astype(np.int64)
            blocks = block_ids[block_at : block_at + count].astype(np.int64)
            slot_at += num_slots
            block_at += count
            if len(group_slots) != num_slots:
                break  # reported below, with the totals
            complete.append(np.bincount(chunk, minlength=num_slots) == per_chunk)
            parts.append(self._group_parts(pieces, blocks, group_slots[chunk], sub, store=store))
        if slot_at != len(slots) or block_at != len(block_ids):
            raise LayoutError(
                f"a job with {len(block_ids)} GPU blocks and {len(slots)} slots, "
                f"where {block_at} and {slot_at} belong together"
            )
        device, row, size = (
            np.concatenate([part[i] for part in parts]) if parts else np.empty(0, np.int64)
            for i in range(3)
        )
        source, destination = (device, row) if store else (row, device)
        merged = _coalesce(source, destination, size)
        return CopyPlan(*merged, np.concatenate(complete) if complete else np.empty(0, bool))

    def _group_parts(
        self,
        pieces: _GroupPieces,
        blocks: Addresses,
        slots: Addresses,
        sub: Addresses,
        *,
        store: bool,
    ) -> tuple[Addresses, Addresses, Addresses]:
        if len(blocks) and not 0 <= blocks.min() <= blocks.max() < self._num_blocks:
            raise LayoutError(f"a job names a GPU block outside 0..{self._num_blocks - 1}")
        # Shape (pieces, GPU blocks), flattened by piece: neighbours of one layer stay adjacent.
        device = pieces.device[:, None] + pieces.device_stride[:, None] * blocks
        rows = self._rows_address + slots * self._row_bytes
        row = rows + pieces.row[:, None] + pieces.row_stride[:, None] * sub
        size = np.broadcast_to(pieces.size[:, None], device.shape)
        if store and (pieces.num_writers > 1).any():
            turn = (slots * self._blocks_per_chunk + sub) % pieces.num_writers[:, None]
            mine = turn == pieces.writer_index[:, None]
            return device[mine], row[mine], size[mine]
        return device.ravel(), row.ravel(), size.ravel()


def _pieces(layout: RowLayout, group: int, tensors: Sequence[DeviceTensor]) -> _GroupPieces:
    columns: list[tuple[int, int, int, int, int, int, int]] = []
    for layer, offset in zip(layout.groups[group], layout.layer_offsets[group], strict=True):
        tensor, mapping = tensors[layer.tensor], layer.mapping
        columns += [
            (
                tensor.address + fragment.local,
                tensor.block_stride,
                offset + fragment.canonical,
                mapping.canonical_bytes,
                fragment.size,
                mapping.num_writers,
                mapping.writer_index,
            )
            for fragment in mapping.fragments
        ]
    return _GroupPieces(*np.array(columns, dtype=np.int64).T)


def _coalesce(
    source: Addresses, destination: Addresses, size: Addresses
) -> tuple[Addresses, Addresses, Addresses]:
    """Join each piece with the next one where they touch on both sides."""
    if len(size) < 2:
        return source, destination, size
    touching = (source[:-1] + size[:-1] == source[1:]) & (
        destination[:-1] + size[:-1] == destination[1:]
    )
    starts = np.flatnonzero(np.concatenate(([True], ~touching)))
    return source[starts], destination[starts], np.add.reduceat(size, starts)
