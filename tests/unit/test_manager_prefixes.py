"""What of a prefix is promoted: longer than the pool, shared, of several groups, in windows."""

from __future__ import annotations

from collections import Counter

import pytest

from kvtier.testing.engine import Groups, key_of
from kvtier.testing.world import T0, World

# -- prefixes longer than the pool, more requests than slots ------------------


@pytest.mark.parametrize("length", [17, 32, 160])
@pytest.mark.parametrize("promoting", [16, 8])
def test_a_prefix_longer_than_the_pool_gets_what_fits(length: int, promoting: int) -> None:
    world = World(16, promoting)
    world.fill(T0, range(length))
    world.open("a", range(length))
    hit = world.until_answered("a", most=4)
    assert hit == promoting
    world.load("a", hit)
    assert world.reads == Counter({key_of(i): 1 for i in range(hit)}), "each block read once"
    world.loaded("a")
    world.whole()


@pytest.mark.parametrize("length", [17, 32, 160])
@pytest.mark.parametrize(
    ("groups", "right"), [(Groups((0,), {1: 2}), 14), (Groups((0, 1), {2: 2}), 7)]
)
def test_a_long_prefix_of_several_groups_gets_what_fits(
    length: int, groups: Groups, right: int
) -> None:
    """Windows are promoted at the boundary of the cut, not at the end of the prompt."""
    world = World(16, 16, groups=groups)
    world.fill(T0, range(length))
    world.open("a", range(length))
    hit = world.until_answered("a", most=6)
    assert hit == right
    world.load("a", hit)
    assert world.reads.total() == world.used, "nothing was read in vain"
    world.loaded("a")
    world.whole()


@pytest.mark.parametrize("waiting", [8, 16, 32])
@pytest.mark.parametrize("shared", [0, 8])
def test_waiting_requests_are_served_in_waves(waiting: int, shared: int) -> None:
    """Four fit at a time; the device takes one per step."""
    world = World(64, 64)
    for n in range(waiting):
        prompt = [*range(shared), *range(1000 * (n + 1), 1000 * (n + 1) + 16 - shared)]
        world.fill(T0, prompt)
        world.open(str(n), prompt)
    served = 0
    for _ in range(4 * waiting):
        answers = {name: world.ask(name) for name in world.requests}
        ready = [name for name, hit in answers.items() if hit is not None]
        assert all(answers[name] == 16 for name in ready), "a hit was lost"
        if ready:
            world.load(ready[0], 16)
        world.step(0.1)
        if ready:
            world.loaded(ready[0])
            served += 1
        if not world.requests:
            break
    assert served == waiting
    distinct = shared + waiting * (16 - shared)
    assert world.reads.total() <= 1.05 * distinct
    world.whole()


@pytest.mark.parametrize("delay", [1, 3])
def test_waiting_requests_that_are_cut_at_windows_are_served_in_waves(delay: int) -> None:
    """Each gets 10 of its 16 blocks and a window of 2: the budget of 12, one after the other."""
    world = World(64, 12, groups=Groups((0,), {1: 2}))
    for n in range(8):
        world.fill(T0, range(1000 * n, 1000 * n + 16))
        world.open(str(n), range(1000 * n, 1000 * n + 16))
    world.hung.add(T0)
    for step in range(60 * delay):
        for name in tuple(world.requests):
            hit = world.ask(name)
            if hit is not None:
                assert hit == 10
                world.load(name, hit)
                world.loaded(name)
        world.step()
        while step % delay == 0 and world.stuck:
            world.answer(world.stuck.pop())
        if not world.requests:
            break
    assert not world.requests, "all are served"
    assert world.reads.total() == world.used


def test_requests_that_share_a_prefix_share_its_reads_and_all_hold_it() -> None:
    """They ask in the same step: the later ones find it on the tier, then filling."""
    world = World(32, 32)
    for n in range(4):
        world.fill(T0, [0, 1, 2, 100 + n])
        world.open(str(n), [0, 1, 2, 100 + n])
    for _ in range(2):
        assert [world.ask(str(n)) for n in range(4)] == [None] * 4
        world.step()
    assert set(world.reads.values()) == {1}
    assert world.reads.total() == 3 + 4
    for i in range(3):
        block = world.pool.blocks[key_of(i)]
        assert block.pins == block.holds == 4, "every one of them holds the shared blocks"
    for n in range(4):
        assert world.ask(str(n)) == 4
        world.load(str(n), 4)
        world.loaded(str(n))
    world.whole()


def test_a_request_that_meets_a_promotion_holds_what_is_readable_before_it() -> None:
    world = World(4, 4)
    world.store("x", [0])
    world.step()
    world.fill(T0, [1])
    world.hung.add(T0)
    world.open("a", [0, 1])
    world.ask("a")
    world.step()
    world.answer(world.stuck.pop())
    world.step()
    world.ask("a")
    world.step()
    world.open("b", [0, 1])
    assert world.ask("b") is None
    world.step()
    world.manager.finish_request("a")
    assert len(world.store("x", range(10, 20))) == 2, "0 is held by b, 1 is filling"
    world.answer(world.stuck.pop(0))
    world.step()
    assert world.ask("b") == 2


# -- windows -----------------------------------------------------------------


def test_of_a_window_group_only_the_window_is_promoted() -> None:
    world = World(32, 32, groups=Groups((), {1: 2}))
    world.fill(T0, range(16))
    world.open("a", range(16))
    assert world.until_answered("a") == 16
    assert set(world.reads) == {key_of(14, 1), key_of(15, 1)}


def test_a_part_of_a_window_is_not_promoted() -> None:
    """Of 0..7 the tier lacks 6: 7 alone is no window, 4 and 5 are."""
    world = World(32, 32, groups=Groups((), {1: 2}))
    world.fill(T0, [0, 1, 2, 3, 4, 5, 7])
    world.open("a", range(8))
    assert world.until_answered("a") == 6
    assert set(world.reads) == {key_of(4, 1), key_of(5, 1)}
