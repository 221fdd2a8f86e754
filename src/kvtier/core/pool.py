"""The primary tier as pure bookkeeping: which key is in which slot, and who may touch it.

Owns no memory. A slot is in exactly one place:

    FREE --allocate--> FILLING --publish--> READY --evict--> FREE
                          |                   |
                          +----- forget ------+--> CONDEMNED --last unpin--> FREE

Keys die early, slots die late: forgetting a key (failure, timeout, reset) is immediate, reusing
its slot waits until the last transfer that touches it has ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from kvtier.core.types import BlockKey, Slot


@runtime_checkable
class Policy(Protocol):
    """Order of eviction among the keys that may be evicted now. Holds exactly those.

    Made for a pool of so many slots: `Policy(capacity)`. A key's life here is

        add --(use, touch)--> [discard --> add]* --> victim, or forget

    Each `discard` and `add` is one use by a request, or by several at the same time. Nothing may
    take longer than O(1), amortised.
    """

    def __len__(self) -> int: ...
    def __contains__(self, key: BlockKey) -> bool: ...
    def add(self, key: BlockKey) -> None:
        """The key became evictable, and was used just now: it is new, or comes back from a pin."""
        ...

    def discard(self, key: BlockKey) -> None:
        """The key was pinned. It comes back by `add`, or is forgotten."""
        ...

    def forget(self, key: BlockKey) -> None:
        """The key left the pool without being a victim; it may be pinned, or not known here."""
        ...

    def touch(self, key: BlockKey) -> None:
        """The request that used the key ended: recent, but not used once more.

        A key that is not evictable is left alone.
        """
        ...

    def use(self, key: BlockKey) -> None:
        """A request used the key without a pin; one that is not evictable is left alone."""
        ...

    def victim(self) -> BlockKey:
        """Remove and return the key to evict. There is one."""
        ...


@dataclass(slots=True, eq=False)
class Block:
    """One occupied slot."""

    key: BlockKey
    slot: Slot
    fill: object | None  # who fills it; None once it is ready
    pins: int = 1  # readers; while filling, its one writer
    holds: int = 0  # grants that count this block against the promotion budget
    ready: bool = False
    condemned: bool = False


class BlockPool:
    """Slots of the primary tier.

    Attributes:
        num_slots: slots in all.
        blocks: key -> block, for keys that are filling or ready. Read it, do not change it.
    """

    def __init__(self, num_slots: int, policy: Policy) -> None:
        assert num_slots > 0, "a pool needs a slot"
        self.num_slots = num_slots
        self.blocks: dict[BlockKey, Block] = {}
        self._free: list[Slot] = [Slot(i) for i in reversed(range(num_slots))]
        self._condemned: set[Block] = set()
        self._policy = policy

    @property
    def available(self) -> int:
        """Slots that `allocate` can hand out, evicting if it must."""
        return len(self._free) + len(self._policy)

    @property
    def used(self) -> int:
        """Slots that are not free."""
        return self.num_slots - len(self._free)

    @property
    def pinned(self) -> int:
        """Slots that can be neither handed out nor evicted now."""
        return self.num_slots - self.available

    def evictable(self, block: Block) -> bool:
        """Whether the block could be evicted now."""
        return block.ready and block.pins == 0 and not block.condemned

    def allocate(
        self, keys: Sequence[BlockKey], fill: object
    ) -> tuple[list[Block], list[BlockKey]]:
        """Reserve a slot per key; returns (blocks filling, keys evicted for them).

        The caller has checked `available` and that no key is here: this never half-succeeds.
        """
        assert len(keys) <= self.available, "caller must check `available`"
        free, blocks = self._free, self.blocks
        evicted: list[BlockKey] = []
        for _ in range(len(keys) - len(free)):
            gone = self._policy.victim()
            block = blocks.pop(gone)
            assert block.pins == 0, "the policy held a block that is in use"
            free.append(block.slot)
            evicted.append(gone)
        filling: list[Block] = []
        for key in keys:
            assert key not in blocks, "key is already in the pool"
            block = Block(key, free.pop(), fill)
            blocks[key] = block
            filling.append(block)
        return filling, evicted

    def publish(self, block: Block) -> None:
        """The bytes are good. The writer's pin stays: its owner releases it with `unpin`."""
        assert block.fill is not None, "publishing twice"
        assert not block.condemned, "publishing a forgotten key"
        block.fill = None
        block.ready = True

    def pin(self, block: Block) -> None:
        """Protect a ready block from eviction."""
        assert block.ready, "only a readable block can be pinned"
        assert not block.condemned, "a forgotten block cannot be pinned"
        if block.pins == 0:
            self._policy.discard(block.key)
        block.pins += 1

    def unpin(self, block: Block) -> None:
        """Give back one pin; the last one makes the block evictable, or frees its slot."""
        assert block.pins > 0, "unpinned more often than pinned"
        block.pins -= 1
        if block.pins:
            return
        if block.condemned:
            self._condemned.remove(block)
            self._free.append(block.slot)
        else:
            assert block.ready, "a filling block ends by publish or forget"
            self._policy.add(block.key)

    def touch(self, keys: Iterable[BlockKey]) -> None:
        """The request that used these ended: in order, the last one becomes the most recent."""
        touch = self._policy.touch
        for key in keys:
            touch(key)

    def use(self, keys: Iterable[BlockKey]) -> None:
        """A request uses these without pinning them, in order, as `touch`."""
        use = self._policy.use
        for key in keys:
            use(key)

    def forget(self, block: Block) -> None:
        """Drop the key now; the slot is free when the last pin goes."""
        assert not block.condemned, "forgetting twice"
        del self.blocks[block.key]
        block.fill = None
        self._policy.forget(block.key)
        if block.pins == 0:
            self._free.append(block.slot)
        else:
            block.condemned = True
            self._condemned.add(block)

    def check(self) -> None:
        """Assert every invariant. O(n): for tests and the simulator."""
        held = [b.slot for b in self.blocks.values()] + [b.slot for b in self._condemned]
        assert sorted(held + self._free) == list(range(self.num_slots)), "slot lost or doubled"
        assert all(b.pins > 0 for b in self._condemned), "condemned without a pin is free"
        for key, block in self.blocks.items():
            assert block.key == key, "key and block disagree"
            assert block.ready == (block.fill is None), "ready means that nobody fills it"
            assert block.ready or block.pins == 1, "a filling block has exactly its writer's pin"
            assert (key in self._policy) == self.evictable(block), "policy and pins disagree"
        idle = sum(self.evictable(b) for b in self.blocks.values())
        assert idle == len(self._policy), "the policy holds something else"
