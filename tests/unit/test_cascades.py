"""What is written to which tiers: shares, second touch, repair."""

from __future__ import annotations

from typing import Any

import pytest

from kvtier.core.types import Done, Dropped, Fault, Probe, Read, Reason, TierId, Write
from kvtier.testing.engine import key_of
from kvtier.testing.world import T0, T1, World, asked


def writes(world: World) -> dict[TierId, list[int]]:
    """Blocks written in this step, per tier."""
    return {
        c.tier: [int.from_bytes(k[:8], "big") for k in c.keys]
        for c in world.step()
        if isinstance(c, Write)
    }


def store_to(world: World, name: str, blocks: list[int], tiers: tuple[TierId, ...] | None) -> None:
    world.manager.open_request(name, None, tiers)
    world.store(name, blocks)


def use(world: World, blocks: list[int]) -> None:
    world.manager.prepare_load("user", [key_of(i) for i in blocks])
    world.manager.complete_load("user")


def test_a_stored_block_goes_to_every_tier() -> None:
    world = World(8, 4, tiers=2)
    world.store("x", [0, 1])
    assert writes(world) == {T0: [0, 1], T1: [0, 1]}


@pytest.mark.parametrize("tiers", [(), (T0,), (T1,), (T0, T1)])
def test_a_request_says_where_its_blocks_may_go(tiers: tuple[TierId, ...]) -> None:
    world = World(8, 4, tiers=2)
    store_to(world, "x", [0], tiers)
    assert writes(world) == {t: [0] for t in tiers}
    use(world, [0])
    assert writes(world) == {}, "nor later"


def test_a_probe_that_is_given_up_takes_no_block_where_it_must_not_go() -> None:
    """The block was stored, for one tier only, while another one was asked for it."""
    world = World(8, 4, tiers=2)
    world.hung |= {T0, T1}
    world.open("a", [0])
    world.ask("a")
    world.step()
    store_to(world, "x", [0], (T0,))
    assert writes(world) == {T0: [0]}
    world.step(31.0)
    world.hung.clear()
    world.answer_stuck()
    world.step(100.0)
    use(world, [0])
    assert T1 not in writes(world)


def test_what_is_over_its_share_is_written_at_its_next_use() -> None:
    world = World(8, 4, writing=2)
    world.store("x", [0, 1, 2])
    assert writes(world) == {T0: [0, 1]}
    assert writes(world) == {}
    use(world, [0, 1, 2])
    assert writes(world) == {T0: [2]}
    use(world, [0, 1, 2])
    assert writes(world) == {}


@pytest.mark.parametrize("fault", [None, Fault.ERROR])
def test_what_failed_is_written_at_its_next_use(fault: Fault | None) -> None:
    world = World(8, 4)
    world.hung.add(T0)
    world.store("x", [0, 1])
    (write,) = world.step()
    world.hung.clear()
    world.inbox.append(Done(write.job, frozenset({key_of(0)}), fault))
    world.step()
    use(world, [0, 1])
    assert writes(world) == {T0: [1]}


def test_what_a_tier_lost_is_written_at_its_next_use() -> None:
    world = World(8, 4, tiers=2)
    world.store("x", [0, 1])
    world.step()
    world.inbox += [Dropped(T1, (key_of(0),)), Dropped(T0, (key_of(7),), Reason.LOST)]
    world.step()
    assert writes(world) == {}, "not before it is used"
    use(world, [0, 1])
    assert writes(world) == {T1: [0]}


def test_a_write_that_hangs_is_given_up_and_tried_again_after_the_tier_recovers() -> None:
    world = World(8, 4, writing=2)
    world.hung.add(T0)
    world.store("x", [0])
    world.step(10.0)
    world.step()
    assert not world.manager.busy, "nobody's hurry"
    assert world.pool.pinned == 1
    use(world, [0])
    assert writes(world) == {}, "the tier does not take writes"
    world.hung.clear()
    world.step(2.0)
    use(world, [0])
    assert writes(world) == {T0: [0]}
    world.answer_stuck()
    world.whole()


def test_late_success_of_a_write_is_believed() -> None:
    world = World(8, 4)
    world.hung.add(T0)
    world.store("x", [0])
    world.step(10.0)
    world.hung.clear()
    world.answer_stuck()
    world.step()
    use(world, [0])
    assert writes(world) == {}, "it is there"


# -- second touch -------------------------------------------------------------


def second_touch(**limits: Any) -> World:
    return World(4, 4, second_touch=True, **limits)


def test_blocks_that_are_met_once_are_not_written() -> None:
    world = second_touch()
    for n in range(0, 40, 2):
        world.store("x", [n, n + 1])
        assert writes(world) == {}
    assert world.manager.ledger.cascades.filtered == 40


@pytest.mark.parametrize("how", ["loaded", "stored again", "computed again"])
def test_the_second_touch_writes(how: str) -> None:
    world = second_touch()
    world.store("x", [0])
    assert writes(world) == {}
    if how == "loaded":
        use(world, [0])
    elif how == "stored again":
        world.manager.prepare_store("x", [key_of(0)])
    else:
        world.store("x", [1, 2, 3, 4])  # evicts it
        assert key_of(0) not in world.pool.blocks
        world.store("x", [0])
    assert writes(world) == {T0: [0]}


def test_the_second_touch_writes_where_the_request_allows() -> None:
    world = second_touch(tiers=2)
    store_to(world, "x", [0], (T1,))
    use(world, [0])
    assert writes(world) == {T1: [0]}


