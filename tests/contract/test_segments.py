from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvtier.drivers.threaded import ThreadedDriver
from kvtier.testing.blocks import NAMESPACE
from kvtier.testing.contract import DriverContract, TierContract
from kvtier.tiers.fs.segments import SegmentsTier

if TYPE_CHECKING:
    from pathlib import Path

    from kvtier.drivers.base import SecondaryTierManager
    from kvtier.tiers.base import Tier


class TestSegmentsTier(TierContract):
    @pytest.fixture(autouse=True)
    def place(self, tmp_path: Path) -> None:
        self.root = tmp_path

    def make(self) -> Tier:
        return SegmentsTier(self.root, NAMESPACE)

    def reopen(self) -> Tier:
        return SegmentsTier(self.root, NAMESPACE)


class TestSegmentsTierWithDurableData(TestSegmentsTier):
    def make(self) -> Tier:
        return SegmentsTier(self.root, NAMESPACE, durability="data")


class TestThreadedDriverOverSegments(DriverContract):
    @pytest.fixture(autouse=True)
    def place(self, tmp_path: Path) -> None:
        self.root = tmp_path

    def make(self) -> SecondaryTierManager:
        return ThreadedDriver("fs", lambda namespace: SegmentsTier(self.root, namespace), 4)

    def make_over(self, tier: Tier) -> SecondaryTierManager:
        return ThreadedDriver("fs", lambda namespace: tier, num_threads=4)
