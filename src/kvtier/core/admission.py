"""Admission: which of the waiting requests may promote what, and when.

Requests are granted what they wish for in the order of their arrival: all of it, if it fits the
budget now, else they wait for their turn and hold nothing for it. What can never fit is cut off at
once (`kvtier.core.plans`). A request that holds something is never made to wait: what does not fit
then is denied. So nobody waits for a slot that somebody holds who waits.

What takes longer to read than to compute, where both are known, or longer than the request may
wait, is denied too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from kvtier.core.boundary import align
from kvtier.core.health import State
from kvtier.core.ledger import Ledger
from kvtier.core.limits import Limits
from kvtier.core.plans import Plan, plan
from kvtier.core.pool import BlockPool
from kvtier.core.presence import PRESENT
from kvtier.core.requests import Fill, Job, Request
from kvtier.core.types import GROUP_BYTES, BlockKey, TierId


class Admission:
    """See the module.

    Attributes:
        block_s: seconds that the engine takes to compute the tokens of one block; None if unknown.
        hurry: tells for how long, in seconds, a request should wait at most from now.
    """

    def __init__(
        self,
        pool: BlockPool,
        ledger: Ledger,
        limits: Limits,
        windows: frozenset[int],
        hurry: Callable[[Request, float], None],
    ) -> None:
        self.block_s: float | None = None
        self.hurry = hurry
        self._pool = pool
        self._ledger = ledger
        self._limits = limits
        self._windows = windows
        self._reading_max = limits.reading_max or limits.promoting_max
        self._opened = 0  # how often a tier was given up, when last looked at
        self._queue: dict[Request, None] = {}  # requests with wishes, or with blocks that come

    def __len__(self) -> int:
        return len(self._queue)

    def __contains__(self, request: Request) -> bool:
        return request in self._queue

    def ask(self, request: Request) -> None:
        """The request has wishes, or met blocks that are being filled."""
        self._queue[request] = None

    def withdraw(self, request: Request) -> None:
        """The request wishes for nothing any more."""
        self._queue.pop(request, None)

    def grant_in_turn(self) -> None:
        """Strictly in the order of arrival: who needs much is not overtaken for ever."""
        if (opened := sum(circuit.opened for circuit in self._ledger.reads)) != self._opened:
            self._opened = opened
            self._dismiss()
        blocked = False
        for request in sorted(self._queue, key=_arrival):
            if any(isinstance(wait, Job) for wait in request.waits):
                request.queued = False  # it asks, and wishes, again when its probes have ended
            elif blocked and not request.held:
                request.queued = bool(request.wishes)  # what is being filled comes anyway
            else:
                request.queued = not self._grant(request)
            if request.queued:
                blocked = True
            else:
                request.refused = None
                del self._queue[request]

    def _dismiss(self) -> None:
        """A tier is left alone from now on: nobody waits for a turn at it."""
        reads = self._ledger.reads
        for request in tuple(self._queue):
            if any(reads[tier].state is State.OPEN for tier in set(request.wishes.values())):
                del self._queue[request]
                request.queued = False
                request.refused = None

    def _grant(self, request: Request) -> bool:
        """Promote what a request wishes for; False if it has to wait for its turn."""
        ledger = self._ledger
        free = (ledger.freed, self._pool.available)
        if (last := request.refused) is not None and free[0] == last[0] and free[1] <= last[1]:
            return False  # nothing came free since
        if not self._still_true(request):
            return True  # the world changed while it waited: let it ask again
        # Hung reads are out of reach for long.
        budget_max = min(self._limits.promoting_max, self._pool.num_slots) - sum(ledger.stuck)
        rooms = {tier: self._room(tier) for tier in set(request.wishes.values())}
        scan, beyond = align(request.scan, self._windows, request.position, self._readable)
        request.denied.update(key for key in beyond if key in request.wishes)
        granted = plan(scan, request.wishes, self._pool, budget_max, self._windows, rooms)
        request.denied.update(granted.cut)
        if not granted.missing and not granted.filling:
            return True
        by_tier: dict[TierId, list[BlockKey]] = {}
        for key in granted.missing:
            by_tier.setdefault(request.wishes[key], []).append(key)
        computing = self.computing_s((*granted.missing, *granted.filling))
        if late := self._too_late(request, by_tier, computing):
            ledger.counts.recomputed_blocks += len(late)
            request.denied.update(late)
            return True  # let it ask for the rest
        if computing is not None:
            self.hurry(request, computing)
        if not self._fits(granted, by_tier):
            if granted.missing and not request.held:
                request.refused = free
                return False
            request.denied.update(granted.missing)  # it holds something: it must not wait
            return True
        self._promote(request, granted, by_tier)
        return True

    def _readable(self, key: BlockKey) -> bool:
        block = self._pool.blocks.get(key)
        return block is not None and block.ready

    def _room(self, tier: TierId) -> int:
        """The most that one grant may read from a tier."""
        ledger = self._ledger
        return ledger.reads[tier].takes(self._reading_max - ledger.stuck[tier], ledger.now)

    def _still_true(self, request: Request) -> bool:
        """Whether every wish can still be had where it was seen."""
        presence, reads, now = self._ledger.presence, self._ledger.reads, self._ledger.now
        if not all(reads[tier].allows(now) for tier in set(request.wishes.values())):
            return False
        return all(presence[t].beliefs.get(key) == PRESENT for key, t in request.wishes.items())

    def _fits(self, granted: Plan, by_tier: dict[TierId, list[BlockKey]]) -> bool:
        reading = self._ledger.reading
        return (
            granted.budget <= self._limits.promoting_max - self._ledger.promoting
            and granted.slots <= self._pool.available
            and all(reading[t] + len(keys) <= self._reading_max for t, keys in by_tier.items())
        )

    def _too_late(
        self, request: Request, by_tier: dict[TierId, list[BlockKey]], computing: float | None
    ) -> list[BlockKey]:
        """What would come later than it is computed, or than the request may wait."""
        assert request.deadline is not None, "a wish begins a wait"
        speeds, now = self._ledger.speeds, self._ledger.now
        patience = request.deadline - now
        if computing is not None:
            patience = min(patience, computing)
        return [
            key
            for tier, keys in by_tier.items()
            if speeds[tier].expect(len(keys), now) > patience
            for key in keys
        ]

    def computing_s(self, keys: Iterable[BlockKey]) -> float | None:
        """Seconds to compute what these blocks hold; None if the engine's rate is unknown."""
        if self.block_s is None:
            return None
        groups = Counter(key[-GROUP_BYTES:] for key in keys)
        # All groups cover the same tokens; the largest one counts them.
        return max(groups.values(), default=0) * self.block_s

    def _promote(
        self, request: Request, granted: Plan, by_tier: dict[TierId, list[BlockKey]]
    ) -> None:
        blocks = self._pool.blocks
        self._ledger.hold(request, [blocks[key] for key in granted.resident])
        for key in granted.filling:
            if key in request.wishes:  # since this step: for another request
                block = blocks[key]
                assert isinstance(block.fill, Fill), "a block that is not ready is being filled"
                self._ledger.wait_for_fill(request, block.fill, block)
        for tier, keys in by_tier.items():
            self._ledger.promote(tier, keys, request)


def _arrival(request: Request) -> int:
    return request.arrival
