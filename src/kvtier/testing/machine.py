"""A state machine that every change of the core has to survive.

Engine, tiers and time are adversaries. `memory` is the truth about bytes: it says which content
lies in each slot, and a store or a promotion smears its slots from the moment it is submitted
until it has ended, as direct memory access would. The rules here are whole stories, so that what
is rare happens often.
"""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import rule

from kvtier.core.health import State
from kvtier.core.requests import Fill
from kvtier.core.types import Dropped, Fault, Lend, Lookup, TierId, group_of
from kvtier.testing.adversaries import Adversaries, faults, masks, names, prompts, tiers
from kvtier.testing.engine import key_of
from kvtier.testing.truth import (
    ALL_TIERS,
    BACKOFF_MAX_S,
    BACKOFF_S,
    JOB_S,
    NAMES,
    NUM_TIERS,
    QUIET_S,
    WAIT_S,
)


class TieringMachine(Adversaries):
    """Drives a real `TieringManager`; subclasses choose the cache groups."""

    @rule(
        name=names,
        bad=masks,
        rounds=st.integers(1, 5),
        then=st.sampled_from(["load", "nothing"]),
        fault=faults,
    )
    def ask_and_serve(
        self, name: str, bad: int, rounds: int, then: str, fault: Fault | None
    ) -> None:
        """Several rounds of a request, with tiers that answer at once."""
        for _ in range(rounds):
            if self._ask(name, then) is not None:
                return
            self.step(0.0)
            self._serve(bad, fault)
            self._check_all()

    @rule(bad=masks, rounds=st.integers(1, 4))
    def all_ask(self, bad: int, rounds: int) -> None:
        """All requests ask in each step, as the engine does."""
        for _ in range(rounds):
            for name in tuple(self.clients):
                self._ask(name, "load")
            self.step(0.0)
            self._serve(bad)
            self._check_all()

    def _serve(self, bad: int = 0, fault: Fault | None = None) -> None:
        for command in [c for c in self.running if not self.hung[c.tier]]:
            self._end(command, bad, fault)

    @rule(tier=tiers, fault=faults, dt=st.sampled_from([0.0, BACKOFF_S, BACKOFF_MAX_S]))
    def fails(self, tier: TierId, fault: Fault | None, dt: float) -> None:
        """All that a tier is asked for now fails; then some time passes."""
        for command in [c for c in self.running if c.tier == tier and not self.hung[tier]]:
            self._end(command, 255, fault)
        self.listen(0.0)
        self._check_all()
        self.step(dt)

    @rule(tier=tiers, prompt=prompts, more=prompts)
    def beside_a_hung_tier(
        self, tier: TierId, prompt: tuple[int, ...], more: tuple[int, ...]
    ) -> None:
        """Reads of one tier hang: they keep its share; the other one serves what fits beside."""
        self._calm()
        self.reset(False)
        self.fence()
        self.neighbour_fills(tier, prompt, 0)
        self.client("a", prompt).request.tiers = (tier,)
        self._ask("a", "nothing")
        self.step(0.0)
        self._serve()
        self.listen(0.0)
        self._ask("a", "nothing")
        self.hung[tier] = True
        for _ in range(4):
            self.step(WAIT_S / 3)
            self._check_all()
        assert self._ask("a", "settle") == 0, "waits for a hung tier"
        other = TierId(1 - tier)
        self.neighbour_fills(other, more, 0)
        self.client("b", more).request.tiers = (other,)
        stuck = self.manager.ledger.stuck[tier]
        assert stuck <= (self.limits.reading_max or self.limits.promoting_max), "over its share"
        hit = self._rounds("b", 6)
        assert hit is not None, "no answer beside a hung tier"
        assert hit >= self._fitting(len(more), self.limits.promoting_max - stuck), "less than fits"

    def _rounds(self, name: str, most: int) -> int | None:
        for _ in range(most):
            if (hit := self._ask(name, "load")) is not None:
                return hit
            self.step(0.0)
            self._serve()
            self.listen(0.0)
            self._check_all()
        return None

    @rule(tier=tiers, prompt=prompts, but=masks, cold=st.booleans())
    def lends(self, tier: TierId, prompt: tuple[int, ...], but: int, cold: bool) -> None:
        """In peace, a tier that asks gets what the primary and the other tiers have, in order."""
        self._calm()
        if cold:
            self.reset(True)
            self.fence()
        self.neighbour_fills(tier, prompt, 0)
        other = TierId(1 - tier)
        self.neighbour_fills(other, prompt, but)
        keys = [key_of(block, group) for group in self.groups.order for block in prompt]
        self.want(tier, prompt, True, False)
        self.listen(0.0)
        answer: Lend | None = None
        for _ in range(6):
            self.step(0.0)
            assert all(c.tier == other or isinstance(c, Lend) for c in self.running), (
                "a tier is asked for what it wants itself"
            )
            answer = next((c for c in self.running if isinstance(c, Lend)), answer)
            self._serve()
            self.listen(0.0)
            self._check_all()
        assert answer is not None, "no answer"
        if cold and not self.groups.windows:
            has = [k for k in keys if (self.epoch, k) in self.tiers[other]]
            fits = min(self.limits.promoting_max, self.limits.reading_max or len(keys))
            asked = keys[: self.limits.lending_max]
            right = [k for k in has if k in asked]
            if len(right) <= fits:
                assert list(answer.keys) == right, "less than could be lent"

    @rule(name=names, prompt=prompts)
    def repair(self, name: str, prompt: tuple[int, ...]) -> None:
        """What a tier did not get is written when it is used again, until it has it."""
        self._calm()
        self.client(name, prompt)
        for _ in range(3 + 3 * len(prompt)):
            self.store(name, len(prompt), False, True)
            while self.stores:
                self.store_ends(0, 0, 0, 20)
            self.step(0.0)
            self._serve()
            self.listen(0.0)
            self._check_all()
        resident = {k for k, b in self.manager.pool.blocks.items() if b.ready}
        keys = {key_of(block, group) for group in self.groups.order for block in prompt}
        for tier in self.clients[name].cascade_to:
            held = {key for epoch, key in self.tiers[tier] if epoch == self.epoch}
            lacking = (keys & resident) - held
            known = {k for k in lacking if tier in self.may_cascade.get(k, ())}
            assert not known, "used again and again, but never written"

    @rule(prompt=prompts, tier=tiers, cold=st.booleans())
    def alone(self, prompt: tuple[int, ...], tier: TierId, cold: bool) -> None:
        """In peace, a prompt that a tier holds is served: soon, all that fits, each block once."""
        self._calm()
        if cold:
            self.reset(True)
            self.fence()
        self.neighbour_fills(tier, prompt, 0)
        self.finish("a")
        self.client("a", prompt)
        self.reads.clear()
        hit: int | None = None
        # A promotion may evict readable blocks beyond a cut, which moves the windows once more.
        for _ in range(6 if cold or not self.groups.windows else 6 + 4 * len(prompt)):
            hit = self._ask("a", "load")
            if hit is not None:
                break
            self.step(0.0)
            self._serve()
            self.listen(0.0)
            self._check_all()
            for key in self.reads:
                block = self.manager.pool.blocks.get(key)
                assert block is not None, "a promoted block is gone before its load"
                assert block.pins, "a promoted block is not held for its load"
        assert hit is not None, "no answer in a bounded number of steps"
        if cold or not self.groups.windows:  # readable blocks beyond a cut move its boundary
            fits = self._fitting(len(prompt), self.limits.promoting_max)
            assert hit >= fits, "less than what fits the budget"
        read = set(self.reads)
        assert len(read) == len(self.reads), "a block was read twice"
        used = {k for _, transfer in self.loads for k in transfer.slots}
        if cold:
            assert read <= used, "a block was read for nothing"

    @rule(prompt=prompts, tier=tiers, lacks=masks)
    def raises(self, prompt: tuple[int, ...], tier: TierId, lacks: int) -> None:
        """In peace, what is promoted from a tier comes to where it is to be, once; what is over a
        budget is owed.
        """
        self._calm()
        self.reset(False)
        self.fence()
        other = TierId(1 - tier)
        self.neighbour_fills(tier, prompt, 0)
        self.neighbour_fills(other, prompt, lacks)
        had = {key for epoch, key in self.tiers[other] if epoch == self.epoch}
        self.client("a", prompt)
        self.reads.clear()
        self.writes.clear()
        self._rounds("a", 12)
        for _ in range(3):
            self.step(0.0)
            self._serve()
            self.listen(0.0)
            self._check_all()
        assert len(self.writes) == len(set(self.writes)), "written twice"
        if other in self.promote_to[tier]:
            has = {key for epoch, key in self.tiers[other] if epoch == self.epoch}
            owed = self.manager.ledger.cascades.owed[other].keys()
            for key in set(self.reads) - had:
                gone = key not in self.manager.pool.blocks
                assert gone or key in has or key in owed, "promoted, but not where it is to be"

    @rule(prompt=prompts, tier=tiers)
    def lost(self, prompt: tuple[int, ...], tier: TierId) -> None:
        """What a tier lost in silence is noticed when it is read, and costs a few steps."""
        self.alone(prompt, tier, cold=True)
        self._calm()
        self.reset(True)
        self.fence()
        for held in self.tiers:
            held.clear()
        self.client("b", prompt)
        for _ in range(4 * NUM_TIERS):
            hit = self._ask("b", "nothing")
            if hit is not None:
                break
            self.step(0.0)
            self._serve()
            self.listen(0.0)
        assert hit == 0, "a hit on nothing, or no answer"

    @rule(
        order=st.permutations(NAMES),
        which=st.lists(prompts, min_size=len(NAMES), max_size=len(NAMES)),
        tier=tiers,
        cold=st.booleans(),
        ends=st.booleans(),
    )
    def rush(
        self,
        order: list[str],
        which: list[tuple[int, ...]],
        tier: TierId,
        cold: bool,
        ends: bool,
    ) -> None:
        """All ask in the same steps, while the device stores: turns, and what they share."""
        self._calm()
        if cold:
            self.reset(True)
            self.fence()
        for name, prompt in zip(order, which, strict=True):
            self.neighbour_fills(tier, prompt, 0)
            self.client(name, prompt)
        self._all_ask_once(order)
        self._serve()
        self.listen(0.0)
        self.store(order[-1], 3, False, True)
        self._all_ask_once(order)
        blocks = self.manager.pool.blocks
        for client in self.clients.values():
            request = client.request
            fills = all(isinstance(wait, Fill) for wait in request.waits)
            if request.waits and fills and not request.queued and not request.denied:
                for key in request.wishes:
                    assert key in blocks, "granted in part"
                    assert blocks[key].ready or blocks[key].fill in request.waits, "does not hold"
        if ends:
            while self.stores:
                self.store_ends(0, 0, 0, 20)
            self._check_all()
            self._in_waves()

    def _in_waves(self) -> None:
        """Whoever has an answer loads and ends: so all are answered, and none by its deadline."""
        for _ in range(15 * len(NAMES)):
            for name in tuple(self.clients):
                if self._ask(name, "load") is not None:
                    if any(owner == name for owner, _ in self.loads):
                        self.load_ends([owner for owner, _ in self.loads].index(name))
                    self.finish(name)
            if not self.clients:
                return
            self.step(0.0)
            self._serve()
            self.listen(0.0)
            self._check_all()
        raise AssertionError("waits for its turn without end")

    def _all_ask_once(self, order: list[str]) -> None:
        for name in order:
            self._ask(name, "nothing")
        self.step(0.0)
        self._check_all()

    @rule(prompt=prompts, tier=tiers, at=st.integers(0, 5))
    def gap(self, prompt: tuple[int, ...], tier: TierId, at: int) -> None:
        """A tier lacks one block of each window group: what is right of it is no window."""
        self.neighbour_fills(tier, prompt, 0)
        for group in self.groups.windows or ():
            for held in self.tiers:
                held.discard((self.epoch, key_of(prompt[at % len(prompt)], group)))
        self._calm()
        self.reset(True)
        self.fence()
        self.client("a", prompt)
        self.reads.clear()
        hit: int | None = None
        for _ in range(12):
            hit = self._ask("a", "load")
            if hit is not None:
                break
            self.step(0.0)
            self._serve()
            self.listen(0.0)
        assert hit is not None, "no answer in a bounded number of steps"
        if not self.clients["a"].request.denied:
            used = {k for _, transfer in self.loads for k in transfer.slots}
            windows = {k for k in self.reads if self.groups.window(group_of(k))}
            assert windows <= used or not hit, "a part of a window was read"

    @rule(
        name=names,
        count=st.integers(1, 6),
        then=st.sampled_from(["step", "late", "reset", "again"]),
    )
    def store_at_once(self, name: str, count: int, then: str) -> None:
        """A whole store, so that cascades happen often; at times one that is not sent."""
        before = len(self.stores)
        self.store(name, count, False, True)
        if len(self.stores) > before:
            self.store_ends(before, 0, 0, 20)
        if then == "again":
            self.store(name, count, True, False)
        elif then == "reset":
            self.reset(count % 2 == 0)
        if then == "late":
            self.listen(JOB_S)
        else:
            self.step(0.0)

    @rule(name=names, count=st.integers(1, 4))
    def ask_while_written(self, name: str, count: int) -> None:
        """A request asks for what a cascade from before a reset is writing."""
        self.store(name, count, False, True)
        self.step(0.0)
        self.reset(True)
        self._ask(name, "nothing")
        self._serve()
        self.listen(0.0)
        self.step(0.0)

    def _calm(self) -> None:
        """Everything in flight ends, all requests end, all that was doubted is forgotten."""
        self.hung = [False] * NUM_TIERS
        while self.stores:
            self.store_ends(0, 0, 0, 20)
        while self.loads:
            self.load_ends(0)
        if self.fenced:
            self.fence()
        for name in tuple(self.clients):
            self.finish(name)
        self.manager.set_prefill_rate(None)
        for _ in range(40):
            self.step(0.0)
            self._serve()
            self.listen(0.0)  # what was promoted is written elsewhere now
            if not self.running and not self.asked and not self.manager.ledger._outbox:
                break
        for tier, presence in enumerate(self.manager.ledger.presence):  # a sweep of each tier
            lost = [k for k in presence.beliefs if (self.epoch, k) not in self.tiers[tier]]
            self.inbox.append(Dropped(TierId(tier), tuple(lost)))
        self.listen(0.0)
        self.step(QUIET_S)  # so that a tier that was slow is tried again
        assert not self.running, "a command without a request"
        for tier in ALL_TIERS:
            self._mend(tier)
        self._whole()

    def _mend(self, tier: TierId) -> None:
        """A tier that works again is found out by trials, one after the other."""
        ledger = self.manager.ledger
        for attempt in range(4):
            if ledger.reads[tier].state is State.CLOSED:
                break
            self.strangers += 1
            key = key_of(self.strangers)
            self.tiers[tier].add((self.epoch, key))
            self.once[tier].add((self.epoch, key))
            request = self.manager.open_request("trial", (tier,), ())
            for _ in range(4):
                answer = self.manager.lookup(request, key)
                self.step(0.0)
                assert len(self.running) <= 1, "more than one trial"
                self._serve()
                self.listen(0.0)
            assert answer is Lookup.HIT or attempt == 0, "a trial was in vain"
            self.manager.finish_request("trial")
        assert ledger.reads[tier].state is State.CLOSED, "never used again"
        for _ in range(3):
            self.strangers += 1
            slots = self.manager.prepare_store("trial", [key_of(self.strangers)])
            self._smear(slots.values())
            for key, slot in slots.items():
                self.memory[slot] = (self.epoch, key)
                self.may_cascade[key] = set(ALL_TIERS)
                self.met[key] = 2
            self.manager.complete_store(slots)
            self.manager.prepare_store("trial", list(slots))  # the second touch
            self.step(0.0)
            self._serve()
            self.listen(0.0)
        assert ledger.writes[tier].state is State.CLOSED, "never written to again"

    # -- what must always hold --------------------------------------------

    def teardown(self) -> None:
        """Everything ends, and the pool is whole again."""
        if hasattr(self, "manager"):
            self._calm()
