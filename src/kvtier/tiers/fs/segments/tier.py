"""The `segments` layout as a `Tier`."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Literal

from kvtier.errors import MissingBlockError
from kvtier.tiers.fs.segments.blocks import OwnedBlocks
from kvtier.tiers.fs.segments.follower import Followers
from kvtier.tiers.fs.segments.owned import OwnedStores
from kvtier.tiers.fs.segments.upkeep import Upkeep
from kvtier.tiers.fs.space import Space, Unbounded

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from kvtier.core.types import BlockKey
    from kvtier.tiers.base import Buffers

DEFAULT_SEGMENT_BYTES = 256 << 20
"""Large enough that files are few (4,096 for 1 TiB), small enough to be given up one at a time.
With a capacity, an eighth of 4 % of it or so is better: about 32 segments."""

UPKEEP_S = 1.0
"""Seconds between two rounds of upkeep: what a killed process forgets of the order of use, and how
long a request waits."""


class SegmentsTier:
    """Keeps blocks in slots of preallocated files below `<root>/<namespace>/stores`.

    Several tiers, in processes of one host, may share a root: each writes to stores of its own and
    reads from all. What a process that is gone left behind is taken over.

    Blocks may have any length: slots have the length of their first block, rounded up to pages, and
    blocks of another size go to other segments.

    Args:
        root: an existing directory.
        namespace: hex digest under which the blocks are kept.
        description: written to `namespace.json` unless that exists; must hold no secret.
        space: where room is asked for before a segment is made.
        durability: `none`: blocks survive the death of processes; `data`: also a loss of power,
            once their write has returned.
        direct: use direct I/O where buffers allow it.
        segment_bytes: size of the largest segments; at least `FIRST_SLOTS` slots are made of them.
            The first ones are smaller.
        clock: seconds, monotonic.
        wall_clock_ns: nanoseconds since the epoch.
        upkeep_s: seconds between rounds of upkeep; None leaves them to the caller.

    Raises:
        OSError: the directory of the namespace cannot be made.
    """

    def __init__(
        self,
        root: Path,
        namespace: str,
        description: Mapping[str, object] | None = None,
        *,
        space: Space | None = None,
        durability: Literal["none", "data"] = "none",
        direct: bool = True,
        segment_bytes: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock_ns: Callable[[], int] = time.time_ns,
        upkeep_s: float | None = UPKEEP_S,
    ) -> None:
        durable = durability == "data"
        self._owned = OwnedStores(
            root,
            namespace,
            description,
            space or Unbounded(),
            segment_bytes or DEFAULT_SEGMENT_BYTES,
            direct,
            durable,
            clock,
            wall_clock_ns,
        )
        self._blocks = OwnedBlocks(self._owned, durable)
        self._followers = Followers(
            self._owned.directory,
            direct,
            lambda: {store.name for store in self._owned.stores()},
            self._owned.dropped.extend,
            wall_clock_ns,
        )
        self._upkeep = Upkeep(self._owned, self._followers, direct, durable, wall_clock_ns)
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._upkeep.begin()
        if upkeep_s is not None:
            self._thread = threading.Thread(
                target=self._serve, args=(upkeep_s,), name="kvtier-segments", daemon=True
            )
            self._thread.start()

    def exists(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Whether each key is held, by this process or another on the host: from memory, with a
        glance at the logs of the others.
        """
        followers = self._followers.look()
        own = self._owned.slots.keys
        answers = list(map(own.__contains__, keys))
        for follower in followers:
            held = follower.keys
            if held:
                answers = [answer or key in held for answer, key in zip(answers, keys, strict=True)]
        return answers

    def read(self, key: BlockKey, into: Buffers) -> None:
        """See `Tier.read`.

        Raises:
            MissingBlockError: absent, or not exactly as long as `into`.
            OSError: the medium failed.
        """
        (error,) = self.read_batch([key], [into])
        if error is not None:
            raise error

    def write(self, key: BlockKey, data: Buffers) -> None:
        """See `Tier.write`.

        Raises:
            TierFullError: no space for a segment, and nothing to evict.
            OSError: the medium failed.
        """
        (error,) = self.write_batch([key], [data])
        if error is not None:
            raise error

    def read_batch(
        self, keys: Sequence[BlockKey], into: Sequence[Buffers]
    ) -> list[BaseException | None]:
        """See `SupportsBatch.read_batch`: one call for each run of adjacent slots."""
        outcome = self._blocks.read(keys, into, range(len(keys)))
        left = [i for i in range(len(keys)) if i not in outcome]
        if left:
            outcome.update(self._followers.read(keys, into, left))
            # a store may have been adopted between the two looks
            left = [i for i in left if i not in outcome and keys[i] in self._owned.slots.keys]
            outcome.update(self._blocks.read(keys, into, left))
        return [
            outcome[i] if i in outcome else MissingBlockError(f"no block {key.hex()}")
            for i, key in enumerate(keys)
        ]

    def write_batch(
        self, keys: Sequence[BlockKey], data: Sequence[Buffers]
    ) -> list[BaseException | None]:
        """See `SupportsBatch.write_batch`: adjacent slots where possible, one call for each run."""
        own = self._owned.slots.keys
        followed = any(follower.keys for follower in self._followers.look())
        new = [
            i
            for i, key in enumerate(keys)
            if not followed
            or key in own
            or not self._followers.touch(key, sum(view.nbytes for view in data[i]))
        ]
        failures = self._blocks.write(keys, data, new)
        return [failures.get(i) for i in range(len(keys))]

    def delete(self, key: BlockKey) -> None:
        """Forget a block; absent is fine. Of another process's block, its owner is asked to."""
        if not self._blocks.delete(key):
            self._followers.delete(key)

    def take_dropped(self) -> list[BlockKey]:
        """Keys given up since the last call, here or by the process that kept them."""
        dropped: dict[BlockKey, None] = {}
        while self._owned.dropped:
            dropped[self._owned.dropped.popleft()] = None
        held = [self._owned.slots.keys, *(follower.keys for follower in self._followers.all())]
        return [key for key in dropped if not any(key in keys for keys in held)]

    def figures(self) -> dict[str, float]:
        """Levels and running totals of this process's stores, and what it follows."""
        counts = self._owned.slots.counts()
        stores = self._owned.stores()
        followers = self._followers.all()
        return {
            "blocks": len(self._owned.slots),
            "used_bytes": sum(size * slots for size, (slots, _) in counts.items()),
            "free_bytes": sum(size * free for size, (_, free) in counts.items()),
            "segments": len(self._owned.slots.segments()),
            "stores": len(stores),
            "log_bytes": sum(store.log.nbytes for store in stores),
            "followed_stores": len(followers),
            "followed_blocks": sum(len(follower.keys) for follower in followers),
            "inventory_complete": float(self._upkeep.is_complete()),
            **{name: self._owned.totals[name] for name in TOTALS},
        }

    def owned_bytes(self) -> int:
        """Bytes of the segments that only this tier can give up, of adopted stores too."""
        return sum(segment.nbytes for segment in self._owned.slots.segments())

    def maintain(self) -> None:
        """One round of upkeep, as it runs by itself every `upkeep_s` seconds."""
        self._upkeep.round()

    def close(self) -> None:
        """Write down the order of use and let go of the stores; a next process takes them over."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join()
        self._upkeep.end()
        self._followers.close()
        self._owned.close()

    def _serve(self, interval_s: float) -> None:
        self._upkeep.catch_up()
        while not self._closing.wait(interval_s):
            self._upkeep.round()


TOTALS = (
    "evicted_blocks",
    "requested_blocks",
    "lost_blocks",
    "lost_segments",
    "lost_stores",
    "full_blocks",
    "full_disk",
    "adopted_stores",
    "adopted_blocks",
    "compactions",
    "upkeep_failures",
)
"""Names of the running totals in `figures`."""
