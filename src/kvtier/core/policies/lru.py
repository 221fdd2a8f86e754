"""Least recently used, over evictable keys only."""

from __future__ import annotations

from collections import OrderedDict

from kvtier.core.types import BlockKey


class LRU:
    """Holds exactly the keys that may be evicted now, oldest first.

    A pinned block is not here, so `victim` never scans past one. Every method is O(1).
    """

    def __init__(self, capacity: int) -> None:  # noqa: ARG002 - policies with ghosts need it
        self._order: OrderedDict[BlockKey, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._order

    def add(self, key: BlockKey) -> None:
        """The key became evictable; it is the most recent one."""
        assert key not in self._order, "key is already evictable"
        self._order[key] = None

    def discard(self, key: BlockKey) -> None:
        """The key was pinned."""
        del self._order[key]

    def forget(self, key: BlockKey) -> None:
        """The key left the pool without being a victim."""
        self._order.pop(key, None)

    def touch(self, key: BlockKey) -> None:
        """The key is recent; a key that is not evictable is left alone."""
        if key in self._order:
            self._order.move_to_end(key)

    use = touch  # a use makes recent, and nothing else

    def victim(self) -> BlockKey:
        """Remove and return the key to evict."""
        key, _ = self._order.popitem(last=False)
        return key
