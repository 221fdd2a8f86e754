"""Lending: the core's half of serving blocks to others, peers for instance.

A tier asks with `Wanted`; the answer is one `Lend` that names the readable subset and what is
missing. What is lent is pinned under a lease: bounded in slots and in time, renewable up to a
limit. When a lease ends, nothing more is promised, but its slots are free only when the tier has
said `Done`: it may still be reading them.

With `promote`, what other tiers hold is promoted first, as if a request had asked; the tier that
asks is never asked itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvtier.core.pool import Block, BlockPool
from kvtier.core.types import BlockKey, JobId, Lend, Wanted


@dataclass(slots=True, eq=False)
class Lease:
    """Blocks lent under one job."""

    command: Lend
    blocks: Sequence[Block]
    until: float
    at_most_until: float
    ended: bool = False  # nothing is promised any more; its `Done` is awaited


@dataclass(slots=True)
class Lending:
    """Every lease of one manager.

    Attributes:
        lent: slots under leases, those included that ended but are not done.
        refused: blocks that were readable, but over the budget.
    """

    pool: BlockPool
    lending_max: int
    lease_s: float
    lease_max_s: float
    lent: int = 0
    refused: int = 0
    leases: dict[JobId, Lease] = field(default_factory=dict)

    def lend(self, wanted: Wanted, job: JobId, epoch: int, now: float) -> Lend:
        """Answer a question from what is readable now."""
        room = self.lending_max - self.lent
        blocks: list[Block] = []
        missing: list[BlockKey] = []
        for key in dict.fromkeys(wanted.keys):
            block = self.pool.blocks.get(key)
            if block is None or not block.ready:
                missing.append(key)
            elif len(blocks) == room:
                self.refused += 1
                missing.append(key)
            else:
                self.pool.pin(block)
                blocks.append(block)
        command = Lend(
            wanted.tier,
            job,
            wanted.ticket,
            tuple([b.key for b in blocks]),
            tuple([b.slot for b in blocks]),
            tuple(missing),
            epoch,
        )
        self.lent += len(blocks)
        self.leases[job] = Lease(command, blocks, now + self.lease_s, now + self.lease_max_s)
        return command

    def renew(self, job: JobId, now: float) -> None:
        """The tier still needs it. Too late, or for too long, is no renewal."""
        lease = self.leases.get(job)
        if lease is not None and not lease.ended and now < lease.until:
            lease.until = min(now + self.lease_s, lease.at_most_until)

    def expire(self, now: float) -> None:
        """End the leases whose time has passed."""
        for lease in self.leases.values():
            if now >= lease.until:
                lease.ended = True

    def recall(self, command: Lend, epoch: int) -> Lend:
        """A reset came before the answer was sent: nothing can be lent any more."""
        lease = self.leases[command.job]
        self._give_back(lease)
        missing = command.keys + command.missing
        lease.command = Lend(command.tier, command.job, command.ticket, (), (), missing, epoch)
        return lease.command

    def end_all(self) -> None:
        """What is lent belongs to an epoch that has ended."""
        for lease in self.leases.values():
            lease.ended = True

    def done(self, job: JobId) -> bool:
        """The tier has finished with a lease; False if there is none of this name."""
        lease = self.leases.pop(job, None)
        if lease is None:
            return False
        self._give_back(lease)
        return True

    def _give_back(self, lease: Lease) -> None:
        self.lent -= len(lease.blocks)
        for block in reversed(lease.blocks):
            self.pool.unpin(block)
        lease.blocks = ()

    @property
    def running(self) -> int:
        """Leases that have not ended."""
        return sum(not lease.ended for lease in self.leases.values())

    def check(self) -> None:
        """Assert what must hold. O(n): for tests."""
        assert self.lent == sum(len(lease.blocks) for lease in self.leases.values()), "lent"
        assert self.lent <= self.lending_max, "lent over budget"
        assert all(block.pins for lease in self.leases.values() for block in lease.blocks), (
            "a lent block without a pin"
        )
