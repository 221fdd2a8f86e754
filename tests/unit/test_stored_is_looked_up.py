"""What is stored is what is looked up: for every mix of groups, prompt length and look-ahead, a
prompt that went down to a tier comes back exactly as far as it would from memory of any size.
"""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.core.types import BlockKey, Lookup, TierId
from kvtier.testing.engine import Groups, key_of, scan
from kvtier.testing.world import World

T0 = TierId(0)


@st.composite
def mixes(draw: st.DrawFn) -> Groups:
    full = tuple(range(draw(st.integers(1, 2))))
    sizes = draw(st.lists(st.integers(1, 4), max_size=2))
    windows = {len(full) + place: size for place, size in enumerate(sizes)}
    groups = [*full, *windows]
    ahead = draw(st.frozensets(st.sampled_from(groups)))
    return Groups(full, windows or None, ahead)


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
@given(mixes(), st.integers(1, 12), st.integers(0, 3), st.data())
def test_a_hit_is_as_long_as_from_endless_memory(
    groups: Groups, stored: int, more: int, data: st.DataObject
) -> None:
    prompt = range(1, stored + more + 1)
    held = stored_by(groups, stored, prompt)
    lost = data.draw(st.sets(st.sampled_from(sorted(held)), max_size=2))
    held -= lost
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
