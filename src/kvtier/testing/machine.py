"""A state machine that every change of the core has to survive.

Engine, tiers and time are adversaries. `memory` is the truth about bytes: it says which content
lies in each slot, and a store or a promotion smears its slots from the moment it is submitted
until it has ended, as direct memory access would. The rules here are whole stories, so that what
is rare happens often.
"""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import rule

from kvtier.core.requests import Fill
from kvtier.core.types import Dropped, TierId, group_of
from kvtier.testing.adversaries import Adversaries, masks, names, prompts, tiers
from kvtier.testing.engine import key_of
from kvtier.testing.truth import ABSENT_S, JOB_S, NAMES, NUM_TIERS


class TieringMachine(Adversaries):
    """Drives a real `TieringManager`; subclasses choose the cache groups."""

    @rule(
        name=names, bad=masks, rounds=st.integers(1, 5), then=st.sampled_from(["load", "nothing"])
    )
    def ask_and_serve(self, name: str, bad: int, rounds: int, then: str) -> None:
        """Several rounds of a request, with tiers that answer at once."""
        for _ in range(rounds):
            if self._ask(name, then) is not None:
                return
            self.step(0.0)
            self._serve(bad)
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

    def _serve(self, bad: int = 0) -> None:
        for command in [c for c in self.running if not self.hung[c.tier]]:
            self._end(command, bad)

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
            assert hit >= self._fitting(len(prompt)), "less than what fits the budget"
        read = set(self.reads)
        assert len(read) == len(self.reads), "a block was read twice"
        used = {k for _, transfer in self.loads for k in transfer.slots}
        if cold:
            assert read <= used, "a block was read for nothing"

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
        self.step(0.0)
        self._serve()
        for tier, presence in enumerate(self.manager.ledger.presence):  # a sweep of each tier
            lost = [k for k in presence.beliefs if (self.epoch, k) not in self.tiers[tier]]
            self.inbox.append(Dropped(TierId(tier), tuple(lost)))
        self.listen(0.0)
        self.step(ABSENT_S)
        assert not self.running, "a command without a request"
        self._whole()

    # -- what must always hold --------------------------------------------

    def teardown(self) -> None:
        """Everything ends, and the pool is whole again."""
        if hasattr(self, "manager"):
            self._calm()
