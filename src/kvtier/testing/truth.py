"""What is true while the core is driven: which bytes lie where, which transfers run.

Every transfer is known here too, so that the manager's own books are never the only witness.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import ClassVar

from hypothesis.stateful import RuleBasedStateMachine, invariant

from kvtier.core.health import REPEATING, State
from kvtier.core.limits import Limits
from kvtier.core.manager import TieringManager
from kvtier.core.presence import PRESENT
from kvtier.core.requests import Fill, Request
from kvtier.core.types import (
    BlockKey,
    Cleared,
    Command,
    Completion,
    Done,
    JobId,
    Lend,
    Lookup,
    Probe,
    Read,
    Removed,
    Slot,
    Stored,
    TierId,
    Wanted,
    Write,
    group_of,
)
from kvtier.testing.engine import Groups

Content = tuple[int, BlockKey]
"""What bytes are: the epoch under which they were computed, and their key."""

NUM_TIERS = 2
ALL_TIERS = frozenset(TierId(t) for t in range(NUM_TIERS))
PROMPTS = ((0, 1, 2, 3), (0, 1, 4, 5), (0, 1), (2, 6, 7), (0, 1, 2, 3, 8, 9))
NAMES = ("a", "b", "c", "d")
WAIT_S, JOB_S, HOLD_S, ABSENT_S = 6.0, 5.0, 3.0, 2.0
STALL_S, BACKOFF_S, BACKOFF_MAX_S, LEASE_S = 4.0, 1.5, 5.0, 2.0
LONGEST_S = 7.0  # the longest step
QUIET_S = 3600.0


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
    cascade_to: frozenset[TierId] = ALL_TIERS
    asked_since: float | None = None
    held_since: float | None = None


@dataclass(slots=True)
class Trials:
    """When one direction of a tier may be tried again, told from outside."""

    state: State = State.CLOSED
    opened: int = 0
    opened_at: float = 0.0
    backoff_s: float = BACKOFF_S
    alive: bool = False  # something that was given up came back since
    heard_at: float = 0.0  # the last end of any of its jobs


def _lives(done: Done, command: Command) -> bool:
    """Whether the end of a job tells that its tier works."""
    if done.ok:
        return done.fault not in REPEATING
    return done.fault is None and not isinstance(command, Write)


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
    promote_to: tuple[frozenset[TierId], ...]

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
        self.writes: list[tuple[TierId, BlockKey]] = []
        self.trials = {(t, w): Trials() for t in sorted(ALL_TIERS) for w in (False, True)}
        self.sent: dict[JobId, float] = {}  # when each running command was submitted
        self.tickets = 0
        self.strangers = 1000  # blocks that nobody asked for before
        self.asked: dict[int, tuple[Wanted, float]] = {}  # ticket -> question, since when
        self.begun: dict[tuple[int, float], float] = {}  # of them: the first step that ended since
        self.may_cascade: dict[BlockKey, set[TierId]] = {}
        self.raised: list[set[BlockKey]] = [set() for _ in range(NUM_TIERS)]  # may be written there
        self.met: dict[BlockKey, int] = {}  # how often the device stored or used it

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
        self._check_circuits()

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
        for request in self._waiting_parties():
            reasons.update(b.slot for b in request.held.values())
        assert self.manager.pool.pinned == len(reasons), "pins without a reason, or none"
        for tier, owed in enumerate(self.manager.ledger.cascades.owed):
            assert owed.keys() <= self.manager.pool.blocks.keys(), f"owed to {tier}, but gone"
        self._check_shares(reasons)

    def _check_shares(self, reasons: set[Slot]) -> None:
        """Nobody takes more than its share, and running stores find theirs."""
        limits = self.limits
        taken = [*self.running, *self.unheard.values()]
        for tier in ALL_TIERS:
            reads = sum(len(c.slots) for c in taken if isinstance(c, Read) and c.tier == tier)
            assert reads <= (limits.reading_max or limits.promoting_max), "reads over their share"
            writes = sum(len(c.slots) for c in taken if isinstance(c, Write) and c.tier == tier)
            assert writes <= limits.writing_max, "writes over their share"
        lent = sum(len(c.slots) for c in taken if isinstance(c, Lend))
        assert lent <= limits.lending_max, "more lent than may be"
        shares = limits.promoting_max + NUM_TIERS * limits.writing_max + limits.lending_max
        device = self._slots_of_device()
        assert len(reasons - device) <= shares, "others take what stores need"
        storing = sum(len(t.slots) for t in self.stores)
        if limits.storing_max is not None:
            assert storing <= limits.storing_max, "stores over their share"
            if shares + limits.storing_max <= self.num_slots and not self.loads and not self.fenced:
                free = self.manager.pool.available
                assert free >= limits.storing_max - storing, "no room for a store"

    def _check_circuits(self) -> None:
        """An open circuit is left alone, nobody waits for it, and it has one trial at a time."""
        ledger = self.manager.ledger
        live: dict[tuple[TierId, bool], list[Command]] = {place: [] for place in self.trials}
        for job in ledger._jobs.values():
            if not job.abandoned:
                live[job.command.tier, isinstance(job.command, Write)].append(job.command)
        for (tier, writes), trial in self.trials.items():
            circuit = (ledger.writes if writes else ledger.reads)[tier]
            jobs = live[tier, writes]
            if circuit.state is State.OPEN:
                assert not jobs, "somebody waits for an open tier"
                if not writes:
                    assert not ledger.speeds[tier].queued, "reads are queued for an open tier"
            if circuit.state is State.HALF_OPEN:
                assert len(jobs) <= 1, "more than one trial"
                for command in jobs:
                    blocks = 0 if isinstance(command, Probe) else len(command.keys)
                    assert blocks <= self.limits.patience.trial_max, "a trial too big"
            times = [self.sent[c.job] for c in jobs if c.job in self.sent]
            if times:
                since = max(min(times), trial.heard_at)
                assert self.now < since + self.limits.patience.stall_s, "a tier stalls unnoticed"

    def _observe_circuits(self, heard: Iterable[Completion], live: set[JobId]) -> None:
        """After a step began: do circuits open when they should, and for as long as they should?"""
        ledger = self.manager.ledger
        failed: set[tuple[TierId, bool]] = set()
        alive: set[tuple[TierId, bool]] = set()
        for completion in heard:
            if not isinstance(completion, Done) or completion.job not in self.unheard:
                continue
            command = self.unheard[completion.job]
            place = (command.tier, isinstance(command, Write))
            if isinstance(command, Lend):
                continue
            self.trials[place].heard_at = self.now
            if completion.job in live and completion.fault in REPEATING:
                failed.add(place)
            if _lives(completion, command):
                alive.add(place)
                self.trials[place].alive |= completion.job not in live
        for place, trial in self.trials.items():
            circuit = (ledger.writes if place[1] else ledger.reads)[place[0]]
            assert circuit.opened - trial.opened <= 1, "opened twice in one step"
            if circuit.opened > trial.opened:
                doubled = min(2 * trial.backoff_s, BACKOFF_MAX_S)
                trial.backoff_s = doubled if trial.state is State.HALF_OPEN else BACKOFF_S
                trial.opened, trial.opened_at = circuit.opened, self.now
                trial.alive = place in alive
            elif place in failed:
                raise AssertionError("a fault that repeats does not open the circuit")
            waited = self.now >= trial.opened_at + trial.backoff_s
            if circuit.state is State.OPEN:
                assert not waited or place[1], "its time has come, but it is not tried"
            elif trial.state is State.OPEN or circuit.opened > trial.opened:
                assert waited or trial.alive, "tried before its time"
            trial.state = circuit.state

    def _note_trials(self) -> None:
        """Writes are tried as soon as there is something to write."""
        for (tier, writes), trial in self.trials.items():
            state = (self.manager.ledger.writes if writes else self.manager.ledger.reads)[
                tier
            ].state
            if trial.state is State.OPEN and state is State.HALF_OPEN:
                waited = self.now >= trial.opened_at + trial.backoff_s
                assert waited or trial.alive, "tried before its time"
                trial.state = state

    def _check_commands(self, commands: list[Command]) -> None:
        ledger = self.manager.ledger
        for request in self._waiting_parties():
            if request.queued:
                for tier in request.wishes.values():
                    assert ledger.reads[tier].state is not State.OPEN, "queues for an open tier"
        for (tier, writes), trial in self.trials.items():
            circuit = (ledger.writes if writes else ledger.reads)[tier]
            if circuit.state is State.CLOSED:
                continue
            kinds = (Write,) if writes else (Probe, Read)
            issued = [c for c in commands if c.tier == tier and isinstance(c, kinds)]
            assert len(issued) <= (circuit.state is State.HALF_OPEN), "asked while it is open"
            waited = self.now >= trial.opened_at + trial.backoff_s
            assert not issued or waited or trial.alive, "tried before its time"

    def _check_write(self, command: Write) -> None:
        """What is cascaded may go there, and was met twice if that is asked for; or it was promoted
        from a tier whose blocks are to be there.
        """
        before = {key for epoch, key in self.once[command.tier] if epoch == self.epoch}
        for key in command.keys:
            if (
                key not in before and key not in self.raised[command.tier]
            ):  # else the tier lost it, and it is repaired
                assert command.tier in self.may_cascade[key], "stored where it must not be"
                if self.limits.second_touch:
                    assert self.met.get(key, 0) > 1, "cascaded at the first touch"

    def _check_answer(self, command: Lend) -> None:
        wanted, _ = self.asked.pop(command.ticket)
        assert command.tier == wanted.tier, "answered somebody else"
        both = [*command.keys, *command.missing]
        assert sorted(both) == sorted(set(wanted.keys)), "not an answer to the question"

    def _check_all_answered(self) -> None:
        heard = {w.ticket for w in self.inbox if isinstance(w, Wanted)}
        for ticket, (wanted, since) in self.asked.items():
            assert wanted.promote or ticket in heard, "a question was not answered at once"
            # its wait begins at the end of a step, however long that took to come
            begun = self.begun.setdefault((ticket, since), self.now)
            late = self.now >= begun + WAIT_S + LONGEST_S
            assert not late or ticket in heard, "a tier waits for ever"

    def _waiting_parties(self) -> list[Request]:
        return [*(c.request for c in self.clients.values()), *self.manager._borrowers]

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
                # What ends while no step begins is noticed when the next one does.
                most = WAIT_S + HOLD_S + LONGEST_S
                assert self.now < client.held_since + most, "holds for ever"

        ledger = self.manager.ledger
        for request in self._waiting_parties():
            for wait in request.waits:
                tier = wait.tier if isinstance(wait, Fill) else wait.command.tier
                if tier is not None:
                    assert ledger.reads[tier].state is not State.OPEN, "waits for an open tier"

    def _whole(self) -> None:
        manager, ledger = self.manager, self.manager.ledger
        self._check_all()
        assert not manager.busy, "busy with nothing"
        assert manager.pool.available == self.num_slots, "slots leaked"
        assert not any(ledger.jobs_in_flight), "jobs leaked"
        assert ledger.promoting == 0, "the promotion budget leaked"
        assert not any(ledger.cascades.writing), "the cascade budget leaked"
        assert not any(ledger.reading), "the budget of reads leaked"
        assert not any(speed.queued for speed in ledger.speeds), "reads are queued for ever"
        assert not ledger.lending.leases, "leases leaked"
        assert not self.asked, "a question without an answer"

    def _slots_of_device(self) -> set[Slot]:
        busy: set[Slot] = set()
        for transfer in [*self.stores, *(t for _, t in self.loads), *(t for _, t in self.fenced)]:
            busy.update(transfer.slots.values())
        return busy

    def _slots_in_transfer(self) -> set[Slot]:
        busy = self._slots_of_device()
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
            assert self.memory[slot] == (epoch, key), "wrong bytes under a tier that reads"

    def _wishes_of(self, request: Request) -> object:
        manager = self.manager
        return (
            tuple(request.scan),
            dict(request.wishes),
            [tuple(keys) for keys in manager._to_probe],
            request in manager._admission,
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

    def _fitting(self, length: int, most: int) -> int:
        """Blocks of a prompt that fit a budget of so many slots."""
        windows = sum(min(length, n) for n in (self.groups.windows or {}).values())
        room = min(most, self.limits.reading_max or most) - windows
        full = len(self.groups.full)
        if full * length <= room:
            return length
        return length * max(0, room) // (full * length)
