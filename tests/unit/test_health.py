"""Circuits and measured speed, alone and under the manager."""

from __future__ import annotations

import pytest

from kvtier.core.health import REPEATING, Circuit, Patience, Speed, State
from kvtier.core.types import Done, Fault, Probe, Read, Write
from kvtier.testing.engine import key_of
from kvtier.testing.world import T0, T1, World, asked

PATIENCE = Patience(failures_max=3, stall_s=10.0, backoff_s=1.0, backoff_max_s=4.0, trial_max=2)


def circuit() -> Circuit:
    return Circuit(PATIENCE, 0.0)


def fail(circuit: Circuit, now: float, fault: Fault = Fault.ERROR, *, moves: bool = True) -> bool:
    circuit.submitted(now, moves=moves)
    return circuit.ended(now, fault, moves=moves, moved=False)


def work(circuit: Circuit, now: float, *, moves: bool = True) -> None:
    circuit.submitted(now, moves=moves)
    assert not circuit.ended(now, None, moves=moves, moved=moves)


def opened() -> Circuit:
    """Opened at 0, to be tried at 1."""
    it = circuit()
    assert fail(it, 0.0, Fault.UNREACHABLE)
    return it


# -- a circuit ----------------------------------------------------------------


def test_it_opens_after_so_many_failures_in_a_row() -> None:
    it = circuit()
    assert [fail(it, 0.0) for _ in range(2)] == [False, False]
    work(it, 0.0)
    assert [fail(it, 0.0) for _ in range(3)] == [False, False, True]
    assert (it.state, it.fault, it.opened) == (State.OPEN, Fault.ERROR, 1)


@pytest.mark.parametrize("fault", list(Fault))
def test_a_fault_that_repeats_opens_it_at_once(fault: Fault) -> None:
    assert fail(circuit(), 0.0, fault) == (fault in REPEATING)


def test_it_takes_one_trial_after_its_backoff() -> None:
    it = opened()
    assert not it.allows(0.99)
    assert it.allows(1.0)
    it.submitted(1.0, moves=True)
    assert not it.allows(1.0), "one trial at a time"
    it.ended(1.5, None, moves=True, moved=True)
    assert it.state is State.CLOSED
    assert it.takes(9, 1.5) == 9


def test_a_trial_is_small() -> None:
    it = opened()
    assert it.takes(9, 0.5) == 0
    assert it.takes(9, 1.0) == 2
    assert it.takes(1, 1.0) == 1


@pytest.mark.parametrize("end", ["failed", "missed", "stalled"])
def test_a_trial_that_fails_doubles_the_backoff_up_to_its_bound(end: str) -> None:
    it, now, waits = opened(), 0.0, []
    for _ in range(4):
        start = now
        now = next(start + n / 2 for n in range(100) if it.allows(start + n / 2))
        waits.append(now - start)
        it.submitted(now, moves=True)
        if end == "failed":
            assert it.ended(now, Fault.ERROR, moves=True, moved=False)
        elif end == "missed":
            assert it.missed(now, moves=True)
        else:
            assert not it.stalled(now + 9.9)
            now += 10.0
            assert it.stalled(now)
    assert waits == [1.0, 2.0, 4.0, 4.0]
    assert it.allows(now + 4.0)
    work(it, now + 4.0)
    assert fail(it, now + 5.0, Fault.FULL)
    assert it.allows(now + 6.0), "after a success the backoff begins anew"


def test_it_opens_when_nothing_comes_back() -> None:
    it = circuit()
    it.submitted(100.0, moves=True)
    it.submitted(105.0, moves=True)
    assert not it.stalled(109.9)
    it.ended(109.9, None, moves=True, moved=True)
    assert not it.stalled(119.8), "something came back"
    assert it.stalled(119.9)
    assert it.fault is Fault.STALLED


def test_quiet_is_no_stall() -> None:
    it = circuit()
    work(it, 1.0)
    assert not it.stalled(1000.0)
    it.submitted(1000.0, moves=True)
    assert not it.stalled(1009.0)


def test_jobs_from_before_it_opened_stall_nothing_afterwards() -> None:
    """A read that hangs for ever must not open a circuit that a trial has closed."""
    it = circuit()
    it.submitted(0.0, moves=True)
    assert it.stalled(10.0)
    assert it.allows(11.0)
    assert not it.stalled(50.0), "half open, and nothing was tried yet"
    assert it.allows(50.0)
    work(it, 50.0)
    assert not it.stalled(99.0), "recovered; only the old job is still out"


