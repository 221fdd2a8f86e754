"""Errors inside the manager: none leaves it, and no slot is reused under a transfer."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import manager_engines
import pytest
from connector import Engine, keys_of
from manager_engines import MEMORY, Make, free_slots, hold_copies, total
from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadPolicy,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvtier.vllm.worker import NO_SLOT, PrimaryLoadStoreSpec

make = manager_engines.make
newest = manager_engines.newest


class Boom(RuntimeError):
    pass


def boom(*_: object, **__: object) -> Any:
    raise Boom("on purpose")


(KEY,) = keys_of(77, 1)

CONTEXT = ReqContext("contained")

END = ScheduleEndContext(["contained"], [])

CALLS: dict[str, tuple[str, str, Callable[[Engine], Any], Callable[[Any], bool]]] = {
    # name: whose attribute raises, the call, whether the answer is one that vLLM can use
    "on_new_request": (
        "core", "open_request",
        lambda e: e.manager.on_new_request(CONTEXT),
        lambda a: isinstance(a, RequestOffloadingContext) and a.policy is OffloadPolicy.CHUNK_LEVEL,
    ),
    "lookup": (
        "core", "lookup",
        lambda e: e.manager.lookup(KEY, CONTEXT),
        lambda a: a is LookupResult.MISS,
    ),
    "lookup of a stranger": (
        "core", "open_request",
        lambda e: e.manager.lookup(KEY, ReqContext("stranger")),
        lambda a: a is LookupResult.MISS,
    ),
    "lookup that begins a step": (
        "offloader", "begin",
        lambda e: e.manager.lookup(KEY, CONTEXT),
        lambda a: a is LookupResult.MISS,
    ),
    "get_load_source": (
        "core", "source_of",
        lambda e: e.manager.get_load_source(KEY, CONTEXT),
        lambda a: a is CacheHitSource.EXTERNAL_UNSPECIFIED,
    ),
    "on_request_finished": (
        "core", "finish_request",
        lambda e: (e.manager._requests.setdefault("contained", object()), # type: ignore[arg-type]
                   e.manager.on_request_finished(CONTEXT))[1],
        lambda a: a is None,
    ),
    "prepare_load": (
        "core", "prepare_load",
        lambda e: e.manager.prepare_load([KEY], CONTEXT),
        lambda a: isinstance(a, PrimaryLoadStoreSpec) and a.block_ids.tolist() == [NO_SLOT],
    ),
    "complete_load": (
        "core", "complete_load",
        lambda e: e.manager.complete_load({KEY}, CONTEXT),
        lambda a: a is None,
    ),
    "prepare_store": (
        "core", "prepare_store",
        lambda e: e.manager.prepare_store([KEY], CONTEXT),
        lambda a: isinstance(a, PrepareStoreOutput)
        and a.keys_to_store == []
        and isinstance(a.store_spec, PrimaryLoadStoreSpec),
    ),
    "complete_store": (
        "core", "complete_store",
        lambda e: e.manager.complete_store({KEY}, CONTEXT),
        lambda a: a is None,
    ),
    "settling": (
        "core", "settle_request",
        lambda e: e.manager.on_schedule_end(END),
        lambda a: a is None,
    ),
    "beginning": (
        "core", "begin_step",
        lambda e: e.manager.on_schedule_end(END),
        lambda a: a is None,
    ),
    "ending": (
        "core", "end_step",
        lambda e: e.manager.on_schedule_end(END),
        lambda a: a is None,
    ),
    "get_stats": (
        "totals", "collect",
        lambda e: e.manager.get_stats(),
        lambda a: a is None,
    ),
    "take_events": (
        "core", "take_events",
        lambda e: list(e.manager.take_events()),
        lambda a: a == [],
    ),
    "translating": (
        "translator", "_event",
        lambda e: list(e.manager.take_events()),
        lambda a: a == [],
    ),
    "reset_cache": (
        "core", "reset",
        lambda e: e.manager.reset_cache(),
        lambda a: a is None,
    ),
    "on_reset_flushed": (
        "core", "fence_passed",
        lambda e: e.manager.on_reset_flushed(),
        lambda a: a is None,
    ),
    "shutdown": (
        "offloader", "close",
        lambda e: e.manager.shutdown(),
        lambda a: a is None,
    ),
}  # fmt: skip


def break_it(engine: Engine, owner: str, name: str, patch: pytest.MonkeyPatch) -> None:
    owners = {
        "core": engine.offloader.core,
        "offloader": engine.offloader,
        "totals": engine.manager._totals,
        "translator": engine.manager._translator,
    }
    patch.setattr(owners[owner], name, boom)


@pytest.mark.parametrize("name", CALLS)
def test_no_error_leaves_the_manager(
    make: Make, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    engine = make(num_slots=8, tiers=[MEMORY])
    engine.manager.on_new_request(CONTEXT)
    engine.run("before", keys_of(1, 4))
    engine.offloader.reset()  # leaves events to translate
    owner, attribute, call, usable = CALLS[name]
    with monkeypatch.context() as patch, caplog.at_level(logging.ERROR):
        break_it(engine, owner, attribute, patch)
        answer = call(engine)
    assert usable(answer), answer
    assert engine.manager._errors >= 1
    contained = [r for r in caplog.records if "contained an error" in r.getMessage()]
    assert len(contained) == 1
    assert contained[0].exc_info is not None
    assert contained[0].exc_info[0] is Boom
    if name == "shutdown":
        return
    engine.manager._transfers = 0  # of the call above, which no job followed
    # and the engine goes on, with an empty cache or without one
    assert engine.run("after", keys_of(2, 4)).hits == 0
    engine.run("again", keys_of(2, 4))


@pytest.mark.parametrize("name", [n for n in CALLS if n != "shutdown"])
def test_after_one_error_the_cache_works_again(
    make: Make, name: str, monkeypatch: pytest.MonkeyPatch
):
    engine = make(num_slots=8, tiers=[MEMORY])
    engine.manager.on_new_request(CONTEXT)
    engine.offloader.reset()
    owner, attribute, call, _ = CALLS[name]
    with monkeypatch.context() as patch:
        break_it(engine, owner, attribute, patch)
        call(engine)
    engine.manager._transfers = 0  # of the call above, which no job followed
    engine.step()
    engine.step()
    assert engine.manager._off is False
    assert engine.run("store", keys_of(2, 4)).hits == 0
    assert engine.run("load", keys_of(2, 4)).hits == 4
    engine.manager.on_request_finished(CONTEXT)
    engine.offloader.core.check()
    assert engine.offloader.core.pool.pinned == 0


def test_one_log_per_cause_and_off_after_three_errors(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    engine = make(num_slots=8)
    engine.run("before", keys_of(1, 4))
    monkeypatch.setattr(engine.offloader.core, "lookup", boom)
    context = ReqContext("a")
    for count in (1, 2, 3):
        assert engine.manager._off is False
        assert engine.manager.lookup(KEY, context) is LookupResult.MISS
        assert engine.manager._errors == count
        engine.step()
    assert engine.manager._off
    messages = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert messages == [
        "kvtier: contained an error in lookup",
        "kvtier: offloading is switched off after 3 errors",
    ]
    monkeypatch.undo()
    assert engine.manager.lookup(keys_of(1, 1)[0], context) is LookupResult.MISS
    output = engine.manager.prepare_store(keys_of(3, 2), context)
    assert output is not None
    assert output.keys_to_store == []
    assert engine.manager.has_pending_work() is False
    engine.run("while off", keys_of(5, 3))
    engine.reset_cache()
    engine.step()
    assert total(engine, "vllm:kvtier_internal_errors", ()) == 3


def test_an_error_does_not_take_back_a_hit_that_vllm_was_told_of(
    make: Make, monkeypatch: pytest.MonkeyPatch, newest: bool
):
    """vLLM loads what was a hit; a load that fails would end the engine."""
    engine = make(num_slots=8, newest=newest)
    engine.run("before", keys_of(1, 6))
    real, asked = engine.offloader.core.lookup, []

    def third_time(*arguments: Any) -> Any:
        asked.append(arguments)
        return boom() if len(asked) == 3 else real(*arguments)

    monkeypatch.setattr(engine.offloader.core, "lookup", third_time)
    request = engine.run("a", keys_of(1, 6))
    assert request.hits == 2, "and they were loaded, or the engine would have ended"
    engine.settle()
    assert engine.manager._off is False
    assert engine.manager._recovering is False
    assert engine.run("b", keys_of(1, 6)).hits == 0
    assert engine.run("c", keys_of(1, 6)).hits == 6
    assert engine.offloader.core.pool.pinned == 0


def test_after_an_error_no_slot_is_reused_under_a_running_transfer(
    make: Make, monkeypatch: pytest.MonkeyPatch, newest: bool
):
    """vLLM knows of no reset then, so it flushes nothing: its completions have to be awaited."""
    engine = make(num_slots=8, newest=newest)
    released = hold_copies(engine, monkeypatch)
    engine.ask("slow", keys_of(1, 6))
    while not engine.jobs:
        engine.step()
    (job,) = engine.jobs.values()
    slots = set(job.spec.block_ids.tolist())
    engine.manager._contain("test", Boom())
    for _ in range(5):
        engine.step()
        assert not free_slots(engine) & slots
        assert engine.manager.has_pending_work()
    other = engine.ask("other", keys_of(1, 6))
    for _ in range(5):
        engine.step()
    assert other.hits == 0
    assert not free_slots(engine) & slots
    released.set()
    engine.settle()
    assert len(free_slots(engine)) == 8
    assert engine.run("again", keys_of(1, 6)).hits == 0
    assert engine.run("and again", keys_of(1, 6)).hits == 6
    engine.offloader.core.check()


def test_a_reset_that_fails_hits_nothing_from_before_it(
    make: Make, monkeypatch: pytest.MonkeyPatch
):
    engine = make(num_slots=8, tiers=[MEMORY])
    engine.run("old weights", keys_of(1, 4))
    with monkeypatch.context() as patch:
        patch.setattr(engine.offloader.core, "reset", boom)
        engine.reset_cache()
        assert engine.maximal_prefix(engine.ask("new weights", keys_of(1, 4))) == 0
    engine.settle()  # with a step that flushes, and one that recovers
    engine.step()
    assert engine.run("newer", keys_of(1, 4)).hits == 0
    assert engine.run("newest", keys_of(1, 4)).hits == 4
