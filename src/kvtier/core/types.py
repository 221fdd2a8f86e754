"""The vocabulary: every value that crosses the boundary of the core.

Commands go out, completions come in, events are told to the world. All are immutable values;
none holds a buffer, a handle or a clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NewType

BlockKey = NewType("BlockKey", bytes)
"""Content address of a block: engine block hash + 4-byte big-endian group; opaque besides."""

Slot = NewType("Slot", int)
"""Row of the primary region, `0 <= slot < num_slots`."""

JobId = NewType("JobId", int)
"""Unique for the life of a manager."""

TierId = NewType("TierId", int)
"""Position of a tier in the configured order; ties among tiers are broken by it."""

GROUP_BYTES = 4
"""The last bytes of a key hold its cache group."""


def group_of(key: BlockKey) -> int:
    """Cache group of a key."""
    return int.from_bytes(key[-GROUP_BYTES:], "big")


class Lookup(Enum):
    """The four answers to "is this block there?"."""

    HIT = "hit"  # readable in the primary tier now
    PENDING = "pending"  # known to exist, bytes on the way
    RETRY = "retry"  # not known yet, or this request's turn has not come
    MISS = "miss"  # nowhere, or not worth the wait


class Fault(Enum):
    """Why a job failed, as far as its driver can tell."""

    ERROR = "error"  # anything else
    FULL = "full"  # no space, over quota, read-only
    THROTTLED = "throttled"  # told to slow down
    UNREACHABLE = "unreachable"  # the server or the mount is gone
    DENIED = "denied"  # credentials or permissions
    STALLED = "stalled"  # nothing comes back; told by the core itself


class Reason(Enum):
    """Why a block left a tier."""

    EVICTED = "evicted"  # to make room
    FAILED = "failed"  # a transfer of it failed or came too late
    LOST = "lost"  # believed there, found missing or damaged
    RESET = "reset"  # the cache was reset


@dataclass(frozen=True, slots=True)
class Probe:
    """Ask a tier which of `keys` it holds."""

    tier: TierId
    job: JobId
    keys: tuple[BlockKey, ...]
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class Read:
    """Promotion: copy `keys[i]` from the tier into `slots[i]`."""

    tier: TierId
    job: JobId
    keys: tuple[BlockKey, ...]
    slots: tuple[Slot, ...]
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class Write:
    """Cascade: copy `slots[i]` to the tier under `keys[i]`."""

    tier: TierId
    job: JobId
    keys: tuple[BlockKey, ...]
    slots: tuple[Slot, ...]
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class Lend:
    """Answer to `Wanted`: `keys[i]` lies in `slots[i]`, and stays there until `Done` or the end of
    the lease. `missing` are the keys that cannot be lent.
    """

    tier: TierId
    job: JobId
    ticket: int
    keys: tuple[BlockKey, ...]
    slots: tuple[Slot, ...]
    missing: tuple[BlockKey, ...]
    epoch: int = 0


Command = Probe | Read | Write | Lend


@dataclass(frozen=True, slots=True)
class Done:
    """A command ended: after this its driver touches none of its slots.

    `ok` holds those of the command's keys that succeeded; for a probe, those that exist. `fault`
    tells why the others failed, if the tier failed; a block that is merely absent is no fault.
    """

    job: JobId
    ok: frozenset[BlockKey] = frozenset()
    fault: Fault | None = None


@dataclass(frozen=True, slots=True)
class Dropped:
    """A tier gave up blocks of its own accord."""

    tier: TierId
    keys: tuple[BlockKey, ...]
    reason: Reason = Reason.EVICTED


@dataclass(frozen=True, slots=True)
class Wanted:
    """A tier asks for blocks on behalf of somebody else, a peer for instance.

    `ticket` is the tier's own name for the question. With `promote`, keys that another tier holds
    are promoted before the answer is given.
    """

    tier: TierId
    ticket: int
    keys: tuple[BlockKey, ...]
    promote: bool = False


@dataclass(frozen=True, slots=True)
class Renewed:
    """A tier still needs what it was lent: the lease begins anew."""

    job: JobId


Completion = Done | Dropped | Wanted | Renewed


@dataclass(frozen=True, slots=True)
class Stored:
    """Blocks became readable. `tier` is None for the primary tier."""

    tier: TierId | None
    keys: tuple[BlockKey, ...]


@dataclass(frozen=True, slots=True)
class Removed:
    """Blocks stopped being readable."""

    tier: TierId | None
    keys: tuple[BlockKey, ...]
    reason: Reason


@dataclass(frozen=True, slots=True)
class Cleared:
    """Everything that the tier held is no longer readable under this epoch."""

    tier: TierId | None


Event = Stored | Removed | Cleared
