"""The segments layout: the contracts, and what lies on the disk."""

from __future__ import annotations

import contextlib
import json
import os
import stat
from typing import TYPE_CHECKING

import pytest
import segments_world
from descriptors import opened_below
from segments_world import (
    SMALL,
    Capacity,
    content_of,
    held,
    open_tier,
    put,
    segments_of,
    stores_of,
    vanish,
)

from kvtier.drivers.threaded import ThreadedDriver
from kvtier.testing.blocks import NAMESPACE, key_of
from kvtier.testing.contract import DriverContract, TierContract
from kvtier.tiers.base import SupportsBatch, SupportsDelete, SupportsDropped, SupportsFigures
from kvtier.tiers.fs.segments import SegmentsTier

if TYPE_CHECKING:
    from pathlib import Path

    from kvtier.drivers.base import SecondaryTierManager
    from kvtier.tiers.base import Tier

tier = segments_world.tier


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


def test_it_has_all_optional_protocols(tier: SegmentsTier) -> None:
    for protocol in (SupportsBatch, SupportsDelete, SupportsDropped, SupportsFigures):
        assert isinstance(tier, protocol)


# --- the back door: the files themselves


def test_a_block_lies_in_a_slot(tmp_path: Path, tier: SegmentsTier) -> None:
    put(tier, 0, 1, 2)
    (segment,) = segments_of(tmp_path)
    content = segment.read_bytes()
    assert len(content) == 16 * SMALL
    for i in range(3):
        assert content[i * SMALL : (i + 1) * SMALL] == content_of(i)
    assert not any(content[3 * SMALL :])


def test_the_names_of_a_store(tmp_path: Path, tier: SegmentsTier) -> None:
    put(tier, 1)
    (store,) = stores_of(tmp_path)
    assert store.parent == tmp_path / NAMESPACE / "stores"
    assert sorted(path.name for path in store.iterdir()) == [
        "0.segment",
        "index.log",
        "lock",
        "requests",
    ]


def test_nothing_is_made_before_the_first_write(tmp_path: Path, tier: SegmentsTier) -> None:
    assert held(tier, range(3)) == set()
    assert [path.name for path in tmp_path.rglob("*")] == [NAMESPACE, "namespace.json"]


def test_an_empty_store_goes_with_its_owner(tmp_path: Path) -> None:
    capacity = Capacity(1 << 20)
    tier = open_tier(tmp_path, capacity)
    put(tier, 1)
    tier.delete(key_of(1))
    tier.close()
    assert stores_of(tmp_path) == []
    assert capacity.used == 0


def test_the_namespace_is_described_once(tmp_path: Path) -> None:
    for model in ("tiny", "other"):
        SegmentsTier(tmp_path, NAMESPACE, {"model": model}).close()
    assert json.loads((tmp_path / NAMESPACE / "namespace.json").read_text()) == {"model": "tiny"}


@pytest.mark.parametrize("umask", [0o000, 0o077, 0o777])
def test_only_the_owner_may_read(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        tier = open_tier(tmp_path)
        put(tier, 1)
        tier._owned.stores()[0].log.rewrite(list, 1)
        vanish(tier)
    finally:
        os.umask(before)
    paths = list(tmp_path.rglob("*"))
    assert len(paths) == 8
    for path in paths:
        expected = 0o700 if path.is_dir() else 0o600
        assert stat.S_IMODE(path.stat().st_mode) == expected, path


def test_a_link_in_place_of_a_segment_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    tier = open_tier(tmp_path / "root")
    put(tier, 1)
    tier.close()
    (segment,) = segments_of(tmp_path / "root")
    elsewhere = tmp_path / "elsewhere"
    segment.rename(elsewhere)
    segment.symlink_to(elsewhere)
    tier = open_tier(tmp_path / "root")
    assert held(tier, [1]) == set()
    put(tier, 2)
    tier.close()
    assert elsewhere.read_bytes()[:SMALL] == content_of(1), "it was written to"


def test_a_root_that_is_gone_is_not_made_again(tmp_path: Path) -> None:
    root = tmp_path / "mount"
    root.mkdir()
    tier = open_tier(root)
    put(tier, 1)
    root.rename(tmp_path / "unmounted")
    for i in range(2, 40):
        with contextlib.suppress(OSError):
            put(tier, i)
    tier.maintain()
    with pytest.raises(FileNotFoundError):
        put(tier, 100)
    with pytest.raises(FileNotFoundError):
        SegmentsTier(root, NAMESPACE)
    assert not root.exists()
    tier.close()


def test_nothing_is_left_open(tmp_path: Path) -> None:
    before = opened_below(tmp_path)
    for _ in range(3):
        one = SegmentsTier(tmp_path, NAMESPACE, space=Capacity(64 * SMALL))
        two = SegmentsTier(tmp_path, NAMESPACE, space=Capacity(64 * SMALL))
        put(one, *range(40))
        put(two, *range(40, 90))
        held(one, range(90))
        one.maintain()
        one.close()
        two.close()
    assert opened_below(tmp_path) == before
