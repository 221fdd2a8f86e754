"""Totals of decisions that no command, completion or event shows."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Counts:
    """Running totals of one manager.

    Attributes:
        expired_jobs: per tier, jobs that were given up.
        unstored_blocks: blocks of the device for which no slot was free or evictable.
        expired_waits: requests whose deadline passed.
        expired_holds: blocks let go before their request loaded them.
        recomputed_blocks: blocks that a tier holds, but that were not worth the wait.
    """

    expired_jobs: list[int] = field(default_factory=list)
    unstored_blocks: int = 0
    expired_waits: int = 0
    expired_holds: int = 0
    recomputed_blocks: int = 0
