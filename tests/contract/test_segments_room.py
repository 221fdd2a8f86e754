"""Room for segments: how it is taken, kept, made and given back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from segments_world import SMALL, Capacity, data_of, get, held, on_disk, open_tier, put, segments_of

from kvtier.errors import TierFullError
from kvtier.testing.blocks import key_of
from kvtier.tiers.fs.segments.owned import RETRY_S

if TYPE_CHECKING:
    from pathlib import Path


def test_segments_grow_with_the_store(tmp_path: Path) -> None:
    tier = open_tier(tmp_path, segment_bytes=64 * SMALL)
    sizes = []
    for i in range(300):
        put(tier, i)
        sizes = [path.stat().st_size // SMALL for path in segments_of(tmp_path)]
    assert sizes == [16, 16, 32, 64, 64, 64, 64]
    tier.close()


@pytest.mark.parametrize("slots", [1, 2, 10, 17, 40])
def test_a_small_capacity_is_used_and_kept(tmp_path: Path, slots: int) -> None:
    capacity = Capacity(slots * SMALL)
    tier = open_tier(tmp_path, capacity)
    for i in range(3 * slots):
        put(tier, i)
        assert held(tier, [i]) == {i}
        assert capacity.used == on_disk(tmp_path)
    assert tier.figures()["blocks"] >= max(1, slots // 2)
    tier.close()


def test_without_any_room_a_write_is_refused(tmp_path: Path) -> None:
    tier = open_tier(tmp_path, Capacity(SMALL - 1))
    with pytest.raises(TierFullError):
        put(tier, 1)
    assert held(tier, [1]) == set()
    tier.close()


def test_a_batch_larger_than_the_capacity_keeps_its_head(tmp_path: Path) -> None:
    tier = open_tier(tmp_path, Capacity(16 * SMALL))
    keys = [key_of(i) for i in range(20)]
    errors = tier.write_batch(keys, data_of(keys))
    assert [isinstance(error, TierFullError) for error in errors] == [False] * 16 + [True] * 4
    assert held(tier, range(20)) == set(range(16))
    tier.close()


def test_the_block_that_was_not_used_for_longest_goes(tmp_path: Path) -> None:
    tier = open_tier(tmp_path, Capacity(16 * SMALL))
    put(tier, *range(16))
    get(tier, 0)  # a read is a use,
    put(tier, 1)  # and so is a write
    put(tier, 20, 21)
    assert tier.take_dropped() == [key_of(2), key_of(3)]
    assert tier.take_dropped() == []
    assert held(tier, range(16)) == set(range(16)) - {2, 3}
    tier.close()


def test_other_lengths_make_room_for_one_another(tmp_path: Path) -> None:
    tier = open_tier(tmp_path, Capacity(32 * SMALL))
    put(tier, *range(32))
    put(tier, 50, length=2 * SMALL)
    assert held(tier, [50], 2 * SMALL) == {50}
    assert len(held(tier, range(32))) == 16
    tier.close()


def test_a_debt_is_paid_with_the_coldest_segment(tmp_path: Path) -> None:
    capacity = Capacity(64 * SMALL)
    tier = open_tier(tmp_path, capacity)
    put(tier, *range(16))
    put(tier, *range(16, 32))
    for i in range(16):
        get(tier, i)
    capacity.debt = 1
    tier.maintain()
    assert held(tier, range(32)) == set(range(16))
    assert capacity.used == 16 * SMALL
    assert set(tier.take_dropped()) == {key_of(i) for i in range(16, 32)}
    capacity.debt = 1000 * SMALL
    tier.maintain()
    assert (held(tier, range(32)), capacity.used) == (set(), 0)
    assert segments_of(tmp_path) == []
    capacity.debt = 0
    put(tier, 1)
    assert held(tier, [1]) == {1}
    tier.close()


def test_refused_space_is_asked_for_again_after_a_while(tmp_path: Path) -> None:
    now = [0.0]
    capacity = Capacity(16 * SMALL)
    tier = open_tier(tmp_path, capacity, clock=lambda: now[0])
    put(tier, *range(16))
    capacity.refusals = 0
    for i in range(16, 32):
        put(tier, i)
    assert capacity.refusals == 1, "a ledger is not asked for each block"
    capacity.nbytes *= 2
    now[0] += RETRY_S
    put(tier, *range(32, 48))
    assert tier.figures()["blocks"] == 32
    tier.close()
