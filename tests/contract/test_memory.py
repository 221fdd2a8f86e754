from __future__ import annotations

from kvtier.testing.contract import TierContract
from kvtier.tiers.base import SupportsDelete, Tier
from kvtier.tiers.memory import MemoryTier


class TestMemoryTier(TierContract):
    def make(self) -> Tier:
        return MemoryTier()


def test_it_can_delete() -> None:
    assert isinstance(MemoryTier(), SupportsDelete)
