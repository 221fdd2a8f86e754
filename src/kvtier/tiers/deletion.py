"""What a deletion of blocks did, wherever they lay."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, Self, TypeVar

Block = TypeVar("Block")


@dataclass(slots=True)
class Deletion(Generic[Block]):
    """Sums over some blocks.

    Attributes:
        blocks: removed.
        nbytes: of the blocks removed.
        kept: left alone since they were used meanwhile, or gone already.
        failures: blocks that could not be removed, and why.
    """

    blocks: int = 0
    nbytes: int = 0
    kept: int = 0
    failures: list[tuple[Block, str]] = field(default_factory=list)

    def __iadd__(self, other: Deletion[Block]) -> Self:
        self.blocks += other.blocks
        self.nbytes += other.nbytes
        self.kept += other.kept
        self.failures += other.failures
        return self
