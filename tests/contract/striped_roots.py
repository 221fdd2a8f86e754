"""Three roots in memory behind one tier, with faults, a clock and a tap on each."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

import pytest

from kvtier.testing.blocks import NAMESPACE, key_of
from kvtier.testing.contract import TierContract
from kvtier.testing.faults import FaultyTier
from kvtier.tiers.fs.files import FilesTier
from kvtier.tiers.fs.roots import Root
from kvtier.tiers.fs.striped import StripedTier
from kvtier.tiers.memory import MemoryTier

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kvtier.core.types import BlockKey

put = TierContract.put
get = TierContract.get

EIO = OSError(errno.EIO, "disk")
NAMES = ("a", "b", "c")


def files_root(path: Path) -> Root:
    return Root(str(path), lambda: FilesTier(path, NAMESPACE))


class Striped:
    """A striped tier over memory, with faults to script and a clock to move."""

    def __init__(self, names: Sequence[str] = NAMES) -> None:
        self.now = 0.0
        self.memory = {name: MemoryTier() for name in names}
        self.faulty = {name: FaultyTier(self.memory[name]) for name in names}
        self.tier = StripedTier(
            [Root(name, lambda name=name: self.faulty[name]) for name in names],  # type: ignore[misc]
            clock=lambda: self.now,
        )

    def holders(self, key: BlockKey) -> list[str]:
        return [name for name, tier in self.memory.items() if tier.exists([key])[0]]

    def keys_of(self, name: str, count: int = 3) -> list[BlockKey]:
        """Keys whose first root has this name."""
        found: list[BlockKey] = []
        probe = Striped(tuple(self.memory))
        i = 0
        while len(found) < count:
            put(probe.tier, key_of(i))
            if probe.holders(key_of(i)) == [name]:
                found.append(key_of(i))
            i += 1
        return found


@pytest.fixture
def striped() -> Striped:
    return Striped()
