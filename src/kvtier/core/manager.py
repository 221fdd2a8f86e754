"""TieringManager: decides what moves between the primary tier and the others.

Pure and single-threaded: nothing here blocks, sleeps, logs or reads a clock. One engine step is

    manager.begin_step(now, completions)   # what happened since last time
    lookup / prepare_* / complete_*        # the engine's questions
    for command in manager.end_step():     # what should happen next
        ...

The host's duties:
 1. `now` never runs backwards.
 2. Every command of `end_step` is carried out and ends in exactly one `Done`, unless the tier
    has ceased to exist together with everything that could touch its slots.
 3. A key that was HIT is given to `prepare_load` before the next `prepare_store` or `end_step`.
 4. After `reset`, `fence_passed` is called once no device transfer from before it is running.

Lookup never allocates. It answers from the pool and the beliefs and notes what it would take;
`end_step` sends probes and makes grants, in arrival order. While a request waits, its re-ask is
answered from two fields: RETRY for the first key, then MISS, or PENDING in a window group.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable, Sequence

from kvtier.core.admission import Admission
from kvtier.core.borrowers import Borrowers
from kvtier.core.ledger import Ledger
from kvtier.core.limits import Limits
from kvtier.core.pool import Block, BlockPool
from kvtier.core.presence import PRESENT
from kvtier.core.requests import Fill, Position, Request
from kvtier.core.types import (
    BlockKey,
    Command,
    Completion,
    Done,
    Dropped,
    Event,
    Lookup,
    Renewed,
    Slot,
    TierId,
    Wanted,
    group_of,
)


class TieringManager:
    """One engine's cache.

    Args:
        pool: the primary tier.
        num_tiers: tiers below it.
        now: the time, in seconds of any monotonic clock.
        limits: bounds.
        windows: cache groups whose lookups run from the right until a window is satisfied.
        promote_to: per tier, those that get what is promoted from it, as far as they are not
            believed to have it; none by default.
    """

    def __init__(
        self,
        pool: BlockPool,
        num_tiers: int,
        now: float,
        limits: Limits,
        windows: frozenset[int] = frozenset(),
        promote_to: Sequence[Collection[TierId]] = (),
    ) -> None:
        assert len(promote_to) in (0, num_tiers), "one set per tier, or none at all"
        raised = [frozenset(tiers) for tiers in promote_to] or [frozenset()] * num_tiers
        assert all(place not in tiers for place, tiers in enumerate(raised)), "it has that already"
        self.tiers = tuple(TierId(i) for i in range(num_tiers))
        self.windows = windows
        self.pool = pool
        self._ledger = Ledger(pool, num_tiers, now, limits, raised)
        self._limits = limits
        self._storing_max = limits.storing_max or pool.num_slots
        self._blocks = pool.blocks
        self._beliefs = [p.beliefs for p in self._ledger.presence]
        self._now = now
        self._step = 0
        self._admission = Admission(pool, self._ledger, limits, windows, self._hurry)
        self._ranked = self.tiers  # that may be read now, the fastest first
        self._arrivals = 0
        self._requests: dict[str, Request] = {}
        self._borrowers = Borrowers(
            self.tiers, self._ledger, limits.lending_max, self.lookup, self._settle
        )
        self._to_probe: list[dict[BlockKey, None]] = [{} for _ in self.tiers]
        self._probers: list[dict[Request, None]] = [{} for _ in self.tiers]
        self._deadlines: list[tuple[float, int, Request]] = []  # a heap
        self._loads: dict[str, list[Block]] = {}
        self._fenced: list[Block] = []

    # -- the step ---------------------------------------------------------

    def begin_step(self, now: float, completions: Iterable[Completion] = ()) -> None:
        """Take in what happened. May be called more than once before `end_step`."""
        assert now >= self._now, "time runs forward"
        self._now = now
        self._step += 1
        ledger = self._ledger
        ledger.now = now
        for completion in completions:
            match completion:
                case Done(job, ok, fault):
                    ledger.finish(job, ok, fault)
                case Dropped(tier, keys, reason):
                    ledger.lost(tier, keys, reason)
                case Wanted():
                    self._arrivals += 1
                    self._borrowers.ask(completion, self._arrivals)
                case Renewed(job):
                    ledger.lending.renew(job, now)
        ledger.expire()
        while self._deadlines and self._deadlines[0][0] <= now:
            deadline, _, request = heapq.heappop(self._deadlines)
            if request.deadline == deadline and not request.given_up:
                self._give_up(request)
        readable = [t for t in self.tiers if ledger.reads[t].allows(now)]
        self._ranked = tuple(sorted(readable, key=lambda t: ledger.speeds[t].expect(1, now)))

    def end_step(self) -> list[Command]:
        """Decide what to ask of the tiers now."""
        self._borrowers.serve()
        for tier in self.tiers:
            if self._to_probe[tier]:
                # It may have stopped answering since: whoever asked asks again.
                if self._ledger.reads[tier].allows(self._now):
                    self._ledger.probe(tier, tuple(self._to_probe[tier]), self._probers[tier])
                self._to_probe[tier].clear()
                self._probers[tier] = {}
        self._admission.grant_in_turn()
        return self._ledger.take_commands()

    @property
    def busy(self) -> bool:
        """True while the engine must keep stepping: a completion or a decision is due."""
        return self._ledger.busy or bool(self._admission or self._borrowers)

    def take_events(self) -> list[Event]:
        """Facts since the last call, in the order in which they became true."""
        return self._ledger.take_events()

    @property
    def epoch(self) -> int:
        """Counts resets that made the tiers' contents invisible."""
        return self._ledger.epoch

    # -- requests ---------------------------------------------------------

    def open_request(
        self,
        request_id: str,
        tiers: Collection[TierId] | None = None,
        cascade_to: Collection[TierId] | None = None,
        position: Position | None = None,
    ) -> Request:
        """Begin to serve a request.

        Args:
            request_id: its name; one that is known already is replaced.
            tiers: those it may load from; all when None.
            cascade_to: those that may get what it stores; all when None.
            position: end of a key's tokens in its prompt; without it, groups are not aligned.
        """
        if request_id in self._requests:
            self.finish_request(request_id)
        self._arrivals += 1
        allowed = self.tiers if tiers is None else tuple(t for t in self.tiers if t in tiers)
        stores_to = None if cascade_to is None else frozenset(cascade_to)
        request = Request(request_id, self._arrivals, allowed, stores_to, position)
        self._requests[request_id] = request
        return request

    def settle_request(self, request_id: str) -> None:
        """The engine runs the request: what it still wishes for, it does not need any more."""
        if (request := self._requests.get(request_id)) is not None:
            self._settle(request)

    def finish_request(self, request_id: str) -> None:
        """The request ended: give everything back, and refresh what it used, tail first."""
        if (request := self._requests.pop(request_id, None)) is not None:
            self._settle(request)
            self.pool.touch(reversed(request.used))

    def set_prefill_rate(self, block_s: float | None) -> None:
        """How long the engine takes to compute the tokens of one block, in seconds; None: unknown.

        What takes longer to read is then computed, and no wait is longer than computing what is
        waited for would take, but for `wait_min_s`.
        """
        assert block_s is None or block_s > 0, "computing takes time"
        self._admission.block_s = block_s

    def source_of(self, request_id: str, key: BlockKey) -> TierId | None:
        """The tier from which a block was promoted for this request; None: the primary."""
        request = self._requests.get(request_id)
        return request.origin.get(key) if request is not None else None

    def _settle(self, request: Request) -> None:
        request.settle()
        self._withdraw(request)
        self._ledger.let_go(request, tuple(request.held))

    def _give_up(self, request: Request) -> None:
        self._ledger.counts.expired_waits += 1
        request.given_up = True
        request.stop_waiting()
        self._withdraw(request)

    def _withdraw(self, request: Request) -> None:
        """What it asked for in this step is not decided for it any more."""
        self._admission.withdraw(request)
        for probers in self._probers:
            probers.pop(request, None)

    # -- lookup and promotion ---------------------------------------------

    def lookup(self, request: Request, key: BlockKey) -> Lookup:
        """Whether a block can be loaded for this request. Allocates nothing, evicts nothing."""
        if request.step != self._step:
            self._begin_scan(request)
        if request.short:
            group = group_of(key)
            if key == request.firsts.setdefault(group, key):
                return Lookup.RETRY
            return Lookup.PENDING if group in self.windows else Lookup.MISS
        block = self._blocks.get(key)
        if block is not None:
            if block.ready:
                request.scan.append(key)
                return Lookup.HIT
            return self._meet_filling(request, block)
        if request.given_up or key in request.denied:
            return self._miss(request, key)
        return self._look_below(request, key)

    def _miss(self, request: Request, key: BlockKey) -> Lookup:
        """In a window group a gap rules out whatever was found to its right."""
        if self.windows and not request.by_block and (group := group_of(key)) in self.windows:
            scan = request.scan
            while scan and group_of(scan[-1]) == group:
                request.wishes.pop(scan.pop(), None)
        return Lookup.MISS

    def _begin_scan(self, request: Request) -> None:
        request.step = self._step
        request.firsts.clear()
        request.short = request.queued or bool(request.waits)
        if not request.short:
            request.scan.clear()
            request.wishes.clear()

    def _start_waiting(self, request: Request) -> None:
        if request.deadline is None:
            request.deadline = self._now + self._limits.wait_max_s
            heapq.heappush(self._deadlines, (request.deadline, request.arrival, request))

    def _hurry(self, request: Request, seconds: float) -> None:
        """Computing would take that long: no use in waiting longer."""
        deadline = self._now + max(seconds, self._limits.wait_min_s)
        if request.deadline is None or deadline < request.deadline:
            request.deadline = deadline
            heapq.heappush(self._deadlines, (deadline, request.arrival, request))

    def _meet_filling(self, request: Request, block: Block) -> Lookup:
        if request.given_up:
            return self._miss(request, block.key)
        fill = block.fill
        assert isinstance(fill, Fill), "a block that is not ready is being filled"
        self._ledger.wait_for_fill(request, fill, block)
        request.scan.append(block.key)
        self._admission.ask(request)
        self._start_waiting(request)
        return Lookup.PENDING

    def _look_below(self, request: Request, key: BlockKey) -> Lookup:
        unknown: list[TierId] = []
        for tier in self._ranked:
            if tier not in request.tiers:
                continue
            belief = self._beliefs[tier].get(key)
            if belief is None:
                unknown.append(tier)
            elif belief == PRESENT:
                request.wishes[key] = tier
                request.scan.append(key)
                self._admission.ask(request)
                self._start_waiting(request)
                return Lookup.PENDING
            elif belief < 0 or belief <= self._now:
                unknown.append(tier)
        if not unknown:
            return self._miss(request, key)
        for tier in unknown:
            belief = self._beliefs[tier].get(key)
            if belief is not None and belief < 0:
                self._ledger.wait_for_probe(request, tier, key)
            else:
                self._to_probe[tier][key] = None
                self._probers[tier][request] = None
        self._start_waiting(request)
        return Lookup.RETRY

    # -- device <-> primary -----------------------------------------------

    def prepare_load(self, request_id: str, keys: Iterable[BlockKey]) -> list[Slot | None]:
        """Pin blocks for a load into the device.

        Returns:
            The slot of each key, in order; None for one that is not readable.
        """
        slots: list[Slot | None] = []
        blocks: list[Block] = []
        for key in keys:
            block = self._blocks.get(key)
            if block is None or not block.ready:
                slots.append(None)
                continue
            self.pool.pin(block)
            blocks.append(block)
            slots.append(block.slot)
        self._loads.setdefault(request_id, []).extend(blocks)
        if (request := self._requests.get(request_id)) is not None:
            self._settle(request)
            request.used.extend([b.key for b in blocks])
        self._ledger.cascades.offer_owed(blocks)
        return slots

    def complete_load(self, request_id: str) -> None:
        """The device has read everything that was prepared for this request."""
        for block in reversed(self._loads.pop(request_id, ())):
            self.pool.unpin(block)

    def prepare_store(
        self,
        request_id: str,
        keys: Sequence[BlockKey],
        position: Callable[[BlockKey], int] | None = None,
    ) -> dict[BlockKey, Slot]:
        """Reserve slots for keys that are not held, in order; the longest head that fits.

        Args:
            request_id: who stores.
            keys: in the engine's order.
            position: end of a key's tokens in the prompt, which decides what is a head when keys
                of several groups do not all fit; the order given when None.
        """
        blocks = self._blocks
        new = [key for key in dict.fromkeys(keys) if key not in blocks]
        if len(new) < len(keys):
            old = [block for key in keys if (block := blocks.get(key)) is not None and block.ready]
            self._ledger.cascades.offer_owed(old)  # first: what it pins is used by that pin
            self.pool.use([b.key for b in reversed(old)])
        room = min(self.pool.available, self._storing_max - self._ledger.storing)
        if len(new) > room:
            self._ledger.counts.unstored_blocks += len(new) - room
            kept = set((sorted(new, key=position) if position is not None else new)[:room])
            new = [key for key in new if key in kept]
        request = self._requests.get(request_id)
        fill = Fill(cascade_to=request.cascade_to if request is not None else None)
        fill.blocks = self._ledger.allocate(new, fill)
        self._ledger.storing += len(new)
        if request is not None:
            request.used.extend(keys)
        return {b.key: b.slot for b in fill.blocks}

    def storing(self, keys: Iterable[BlockKey]) -> list[tuple[BlockKey, Slot]]:
        """Those of the keys that the device is storing now, with their slots."""
        found = []
        for key in keys:
            block = self._blocks.get(key)
            if block is not None and isinstance(block.fill, Fill) and block.fill.tier is None:
                found.append((key, block.slot))
        return found

    def complete_store(
        self, keys: Iterable[BlockKey], bad: Collection[BlockKey] = frozenset()
    ) -> None:
        """The device has written these; all but `bad` become readable and are cascaded."""
        left = {key for key, _ in self.storing(keys)}
        while left:
            fill = self._blocks[next(iter(left))].fill
            assert isinstance(fill, Fill), "`storing` returns blocks that are being filled"
            mine = [b for b in fill.blocks if b.fill is fill and b.key in left]
            left.difference_update([b.key for b in mine])
            self._ledger.storing -= len(mine)
            good = [b for b in mine if b.key not in bad]
            self._ledger.publish(good)
            self._ledger.cascades.begin(good, fill.cascade_to)
            self._ledger.end_fill(fill, good)
            for block in reversed(mine):
                if not block.ready:
                    self.pool.forget(block)
                self.pool.unpin(block)

    # -- reset ------------------------------------------------------------

    def reset(self, *, keep_tiers: bool = False) -> None:
        """Forget everything in the primary at once, and wait for nothing.

        Slots under a tier's I/O come back when it ends; slots under the device's transfers when
        `fence_passed` is called. The engine completes none of those transfers here.

        Args:
            keep_tiers: the tiers' contents stay valid; else a new epoch begins, under which
                nothing stored before is visible.
        """
        for request in (*self._requests.values(), *self._borrowers):
            self._settle(request)
        for block in self._blocks.values():
            if isinstance(block.fill, Fill) and block.fill.tier is None:
                self._fenced.append(block)
        self._ledger.storing = 0
        for blocks in self._loads.values():
            self._fenced += blocks
        self._loads.clear()
        for tier in self.tiers:
            self._to_probe[tier].clear()
        self._ledger.reset(keep_tiers=keep_tiers)
        if not keep_tiers:
            self._borrowers.dismiss()

    def fence_passed(self) -> None:
        """No device transfer from before the latest reset is running any more."""
        for block in self._fenced:
            self.pool.unpin(block)
        self._fenced.clear()

    # -- looking in -------------------------------------------------------

    @property
    def ledger(self) -> Ledger:
        """The books, to be read for metrics."""
        return self._ledger

    def check(self) -> None:
        """Assert every invariant. O(n): for tests and the simulator."""
        self.pool.check()
        self._ledger.check()
        storing = sum(
            isinstance(b.fill, Fill) and b.fill.tier is None for b in self._blocks.values()
        )
        assert storing == self._ledger.storing <= self._storing_max, "stores over budget"
        for request in (*self._requests.values(), *self._borrowers):
            assert request.deadline is None or request.given_up or self._now < request.deadline, (
                "a wait without an end"
            )
            assert not request.waiting or request.deadline is not None, "waits without a deadline"
            assert not request.held or self._now < request.held_until, "a hold without an end"
            assert not (request.queued and request.held), "holds and waits"
            assert request.queued <= (request in self._admission), "queued, but in no queue"
