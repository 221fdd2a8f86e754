"""Several roots behind one tier: the contract, and where keys go."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import pytest
import striped_roots
from striped_roots import EIO, NAMES, Striped, files_root

from kvtier.errors import MissingBlockError
from kvtier.testing.blocks import BLOCK_BYTES, NAMESPACE, block_of, key_of
from kvtier.testing.contract import TierContract
from kvtier.testing.faults import Fail, FaultyTier
from kvtier.tiers.base import SupportsBatch, SupportsDelete, SupportsDropped, SupportsFigures, Tier
from kvtier.tiers.fs.roots import Root
from kvtier.tiers.fs.segments.tier import SegmentsTier
from kvtier.tiers.fs.striped import StripedTier
from kvtier.tiers.memory import MemoryTier

if TYPE_CHECKING:
    from pathlib import Path

striped = striped_roots.striped


class TestStripedMemory(TierContract):
    def make(self) -> Tier:
        return StripedTier([Root(name, MemoryTier) for name in NAMES])


class TestStripedFiles(TierContract):
    @pytest.fixture(autouse=True)
    def place(self, tmp_path: Path) -> None:
        self.root = tmp_path
        for name in NAMES:
            (tmp_path / name).mkdir()

    def make(self) -> Tier:
        return StripedTier([files_root(self.root / name) for name in NAMES])

    def reopen(self) -> Tier:
        return self.make()


class TestStripedSegments(TestStripedFiles):
    def make(self) -> Tier:
        return StripedTier(
            [
                Root(name, lambda name=name: SegmentsTier(self.root / name, NAMESPACE))  # type: ignore[misc]
                for name in NAMES
            ]
        )


class TestFilesAndSegments(TestStripedFiles):
    def make(self) -> Tier:
        segments = Root("b", lambda: SegmentsTier(self.root / "b", NAMESPACE))
        return StripedTier([files_root(self.root / "a"), segments])


class TestOneRoot(TierContract):
    def make(self) -> Tier:
        return StripedTier([Root("only", MemoryTier)])


class TestAFailingRoot(TierContract):
    """Every test of a tier passes with one root that never works."""

    def make(self) -> Tier:
        faulty = FaultyTier(MemoryTier())
        for operation in ("exists", "read", "write", "delete"):
            faulty.script(operation, Fail(EIO))  # type: ignore[arg-type]
        return StripedTier(
            [Root("a", MemoryTier), Root("b", lambda: faulty), Root("c", MemoryTier)]
        )


def test_it_supports_what_roots_may(striped: Striped) -> None:
    for protocol in (SupportsBatch, SupportsDelete, SupportsDropped, SupportsFigures):
        assert isinstance(striped.tier, protocol)
    assert striped.tier.take_dropped() == []


# --- where keys go


def test_keys_are_spread_evenly_and_stay(striped: Striped) -> None:
    keys = [key_of(i) for i in range(600)]
    for key in keys:
        striped.tier.write(key, (memoryview(b"block"),))
    homes = {key: striped.holders(key) for key in keys}
    assert all(len(names) == 1 for names in homes.values())
    counts = Counter(names[0] for names in homes.values())
    assert all(160 < counts[name] < 240 for name in NAMES)
    reordered = Striped(("c", "a", "b"))
    larger = Striped(("a", "b", "c", "d"))
    moved = 0
    for key in keys:
        reordered.tier.write(key, (memoryview(b"block"),))
        larger.tier.write(key, (memoryview(b"block"),))
        assert reordered.holders(key) == homes[key], "the order of the settings decides nothing"
        assert larger.holders(key) in (homes[key], ["d"]), "a new root takes its share alone"
        moved += larger.holders(key) == ["d"]
    assert 110 < moved < 190


def test_a_batch_goes_to_its_roots(striped: Striped) -> None:
    keys = [key_of(i) for i in range(30)]
    blocks = [(memoryview(block_of(key)),) for key in keys]
    assert list(striped.tier.write_batch(keys, blocks)) == [None] * 30
    assert {tuple(striped.holders(key)) for key in keys} == {("a",), ("b",), ("c",)}
    into = [bytearray(BLOCK_BYTES) for _ in range(31)]
    outcomes = striped.tier.read_batch([*keys, key_of(99)], [(memoryview(b),) for b in into])
    assert outcomes[:30] == [None] * 30
    assert isinstance(outcomes[30], MissingBlockError)
    assert [bytes(b) for b in into[:30]] == [block_of(key) for key in keys]
