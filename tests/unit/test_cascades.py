"""What is written to which tiers: shares, second touch, repair."""

from __future__ import annotations

from typing import Any

import pytest

from kvtier.core.types import Done, Dropped, Fault, Probe, Reason, TierId, Write
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
