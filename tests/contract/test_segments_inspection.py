"""Stores seen from the command line: listed, read, and evicted from beside their owner."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

import pytest
from segments_world import (
    SMALL,
    Capacity,
    content_of,
    get,
    held,
    open_tier,
    put,
    rewrite_log,
    segments_of,
    stores_of,
)

from kvtier.errors import MissingBlockError
from kvtier.testing.blocks import NAMESPACE, key_of
from kvtier.tiers.fs.segments import SegmentsTier, inspection

if TYPE_CHECKING:
    from pathlib import Path


def test_stores_are_listed_and_read_beside_their_owner(tmp_path: Path) -> None:
    tier = open_tier(tmp_path, wall_clock_ns=iter(range(1000, 9999)).__next__)
    put(tier, 1, 2)
    get(tier, 1)
    tier.maintain()
    (listing,) = inspection.list_stores(tmp_path / NAMESPACE)
    assert listing == (str(stores_of(tmp_path)[0]), True, 1, 16 * SMALL)
    with inspection.StoreReader(listing.directory) as reader:
        blocks = {block.key: block for block in reader.blocks()}
        assert blocks.keys() == {key_of(1), key_of(2)}
        first, second = blocks[key_of(1)], blocks[key_of(2)]
        assert (first.length, first.segment, first.slot) == (SMALL, 0, 0)
        assert first.created_ns < second.created_ns == second.used_ns < first.used_ns
        into = bytearray(SMALL)
        reader.read(first, memoryview(into))
        assert into == content_of(1)
        tier.delete(key_of(1))
        with pytest.raises(MissingBlockError):
            reader.read(first, memoryview(into))
        rewrite_log(tier)
        reader.read(second, memoryview(into))
        assert into == content_of(2)
    tier.close()
    (listing,) = inspection.list_stores(tmp_path / NAMESPACE)
    assert not listing.alive
    assert len(inspection.StoreReader(listing.directory)) == 1


def test_an_owner_evicts_what_it_is_asked_to(tmp_path: Path) -> None:
    capacity = Capacity(1 << 20)
    tier = SegmentsTier(tmp_path, NAMESPACE, space=capacity, upkeep_s=0.01)
    put(tier, *range(20))
    (directory,) = stores_of(tmp_path)
    assert inspection.evict(str(directory), [key_of(3), key_of(99)]).requested
    while tier.exists([key_of(3)]) == [True]:
        threading.Event().wait(0.01)
    assert held(tier, range(20)) == set(range(20)) - {3}
    assert inspection.evict(str(directory), None).requested
    while capacity.used:
        threading.Event().wait(0.01)
    assert held(tier, range(20)) == set()
    assert set(tier.take_dropped()) == {key_of(i) for i in range(20)}
    assert list((directory / "requests").iterdir()) == []
    tier.close()


def test_a_request_that_makes_no_sense_is_thrown_away(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    put(tier, 1)
    requests = stores_of(tmp_path)[0] / "requests"
    (requests / "a.request").write_bytes(os.urandom(1000))
    (requests / "b.request").symlink_to("/etc/passwd")
    (requests / "c.request").mkdir()
    for name in ("foreign", "new.tmp", "old.tmp"):
        (requests / name).touch()
    os.utime(requests / "old.tmp", (0, 0))
    tier.maintain()
    tier.maintain()
    assert sorted(path.name for path in requests.iterdir()) == ["c.request", "foreign", "new.tmp"]
    assert tier.figures()["upkeep_failures"] == 0
    assert held(tier, [1]) == {1}
    tier.close()


def test_a_store_without_an_owner_is_evicted_from_at_once(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    put(tier, *range(16))
    put(tier, *range(16, 20))
    tier.close()
    (store,) = stores_of(tmp_path)
    keys = [key_of(i) for i in (0, 16, 17, 18, 19, 50)]
    assert inspection.evict(str(store), keys) == (False, 5, 16 * SMALL)
    tier = open_tier(tmp_path)
    assert held(tier, range(20)) == set(range(1, 16))
    tier.close()
    assert inspection.evict(str(store), None) == (False, 15, 16 * SMALL)
    assert not store.exists()
    assert segments_of(tmp_path) == []
