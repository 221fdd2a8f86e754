"""The adversaries of the core: rules for the engine, for the tiers and for time."""

from __future__ import annotations

from typing import ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from kvtier.core.health import Patience, State
from kvtier.core.limits import Limits
from kvtier.core.manager import TieringManager
from kvtier.core.policies import POLICIES
from kvtier.core.pool import BlockPool
from kvtier.core.presence import PRESENT
from kvtier.core.requests import Request
from kvtier.core.types import (
    BlockKey,
    Command,
    Done,
    Dropped,
    Fault,
    JobId,
    Lend,
    Lookup,
    Probe,
    Read,
    Renewed,
    TierId,
    Wanted,
    Write,
)
from kvtier.testing.engine import key_of, scan
from kvtier.testing.truth import (
    ABSENT_S,
    ALL_TIERS,
    BACKOFF_MAX_S,
    BACKOFF_S,
    HOLD_S,
    JOB_S,
    LEASE_S,
    NAMES,
    NUM_TIERS,
    PROMPTS,
    STALL_S,
    WAIT_S,
    Client,
    Transfer,
    Truth,
)

names = st.sampled_from(NAMES)
prompts = st.sampled_from(PROMPTS)
tiers = st.integers(0, NUM_TIERS - 1).map(TierId)
picks = st.integers(0, 15)
chance = st.integers(0, 3).map(lambda n: n == 0)
masks = st.one_of(st.just(0), st.integers(0, 255))
faults = st.sampled_from([None, None, None, *(f for f in Fault if f is not Fault.STALLED)])
some_tiers = st.sampled_from([None, None, (TierId(0),), (TierId(1),), ()])


