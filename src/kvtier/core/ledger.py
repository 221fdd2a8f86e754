"""The books of the manager: jobs in flight, beliefs, budgets, holds, events.

Everything that a completion changes is changed here. Failure, lateness and reset are one
mechanism: the key is forgotten now, its slot is free when its I/O has ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence

from kvtier.core.cascades import Cascades
from kvtier.core.counts import Counts
from kvtier.core.health import REPEATING, Circuit, Speed
from kvtier.core.lending import Lending
from kvtier.core.limits import Limits
from kvtier.core.pool import Block, BlockPool
from kvtier.core.presence import PRESENT, Presence
from kvtier.core.requests import Fill, Job, Request
from kvtier.core.types import (
    BlockKey,
    Cleared,
    Command,
    Event,
    Fault,
    JobId,
    Lend,
    Probe,
    Read,
    Reason,
    Removed,
    Stored,
    TierId,
    Wanted,
    Write,
)


class Ledger:
    """See the module. `now` is set by the manager at the start of each step.

    Attributes:
        epoch: of the commands issued now.
        presence: beliefs, per tier.
        reads, writes: circuits, per tier.
        speeds: of reads, per tier.
        reading: slots being read into, per tier, those of hung reads included.
        stuck: of these, the slots of reads that were given up.
        promoting: slots being read into, or held.
        freed: counts what makes room for promotions.
        storing: slots that the device is storing into.
        cascades, lending: see there.
    """

    def __init__(
        self,
        pool: BlockPool,
        num_tiers: int,
        now: float,
        limits: Limits,
        promote_to: Sequence[frozenset[TierId]],
    ) -> None:
        self.now = now
        self.epoch = 0
        self.presence = [Presence(limits.known_max, limits.absent_ttl_s) for _ in range(num_tiers)]
        self.reads = [Circuit(limits.patience, now) for _ in range(num_tiers)]
        self.writes = [Circuit(limits.patience, now) for _ in range(num_tiers)]
        self.speeds = [Speed() for _ in range(num_tiers)]
        self.reading = [0] * num_tiers
        self.stuck = [0] * num_tiers
        self.promoting = 0
        self.freed = 0
        self.storing = 0
        self.jobs_in_flight = [0] * num_tiers  # whose `Done` has not come, abandoned or not
        self.counts = Counts([0] * num_tiers)
        touched_max = limits.known_max if limits.second_touch else None
        self.cascades = Cascades(pool, self.presence, self, limits.writing_max, touched_max)
        self.lending = Lending(pool, limits.lending_max, limits.lease_s, limits.lease_max_s)
        self._pool = pool
        self._limits = limits
        self._promote_to = promote_to
        self._jobs: dict[JobId, Job] = {}
        self._deadlines: deque[Job] = deque()  # all jobs have the same patience: in order
        self._holds: deque[tuple[float, Request]] = deque()
        self._live = 0  # jobs not abandoned
        self._last_job = 0
        self._outbox: list[Command] = []
        self._events: list[Event] = []

    @property
    def busy(self) -> bool:
        """Whether a completion that matters is due. Abandoned jobs are nobody's hurry."""
        return self._live > 0 or self.lending.running > 0 or bool(self._outbox)

    def take_commands(self) -> list[Command]:
        """Commands since the last call, but for writes that were given up before they were sent."""
        commands = []
        for command in self._outbox:
            job = self._jobs.get(command.job)
            if job is not None and job.abandoned:
                self._recall(self._jobs.pop(command.job))
            else:
                commands.append(command)
        self._outbox.clear()
        return commands

    def take_events(self) -> list[Event]:
        """Events since the last call."""
        events, self._events = self._events, []
        return events

    # -- issuing ----------------------------------------------------------

    def probe(self, tier: TierId, keys: tuple[BlockKey, ...], waiters: dict[Request, None]) -> None:
        """Ask a tier for keys on behalf of these requests."""
        job = self._submit(Probe(tier, self._new_job(), keys, self.epoch))
        job.waiters = waiters
        for request in waiters:
            request.waits.add(job)
        self.presence[tier].set_probing(keys, job.command.job)

    def wait_for_probe(self, request: Request, tier: TierId, key: BlockKey) -> None:
        """Let a request wait for the running probe that asks a tier for this key."""
        probe = self.presence[tier].probe_of(key)
        if probe is not None and (job := self._jobs.get(probe)) is not None:
            job.waiters[request] = None
            request.waits.add(job)

    def wait_for_fill(self, request: Request, fill: Fill, block: Block) -> None:
        """Let a request wait for a block that is being filled, and hold it then."""
        fill.waiters.setdefault(request, []).append(block)
        request.waits.add(fill)

    def promote(self, tier: TierId, keys: Sequence[BlockKey], request: Request) -> None:
        """Read keys from a tier into fresh slots, for a request that will hold them."""
        for start in range(0, len(keys), self._limits.job_max):
            self._read(tier, tuple(keys[start : start + self._limits.job_max]), request)

    def _read(self, tier: TierId, keys: tuple[BlockKey, ...], request: Request) -> None:
        raised = self._promote_to[tier]
        if request.cascade_to is not None:
            raised &= request.cascade_to
        fill = Fill(tier, raised)
        fill.blocks = self.allocate(keys, fill)
        fill.waiters[request] = list(fill.blocks)
        request.waits.add(fill)
        for block in fill.blocks:
            block.holds = 1
            request.origin[block.key] = tier
        self.promoting += len(fill.blocks)
        self.reading[tier] += len(fill.blocks)
        self.speeds[tier].submitted(len(fill.blocks))
        slots = tuple([b.slot for b in fill.blocks])
        command = Read(tier, self._new_job(), keys, slots, self.epoch)
        self._submit(command, fill.blocks, fill)

    def takes(self, tier: TierId, blocks: int) -> int:
        """How many of so many blocks the tier takes in one write now."""
        return self.writes[tier].takes(blocks, self.now)

    def write(self, tier: TierId, blocks: Sequence[Block]) -> None:
        """Submit writes of pinned blocks."""
        for start in range(0, len(blocks), self._limits.job_max):
            some = blocks[start : start + self._limits.job_max]
            keys = tuple([b.key for b in some])
            slots = tuple([b.slot for b in some])
            self._submit(Write(tier, self._new_job(), keys, slots, self.epoch), some)

    def lend(self, wanted: Wanted) -> None:
        """Answer a tier's question from what is readable now."""
        self._outbox.append(self.lending.lend(wanted, self._new_job(), self.epoch, self.now))

    def allocate(self, keys: Sequence[BlockKey], fill: Fill) -> list[Block]:
        """Slots for keys, evicting if need be."""
        blocks, evicted = self._pool.allocate(keys, fill)
        if evicted:
            self.cascades.forget(evicted)
            self._events.append(Removed(None, tuple(evicted), Reason.EVICTED))
        return blocks

    # -- holds ------------------------------------------------------------

    def hold(self, request: Request, blocks: Iterable[Block]) -> None:
        """Pin readable blocks for a request until it loads them, as far as the budget goes."""
        room = self._limits.promoting_max - self.promoting
        for block in blocks:
            if block.key in request.held:
                continue
            if block.holds == 0:
                if room == 0:
                    continue
                room -= 1
                self.promoting += 1
            self._pool.pin(block)
            block.holds += 1
            request.held[block.key] = block
        request.held_until = self.now + self._limits.hold_s
        self._holds.append((request.held_until, request))

    def let_go(self, request: Request, keys: Iterable[BlockKey]) -> None:
        """Unpin blocks that were held, the last one first: heads are to outlive tails."""
        for key in reversed(tuple(keys)):
            if (block := request.held.pop(key, None)) is not None:
                self._release_hold(block)
                self._pool.unpin(block)

    def _release_hold(self, block: Block) -> None:
        block.holds -= 1
        self.promoting -= block.holds == 0
        self.freed += block.holds == 0

    # -- completions ------------------------------------------------------

    def finish(self, job_id: JobId, ok: Collection[BlockKey], fault: Fault | None) -> None:
        """A driver reports the end of a job. One that is unknown is ignored: what another
        process did is not asserted.
        """
        job = self._jobs.pop(job_id, None)
        if job is None:
            self.lending.done(job_id)
            return
        command = job.command
        tier = command.tier
        self._live -= not job.abandoned
        self.jobs_in_flight[tier] -= 1
        good = [key for key in command.keys if key in ok]
        bad = [] if len(good) == len(command.keys) else [k for k in command.keys if k not in ok]
        # A tier that did part of a job works; unless it says that the rest will fail again.
        problem = fault if fault in REPEATING or not good else None
        if fault is None and bad and isinstance(command, Write) and not good:
            problem = Fault.ERROR
        opened = self._tell_circuit(job, problem, moved=bool(good))
        current = command.epoch == self.epoch
        match command:
            case Probe():
                for request in job.waiters:
                    request.waits.discard(job)
                    self._hurry_past(request, tier)
                if current:
                    # A write or the tier itself may have told more than the probe saw.
                    bad = self.presence[tier].unanswered(bad, job_id)
                    self._believe(tier, good, bad)
            case Write():
                if current:
                    self._believe(tier, good, bad, Reason.FAILED)
                    self.cascades.owe(tier, bad)
                self.cascades.ended(tier, job.blocks)
            case Read():
                if current and not job.abandoned:
                    self._believe(tier, (), bad)
                if not job.abandoned:
                    self.speeds[tier].ended(
                        len(command.keys), len(good), job.submitted_at, self.now
                    )
                self.freed += 1
                self.reading[tier] -= len(job.blocks)
                self.stuck[tier] -= len(job.blocks) if job.abandoned else 0
                self._settle_read(job, ok)
        if opened:
            self._abandon_all(tier, reads=not isinstance(command, Write))

    def lost(self, tier: TierId, keys: Sequence[BlockKey], reason: Reason) -> None:
        """A tier gave up blocks, or turned out not to have them."""
        gone = self.presence[tier].set_absent(keys, self.now)
        self.cascades.owe(tier, gone)
        if gone:
            self._events.append(Removed(tier, tuple(gone), reason))

    def expire(self) -> None:
        """Give up jobs, holds and leases whose time has passed, and jobs of tiers that stall."""
        now = self.now
        for reads, circuits in ((True, self.reads), (False, self.writes)):
            for place, circuit in enumerate(circuits):
                if circuit.stalled(now):
                    self._abandon_all(TierId(place), reads=reads)
        self.lending.expire(now)
        while self._deadlines and self._deadlines[0].deadline <= now:
            job = self._deadlines.popleft()
            command = job.command
            if command.job in self._jobs and not job.abandoned:
                opened = self._circuit_of(command).missed(now, moves=job.moves)
                self._abandon(job)
                if opened:
                    self._abandon_all(command.tier, reads=not isinstance(command, Write))
        while self._holds and self._holds[0][0] <= now:
            until, request = self._holds.popleft()
            if request.held and request.held_until == until:
                self.counts.expired_holds += len(request.held)
                self.let_go(request, tuple(request.held))

    def publish(self, blocks: Sequence[Block]) -> None:
        """Bytes are good. The writer's pin stays with the caller."""
        for block in blocks:
            self._pool.publish(block)
        if blocks:
            self._events.append(Stored(None, tuple([b.key for b in blocks])))

    def end_fill(self, fill: Fill, good: Sequence[Block]) -> None:
        """Tell who waits for a fill that it ended; they hold the good blocks that they met."""
        readable = set(good)
        for request, met in fill.waiters.items():
            if fill in request.waits:
                request.waits.discard(fill)
                if not request.queued:  # who waits for its turn holds nothing
                    self.hold(request, [b for b in met if b in readable])
        fill.waiters.clear()

    def _believe(
        self,
        tier: TierId,
        good: Sequence[BlockKey],
        bad: Sequence[BlockKey],
        reason: Reason = Reason.LOST,
    ) -> None:
        if good and (news := self.presence[tier].set_present(good)):
            self._events.append(Stored(tier, tuple(news)))
        if bad:
            self.lost(tier, bad, reason)

    def _settle_read(self, job: Job, ok: Collection[BlockKey]) -> None:
        fill = job.fill
        assert fill is not None, "a read fills something"
        good = [b for b in fill.blocks if not b.condemned and b.key in ok]
        self.publish(good)
        self.cascades.raise_to(good, fill.cascade_to or ())
        self.end_fill(fill, good)
        for block in reversed(fill.blocks):
            self._release_hold(block)
            if not block.condemned and not block.ready:
                self._pool.forget(block)
            self._pool.unpin(block)

    def _hurry_past(self, request: Request, tier: TierId) -> None:
        """A tier has answered a request: let it ask again before slower ones have. What this tier
        has, it need not wait for; for the rest it waits on.
        """
        rank = (self.speeds[tier].expect(1, self.now), tier)
        for wait in tuple(request.waits):
            if isinstance(wait, Job) and isinstance(wait.command, Probe):
                other = wait.command.tier
                if (self.speeds[other].expect(1, self.now), other) > rank:
                    request.waits.discard(wait)

    def _abandon_all(self, tier: TierId, *, reads: bool) -> None:
        """Its circuit opened: nobody waits for it."""
        for job in self._jobs.values():
            if (
                job.command.tier == tier
                and not job.abandoned
                and isinstance(job.command, Write) != reads
            ):
                self._abandon(job)

    def _tell_circuit(self, job: Job, problem: Fault | None, *, moved: bool) -> bool:
        """Whether the circuit opened since a job ended."""
        circuit = self._circuit_of(job.command)
        if job.abandoned:
            circuit.late(self.now, alive=problem is None)
            return False
        return circuit.ended(self.now, problem, moves=job.moves, moved=job.moves and moved)

    def _circuit_of(self, command: Command) -> Circuit:
        circuits = self.writes if isinstance(command, Write) else self.reads
        return circuits[command.tier]

    def _abandon(self, job: Job) -> None:
        """Give up on the keys; the slots wait for the driver's `Done`."""
        job.abandoned = True
        self._live -= 1
        command = job.command
        self.counts.expired_jobs[command.tier] += 1
        for request in job.waiters:
            request.waits.discard(job)
        if command.epoch == self.epoch:
            keys: Sequence[BlockKey] = command.keys
            if isinstance(command, Probe):
                keys = self.presence[command.tier].unanswered(keys, command.job)
            self.lost(command.tier, keys, Reason.FAILED)
            if isinstance(command, Write):
                self.cascades.owe(command.tier, keys)
        if job.fill is not None:
            self.speeds[command.tier].given_up(len(job.blocks))
            self.stuck[command.tier] += len(job.blocks)
            self.end_fill(job.fill, ())
            for block in job.fill.blocks:
                if not block.condemned:
                    self._pool.forget(block)

    # -- reset ------------------------------------------------------------

    def reset(self, *, keep_tiers: bool) -> None:
        """Forget every key of the primary now. Jobs that were sent run on; their results are
        ignored, and their slots come back with their `Done`.
        """
        self.epoch += not keep_tiers
        unsent, self._outbox = self._outbox, []
        for command in unsent:
            if isinstance(command, Lend):  # an answer to a tier is still due
                self._outbox.append(self.lending.recall(command, self.epoch))
            else:
                self._recall(self._jobs.pop(command.job))
        if not keep_tiers:
            self.lending.end_all()
        blocks = tuple(self._pool.blocks.values())
        if readable := tuple([b.key for b in blocks if b.ready]):
            self._events.append(Removed(None, readable, Reason.RESET))
        for block in blocks:
            self._pool.forget(block)
        for job in self._jobs.values():
            job.waiters = {}
            if job.fill is not None:
                job.fill.waiters.clear()
        self._holds.clear()
        self.cascades.reset()
        self._events.append(Cleared(None))
        if not keep_tiers:
            for tier, presence in enumerate(self.presence):
                if gone := tuple([k for k, b in presence.beliefs.items() if b == PRESENT]):
                    self._events.append(Removed(TierId(tier), gone, Reason.RESET))
                presence.clear()
                self._events.append(Cleared(TierId(tier)))

    def _recall(self, job: Job) -> None:
        """Undo a job whose command was never sent."""
        command = job.command
        assert isinstance(command, Write), "probes and reads are sent in the step of their decision"
        self._live -= not job.abandoned
        self.jobs_in_flight[command.tier] -= 1
        if not job.abandoned:
            self.writes[command.tier].withdrawn(moves=True)
        self.cascades.ended(command.tier, job.blocks)

    # -- jobs -------------------------------------------------------------

    def _new_job(self) -> JobId:
        self._last_job += 1
        return JobId(self._last_job)

    def _submit(
        self, command: Command, blocks: Sequence[Block] = (), fill: Fill | None = None
    ) -> Job:
        job = Job(command, self.now, self.now + self._limits.job_deadline_s, blocks, fill)
        self._circuit_of(command).submitted(self.now, moves=job.moves)
        self._jobs[command.job] = job
        self._deadlines.append(job)
        self._live += 1
        self.jobs_in_flight[command.tier] += 1
        self._outbox.append(command)
        return job

    def check(self) -> None:
        """Assert every invariant that concerns jobs and budgets. O(n): for tests."""
        filling: set[Block] = set()
        writing = [0] * len(self.presence)
        reading = [0] * len(self.presence)
        stuck = [0] * len(self.presence)
        for job in self._jobs.values():
            assert job.abandoned or self.now < job.deadline, "a job without an end"
            match job.command:
                case Write(tier=tier):
                    writing[tier] += len(job.blocks)
                case Read(tier=tier):
                    filling |= set(job.blocks)
                    reading[tier] += len(job.blocks)
                    stuck[tier] += len(job.blocks) if job.abandoned else 0
                    assert not job.abandoned or all(b.condemned for b in job.blocks), (
                        "given up, but still pending"
                    )
                case Probe():
                    pass
        assert writing == self.cascades.writing, "the cascade budget does not add up"
        assert (reading, stuck) == (self.reading, self.stuck), "reads do not add up"
        self.lending.check()
        assert all(n <= self._limits.writing_max for n in writing), "cascades over budget"
        assert sum(not j.abandoned for j in self._jobs.values()) == self._live, "live jobs"
        held = {b for b in self._pool.blocks.values() if b.holds} | filling
        assert self.promoting == len(held), "the promotion budget does not add up"
        assert self.promoting <= self._limits.promoting_max, "promotions over budget"
