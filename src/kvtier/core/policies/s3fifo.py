"""S3-FIFO: three queues instead of an order of recency; what is used once leaves soon.

Yang, Zhang, Qiu, Yue, Rashmi: "FIFO queues are all you need for cache eviction", SOSP 2023.

New keys enter `small`, a tenth of the cache. At its end, keys used more than once since go on to
`main`, others are evicted and remembered as ghosts. A key that comes back while it is a ghost
enters `main` at once. At the end of `main`, a key that was used goes round again, once per use.

What pins change: a pinned key keeps its place in its queue. If its turn to leave comes meanwhile it
is set aside, and joins `main` when it comes back: it was in use when a rarer key would have gone.
So a victim is found past pinned keys in O(1) amortised: each pin is met at most once. Coming back
is one use.
"""

from __future__ import annotations

from collections import OrderedDict

from kvtier.core.types import BlockKey

USES_MAX = 3
"""Uses are counted up to this, as in the paper (2 bits)."""

SMALL_SHARE = 10
"""One in so many slots belongs to `small`, as in the paper."""


class S3FIFO:
    """Every method is O(1); `victim` amortised over the uses and pins since.

    Args:
        capacity: slots of the pool. At most nine tenths as many ghosts are remembered.
    """

    def __init__(self, capacity: int) -> None:
        self._small_max = max(1, capacity // SMALL_SHARE)
        self._ghosts_max = capacity - self._small_max
        self._small: OrderedDict[BlockKey, None] = OrderedDict()  # with pinned keys, in order
        self._main: OrderedDict[BlockKey, None] = OrderedDict()  # so is this
        self._ghosts: OrderedDict[BlockKey, None] = OrderedDict()
        self._uses: dict[BlockKey, int] = {}  # of every key, those set aside included
        self._pinned: set[BlockKey] = set()

    def __len__(self) -> int:
        return len(self._uses) - len(self._pinned)

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._uses and key not in self._pinned

    def add(self, key: BlockKey) -> None:
        """The key became evictable: it is new, or comes back from a pin."""
        if key in self._pinned:
            self._pinned.remove(key)
            if key not in self._small:
                self._main[key] = None  # one that was not set aside keeps its place
            if self._uses[key] < USES_MAX:
                self._uses[key] += 1
            return
        assert key not in self._uses, "key is already evictable"
        self._uses[key] = 0
        if key in self._ghosts:
            del self._ghosts[key]
            self._main[key] = None
        else:
            self._small[key] = None

    def discard(self, key: BlockKey) -> None:
        """The key was pinned."""
        assert key in self._uses, "key is not evictable"
        self._pinned.add(key)

    def forget(self, key: BlockKey) -> None:
        """The key left the pool without being a victim: nothing is known of it any more."""
        self._ghosts.pop(key, None)
        if self._uses.pop(key, None) is not None:
            self._pinned.discard(key)
            self._small.pop(key, None)
            self._main.pop(key, None)

    def touch(self, key: BlockKey) -> None:
        """There is no recency in a queue."""

    def use(self, key: BlockKey) -> None:
        """The key was used once more; one that is not evictable is left alone."""
        if key not in self._pinned and self._uses.get(key, USES_MAX) < USES_MAX:
            self._uses[key] += 1

    def victim(self) -> BlockKey:
        """Remove and return the key to evict. The caller knows that there is one."""
        small, main, uses, pinned = self._small, self._main, self._uses, self._pinned
        while True:
            if small and (len(small) > self._small_max or not main):
                key, _ = small.popitem(last=False)
                if key in pinned:
                    continue
                if uses[key] > 1:
                    uses[key] = 0
                    main[key] = None
                    continue
                self._ghosts[key] = None
                if len(self._ghosts) > self._ghosts_max:
                    self._ghosts.popitem(last=False)
            else:
                key, _ = main.popitem(last=False)
                if key in pinned:
                    continue
                if uses[key]:
                    uses[key] -= 1
                    main[key] = None
                    continue
            del uses[key]
            return key
