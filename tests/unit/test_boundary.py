"""Where the groups of one request meet."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from kvtier.core.boundary import align
from kvtier.core.types import BlockKey, TierId
from kvtier.testing.engine import Groups, key_of
from kvtier.testing.world import World

NONE = frozenset[int]()
T0 = TierId(0)


def keys(group: int, blocks: Iterable[int]) -> list[BlockKey]:
    return [key_of(block, group) for block in blocks]


def position(key: BlockKey) -> int:
    """Blocks are numbered from 1; group 2 has blocks of twice the tokens."""
    size = 2 if key[-1] == 2 else 1
    return int.from_bytes(key[:8], "big") * size


def missing(key: BlockKey) -> bool:
    """Nothing is readable yet."""
    return False


def test_one_group_is_left_alone():
    scan = keys(0, range(1, 9))
    assert align(scan, NONE, position, missing) == (scan, [])


def test_without_positions_nothing_is_known():
    scan = keys(0, range(1, 9)) + keys(1, range(1, 3))
    assert align(scan, NONE, None, missing) == (scan, [])


def test_full_groups_end_together_but_for_one_block_ahead():
    scan = keys(0, range(1, 9)) + keys(1, range(1, 4))
    kept, beyond = align(scan, NONE, position, missing)
    assert kept == keys(0, range(1, 5)) + keys(1, range(1, 4))
    assert beyond == keys(0, range(5, 9))


def test_groups_of_other_block_sizes_meet_by_tokens():
    scan = keys(0, range(1, 9)) + keys(2, range(1, 3))
    kept, beyond = align(scan, NONE, position, missing)
    assert kept == keys(0, range(1, 6)) + keys(2, range(1, 3))
    assert beyond == keys(0, range(6, 9))


def test_a_window_that_ends_earlier_bounds_the_full_groups():
    scan = keys(0, range(1, 9)) + keys(1, (4, 3))
    kept, beyond = align(scan, frozenset({1}), position, missing)
    assert kept == keys(0, range(1, 6)) + keys(1, (4, 3))
    assert beyond == keys(0, range(6, 9))


def test_a_window_beyond_the_boundary_is_not_read_and_not_denied():
    scan = keys(0, range(1, 5)) + keys(1, (8, 7))
    kept, beyond = align(scan, frozenset({1}), position, missing)
    assert kept == keys(0, range(1, 5))
    assert beyond == []


def test_a_window_that_the_engine_asks_for_when_it_knows_the_boundary_is_the_right_one():
    """A group that speculates looks one block ahead of the boundary."""
    scan = keys(0, range(1, 5)) + keys(1, (5, 4, 3))
    kept, beyond = align(scan, frozenset({1}), position, lambda key: key[-1] == 0)
    assert (kept, beyond) == (scan, [])


def test_a_window_group_that_found_nothing_cuts_nothing_here():
    """Its miss is the engine's to see: it loads nothing then, and settles the request."""
    scan = keys(0, range(1, 5))
    assert align(scan, frozenset({1}), position, missing) == (scan, [])


def test_a_key_of_another_prompt_is_no_boundary():
    scan = keys(0, range(1, 5)) + keys(1, range(1, 3))
    assert align(scan, NONE, lambda key: None if key[-1] == 1 else position(key), missing) == (
        scan,
        [],
    )


@pytest.mark.parametrize("blocks", [255, 256, 257, 600])
def test_a_long_promotion_is_read_in_jobs_of_bounded_size(blocks: int):
    world = World(1024, 1024)
    world.fill(T0, range(blocks))
    world.open("a", range(blocks))
    sizes: list[int] = []
    for _ in range(6):
        if (hit := world.ask("a")) is not None:
            break
        sizes += [len(command.keys) for command in world.step() if hasattr(command, "slots")]
    assert hit == blocks
    assert sum(sizes) == blocks
    assert max(sizes) <= 256


def test_two_full_groups_read_to_where_they_meet():
    world = World(32, 32, groups=Groups((0, 1)))
    world.holding[T0] |= set(keys(0, range(8)) + keys(1, range(3)))
    world.open("a", range(8))
    request = world.requests["a"]
    request.position = lambda key: int.from_bytes(key[:8], "big") + 1
    assert world.until_answered("a") == 3
    assert sum(world.reads.values()) == 7, "three blocks each, and one ahead"
