"""ARC: recency and frequency, with the balance between them learnt from what was evicted wrongly.

Megiddo, Modha: "ARC: a self-tuning, low overhead replacement cache", FAST 2003.

`once` (the paper's T1) holds keys used once, `often` (T2) the others, each the oldest first.
Evicted keys are remembered in a ghost list each (B1, B2). A key that comes back while it is a ghost
enters `often`, and shifts the target size of `once` (the paper's p) towards the list that lost it.

What differs from the paper:

- Slots are taken before the pool knows when its blocks become evictable, so that a victim is chosen
  before its successor is seen: the target moves after the eviction, not before it, and the
  paper's tie-break (`once` is exactly at its target and the successor is a ghost of `often`) is
  left out.
- A pinned key is neither in `once` nor in `often`. A pin is a use: the key comes back as the most
  recent of `often`, and counts as one of its keys meanwhile. Where the list that is to give a key
  has only pinned ones, the other gives it.
"""

from __future__ import annotations

from collections import OrderedDict

from kvtier.core.types import BlockKey


class ARC:
    """Every method is O(1); so is the number of ghosts dropped per key added, amortised.

    Args:
        capacity: slots of the pool. After each key added at most as many ghosts are remembered;
            keys and ghosts together are at most twice as many at any time.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._target = 0.0  # keys in `once`, as far as ghosts have taught
        self._once: OrderedDict[BlockKey, None] = OrderedDict()
        self._often: OrderedDict[BlockKey, None] = OrderedDict()
        self._once_ghosts: OrderedDict[BlockKey, None] = OrderedDict()
        self._often_ghosts: OrderedDict[BlockKey, None] = OrderedDict()
        self._pinned: set[BlockKey] = set()

    @property
    def target(self) -> float:
        """Keys that `once` should hold, from 0 to the capacity."""
        return self._target

    def __len__(self) -> int:
        return len(self._once) + len(self._often)

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._once or key in self._often

    def add(self, key: BlockKey) -> None:
        """The key became evictable: it is new, or comes back from a pin."""
        if key in self._pinned:
            self._pinned.remove(key)
            self._often[key] = None
            return
        assert key not in self._once, "key is already evictable"
        assert key not in self._often, "key is already evictable"
        once_ghosts, often_ghosts = self._once_ghosts, self._often_ghosts
        if key in once_ghosts:
            step = max(1.0, len(often_ghosts) / len(once_ghosts))
            self._target = min(float(self._capacity), self._target + step)
            del once_ghosts[key]
            self._often[key] = None
        elif key in often_ghosts:
            step = max(1.0, len(once_ghosts) / len(often_ghosts))
            self._target = max(0.0, self._target - step)
            del often_ghosts[key]
            self._often[key] = None
        else:
            self._once[key] = None
        while once_ghosts and len(self._once) + len(once_ghosts) > self._capacity:
            once_ghosts.popitem(last=False)
        while len(once_ghosts) + len(often_ghosts) > self._capacity:
            (often_ghosts or once_ghosts).popitem(last=False)

    def discard(self, key: BlockKey) -> None:
        """The key was pinned."""
        if key in self._often:
            del self._often[key]
        else:
            del self._once[key]
        self._pinned.add(key)

    def forget(self, key: BlockKey) -> None:
        """The key left the pool without being a victim: nothing is known of it any more."""
        self._pinned.discard(key)
        for keys in (self._once, self._often, self._once_ghosts, self._often_ghosts):
            keys.pop(key, None)

    def touch(self, key: BlockKey) -> None:
        """The key is recent; a key that is not evictable is left alone."""
        if key in self._often:
            self._often.move_to_end(key)
        elif key in self._once:
            self._once.move_to_end(key)

    def use(self, key: BlockKey) -> None:
        """The key was used once more; one that is not evictable is left alone."""
        if key in self._often:
            self._often.move_to_end(key)
        elif key in self._once:
            del self._once[key]
            self._often[key] = None

    def victim(self) -> BlockKey:
        """Remove and return the key to evict. The caller knows that there is one."""
        once = self._once
        if once and (len(once) > self._target or not self._often):
            key, _ = once.popitem(last=False)
            self._once_ghosts[key] = None
        else:
            key, _ = self._often.popitem(last=False)
            self._often_ghosts[key] = None
        return key
