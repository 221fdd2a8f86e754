"""Which blocks are written to which tiers, and when.

A block is offered to every tier as soon as it is readable, within the tier's budget and while the
tier takes writes. What a tier does not get is *owed* to it: offered again when the block is next
used, and never queued with a pin. So is a block that a tier lost while the primary still has it.

A block that was promoted from a tier is *raised*: offered to the tiers that are to get what is
found there, if they are not believed to have it. It was stored before: that is no first touch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Protocol

from kvtier.core.pool import Block, BlockPool
from kvtier.core.presence import PRESENT, Presence
from kvtier.core.types import BlockKey, TierId


class Writer(Protocol):
    """What cascades need of the ledger."""

    def takes(self, tier: TierId, blocks: int) -> int:
        """How many of so many blocks the tier takes in one write now."""
        ...

    def write(self, tier: TierId, blocks: Sequence[Block]) -> None:
        """Submit a write of pinned blocks."""
        ...


class Cascades:
    """See the module.

    Attributes:
        owed: per tier, keys to offer again.
        writing: per tier, slots that its writes pin.
        skipped: per tier, blocks that were over its budget or came while it took no writes.
        filtered: blocks held back since their key was new.
    """

    def __init__(
        self,
        pool: BlockPool,
        presence: Sequence[Presence],
        writer: Writer,
        writing_max: int,
        touched_max: int | None,
    ) -> None:
        self.owed: list[dict[BlockKey, None]] = [{} for _ in presence]
        self.writing = [0] * len(presence)
        self.skipped = [0] * len(presence)
        self.filtered = 0
        self._pool = pool
        self._presence = presence
        self._writer = writer
        self._writing_max = writing_max
        self._touched_max = touched_max  # None: every block is worth storing
        self._touched: dict[BlockKey, None] = {}

    def begin(self, blocks: Sequence[Block], tiers: Collection[TierId] | None) -> None:
        """Blocks became readable: offer them to the tiers (None: all)."""
        worth = blocks if self._touched_max is None else self._second_touch(blocks, tiers)
        for place in range(len(self._presence)):
            if tiers is None or place in tiers:
                self.offer(TierId(place), worth)

    def raise_to(self, blocks: Sequence[Block], tiers: Collection[TierId]) -> None:
        """Blocks were promoted: offer them to these tiers."""
        for place in range(len(self._presence)):
            if place in tiers:
                self.offer(TierId(place), blocks)

    def offer(self, tier: TierId, blocks: Sequence[Block]) -> None:
        """Write blocks to one tier, as far as its budget goes; what is over is owed."""
        beliefs = self._presence[tier].beliefs
        fresh = [b for b in blocks if beliefs.get(b.key) != PRESENT]
        room = self._writer.takes(tier, self._writing_max - self.writing[tier])
        if len(fresh) > room:
            self.skipped[tier] += len(fresh) - room
            self.owe(tier, [b.key for b in fresh[room:]])
            fresh = fresh[:room]
        if not fresh:
            return
        for block in fresh:
            self._pool.pin(block)
        self.writing[tier] += len(fresh)
        self._writer.write(tier, fresh)

    def offer_owed(self, blocks: Iterable[Block]) -> None:
        """Blocks are being used: offer them to the tiers that they are owed to."""
        for place, owed in enumerate(self.owed):
            if owed:
                again = [b for b in dict.fromkeys(blocks) if b.key in owed]
                for block in again:
                    del owed[block.key]
                if again:
                    self.offer(TierId(place), again)

    def owe(self, tier: TierId, keys: Iterable[BlockKey]) -> None:
        """Offer those of these that the primary has again when they are next used."""
        blocks, owed = self._pool.blocks, self.owed[tier]
        for key in keys:
            if (block := blocks.get(key)) is not None and block.ready:
                owed[key] = None

    def ended(self, tier: TierId, blocks: Sequence[Block]) -> None:
        """A write ended: give its slots back, heads last, so that they outlive tails."""
        self.writing[tier] -= len(blocks)
        for block in reversed(blocks):
            self._pool.unpin(block)

    def forget(self, keys: Iterable[BlockKey]) -> None:
        """The primary does not have these any more."""
        for owed in self.owed:
            if owed:
                for key in keys:
                    owed.pop(key, None)

    def reset(self) -> None:
        """The primary has nothing any more."""
        for owed in self.owed:
            owed.clear()

    def _second_touch(
        self, blocks: Sequence[Block], tiers: Collection[TierId] | None
    ) -> Sequence[Block]:
        """Blocks whose key was met before; the others are owed, so their next use stores them."""
        assert self._touched_max is not None, "no filter, nothing to filter"
        known = [b for b in blocks if b.key in self._touched]
        new = [b.key for b in blocks if b.key not in self._touched]
        self._touched.update(dict.fromkeys(new))
        for _ in range(len(self._touched) - self._touched_max):
            del self._touched[next(iter(self._touched))]
        self.filtered += len(new)
        for place in range(len(self._presence)):
            if tiers is None or place in tiers:
                self.owe(TierId(place), new)
        return known