def test_a_late_success_brings_the_trial_forward_but_does_not_close_it() -> None:
    it = opened()
    it.late(0.1, alive=False)
    assert not it.allows(0.1), "a late failure is no sign of life"
    it.late(0.2, alive=True)
    assert it.state is State.OPEN
    assert it.allows(0.2)
    it.submitted(0.2, moves=True)
    it.late(0.3, alive=True)
    assert it.state is State.HALF_OPEN, "the trial decides"
    assert not it.allows(0.3), "the trial is still out"


def test_a_late_failure_does_not_end_the_trial() -> None:
    it = opened()
    it.allows(1.0)
    it.submitted(1.0, moves=True)
    it.late(1.1, alive=False)
    assert it.state is State.HALF_OPEN
    it.ended(1.2, None, moves=True, moved=True)
    assert it.state is State.CLOSED


def test_answered_probes_do_not_excuse_failing_reads() -> None:
    it = circuit()
    for opens in (False, False, True):
        work(it, 0.0, moves=False)
        assert fail(it, 0.0) is opens
    assert it.allows(1.0)
    work(it, 1.0, moves=False)
    assert it.state is State.HALF_OPEN, "only bytes that move close it"
    assert it.allows(1.0)
    work(it, 1.0, moves=True)
    assert it.state is State.CLOSED


def test_an_answered_probe_is_enough_where_probes_failed() -> None:
    it = circuit()
    for _ in range(3):
        fail(it, 0.0, moves=False)
    assert it.allows(1.0)
    work(it, 1.0, moves=False)
    assert it.state is State.CLOSED


def test_a_trial_that_was_not_sent_is_made_again() -> None:
    it = opened()
    it.allows(1.0)
    it.submitted(1.0, moves=True)
    it.withdrawn(moves=True)
    assert it.allows(1.0)
    assert not it.stalled(99.0)


# -- speed --------------------------------------------------------------------


def test_a_new_tier_is_tried() -> None:
    assert Speed().expect(1000, 0.0) == 0.0


def test_speed_is_time_per_block_and_the_queue_counts() -> None:
    it = Speed()
    it.submitted(4)
    it.ended(4, 4, 0.0, 2.0)
    assert it.seconds_per_block == 0.5
    assert it.expect(2, 2.0) == 1.0
    it.submitted(6)
    assert it.expect(2, 99.0) == 4.0


def test_queued_jobs_are_not_counted_twice() -> None:
    it = Speed()
    for _ in range(4):
        it.submitted(2)
    for end in range(1, 5):
        it.ended(2, 2, 0.0, float(end))
    assert it.seconds_per_block == pytest.approx(0.5)


def test_a_large_job_tells_more_than_a_small_one() -> None:
    """A block alone pays the whole latency."""
    it = Speed()
    it.submitted(1)
    it.ended(1, 1, 0.0, 1.0)
    it.submitted(100)
    it.ended(100, 100, 1.0, 2.0)
    assert it.seconds_per_block < 0.02


def test_what_brought_nothing_measures_nothing() -> None:
    it = Speed()
    it.submitted(4)
    it.ended(4, 4, 0.0, 4.0)
    it.submitted(4)
    it.ended(4, 0, 4.0, 4.001)
    assert it.seconds_per_block == 1.0, "a tier that fails fast is not fast"
    it.submitted(4)
    it.given_up(4)
    assert it.queued == 0
    assert it.seconds_per_block == 1.0


def test_a_tier_that_was_slow_once_is_tried_again() -> None:
    it = Speed()
    it.submitted(1)
    it.ended(1, 1, 0.0, 60.0)
    assert it.expect(1, 60.0) == 60.0
    assert it.expect(1, 120.0) == 30.0
    assert it.expect(1, 660.0) < 0.1


# -- under the manager --------------------------------------------------------


@pytest.mark.parametrize("fault", [Fault.FULL, Fault.UNREACHABLE, Fault.DENIED, Fault.THROTTLED])
def test_a_tier_that_cannot_be_written_is_not_written_but_read(fault: Fault) -> None:
    world = World(16, 8, patience=PATIENCE)
    world.fill(T0, range(100, 104))
    world.faults[T0] = fault
    world.store("x", [0])
    world.step()
    world.faults.clear()
    world.store("x", [1])
    assert world.step() == [], "left alone"
    assert world.serve("a", range(100, 104)) == 4, "reads have their own circuit"
    world.store("x", [2])
    assert world.step(1.0) == []
    world.store("x", [3, 4, 5])
    (trial,) = world.step()
    assert isinstance(trial, Write)
    assert len(trial.keys) == 2, "a trial is small"
    world.store("x", [6, 7, 8])
    (write,) = world.step()
    assert len(write.keys) == 3, "and closed it"


