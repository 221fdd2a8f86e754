"""Failed, late, unknown and contradicted jobs: what is believed and what is read."""

from __future__ import annotations

import pytest

from kvtier.core.types import Done, Dropped, JobId, Probe, Reason, Removed, Stored
from kvtier.testing.engine import key_of
from kvtier.testing.world import T0, T1, World


def test_a_failed_block_ends_the_hit_in_front_of_it() -> None:
    world = World(8, 8)
    world.fill(T0, range(5))
    world.open("a", range(5))
    assert world.ask("a") is None
    world.step()
    world.holding[T0].discard(key_of(2))
    assert world.ask("a") is None
    world.step()
    assert world.ask("a") == 2
    assert set(world.pool.blocks) == {key_of(i) for i in (0, 1, 3, 4)}, "the others are kept"
    events = world.manager.take_events()
    assert Removed(T0, (key_of(2),), Reason.LOST) in events
    world.load("a", 2)
    world.loaded("a")
    world.whole()


def test_a_failed_block_is_read_from_the_next_tier() -> None:
    world = World(8, 8, tiers=2)
    world.fill(T0, [0])
    world.fill(T1, [0])
    world.open("a", [0])
    assert world.ask("a") is None
    world.step()
    world.holding[T0].clear()
    assert world.until_answered("a") == 1
    assert world.manager.source_of("a", key_of(0)) == T1


@pytest.mark.parametrize("slow_s", [0.0, 1.0])
def test_a_tier_that_answers_is_not_held_up_by_a_slower_one_alone(slow_s: float) -> None:
    """T0 does not answer. It comes first, unless it was measured to be the slower one."""
    world = World(8, 8, tiers=2)
    if slow_s:
        speed = world.manager.ledger.speeds[T0]
        speed.submitted(1)
        speed.ended(1, 1, 0.0, slow_s)
        world.step(slow_s)
    world.hung.add(T0)
    world.fill(T1, [0, 1])
    world.open("a", [0, 1])
    assert world.ask("a") is None
    world.step()
    assert any(isinstance(command, Probe) for command in world.stuck)
    for _ in range(3):
        answer = world.ask("a")
        world.step()
    assert answer == (2 if slow_s else None)


def test_a_store_that_fails_is_never_readable() -> None:
    world = World(4, 4)
    slots = world.manager.prepare_store("x", [key_of(0), key_of(1)])
    world.manager.complete_store(slots, bad={key_of(0)})
    assert set(world.pool.blocks) == {key_of(1)}
    (write,) = world.step()
    assert write.keys == (key_of(1),)
    world.whole()


def test_a_failed_cascade_is_not_believed() -> None:
    world = World(4, 4)
    world.hung.add(T0)
    world.store("x", [0])
    world.step()
    world.inbox.append(Done(world.stuck.pop().job))
    world.step()
    assert Stored(T0, (key_of(0),)) not in world.manager.take_events()
    world.whole()


def test_completions_of_unknown_or_ended_jobs_are_ignored() -> None:
    world = World(4, 4)
    world.store("x", [0])
    (write,) = world.step()
    world.inbox += [Done(write.job), Done(JobId(99), frozenset({key_of(5)}))]
    world.step()
    assert world.manager.ledger.cascades.writing == [0]
    assert not any(isinstance(e, Removed) for e in world.manager.take_events())
    world.whole()


def test_what_was_written_during_a_probe_stays_believed() -> None:
    """The probe looked before the write; its late answer is older news."""
    world = World(4, 4, job_deadline_s=5.0)
    world.hung.add(T0)
    world.open("a", [0])
    assert world.ask("a") is None
    world.step()
    probe = world.stuck.pop()
    assert isinstance(probe, Probe)
    world.hung.clear()
    world.store("x", [0])
    world.step()
    world.inbox.append(Done(probe.job))
    world.step()
    assert not any(isinstance(e, Removed) for e in world.manager.take_events())
    assert world.manager.ledger.presence[0].set_present([key_of(0)]) == []


def test_a_probe_that_is_given_up_does_not_deny_what_was_written_meanwhile() -> None:
    world = World(4, 4, job_deadline_s=5.0)
    world.hung.add(T0)
    world.open("a", [0])
    world.ask("a")
    world.step()
    world.hung.clear()
    world.store("x", [0])
    world.step()
    world.step(5.0)
    assert world.manager.ledger.counts.expired_jobs == [1]
    assert not any(isinstance(e, Removed) for e in world.manager.take_events())


def test_news_between_question_and_probe_is_kept() -> None:
    world = World(4, 4)
    world.hung.add(T0)
    world.store("x", [0])
    world.step()
    write = world.stuck.pop()
    world.manager.reset(keep_tiers=True)
    world.open("a", [0])
    assert world.ask("a") is None
    world.manager.begin_step(0.0, [Done(write.job, frozenset(write.keys))])
    (probe,) = world.manager.end_step()
    world.manager.begin_step(0.0, [Done(probe.job)])
    events = world.manager.take_events()
    assert events.count(Stored(T0, (key_of(0),))) == 1
    assert not any(isinstance(e, Removed) and e.tier == T0 for e in events)


def test_dropped_blocks_are_not_promoted() -> None:
    world = World(4, 4)
    world.fill(T0, [0])
    world.open("a", [0])
    world.ask("a")
    world.step()
    assert world.ask("a") is None
    world.manager.begin_step(0.0, [Dropped(T0, (key_of(0),))])
    assert world.manager.end_step() == [], "the world changed while it waited"
    assert world.ask("a") == 0
