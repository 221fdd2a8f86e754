"""What the simulated engine remembers: its shape, its requests, the copies of its device."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from kvtier.core.types import BlockKey, Slot
from kvtier.testing.engine import Groups
from kvtier.testing.simulated_tiers import Content


class Phase(Enum):
    """What a request is doing."""

    WAITING = "waiting"
    LOADING = "loading"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class Shape:
    """The engine.

    Attributes:
        device_blocks: blocks that fit on the device.
        running_max: requests that run at a time.
        chunk_blocks: blocks of a prompt computed in a step.
        steps_per_block: steps of decoding that fill a block.
        load_steps: steps that a load takes.
        store_steps: steps that a store takes, after the one that it starts late.
        store_decoded: blocks made by decoding are stored too.
        groups: cache groups.
    """

    device_blocks: int = 1 << 30
    running_max: int = 1 << 30
    chunk_blocks: int = 4
    steps_per_block: int = 4
    load_steps: int = 1
    store_steps: int = 1
    store_decoded: bool = False
    groups: Groups = field(default_factory=Groups)


@dataclass(slots=True, eq=False)
class SimulatedRequest:
    """One request.

    Attributes:
        prompt: numbers of its blocks; what was decoded is appended.
        prompt_blocks: how many of them are the prompt.
        output_blocks: how many it decodes.
        computed: blocks whose bytes are on the device.
        allocated: device blocks it has.
        offered: blocks that were offered for storing.
        hits: blocks that each of its loads found, in order.
        asked_at: step of its first lookup since it last had an answer.
        answered_at: step in which it was first scheduled.
    """

    name: str
    prompt: list[int]
    prompt_blocks: int
    output_blocks: int
    phase: Phase = Phase.WAITING
    computed: int = 0
    allocated: int = 0
    offered: int = 0
    decoding: int = 0
    hits: list[int] = field(default_factory=list)
    added_at: int = 0
    asked_at: int | None = None
    answered_at: int | None = None
    started: bool = False


@dataclass(slots=True, eq=False)
class DeviceCopy:
    """A load or a store of the device."""

    request: SimulatedRequest
    keys: list[BlockKey]
    slots: dict[BlockKey, Slot]
    contents: list[Content | None]
    starts_at: int
    ends_at: int
    hit: int = 0  # of a load
    stale: bool = False  # from before a reset: it is run, and not completed
