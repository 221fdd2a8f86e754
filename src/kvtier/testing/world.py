"""A manager told as a story: the engine above it scans as vLLM does, and the tiers below it answer
at once, unless they hang or fail.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from kvtier.core.limits import Limits
from kvtier.core.manager import TieringManager
from kvtier.core.policies.lru import LRU
from kvtier.core.pool import BlockPool, Policy
from kvtier.core.requests import Request
from kvtier.core.types import (
    BlockKey,
    Command,
    Completion,
    Done,
    Fault,
    Lend,
    Probe,
    Read,
    TierId,
    Wanted,
    Write,
)
from kvtier.testing.engine import Groups, key_of, scan

T0, T1 = TierId(0), TierId(1)


class World:
    """See the module.

    Attributes:
        holding: what each tier holds.
        hung: tiers that do not answer; `stuck` are the commands that they got.
        faults: tiers that fail whatever they are asked, and how.
        lends: answers to what tiers wanted; they end when `give_back` is called.
        inbox: completions for the next step.
        reads: how often each block was read.
        used: blocks loaded by the engine.
    """

    def __init__(
        self,
        slots: int,
        promoting: int,
        *,
        writing: int = 4,
        tiers: int = 1,
        groups: Groups | None = None,
        policy: Policy | None = None,
        promote_to: Sequence[Collection[TierId]] = (),
        **limits: Any,
    ) -> None:
        self.groups = groups or Groups()
        self.limits = Limits(promoting, writing, **limits)
        self.pool = BlockPool(slots, LRU(slots) if policy is None else policy)
        windows = frozenset(self.groups.windows or ())
        self.manager = TieringManager(self.pool, tiers, 0.0, self.limits, windows, promote_to)
        self.now = 0.0
        self.holding: list[set[BlockKey]] = [set() for _ in range(tiers)]
        self.hung: set[TierId] = set()
        self.stuck: list[Command] = []
        self.faults: dict[TierId, Fault] = {}
        self.lends: list[Lend] = []
        self.inbox: list[Completion] = []
        self.reads: Counter[BlockKey] = Counter()
        self.used = 0
        self.prompts: dict[str, tuple[int, ...]] = {}
        self.requests: dict[str, Request] = {}
        self.manager.begin_step(0.0)

    def fill(self, tier: TierId, prompt: Iterable[int]) -> None:
        """A tier holds a prompt, all groups of it."""
        self.holding[tier] |= {key_of(i, g) for g in self.groups.order for i in prompt}

    def open(self, name: str, prompt: Iterable[int], tiers: Iterable[TierId] | None = None) -> None:
        """A request arrives; it may load from these tiers."""
        self.prompts[name] = tuple(prompt)
        only = None if tiers is None else tuple(tiers)
        self.requests[name] = self.manager.open_request(name, only)

    def ask(self, name: str) -> int | None:
        """Blocks that can be loaded now; None: not known yet."""
        request = self.requests[name]
        return scan(lambda key: self.manager.lookup(request, key), self.prompts[name], self.groups)

    def hang_in_a_promotion(self, name: str, i: int) -> None:
        """A request waits for block `i`, whose promotion out of the first tier hangs."""
        self.fill(T0, [i])
        self.open(name, [i])
        self.ask(name)
        self.step()
        self.hung.add(T0)
        self.ask(name)
        self.step()

    def load(self, name: str, hit: int) -> None:
        """The engine begins to load a hit."""
        keys = self.groups.needed(self.prompts[name], hit)
        assert None not in self.manager.prepare_load(name, keys), "a HIT was not there"
        self.used += len(keys)

    def loaded(self, name: str) -> None:
        """The load ended, and the request with it."""
        self.manager.complete_load(name)
        self.manager.finish_request(name)
        del self.requests[name]

    def step(self, dt: float = 0.0) -> list[Command]:
        """End the step; tiers that do not hang answer to the next one, `dt` seconds later."""
        commands = self.manager.end_step()
        self.manager.check()
        for command in commands:
            if isinstance(command, Lend):
                self.lends.append(command)
            elif command.tier in self.hung:
                self.stuck.append(command)
            else:
                self.answer(command)
        self.now += dt
        inbox, self.inbox = self.inbox, []
        self.manager.begin_step(self.now, inbox)
        self.manager.check()
        return commands

    def answer(self, command: Command) -> None:
        """A command ends."""
        if (fault := self.faults.get(command.tier)) is not None:
            self.inbox.append(Done(command.job, frozenset(), fault))
            return
        tier = self.holding[command.tier]
        if isinstance(command, Write):
            tier.update(command.keys)
        elif isinstance(command, Read):
            self.reads.update(command.keys)
        self.inbox.append(Done(command.job, frozenset(k for k in command.keys if k in tier)))

    def answer_stuck(self) -> None:
        """Whatever hung ends."""
        stuck, self.stuck = self.stuck, []
        for command in stuck:
            self.answer(command)

    def want(
        self, tier: TierId, ticket: int, keys: Iterable[BlockKey], *, promote: bool = False
    ) -> None:
        """A tier asks for blocks."""
        self.inbox.append(Wanted(tier, ticket, tuple(keys), promote))

    def give_back(self, lend: Lend) -> None:
        """A tier has read what it was lent."""
        self.lends.remove(lend)
        self.inbox.append(Done(lend.job, frozenset(lend.keys)))

    def until_answered(self, name: str, most: int = 8) -> int:
        """What a request gets, in a bounded number of steps."""
        for _ in range(most):
            hit = self.ask(name)
            if hit is not None:
                return hit
            self.step()
        raise AssertionError(f"{name} was not answered in {most} steps")

    def serve(self, name: str, prompt: Iterable[int], tiers: Iterable[TierId] | None = None) -> int:
        """A whole request; returns its hit."""
        self.open(name, prompt, tiers)
        hit = self.until_answered(name)
        self.load(name, hit)
        self.loaded(name)
        return hit

    def store(self, name: str, prompt: Iterable[int]) -> list[BlockKey]:
        """Store blocks of group 0 at once; returns those that had room."""
        slots = self.manager.prepare_store(name, [key_of(i) for i in prompt])
        self.manager.complete_store(slots)
        return list(slots)

    def whole(self) -> None:
        """All ended: nothing may be left."""
        self.step()
        self.step()
        assert self.pool.available == self.pool.num_slots, "slots leaked"
        assert not any(self.manager.ledger.jobs_in_flight), "jobs leaked"
        assert self.manager.ledger.promoting == 0, "the promotion budget leaked"
        assert not self.manager.ledger.lending.leases, "leases leaked"
        assert not self.manager.busy, "busy with nothing"


def asked(commands: Iterable[Command], tier: TierId) -> list[type]:
    """What kinds of commands went to a tier."""
    return [type(c) for c in commands if c.tier == tier and isinstance(c, Probe | Read | Write)]
