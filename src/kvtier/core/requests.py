"""What the manager remembers of one request, and of the transfers that requests wait for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvtier.core.pool import Block
from kvtier.core.types import BlockKey, Command, Probe, TierId

Position = Callable[[BlockKey], int | None]
"""End of a key's tokens in a prompt; None for a key that is not of it."""


@dataclass(slots=True, eq=False)
class Fill:
    """Blocks being filled together: by one store of the device, or by one promotion.

    Attributes:
        tier: where the bytes come from; None: the device.
        cascade_to: tiers that are to get them; None: all.
        blocks: the blocks, in the order in which they were asked for.
        waiters: request -> those of the blocks that it met while they were filling. It holds them
            once they are good.
    """

    tier: TierId | None = None
    cascade_to: frozenset[TierId] | None = None
    blocks: list[Block] = field(default_factory=list)
    waiters: dict[Request, list[Block]] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Job:
    """One command in flight.

    Attributes:
        command: what was asked of the tier.
        submitted_at: when.
        deadline: when its keys are given up.
        blocks: primary blocks pinned until `Done`; empty for a probe.
        fill: for a promotion, the blocks being filled.
        waiters: for a probe, the requests that wait for the answer.
        abandoned: given up; only its `Done` is awaited, to free the slots.
    """

    command: Command
    submitted_at: float
    deadline: float
    blocks: Sequence[Block] = ()
    fill: Fill | None = None
    waiters: dict[Request, None] = field(default_factory=dict)
    abandoned: bool = False

    @property
    def moves(self) -> bool:
        """Whether it moves bytes."""
        return not isinstance(self.command, Probe)


@dataclass(slots=True, eq=False)
class Request:
    """One request of the engine, from its first lookup to its end.

    Attributes:
        request_id: the engine's name for it.
        arrival: its place in the order of arrival.
        tiers: tiers it may load from, in order.
        cascade_to: tiers that may get what it stores; None: all.
        position: end of a key's tokens in its prompt, if known: tells where groups meet.
        step: the step of its latest scan.
        short: that scan is answered without looking anything up, since the request waits.
        firsts: cache group -> first key of that scan, noted while it is short.
        scan: keys found readable, filling or in a tier by the latest full scan, in order.
        wishes: of these, the ones that only a tier holds -> that tier.
        denied: keys beyond its grant: MISS until its wait ends.
        waits: the probes and fills whose end it waits for.
        queued: its wishes wait for their turn; it holds nothing for them meanwhile.
        refused: what was free (see admission) when it was last told to wait for its turn.
        by_block: each block is worth something by itself: a gap ends nothing.
        given_up: its deadline has passed: what is not readable now is a MISS.
        deadline: end of its wait; None while it has not waited.
        held: blocks pinned for it until it loads them.
        held_until: when they are let go.
        origin: key -> tier from which it was promoted for this request.
        used: keys it stored or loaded, in order; their recency is refreshed when it ends.
    """

    request_id: str
    arrival: int
    tiers: tuple[TierId, ...]
    cascade_to: frozenset[TierId] | None = None
    position: Position | None = None
    step: int = -1
    short: bool = False
    firsts: dict[int, BlockKey] = field(default_factory=dict)
    scan: list[BlockKey] = field(default_factory=list)
    wishes: dict[BlockKey, TierId] = field(default_factory=dict)
    denied: set[BlockKey] = field(default_factory=set)
    waits: set[Job | Fill] = field(default_factory=set)
    queued: bool = False
    refused: tuple[int, int] | None = None
    by_block: bool = False
    given_up: bool = False
    deadline: float | None = None
    held: dict[BlockKey, Block] = field(default_factory=dict)
    held_until: float = 0.0
    origin: dict[BlockKey, TierId] = field(default_factory=dict)
    used: list[BlockKey] = field(default_factory=list)

    @property
    def waiting(self) -> bool:
        """Whether a complete answer exists without looking anything up."""
        return self.queued or bool(self.waits)

    def stop_waiting(self) -> None:
        """Wish for nothing and wait for nothing. What it holds stays held."""
        self.scan.clear()
        self.wishes.clear()
        self.waits.clear()
        self.queued = False
        self.refused = None

    def settle(self) -> None:
        """The engine has its answer: the wait is over, and a later one starts afresh."""
        self.stop_waiting()
        self.denied.clear()
        self.given_up = False
        self.deadline = None
        self.step = -1
