"""Moves a run of blocks between slots and a tier: one call where the tier takes batches.

What goes wrong with one block is told of that block alone.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvtier.envelope import HEADER_BYTES, seal, verify
from kvtier.errors import EnvelopeError, MissingBlockError
from kvtier.tiers.base import Buffers, SupportsBatch, Tier

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvtier.core.types import BlockKey

LOOKUP_KEYS_MIN = 256
LOOKUP_KEYS_MAX = 1024
"""Keys that one task looks up."""

RUN_BLOCKS_MAX = 64
"""Blocks that one task moves at most: a header of each is kept per thread."""

RUN_BYTES_MIN = 512 << 10
"""A task moves so many bytes if there are: to wake another thread for less takes longer. A tier may
want more, see `kvtier.tiers.base.SupportsBatchBytes`."""

RUN_BYTES_MAX = 16 << 20
"""Bytes that one task moves at most: beyond, a longer call brings no more throughput."""

Outcome = BaseException | None


class Headers:
    """Buffers for the headers of one thread's blocks, each page aligned, so that a medium that
    wants aligned memory can move them as they are.
    """

    def __init__(self) -> None:
        self._view = memoryview(mmap.mmap(-1, RUN_BLOCKS_MAX * HEADER_BYTES))

    def __getitem__(self, index: int) -> memoryview:
        return self._view[index * HEADER_BYTES : (index + 1) * HEADER_BYTES]


@dataclass(slots=True)
class Moved:
    """What became of a run of blocks; those in neither list were not there.

    Attributes:
        ok: keys that were moved and, if read, verified.
        corrupt: keys that were read but are not what they should be, and why.
        failed: what was raised for the others.
    """

    ok: list[BlockKey] = field(default_factory=list)
    corrupt: list[tuple[BlockKey, EnvelopeError]] = field(default_factory=list)
    failed: list[BaseException] = field(default_factory=list)


def run_length(num_blocks: int, block_bytes: int, num_threads: int, bytes_min: int = 0) -> int:
    """Blocks per task such that what is queued keeps all threads busy, within the bounds above.
    `bytes_min` other than 0 takes the place of `RUN_BYTES_MIN`.
    """
    block_bytes = max(block_bytes, 1)
    share = max(-(-num_blocks // num_threads), (bytes_min or RUN_BYTES_MIN) // block_bytes)
    return max(1, min(share, RUN_BLOCKS_MAX, RUN_BYTES_MAX // block_bytes))


def lookup_length(num_keys: int, num_threads: int) -> int:
    """Keys per task of a lookup: it is spread evenly over the threads, so that it takes the time of
    one round trip, within the bounds above.
    """
    return max(LOOKUP_KEYS_MIN, min(-(-num_keys // num_threads), LOOKUP_KEYS_MAX))


def load(
    tier: Tier,
    namespace: str,
    keys: Sequence[BlockKey],
    slots: Sequence[memoryview],
    headers: Headers,
) -> Moved:
    """Read blocks into slots and verify every byte of them."""
    into = [(headers[i], slot) for i, slot in enumerate(slots)]
    moved = Moved()
    outcomes = _move(
        keys, into, tier.read, tier.read_batch if isinstance(tier, SupportsBatch) else None
    )
    for key, (header, slot), outcome in zip(keys, into, outcomes, strict=True):
        if isinstance(outcome, MissingBlockError):
            continue
        if outcome is not None:
            moved.failed.append(outcome)
            continue
        try:
            verify(header, namespace, key, slot)
        except EnvelopeError as error:
            moved.corrupt.append((key, error))
        else:
            moved.ok.append(key)
    return moved


def store(
    tier: Tier,
    namespace: str,
    keys: Sequence[BlockKey],
    slots: Sequence[memoryview],
    headers: Headers,
    created_ns: int,
) -> Moved:
    """Seal blocks and write them."""
    moved = Moved()
    sealed: list[BlockKey] = []
    data: list[tuple[memoryview, memoryview]] = []
    for key, slot in zip(keys, slots, strict=True):
        header = headers[len(sealed)]
        try:
            header[:] = seal(namespace, key, slot, created_ns)
        except EnvelopeError as error:
            moved.failed.append(error)
            continue
        sealed.append(key)
        data.append((header, slot))
    outcomes = _move(
        sealed, data, tier.write, tier.write_batch if isinstance(tier, SupportsBatch) else None
    )
    for key, outcome in zip(sealed, outcomes, strict=True):
        if outcome is None:
            moved.ok.append(key)
        else:
            moved.failed.append(outcome)
    return moved


def _move(
    keys: Sequence[BlockKey],
    buffers: Sequence[Buffers],
    one: Callable[[BlockKey, Buffers], None],
    batch: Callable[[Sequence[BlockKey], Sequence[Buffers]], Sequence[Outcome]] | None,
) -> Sequence[Outcome]:
    """One outcome per key. Raises only what a batch raises as a whole."""
    if batch is not None:
        outcomes = batch(keys, buffers)
        if len(outcomes) != len(keys):
            raise ValueError(f"the tier told of {len(outcomes)} blocks instead of {len(keys)}")
        return outcomes
    return [_outcome(one, key, buffer) for key, buffer in zip(keys, buffers, strict=True)]


def _outcome(one: Callable[[BlockKey, Buffers], None], key: BlockKey, buffers: Buffers) -> Outcome:
    try:
        one(key, buffers)
    # also what is not an Exception: extension modules raise panics as such, and every job must end
    except BaseException as error:  # noqa: BLE001
        return error
    return None
