"""What a planted fault is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """A fault: in `file`, `old` becomes `new`. `old` occurs exactly once."""

    what: str
    file: str
    old: str
    new: str