class Adversaries(Truth):
    """An engine, tiers and a clock, each of which does what it likes, when it likes.

    Attributes:
        policy: name of the primary tier's; subclasses choose another.
    """

    policy: ClassVar[str] = "lru"

    @initialize(
        num_slots=st.integers(3, 8),
        promoting=st.integers(1, 8),
        writing=st.integers(1, 3),
        reading=st.one_of(st.none(), st.integers(1, 6)),
        storing=st.one_of(st.none(), st.integers(1, 6)),
        lending=st.integers(0, 4),
        second_touch=chance,
        failures=st.integers(1, 3),
        stall_s=st.sampled_from([STALL_S, STALL_S, 100.0]),
        trial=st.integers(1, 4),
        adds_up=st.booleans(),
        warm=st.lists(prompts, max_size=3),
        promote_to=st.tuples(*(st.booleans() for _ in range(NUM_TIERS))),
    )
    def start(
        self,
        num_slots: int,
        promoting: int,
        writing: int,
        reading: int | None,
        storing: int | None,
        lending: int,
        second_touch: bool,
        failures: int,
        stall_s: float,
        trial: int,
        adds_up: bool,
        warm: list[tuple[int, ...]],
        promote_to: tuple[bool, ...],
    ) -> None:
        """A new manager over tiers that a neighbour may have filled."""
        if adds_up:
            num_slots = promoting + NUM_TIERS * writing + lending + (storing or 0)
        self.num_slots = num_slots
        self.limits = Limits(
            promoting_max=min(promoting, num_slots),
            writing_max=writing,
            reading_max=reading,
            storing_max=storing,
            lending_max=lending,
            second_touch=second_touch,
            wait_min_s=0.5,
            lease_s=LEASE_S,
            lease_max_s=2 * LEASE_S,
            patience=Patience(failures, stall_s, BACKOFF_S, BACKOFF_MAX_S, trial),
            job_deadline_s=JOB_S,
            wait_max_s=WAIT_S,
            hold_s=HOLD_S,
            absent_ttl_s=ABSENT_S,
        )
        self.promote_to = tuple(
            ALL_TIERS - {TierId(place)} if raises else frozenset()
            for place, raises in enumerate(promote_to)
        )
        self.memory = [None] * num_slots
        windows = frozenset(self.groups.windows or ())
        self.manager = TieringManager(
            BlockPool(num_slots, POLICIES[self.policy](num_slots)),
            NUM_TIERS,
            0.0,
            self.limits,
            windows,
            self.promote_to,
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

    @rule(name=names, prompt=prompts, only=some_tiers, cascade_to=some_tiers)
    def open(
        self,
        name: str,
        prompt: tuple[int, ...],
        only: tuple[TierId, ...] | None,
        cascade_to: tuple[TierId, ...] | None,
    ) -> None:
        """A request arrives; one of the same name is replaced."""
        request = self.manager.open_request(name, only, cascade_to)
        stores_to = ALL_TIERS if cascade_to is None else frozenset(cascade_to)
        self.clients[name] = Client(request, prompt, stores_to)

    @rule(block_s=st.sampled_from([None, 0.1, 0.5, 2.0]))
    def rate(self, block_s: float | None) -> None:
        """The engine's speed becomes known, or changes."""
        self.manager.set_prefill_rate(block_s)

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
        if not waits:
            self._check_choice(request)
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

    def _check_choice(self, request: Request) -> None:
        """Among the tiers that hold a block the fastest is asked; among equals, the first."""
        ledger = self.manager.ledger
        waits = [s.expect(1, self.now) for s in ledger.speeds]
        for key, chosen in request.wishes.items():
            assert chosen in request.tiers, "asks a tier that it must not load from"
            for tier in request.tiers:
                closed = ledger.reads[tier].state is State.CLOSED
                if closed and ledger.presence[tier].beliefs.get(key) == PRESENT:
                    best = (waits[chosen], chosen) <= (waits[tier], tier)
                    assert best, "a faster tier has it"

    def _load(self, name: str, client: Client, hit: int) -> None:
        keys = self.groups.needed(client.prompt, hit)
        slots = self.manager.prepare_load(name, keys)
        taken = {k: s for k, s in zip(keys, slots, strict=True) if s is not None}
        assert len(taken) == len(keys), "a HIT could not be loaded"
        for key, slot in taken.items():
            self.met[key] = self.met.get(key, 0) + 1
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

    @rule(name=names, count=st.integers(1, 6), twice=chance, by_position=st.booleans())
    def store(self, name: str, count: int, twice: bool, by_position: bool) -> None:
        """The device begins to store the head of a prompt, all groups."""
        prompt = self.client(name).prompt[:count]
        keys = [key_of(block, group) for group in self.groups.order for block in prompt]
        position = {k: prompt.index(int.from_bytes(k[:8], "big")) for k in keys}
        new = [k for k in keys if k not in self.manager.pool.blocks]
        for key in set(keys).difference(new):
            self.met[key] = self.met.get(key, 0) + 1
        storing = sum(len(t.slots) for t in self.stores)
        slots = self.manager.prepare_store(
            name, keys * 2 if twice else keys, position.__getitem__ if by_position else None
        )
        ranked = sorted(new, key=position.__getitem__) if by_position else new
        room = self.manager.pool.available + len(slots)  # blocks offered again took some before
        room = min(room, (self.limits.storing_max or self.num_slots) - storing)
        assert set(slots) == set(ranked[:room]), "not the longest head that fits"
        self._smear(slots.values())
        if slots:
            self.stores.append(Transfer(slots))
            for key in slots:
                self.may_cascade.setdefault(key, set()).update(self.clients[name].cascade_to)

    @precondition(lambda self: self.stores)
    @rule(pick=picks, part=masks, bad=masks, stranger=st.integers(20, 22))
    def store_ends(self, pick: int, part: int, bad: int, stranger: int) -> None:
        """The device ends all or some blocks of a store, well or badly."""
        transfer = self.stores[pick % len(self.stores)]
        keys = [k for i, k in enumerate(transfer.slots) if not part >> i & 1]
        failed = {k for i, k in enumerate(keys) if bad >> i & 1}
        for key in keys:
            self.met[key] = self.met.get(key, 0) + (key not in failed)
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
        self.may_cascade.clear()
        for raised in self.raised:
            raised.clear()
        self.asked = {ticket: (wanted, self.now) for ticket, (wanted, _) in self.asked.items()}
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
                self._may_be_raised(command)
            elif not isinstance(command, Probe):
                self._right_bytes(command.keys, command.slots, command.epoch)
            if isinstance(command, Write):
                self._check_write(command)
                self.writes += [(command.tier, key) for key in command.keys]
            elif isinstance(command, Lend):
                self._check_answer(command)
            self.running.append(command)
            self.sent[command.job] = self.now
        self._check_commands(commands)
        self._check_all_answered()
        self.listen(dt)

    def _may_be_raised(self, command: Read) -> None:
        """What is promoted for a request may be written where its tier promotes to, if the request
        allows it.
        """
        for request in self._waiting_parties():
            if any(request.origin.get(key) == command.tier for key in command.keys):
                allowed = ALL_TIERS if request.cascade_to is None else request.cascade_to
                for tier in self.promote_to[command.tier] & allowed:
                    self.raised[tier].update(command.keys)

    @rule(tier=tiers, prompt=prompts, promote=st.booleans(), again=st.booleans())
    def want(self, tier: TierId, prompt: tuple[int, ...], promote: bool, again: bool) -> None:
        """A tier asks on behalf of a peer."""
        keys = [key_of(block, group) for group in self.groups.order for block in prompt]
        self.tickets += 1
        wanted = Wanted(tier, self.tickets, tuple(keys * 2 if again else keys), promote)
        self.asked[self.tickets] = (wanted, self.now)
        self.inbox.append(wanted)

    @rule(pick=picks)
    def renew(self, pick: int) -> None:
        """A tier still needs what it was lent, or what it gave back long ago."""
        lent = [c.job for c in self.running if isinstance(c, Lend)] or self.ended or [JobId(9_999)]
        self.inbox.append(Renewed(lent[pick % len(lent)]))

    @rule(dt=st.sampled_from([0.0, 0.0, 1.0, 7.0]))
    def listen(self, dt: float) -> None:
        """Time passes and completions come in."""
        self._note_trials()
        live = {j.command.job for j in self.manager.ledger._jobs.values() if not j.abandoned}
        self.now += dt
        inbox, self.inbox = self.inbox, []
        for completion in inbox:
            if isinstance(completion, Wanted):
                self.asked[completion.ticket] = (completion, self.now)
        self.manager.begin_step(self.now, inbox)
        self._observe_circuits(inbox, live)
        for completion in inbox:
            if isinstance(completion, Done):
                self.unheard.pop(completion.job, None)

    @precondition(lambda self: self.running)
    @rule(pick=picks, bad=masks, fault=faults)
    def tier_ends(self, pick: int, bad: int, fault: Fault | None) -> None:
        """A tier ends one of its jobs, well, in part or not at all."""
        able = [c for c in self.running if not self.hung[c.tier]]
        if able:
            self._end(able[pick % len(able)], bad, fault)

    def _end(self, command: Command, bad: int = 0, fault: Fault | None = None) -> None:
        self.running.remove(command)
        tier = self.tiers[command.tier]
        good = [k for i, k in enumerate(command.keys) if not bad >> i & 1]
        if isinstance(command, Probe | Read):
            ok = {k for k in good if (command.epoch, k) in tier}
        elif isinstance(command, Lend):
            ok = set(good)
            self._right_bytes(command.keys, command.slots, command.epoch)
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
        self.inbox.append(Done(command.job, frozenset(ok), fault))

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