def test_what_was_met_is_remembered_in_bounds() -> None:
    world = second_touch(known_max=10)
    for n in range(100):
        world.store("x", [n])
    assert len(world.manager.ledger.cascades._touched) == 10
    world.store("x", [90])
    assert writes(world) == {T0: [90]}
    world.store("x", [89])
    assert writes(world) == {}, "forgotten, so it is new"


def test_a_tier_without_an_answer_costs_the_others_no_write() -> None:
    world = World(16, 4, tiers=2, writing=2)
    world.hung.add(T0)
    for n in range(6):
        world.store("x", [n])
        assert asked(world.step(), T1) == [Write]
    assert world.manager.ledger.cascades.writing == [2, 0]
    assert Probe not in {type(c) for c in world.stuck}


# -- raised -------------------------------------------------------------------


def raising(**more: Any) -> World:
    """Tier 1 promotes to tier 0, which is faster."""
    return World(8, 8, tiers=2, promote_to=[(), (T0,)], **more)


def served(world: World, name: str, blocks: list[int]) -> dict[TierId, list[int]]:
    """Serve a request; what was written on the way."""
    written: dict[TierId, list[int]] = {}
    world.open(name, blocks)
    for _ in range(6):
        hit = world.ask(name)
        if hit is not None:
            world.load(name, hit)
            world.loaded(name)
        for tier, some in writes(world).items():
            written.setdefault(tier, []).extend(some)
        if hit is not None:
            break
    assert hit == len(blocks)
    for tier, some in writes(world).items():
        written.setdefault(tier, []).extend(some)
    return written


def test_what_only_a_slow_tier_has_is_written_to_the_fast_one_once() -> None:
    world = raising()
    world.fill(T1, [0, 1, 2])
    world.fill(T0, [0])
    assert served(world, "a", [0, 1, 2]) == {T0: [1, 2]}
    assert served(world, "b", [0, 1, 2]) == {}
    world.whole()


def test_nothing_goes_down_that_was_promoted_from_above() -> None:
    world = raising()
    world.fill(T0, [0, 1])
    assert served(world, "a", [0, 1]) == {}


def test_by_default_nothing_is_raised() -> None:
    world = World(8, 8, tiers=2)
    world.fill(T1, [0, 1])
    assert served(world, "a", [0, 1]) == {}


@pytest.mark.parametrize("allowed", [(), (T1,), (T0,), None])
def test_a_request_says_where_its_blocks_may_be_raised(
    allowed: tuple[TierId, ...] | None,
) -> None:
    world = raising()
    world.fill(T1, [0])
    world.open("a", [0])
    world.requests["a"].cascade_to = None if allowed is None else frozenset(allowed)
    written = []
    for _ in range(4):
        world.ask("a")
        written += [writes(world)]
    raised = allowed is None or T0 in allowed
    assert [w for w in written if w] == ([{T0: [0]}] if raised else [])


def test_what_is_over_the_share_is_raised_when_it_is_used() -> None:
    world = raising(writing=2)
    world.fill(T1, [0, 1, 2, 3])
    world.hung.add(T0)
    world.open("a", [0, 1, 2, 3], [T1])
    for _ in range(4):
        world.ask("a")
        world.step()
    assert world.manager.ledger.cascades.writing == [2, 0]
    world.hung.clear()
    world.answer_stuck()
    world.step()
    assert world.manager.ledger.cascades.writing == [0, 0]
    hit = world.ask("a")
    assert hit == 4
    world.load("a", hit)
    assert writes(world) == {T0: [2, 3]}


def test_a_block_that_could_not_be_read_is_not_raised() -> None:
    world = raising()
    world.fill(T1, [0, 1])
    world.open("a", [0, 1])
    world.ask("a")
    world.step()
    world.holding[T1].discard(key_of(1))
    written: dict[TierId, list[int]] = {}
    for _ in range(4):
        world.ask("a")
        written |= writes(world)
    assert written == {T0: [0]}


def test_a_block_that_comes_after_a_reset_is_not_raised() -> None:
    world = raising()
    world.fill(T1, [0])
    world.open("a", [0])
    world.ask("a")
    world.step()
    world.ask("a")
    world.hung |= {T0, T1}
    assert asked(world.step(), T1) == [Read]
    world.manager.reset(keep_tiers=True)
    world.hung.clear()
    world.answer_stuck()
    assert writes(world) == {}
    assert writes(world) == {}


def test_raising_is_no_first_touch() -> None:
    world = raising(second_touch=True)
    world.fill(T1, [0])
    world.open("a", [0])
    written: dict[TierId, list[int]] = {}
    for _ in range(4):
        world.ask("a")
        written |= writes(world)
    assert written == {T0: [0]}, "before it is used"


def test_what_is_promoted_for_a_peer_is_raised_nowhere() -> None:
    world = World(8, 8, tiers=2, lending_max=4, promote_to=[(), (T0,)])
    world.fill(T1, [0])
    world.want(T0, 7, [key_of(0)], promote=True)
    world.step()
    for _ in range(5):
        assert writes(world) == {}
    assert [lend.keys for lend in world.lends] == [(key_of(0),)]


@pytest.mark.parametrize("targets", [[()], [(), (), ()], [(T0,), ()]])
def test_targets_that_make_no_sense(targets: list[tuple[TierId, ...]]) -> None:
    with pytest.raises(AssertionError, match=r"one set per tier|has that already"):
        World(8, 8, tiers=2, promote_to=targets)
