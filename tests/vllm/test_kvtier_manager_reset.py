"""A reset: no slot is reused under a transfer, and what was stored before is not there."""

from __future__ import annotations

import manager_engines
import pytest
from connector import keys_of
from manager_engines import ALL_OF_IT, MEMORY, Make, free_slots, hold_copies
from vllm.v1.kv_offload.base import ReqContext, ScheduleEndContext

make = manager_engines.make


@pytest.mark.parametrize("kind", ["store", "load"])
def test_slots_of_running_transfers_come_back_with_the_step_that_flushes(
    make: Make, monkeypatch: pytest.MonkeyPatch, kind: str
):
    engine = make(num_slots=8)
    if kind == "load":
        engine.run("before", keys_of(1, 4))
    released = hold_copies(engine, monkeypatch)
    engine.ask("running", keys_of(1, 4))
    engine.step()
    (job,) = engine.jobs.values()
    slots = set(job.spec.block_ids.tolist())
    assert len(slots) == 4

    engine.reset_cache()
    engine.manager.get_stats()  # the update of a step that was scheduled before the reset
    assert not free_slots(engine) & slots
    engine.schedule()
    assert not free_slots(engine) & slots
    released.set()
    done = engine.execute()
    assert not free_slots(engine) & slots
    engine.update(done)
    assert slots <= free_slots(engine)
    engine.settle()
    assert engine.run("after", keys_of(1, 4)).hits == 0
    engine.offloader.core.check()


def test_vllm_says_itself_that_it_flushed(make: Make, monkeypatch: pytest.MonkeyPatch):
    engine = make(num_slots=8, newest=True)
    released = hold_copies(engine, monkeypatch)
    engine.ask("running", keys_of(1, 4))
    engine.step()
    engine.reset_cache()
    assert len(free_slots(engine)) == 4
    assert engine.manager.has_pending_work()
    engine.manager.on_reset_flushed()
    assert len(free_slots(engine)) == 8
    released.set()
    engine.settle()


def test_scheduling_ahead_of_the_update_does_not_lift_the_fence_early(make: Make):
    """With asynchronous scheduling one more step is under way when the reset comes."""
    engine = make(num_slots=8)
    manager, context = engine.manager, ReqContext("a")
    manager.on_new_request(context)
    end = ScheduleEndContext([], [])
    manager.on_schedule_end(end)  # step 1, whose update comes late
    assert len(manager.prepare_store(keys_of(1, 4), context).keys_to_store) == 4  # type: ignore[union-attr]
    manager.reset_cache()
    manager.on_schedule_end(end)  # step 2 flushes
    manager.get_stats()  # update of step 1
    assert len(free_slots(engine)) == 4
    manager.get_stats()  # update of step 2
    assert len(free_slots(engine)) == 8


def test_a_reset_hides_what_tiers_hold_unless_the_weights_are_named(make: Make):
    for epoch, hits in ((None, 0), ("v1", 4)):
        engine = make(num_slots=16, tiers=[MEMORY], weights_epoch=epoch, **ALL_OF_IT)
        engine.run("a", keys_of(1, 4))
        engine.reset_cache()
        engine.settle()
        assert engine.run("b", keys_of(1, 4)).hits == hits
