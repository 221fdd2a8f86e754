"""What is true while the core is driven: which bytes lie where, which transfers run.

Every transfer is known here too, so that the manager's own books are never the only witness.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import ClassVar

from hypothesis.stateful import RuleBasedStateMachine, invariant

from kvtier.core.limits import Limits
from kvtier.core.manager import TieringManager
from kvtier.core.presence import PRESENT
from kvtier.core.requests import Request
from kvtier.core.types import (
    BlockKey,
    Cleared,
    Command,
    Completion,
    JobId,
    Lookup,
    Probe,
    Removed,
    Slot,
    Stored,
    TierId,
    group_of,
)
from kvtier.testing.engine import Groups

Content = tuple[int, BlockKey]
"""What bytes are: the epoch under which they were computed, and their key."""

NUM_TIERS = 2
PROMPTS = ((0, 1, 2, 3), (0, 1, 4, 5), (0, 1), (2, 6, 7), (0, 1, 2, 3, 8, 9))
NAMES = ("a", "b", "c", "d")
WAIT_S, JOB_S, HOLD_S, ABSENT_S = 6.0, 5.0, 3.0, 2.0


@dataclass(slots=True, eq=False)
class Transfer:
    """A transfer of the device: a load reads its slots, a store writes them."""

    slots: dict[BlockKey, Slot]
    before: dict[Slot, Content | None] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Client:
    """What the engine knows of one request."""

    request: Request
    prompt: tuple[int, ...]
    asked_since: float | None = None
    held_since: float | None = None


class Truth(RuleBasedStateMachine):
    """Every transfer that runs, every byte, and every check; the rules are in its subclasses.

    Attributes:
        memory: slot -> what lies there; None while it is smeared, or garbage.
        tiers: what each tier holds.
        running: commands that the tiers carry out.
        unheard: commands that ended, of which the manager was not told yet.
    """

    groups: ClassVar[Groups] = Groups(full=(0,), windows={1: 2})
    num_slots: int
    limits: Limits
    memory: list[Content | None]
    manager: TieringManager

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.epoch = 0
        self.clients: dict[str, Client] = {}
        self.tiers: list[set[Content]] = [set() for _ in range(NUM_TIERS)]
        self.once: list[set[Content]] = [set() for _ in range(NUM_TIERS)]  # ever held
        self.hung = [False] * NUM_TIERS
        self.stores: list[Transfer] = []
        self.loads: list[tuple[str, Transfer]] = []
        self.fenced: list[tuple[bool, Transfer]] = []  # whether it stores, and what
        self.running: list[Command] = []
        self.inbox: list[Completion] = []
        self.unheard: dict[JobId, Command] = {}  # ended, but the manager was not told yet
        self.ended: list[JobId] = []
        self.log: dict[TierId | None, set[BlockKey]] = {None: set()}
        self.log.update({TierId(t): set() for t in range(NUM_TIERS)})
        self.reads: list[BlockKey] = []

    @invariant()
    def consistent(self) -> None:
        """Every check, after every rule."""
        self._check_all()

    def _check_all(self) -> None:
        self.manager.check()
        assert self.manager.epoch == self.epoch, "epochs differ"
        self._check_bytes()
        self._check_pins()
        self._check_log()
        self._check_waits()

    def _check_bytes(self) -> None:
        for key, block in self.manager.pool.blocks.items():
            if block.ready:
                assert self.memory[block.slot] == (self.epoch, key), "readable, with wrong bytes"

    def _check_pins(self) -> None:
        """No slot is kept from use but for a transfer or a hold."""
        reasons = self._slots_in_transfer()
        for command in [*self.unheard.values(), *self.manager.ledger._outbox]:
            if not isinstance(command, Probe):
                reasons.update(command.slots)
        for client in self.clients.values():
            reasons.update(b.slot for b in client.request.held.values())
        assert self.manager.pool.pinned == len(reasons), "pins without a reason, or none"
        for tier, owed in enumerate(self.manager.ledger.owed):
            assert owed.keys() <= self.manager.pool.blocks.keys(), f"owed to {tier}, but gone"

    def _check_log(self) -> None:
        for event in self.manager.take_events():
            log = self.log[event.tier]
            match event:
                case Stored(_, keys):
                    assert log.isdisjoint(keys), "stored twice"
                    log.update(keys)
                case Removed(_, keys, _):
                    assert log.issuperset(keys), "removed, but was not there"
                    log.difference_update(keys)
                case Cleared():
                    assert not log, "cleared, with keys that were not removed"
        readable = {k for k, b in self.manager.pool.blocks.items() if b.ready}
        assert self.log[None] == readable, "the log of the primary differs"
        for tier, presence in enumerate(self.manager.ledger.presence):
            believed = {k for k, b in presence.beliefs.items() if b == PRESENT}
            assert self.log[TierId(tier)] == believed, "the log of a tier differs"
            held = {key for epoch, key in self.once[tier] if epoch == self.epoch}
            assert believed <= held, "believed, but never there under this epoch"

    def _check_waits(self) -> None:
        for client in self.clients.values():
            request = client.request
            if request.waiting:
                assert client.asked_since is not None, "waits for nobody"
                assert self.now < client.asked_since + WAIT_S, "waits for ever"
            if not request.held:
                client.held_since = None
            elif client.held_since is None:
                client.held_since = self.now
            else:
                assert self.now < client.held_since + WAIT_S + HOLD_S, "holds for ever"

    def _whole(self) -> None:
        manager, ledger = self.manager, self.manager.ledger
        self._check_all()
        assert not manager.busy, "busy with nothing"
        assert manager.pool.available == self.num_slots, "slots leaked"
        assert not any(ledger.jobs_in_flight), "jobs leaked"
        assert ledger.promoting == 0, "the promotion budget leaked"
        assert not any(ledger.writing), "the cascade budget leaked"

    def _slots_in_transfer(self) -> set[Slot]:
        busy: set[Slot] = set()
        for transfer in [*self.stores, *(t for _, t in self.loads), *(t for _, t in self.fenced)]:
            busy.update(transfer.slots.values())
        for command in self.running:
            if not isinstance(command, Probe):
                busy.update(command.slots)
        return busy

    def _smear(self, slots: Iterable[Slot]) -> None:
        busy = self._slots_in_transfer()
        for slot in slots:
            assert slot not in busy, "a slot was given away while a transfer touches it"
            self.memory[slot] = None

    def _unchanged(self, transfer: Transfer) -> None:
        for slot, content in transfer.before.items():
            assert self.memory[slot] == content, "bytes changed under a load"

    def _right_bytes(self, keys: tuple[BlockKey, ...], slots: tuple[Slot, ...], epoch: int) -> None:
        for key, slot in zip(keys, slots, strict=True):
            assert self.memory[slot] == (epoch, key), "wrong bytes under a cascade"

    def _wishes_of(self, request: Request) -> object:
        manager = self.manager
        return (
            tuple(request.scan),
            dict(request.wishes),
            [tuple(keys) for keys in manager._to_probe],
            request in manager._queue,
            set(request.held),
        )

    def _check_short(self, answers: list[tuple[BlockKey, Lookup]]) -> None:
        most = len(self.groups.full) * 2 + sum(n + 1 for n in (self.groups.windows or {}).values())
        assert len(answers) <= most, "a re-ask that is not short"
        firsts: dict[int, BlockKey] = {}
        for key, answer in answers:
            group = group_of(key)
            if firsts.setdefault(group, key) == key:
                assert answer in {Lookup.RETRY, Lookup.PENDING}, "the first key is not known yet"
            else:
                right = Lookup.PENDING if self.groups.window(group) else Lookup.MISS
                assert answer is right, "a complete answer in as few keys as possible"

    def _fitting(self, length: int) -> int:
        windows = sum(min(length, n) for n in (self.groups.windows or {}).values())
        room = self.limits.promoting_max - windows
        full = len(self.groups.full)
        if full * length <= room:
            return length
        return length * max(0, room) // (full * length)
