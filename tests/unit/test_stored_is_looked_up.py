"""What is stored is what is looked up: for every mix of groups, prompt length and look-ahead, a
prompt that went down to a tier comes back exactly as far as it would from memory of any size.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.core.types import BlockKey, Lookup, TierId
from kvtier.testing.engine import Groups, key_of, scan
from kvtier.testing.world import World

T0 = TierId(0)


def every_mix() -> Iterator[Groups]:
    """One or two full groups, up to two windows of up to four blocks, any of them looking ahead."""
    for num_full in (1, 2):
        full = tuple(range(num_full))
        for num_windows in range(3):
            for sizes in itertools.product(range(1, 5), repeat=num_windows):
                windows = {num_full + place: size for place, size in enumerate(sizes)}
                groups = [*full, *windows]
                for count in range(len(groups) + 1):
                    for ahead in itertools.combinations(groups, count):
                        yield Groups(full, windows or None, frozenset(ahead))


MIXES = st.sampled_from(list(every_mix()))
LOST = st.lists(st.integers(0, 999), max_size=2)


def stored_by(groups: Groups, stored: int, prompt: range) -> set[BlockKey]:
    """What an engine offloads of a prompt: all of full groups, the last window of the others."""
    keys: set[BlockKey] = set()
    for group in groups.order:
        window = groups.window(group)
        ahead = group in groups.ahead
        first = 0 if window is None else max(0, stored - window - ahead)
        keys |= {key_of(block, group) for block in prompt[first:stored]}
    return keys


@settings(max_examples=2000)
@given(MIXES, st.integers(1, 12), st.integers(0, 3), LOST)
def test_a_hit_is_as_long_as_from_endless_memory(
    groups: Groups, stored: int, more: int, lost: list[int]
) -> None:
    prompt = range(1, stored + more + 1)
    held = stored_by(groups, stored, prompt)
    in_order = sorted(held)
    held -= {in_order[place % len(in_order)] for place in lost}
    expected = scan(lambda key: Lookup.HIT if key in held else Lookup.MISS, prompt, groups)

    world = World(128, 128, groups=groups)
    world.holding[T0] |= held
    world.open("a", prompt)
    world.requests["a"].position = lambda key: int.from_bytes(key[:8], "big")
    hit = world.until_answered("a", 16)
    assert hit == expected
    if hit:
        needed = groups.needed(prompt, hit)
        world.load("a", hit)
        world.loaded("a")
        assert set(needed) <= set(world.reads)
    assert max(world.reads.values(), default=0) <= 1, "a block was read twice"
