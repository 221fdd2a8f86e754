"""A state machine that every change of the core has to survive.

Engine, tiers and time are adversaries. `memory` is the truth about bytes: it says which content
lies in each slot, and a store or a promotion smears its slots from the moment it is submitted
until it has ended, as direct memory access would. Every transfer that runs is known here too, so
that the manager's own books are never the only witness.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from kvtier.core.limits import Limits
from kvtier.core.manager import TieringManager
from kvtier.core.policies.lru import LRU
from kvtier.core.pool import BlockPool
from kvtier.core.presence import PRESENT
from kvtier.core.requests import Request
from kvtier.core.types import (
    BlockKey,
    Cleared,
    Command,
    Completion,
    Done,
    Dropped,
    JobId,
    Lookup,
    Probe,
    Read,
    Removed,
    Slot,
    Stored,
    TierId,
    group_of,
)
from kvtier.testing.engine import Groups, key_of, scan

Content = tuple[int, BlockKey]
"""What bytes are: the epoch under which they were computed, and their key."""

NUM_TIERS = 2
PROMPTS = ((0, 1, 2, 3), (0, 1, 4, 5), (0, 1), (2, 6, 7), (0, 1, 2, 3, 8, 9))
NAMES = ("a", "b", "c", "d")
WAIT_S, JOB_S, HOLD_S, ABSENT_S = 6.0, 5.0, 3.0, 2.0

names = st.sampled_from(NAMES)
prompts = st.sampled_from(PROMPTS)
tiers = st.integers(0, NUM_TIERS - 1).map(TierId)
picks = st.integers(0, 15)
chance = st.integers(0, 3).map(lambda n: n == 0)
masks = st.one_of(st.just(0), st.integers(0, 255))


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


class TieringMachine(RuleBasedStateMachine):
    """Drives a real `TieringManager`; subclasses choose the cache groups."""

    groups: ClassVar[Groups] = Groups(full=(0,), windows={1: 2})

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

    @initialize(
        num_slots=st.integers(3, 8),
        promoting=st.integers(1, 8),
        writing=st.integers(1, 3),
        warm=st.lists(prompts, max_size=3),
    )
    def start(
        self, num_slots: int, promoting: int, writing: int, warm: list[tuple[int, ...]]
    ) -> None:
        """A new manager over tiers that a neighbour may have filled."""
        self.num_slots = num_slots
        self.limits = Limits(
            promoting_max=min(promoting, num_slots),
            writing_max=writing,
            job_deadline_s=JOB_S,
            wait_max_s=WAIT_S,
            hold_s=HOLD_S,
            absent_ttl_s=ABSENT_S,
        )
        self.memory: list[Content | None] = [None] * num_slots
        windows = frozenset(self.groups.windows or ())
        self.manager = TieringManager(
            BlockPool(num_slots, LRU(num_slots)), NUM_TIERS, 0.0, self.limits, windows
        )
        self.manager.begin_step(0.0)
        for index, prompt in enumerate(warm):
            self.neighbour_fills(TierId(index % NUM_TIERS), prompt, 0)

    # -- the engine -------------------------------------------------------

    def client(self, name: str, prompt: tuple[int, ...] | None = None) -> Client:
        """The request of this name; opened if there is none."""
        if name not in self.clients:
            chosen = prompt if prompt is not None else PROMPTS[NAMES.index(name)]
            self.clients[name] = Client(self.manager.open_request(name), chosen)
        return self.clients[name]

    @rule(name=names, prompt=prompts, only=st.sampled_from([None, None, (0,), (1,), ()]))
    def open(self, name: str, prompt: tuple[int, ...], only: tuple[TierId, ...] | None) -> None:
        """A request arrives; one of the same name is replaced."""
        self.clients[name] = Client(self.manager.open_request(name, only), prompt)

    @rule(name=names, then=st.sampled_from(["load", "load", "settle", "nothing"]))
    def ask(self, name: str, then: str) -> None:
        """The engine scans, and goes on with the answer or lacks the room for it."""
        self._ask(name, then)

    def _ask(self, name: str, then: str) -> int | None:
        client = self.client(name)
        if any(owner == name for owner, _ in self.loads):
            return None
        request = client.request
        # Within one step an earlier full scan may be repeated; a waiting request's is new.
        waits = request.waiting and request.step != self.manager._step
        books = self._wishes_of(request)
        answers: list[tuple[BlockKey, Lookup]] = []

        def lookup(key: BlockKey) -> Lookup:
            answer = self.manager.lookup(request, key)
            answers.append((key, answer))
            return answer

        hit = scan(lookup, client.prompt, self.groups)
        if waits:
            assert hit is None, "a waiting request got an answer from a short scan"
            self._check_short(answers)
            assert self._wishes_of(request) == books, "a re-ask changed the books"
        if client.asked_since is None and {a for _, a in answers} - {Lookup.HIT, Lookup.MISS}:
            client.asked_since = self.now
        if hit is None:
            assert client.asked_since is not None, "deferred without a reason"
            assert self.now < client.asked_since + WAIT_S, "deferred beyond its deadline"
        elif then == "load" and hit:
            self._load(name, client, hit)
        elif then != "nothing":
            self.manager.settle_request(name)
            client.asked_since = None
        return hit

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

    def _load(self, name: str, client: Client, hit: int) -> None:
        keys = self.groups.needed(client.prompt, hit)
        slots = self.manager.prepare_load(name, keys)
        taken = {k: s for k, s in zip(keys, slots, strict=True) if s is not None}
        assert len(taken) == len(keys), "a HIT could not be loaded"
        for key, slot in taken.items():
            assert self.memory[slot] == (self.epoch, key), "HIT on wrong bytes"
        self.loads.append((name, Transfer(taken, {s: self.memory[s] for s in taken.values()})))
        client.asked_since = None

    @precondition(lambda self: self.loads)
    @rule(pick=picks)
    def load_ends(self, pick: int) -> None:
        """All loads of one request have ended."""
        name = self.loads[pick % len(self.loads)][0]
        for owner, transfer in self.loads:
            if owner == name:
                self._unchanged(transfer)
        self.loads = [(owner, t) for owner, t in self.loads if owner != name]
        self.manager.complete_load(name)

    def _unchanged(self, transfer: Transfer) -> None:
        for slot, content in transfer.before.items():
            assert self.memory[slot] == content, "bytes changed under a load"

    @rule(name=names, count=st.integers(1, 6), twice=chance, by_position=st.booleans())
    def store(self, name: str, count: int, twice: bool, by_position: bool) -> None:
        """The device begins to store the head of a prompt, all groups."""
        prompt = self.client(name).prompt[:count]
        keys = [key_of(block, group) for group in self.groups.order for block in prompt]
        position = {k: prompt.index(int.from_bytes(k[:8], "big")) for k in keys}
        new = [k for k in keys if k not in self.manager.pool.blocks]
        slots = self.manager.prepare_store(
            name, keys * 2 if twice else keys, position.__getitem__ if by_position else None
        )
        ranked = sorted(new, key=position.__getitem__) if by_position else new
        room = self.manager.pool.available + len(slots)  # blocks offered again took some before
        assert set(slots) == set(ranked[:room]), "not the longest head that fits"
        self._smear(slots.values())
        if slots:
            self.stores.append(Transfer(slots))

    def _smear(self, slots: object) -> None:
        busy = self._slots_in_transfer()
        for slot in slots:  # type: ignore[attr-defined]
            assert slot not in busy, "a slot was given away while a transfer touches it"
            self.memory[slot] = None

    @precondition(lambda self: self.stores)
    @rule(pick=picks, part=masks, bad=masks, stranger=st.integers(20, 22))
    def store_ends(self, pick: int, part: int, bad: int, stranger: int) -> None:
        """The device ends all or some blocks of a store, well or badly."""
        transfer = self.stores[pick % len(self.stores)]
        keys = [k for i, k in enumerate(transfer.slots) if not part >> i & 1]
        failed = {k for i, k in enumerate(keys) if bad >> i & 1}
        for key in keys:
            slot = transfer.slots.pop(key)
            self.memory[slot] = None if key in failed else (self.epoch, key)
        if not transfer.slots:
            self.stores.remove(transfer)
        self.manager.complete_store([*keys, key_of(stranger)], failed)
        for key in keys:
            block = self.manager.pool.blocks.get(key)
            assert (block is not None and block.ready) == (key not in failed), "not published"

    @rule(name=names)
    def settle(self, name: str) -> None:
        """The engine runs the request with what it has."""
        self.manager.settle_request(name)
        if name in self.clients:
            self.clients[name].asked_since = None

    @rule(name=names)
    def finish(self, name: str) -> None:
        """The request ends or is aborted, in whatever state it is."""
        self.manager.finish_request(name)
        if (client := self.clients.pop(name, None)) is not None:
            assert not client.request.held, "ended and holds"

    @rule(keep=st.booleans())
    def reset(self, keep: bool) -> None:
        """The cache is reset; the device's transfers run on until the fence."""
        self.manager.reset(keep_tiers=keep)
        self.epoch += not keep
        assert not self.manager.pool.blocks, "a key survived the reset"
        self.fenced += [(True, t) for t in self.stores] + [(False, t) for _, t in self.loads]
        self.stores.clear()
        self.loads.clear()
        for client in self.clients.values():
            client.asked_since = None

    @precondition(lambda self: self.fenced)
    @rule()
    def fence(self) -> None:
        """No device transfer from before the reset runs any more."""
        for stores, transfer in self.fenced:
            if not stores:
                self._unchanged(transfer)
        self.fenced.clear()
        self.manager.fence_passed()

    # -- time and tiers ---------------------------------------------------

    @rule(dt=st.sampled_from([0.0, 0.0, 1.0, 2.5, 7.0]))
    def step(self, dt: float) -> None:
        """The engine ends a step and begins the next one."""
        requests = [c.request for c in self.clients.values()]
        idle = {r: len(r.origin) for r in requests if not r.held}
        commands = self.manager.end_step()
        self.manager.check()
        waiting = min((r.arrival for r in requests if r.queued), default=0)
        for request, count in idle.items():
            if waiting and len(request.origin) > count:
                assert request.arrival < waiting, "overtook one that waits for its turn"
        assert len({c.tier for c in commands if isinstance(c, Probe)}) == sum(
            isinstance(c, Probe) for c in commands
        ), "more than one probe per tier"
        for command in commands:
            assert command.epoch == self.epoch, "a command under another epoch"
            assert len(set(command.keys)) == len(command.keys), "a key twice in one command"
            if isinstance(command, Read):
                self._smear(command.slots)
                self.reads += command.keys
            elif not isinstance(command, Probe):
                self._right_bytes(command.keys, command.slots, command.epoch)
            self.running.append(command)
        self.listen(dt)

    @rule(dt=st.sampled_from([0.0, 0.0, 1.0, 7.0]))
    def listen(self, dt: float) -> None:
        """Time passes and completions come in."""
        self.now += dt
        inbox, self.inbox = self.inbox, []
        for completion in inbox:
            if isinstance(completion, Done):
                self.unheard.pop(completion.job, None)
        self.manager.begin_step(self.now, inbox)

    def _right_bytes(self, keys: tuple[BlockKey, ...], slots: tuple[Slot, ...], epoch: int) -> None:
        for key, slot in zip(keys, slots, strict=True):
            assert self.memory[slot] == (epoch, key), "wrong bytes under a cascade"

    @precondition(lambda self: self.running)
    @rule(pick=picks, bad=masks)
    def tier_ends(self, pick: int, bad: int) -> None:
        """A tier ends one of its jobs, well, in part or not at all."""
        able = [c for c in self.running if not self.hung[c.tier]]
        if able:
            self._end(able[pick % len(able)], bad)

    def _end(self, command: Command, bad: int = 0) -> None:
        self.running.remove(command)
        tier = self.tiers[command.tier]
        good = [k for i, k in enumerate(command.keys) if not bad >> i & 1]
        if isinstance(command, Probe | Read):
            ok = {k for k in good if (command.epoch, k) in tier}
        else:
            ok = set(good)
            self._right_bytes(command.keys, command.slots, command.epoch)
            tier |= {(command.epoch, k) for k in ok}
            self.once[command.tier] |= tier
        if isinstance(command, Read):
            for key, slot in zip(command.keys, command.slots, strict=True):
                assert self.memory[slot] is None, "bytes appeared under a promotion"
                if key in ok:
                    self.memory[slot] = (command.epoch, key)
        self.unheard[command.job] = command
        self.ended.append(command.job)
        self.inbox.append(Done(command.job, frozenset(ok)))

    @rule(pick=picks, count=picks)
    def tier_repeats_itself(self, pick: int, count: int) -> None:
        """A completion of a job that ended long ago, or never was."""
        old = [job for job in self.ended if job not in self.unheard]
        job = old[pick % len(old)] if old else JobId(10_000 + count)
        self.inbox.append(Done(job, frozenset(key_of(i) for i in range(count))))

    @rule(tier=tiers, hung=chance)
    def hang(self, tier: TierId, hung: bool) -> None:
        """A tier stops answering, or comes back."""
        self.hung[tier] = hung

    @rule(tier=tiers, prompt=prompts, but=masks)
    def neighbour_fills(self, tier: TierId, prompt: tuple[int, ...], but: int) -> None:
        """Another engine stores a prompt in a tier that both use."""
        keys = [key_of(block, group) for group in self.groups.order for block in prompt]
        self.tiers[tier] |= {(self.epoch, k) for i, k in enumerate(keys) if not but >> i & 1}
        self.once[tier] |= self.tiers[tier]

    @rule(tier=tiers, prompt=prompts, but=masks, tells=st.booleans())
    def tier_evicts(self, tier: TierId, prompt: tuple[int, ...], but: int, tells: bool) -> None:
        """A tier gives up blocks, and says so or not."""
        keys = [key_of(block, group) for group in self.groups.order for block in prompt]
        gone = tuple(k for i, k in enumerate(keys) if not but >> i & 1)
        self.tiers[tier] -= {(self.epoch, k) for k in gone}
        if tells:
            self.inbox.append(Dropped(tier, gone))

    # -- whole stories, so that they happen often --------------------------

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

    def _fitting(self, length: int) -> int:
        windows = sum(min(length, n) for n in (self.groups.windows or {}).values())
        room = self.limits.promoting_max - windows
        full = len(self.groups.full)
        if full * length <= room:
            return length
        return length * max(0, room) // (full * length)

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

    def _whole(self) -> None:
        manager, ledger = self.manager, self.manager.ledger
        self._check_all()
        assert not manager.busy, "busy with nothing"
        assert manager.pool.available == self.num_slots, "slots leaked"
        assert ledger.jobs_in_flight == 0, "jobs leaked"
        assert ledger.promoting == 0, "the promotion budget leaked"
        assert not any(ledger.writing), "the cascade budget leaked"

    # -- what must always hold --------------------------------------------

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

    def _slots_in_transfer(self) -> set[Slot]:
        busy: set[Slot] = set()
        for transfer in [*self.stores, *(t for _, t in self.loads), *(t for _, t in self.fenced)]:
            busy.update(transfer.slots.values())
        for command in self.running:
            if not isinstance(command, Probe):
                busy.update(command.slots)
        return busy

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

    def teardown(self) -> None:
        """Everything ends, and the pool is whole again."""
        if hasattr(self, "manager"):
            self._calm()
