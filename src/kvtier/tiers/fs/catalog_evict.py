"""Which blocks to give up, and giving them up: those whose last use is oldest first."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from kvtier.tiers.fs.catalog_findings import Deleted

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvtier.tiers.fs.catalog import LayoutBlocks
    from kvtier.tiers.fs.catalog_findings import BlockEntry
    from kvtier.tiers.fs.catalog_verify import Stored

_BATCH = 8192
"""Blocks deleted at a time; the owner of a store takes about a second for each batch."""


def choose_victims(
    stored: Sequence[Stored], used_before_s: float | None, to_bytes: int | None
) -> list[Stored]:
    """Blocks to evict, oldest use first.

    Args:
        stored: the blocks to choose from.
        used_before_s: only those last used before this, seconds since the epoch.
        to_bytes: no more than needed for the rest of `stored` to have at most this.
    """
    victims = []
    left = sum(entry.nbytes for _, _, entry in stored)
    for one in sorted(stored, key=lambda one: one[2].last_use_s):
        entry = one[2]
        if used_before_s is not None and entry.last_use_s >= used_before_s:
            break
        if to_bytes is not None and left <= to_bytes:
            break
        left -= entry.nbytes
        victims.append(one)
    return victims


def evict(victims: Sequence[Stored], progress: Callable[[int], None]) -> Deleted:
    """Delete the victims, in order, but for those that were used since they were listed.

    Args:
        victims: blocks, oldest use first.
        progress: told the bytes of each batch.
    """
    deleted = Deleted()
    for start in range(0, len(victims), _BATCH):
        batch: dict[LayoutBlocks, list[BlockEntry]] = defaultdict(list)
        for _, layout, entry in victims[start : start + _BATCH]:
            batch[layout].append(entry)
        for layout, entries in batch.items():
            deleted += layout.delete(entries, unless_used=True)
            progress(sum(entry.nbytes for entry in entries))
    return deleted