def test_all_stores_fail_and_few_are_tried() -> None:
    world = World(64, 8, patience=PATIENCE)
    world.faults[T0] = Fault.ERROR
    tried = 0
    for n in range(50):
        world.store("x", [n])
        tried += len(world.step(0.1))
    assert tried == 3 + 2, "three failures, then trials after 1 and 2 seconds"


@pytest.mark.parametrize("what", [Probe, Read])
def test_nobody_waits_longer_for_a_tier_than_it_may_stall(what: type) -> None:
    world = World(16, 8, patience=PATIENCE)
    world.fill(T0, range(4))
    world.open("a", range(4))
    world.open("b", range(4))
    if what is Read:
        world.ask("a")
        world.step()
    world.ask("a")
    world.ask("b")
    world.hung.add(T0)
    world.step(5.0)
    assert world.ask("a") is world.ask("b") is None
    world.step(5.0)
    assert world.ask("a") == world.ask("b") == 0
    assert not world.manager.busy
    world.open("c", range(4))
    assert world.ask("c") == 0, "and who comes later is not sent there"
    world.answer_stuck()
    world.whole()


def test_nobody_waits_for_what_was_asked_before_it_opened() -> None:
    """One job says that the server is gone: the other one is not waited for."""
    world = World(16, 8, patience=PATIENCE)
    world.fill(T0, range(8))
    world.manager.ledger.presence[T0].set_present([key_of(i) for i in range(8)])
    world.hung.add(T0)
    for name, prompt in {"a": range(4), "b": range(4, 8)}.items():
        world.open(name, prompt)
        world.ask(name)
    world.step()
    first, second = world.stuck
    world.inbox.append(Done(first.job, frozenset(), Fault.UNREACHABLE))
    world.step()
    assert world.ask("a") == world.ask("b") == 0
    world.inbox.append(Done(second.job, frozenset(second.keys)))
    world.step()
    world.whole()
    assert world.pool.used == 0, "late bytes of a read that was given up are not published"


def test_a_tier_that_works_again_is_found_out_by_one_trial() -> None:
    world = World(16, 8, patience=PATIENCE)
    world.fill(T0, range(4))
    world.faults[T0] = Fault.UNREACHABLE
    assert world.serve("a", range(4)) == 0
    world.faults.clear()
    assert world.serve("b", range(4)) == 0, "still left alone"
    world.step(11.0)
    world.open("c", range(4))
    world.open("d", range(100, 104))
    world.ask("c")
    world.ask("d")
    assert asked(world.step(), T0) == [Probe], "one trial, for both"
    assert world.until_answered("c") == 4
    assert world.until_answered("d") == 0


def test_two_requests_with_wishes_make_one_trial() -> None:
    world = World(16, 8, patience=PATIENCE)
    keys = [key_of(i) for i in range(8)]
    world.fill(T0, range(8))
    world.faults[T0] = Fault.UNREACHABLE
    assert world.serve("x", range(50, 51)) == 0
    world.faults.clear()
    world.step(11.0)
    world.manager.ledger.presence[T0].set_present(keys)
    world.open("a", range(4))
    world.open("b", range(4, 8))
    world.ask("a")
    world.ask("b")
    (trial,) = world.step()
    assert isinstance(trial, Read)
    assert len(trial.keys) == 2
    assert world.until_answered("a") == 2, "a trial is small"
    assert world.manager.ledger.reads[T0].state is State.CLOSED


def test_a_request_in_the_queue_does_not_wait_for_a_tier_that_opens() -> None:
    world = World(16, 4, tiers=2, patience=PATIENCE)
    prompts = {"a": range(4), "first": range(20, 24), "b": range(10, 14)}
    for name, prompt in prompts.items():
        world.fill(T1 if name == "b" else T0, prompt)
        world.open(name, prompt)
    for _ in range(2):
        for name in prompts:
            world.ask(name)
        world.step()
    world.step()
    assert world.requests["b"].queued, "a holds the budget, and nothing comes free"
    circuit = world.manager.ledger.reads[T1]
    circuit.submitted(world.now, moves=False)
    circuit.ended(world.now, Fault.DENIED, moves=False, moved=False)
    world.manager.ledger._abandon_all(T1, reads=True)
    world.step()
    assert world.ask("b") == 0
    assert world.requests["first"].queued, "whose tier works"


def test_an_unsent_write_is_not_sent_to_a_tier_that_opened() -> None:
    world = World(16, 4, patience=PATIENCE)
    world.hung.add(T0)
    world.store("x", [0])
    world.step()
    world.store("x", [1])
    (write,) = world.stuck
    world.manager.begin_step(0.0, [Done(write.job, frozenset(), Fault.FULL)])
    assert world.manager.end_step() == []
    assert world.manager.ledger.cascades.writing == [0]
    assert set(world.manager.ledger.cascades.owed[T0]) == {key_of(0), key_of(1)}
    world.manager.check()


def test_an_unsent_probe_is_not_sent_to_a_tier_that_opened() -> None:
    world = World(16, 4, patience=PATIENCE)
    world.manager.ledger.presence[T0].set_present([key_of(0)])
    world.hung.add(T0)
    world.open("a", [0])
    world.ask("a")
    world.step()
    world.open("b", [1])
    world.ask("b")
    (read,) = world.stuck
    world.manager.begin_step(0.0, [Done(read.job, frozenset(), Fault.DENIED)])
    assert world.manager.end_step() == []
    world.manager.begin_step(0.0)
    assert world.ask("b") == 0


@pytest.mark.parametrize("reads", [True, False])
def test_jobs_that_miss_their_deadline_open_the_circuit(reads: bool) -> None:
    """Even where others are answered meanwhile, so that nothing stalls."""
    patience = Patience(failures_max=2, stall_s=1000.0)
    world = World(16, 8, writing=8, patience=patience, job_deadline_s=5.0, wait_max_s=50.0)
    world.hung.add(T0)
    ledger = world.manager.ledger
    circuit = (ledger.reads if reads else ledger.writes)[T0]
    for n in range(2):
        assert circuit.state is State.CLOSED
        if reads:
            world.open(str(n), [n])
            world.ask(str(n))
        else:
            world.store("x", [n])
        world.step(5.0)
    assert circuit.state is State.OPEN
    assert circuit.fault is Fault.STALLED
    assert ledger.counts.expired_jobs == [2]
    assert all(world.ask(name) == 0 for name in world.requests)


def test_writes_that_bring_nothing_are_failures_whatever_the_driver_says() -> None:
    world = World(16, 8, patience=PATIENCE)
    world.hung.add(T0)
    for n in range(3):
        world.store("x", [n])
        (write,) = world.step()
        world.inbox.append(Done(write.job))
        world.step()
    assert world.manager.ledger.writes[T0].fault is Fault.ERROR
    assert world.manager.ledger.writes[T0].state is State.OPEN


def test_a_write_that_succeeds_in_part_is_no_failure() -> None:
    world = World(16, 8, patience=PATIENCE)
    world.hung.add(T0)
    for n in range(0, 8, 2):
        world.store("x", [n, n + 1])
        (write,) = world.step()
        world.inbox.append(Done(write.job, frozenset(write.keys[:1]), Fault.ERROR))
        world.step()
    assert world.manager.ledger.writes[T0].state is State.CLOSED
    world.store("x", [9, 10])
    (write,) = world.step()
    world.inbox.append(Done(write.job, frozenset(write.keys[:1]), Fault.FULL))
    world.step()
    assert world.manager.ledger.writes[T0].state is State.OPEN, "the rest will fail again"


def test_absence_is_no_fault() -> None:
    world = World(16, 4, patience=PATIENCE)
    for n in range(20):
        assert world.serve(str(n), [n]) == 0
    world.manager.ledger.presence[T0].set_present([key_of(i) for i in range(50, 60)])
    for n in range(50, 60):
        assert world.serve(str(n), [n]) == 0
    assert world.manager.ledger.reads[T0].opened == 0


@pytest.mark.parametrize("hung_moves", [True, False])
def test_what_is_answered_of_one_kind_does_not_excuse_the_other(hung_moves: bool):
    """Lookups that are answered hide no hung read, nor reads that flow a hung lookup."""
    circuit = Circuit(Patience(stall_s=10.0), 0.0)
    circuit.submitted(0.0, moves=hung_moves)
    for second in range(1, 10):
        circuit.submitted(float(second), moves=not hung_moves)
        circuit.ended(float(second), None, moves=not hung_moves, moved=not hung_moves)
        assert not circuit.stalled(float(second))
    assert circuit.stalled(10.0)
    assert circuit.state is State.OPEN
