"""The scheduler's side with real tiers, threads, memory and workers, called as vLLM calls it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from connector import TOKENS, Asked, Engine, content_of, keys_of
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
)
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadPolicy,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
    TierFilter,
    TierMatcher,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvtier.core.types import BlockKey, group_of
from kvtier.region import Mark
from kvtier.vllm.executors.cpu import copy_piecewise
from kvtier.vllm.spec import KVTierSpec
from kvtier.vllm.worker import NO_SLOT, PrimaryLoadStoreSpec

MEMORY = {"type": "memory", "name": "ram"}
ALL_OF_IT = {"promotion_share": 0.45, "cascade_share": 0.45}

Make = Callable[..., Engine]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[Engine] = []

    def engine(**settings: Any) -> Engine:
        made.append(Engine(**settings))
        return made[-1]

    yield engine
    for each in made:
        each.close()


@pytest.fixture(params=[False, True], ids=["0.32", "0.33"])
def newest(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


# -- the way of a block ---------------------------------------------------


@pytest.mark.parametrize("kind", ["memory", "fs"])
@pytest.mark.parametrize("tp", [1, 2])
def test_a_block_goes_down_and_comes_back(
    make: Make, tmp_path: Path, kind: str, tp: int, newest: bool
):
    tier = MEMORY if kind == "memory" else {"type": "fs", "root_dir": str(tmp_path), "name": "ram"}
    engine = make(num_slots=16, tiers=[tier], tp=tp, newest=newest, **ALL_OF_IT)
    first = engine.run("first", keys_of(1, 6))
    assert first.hits == 0
    again = engine.run("again", keys_of(1, 6))
    assert (again.hits, again.sources) == (6, ["HOST"] * 6)
    engine.run("others", keys_of(2, 6))
    engine.run("more", keys_of(3, 6))
    engine.run("even more", keys_of(4, 6))  # 24 blocks in 16 slots: the first prompt is evicted
    assert not any(BlockKey(key) in engine.offloader.core.pool.blocks for key in keys_of(1, 6))
    back = engine.run("back", keys_of(1, 6))
    assert (back.hits, back.sources) == (6, ["DISK"] * 6)
    assert back.deferred > 0
    engine.offloader.core.check()
    assert engine.manager._errors == 0
    assert engine.offloader.core.pool.pinned == 0


def test_another_engine_reads_what_one_left(make: Make, tmp_path: Path, newest: bool):
    tier = {"type": "fs", "root_dir": str(tmp_path)}
    make(num_slots=16, tiers=[tier], tp=2, newest=newest, **ALL_OF_IT).run("a", keys_of(1, 6))
    reader = make(num_slots=16, tiers=[tier], tp=1, newest=newest, **ALL_OF_IT)
    assert reader.run("b", keys_of(1, 6)).hits == 6, "another tensor-parallel size, the same bytes"
    assert reader.run("c", keys_of(1, 6) + keys_of(2, 2)).hits == 6


def test_a_prompt_longer_than_the_pool_keeps_its_head(make: Make, newest: bool):
    engine = make(num_slots=8, newest=newest)
    assert engine.run("long", keys_of(1, 20)).hits == 0
    assert engine.run("again", keys_of(1, 20)).hits == 8
    assert engine.manager.has_pending_work() is False


def test_many_requests_at_once(make: Make, newest: bool):
    engine = make(num_slots=24, tiers=[MEMORY], tp=2, newest=newest, **ALL_OF_IT)
    for prompt in range(6):
        engine.run(f"store {prompt}", keys_of(prompt, 8))
    asked = [engine.ask(f"load {prompt}", keys_of(prompt, 8)) for prompt in range(6)]
    engine.settle()
    assert sum(request.hits or 0 for request in asked) >= 24
    engine.offloader.core.check()
    assert engine.offloader.core.pool.pinned == 0
    assert engine.manager._errors == 0
    assert engine.manager._transfers == 0


def test_an_unknown_request_is_served(make: Make):
    """vLLM may ask for a request that it never announced, or that has ended."""
    engine = make(num_slots=8)
    context = ReqContext("stranger")
    (key,) = keys_of(1, 1)
    assert engine.manager.lookup(key, context) is LookupResult.MISS
    engine.manager.on_request_finished(context)
    engine.manager.on_request_finished(context)
    engine.manager.complete_load({key}, context)
    engine.manager.complete_store({key}, context)
    assert engine.manager._errors == 0


# -- marks ----------------------------------------------------------------


@pytest.mark.parametrize("mark", [Mark.PARTIAL, Mark.FAILED, Mark.UNTOUCHED])
@pytest.mark.parametrize("rank", [0, 1])
def test_only_what_all_ranks_marked_complete_is_published(make: Make, mark: Mark, rank: int):
    engine = make(num_slots=8, tp=2, tiers=[MEMORY])
    engine.ask("a", keys_of(1, 3))
    while not engine.jobs:
        engine.step()
    (job,) = engine.jobs.values()
    slots = job.spec.block_ids.tolist()
    real = engine.update

    def spoil(finished: list[tuple[int, bool]]) -> None:
        if finished:
            engine.region.marks[rank, slots[1]] = mark
        real(finished)

    engine.update = spoil  # type: ignore[method-assign]
    engine.settle()
    readable = [BlockKey(key) in engine.offloader.core.pool.blocks for key in keys_of(1, 3)]
    assert readable == [True, False, True]
    stored = [key for e in engine.events if not e.removed and e.ownership is None for key in e.keys]
    assert set(stored) == {keys_of(1, 3)[0], keys_of(1, 3)[2]}
    assert engine.run("b", keys_of(1, 3)).hits == 1
    engine.offloader.core.check()


def test_a_mark_of_the_last_tenant_says_nothing_of_the_next(make: Make):
    engine = make(num_slots=2)
    engine.run("a", keys_of(1, 2))
    assert (engine.region.marks == Mark.COMPLETE).all()
    output = engine.manager.prepare_store(keys_of(2, 2), ReqContext("b"))
    assert output is not None
    assert len(output.keys_to_store) == 2
    assert (engine.region.marks == Mark.UNTOUCHED).all()
    engine.manager.complete_store(set(keys_of(2, 2)), ReqContext("b"))
    assert engine.offloader.core.pool.used == 0, "nobody copied anything"


def test_a_store_that_vllm_calls_failed_is_not_published(make: Make):
    engine = make(num_slots=4)
    output = engine.manager.prepare_store(keys_of(1, 2), ReqContext("a"))
    assert output is not None
    engine.region.marks[:] = Mark.COMPLETE
    engine.manager.complete_store(set(keys_of(1, 2)), ReqContext("a"), success=False)
    assert engine.offloader.core.pool.used == 0


# -- errors inside --------------------------------------------------------


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


def hold_copies(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    released = threading.Event()
    engine.gates.append(released)

    def held(*arrays: Any) -> None:
        released.wait()
        copy_piecewise(*arrays)

    for rank in engine.ranks:
        monkeypatch.setattr(rank.worker._executor, "_copy", held)
    return released


def free_slots(engine: Engine) -> set[int]:
    return set(engine.offloader.core.pool._free)


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


# -- reset ----------------------------------------------------------------


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


# -- what vLLM is told ----------------------------------------------------


def total(engine: Engine, name: str, labels: tuple[str, ...]) -> float:
    return float(engine.metrics._values[name][labels])


def resident(engine: Engine, owner: str | None) -> set[bytes]:
    """Replay of the events."""
    keys: set[bytes] = set()
    for event in engine.events:
        if event.ownership == owner:
            (keys.difference_update if event.removed else keys.update)(event.keys)
    return keys


def test_replaying_the_events_gives_what_is_resident(make: Make):
    engine = make(num_slots=8, tiers=[MEMORY], **ALL_OF_IT)
    for prompt in range(4):
        engine.run(f"store {prompt}", keys_of(prompt, 3))
    engine.run("load", keys_of(0, 3))
    core = engine.offloader.core
    assert resident(engine, None) == {k for k, b in core.pool.blocks.items() if b.ready}
    assert resident(engine, "ram") == {key for p in range(4) for key in keys_of(p, 3)}
    for event in engine.events:
        if event.ownership is None:
            assert (event.medium, event.locality) == (Medium.CPU, None)
            assert event.removal_expected
        else:
            assert (event.medium, event.locality) == (Medium.STORAGE, Locality.LOCAL)
    engine.reset_cache()
    engine.step()
    assert resident(engine, None) == resident(engine, "ram") == set()


def test_without_events_nothing_is_told_or_kept(make: Make):
    engine = make(num_slots=8, emit_events=False)
    engine.run("a", keys_of(1, 4))
    assert engine.events == []
    assert engine.offloader.core.ledger._events == []


def test_metrics_have_the_names_and_labels_that_are_declared(make: Make):
    """The front end asserts on both, in another process."""
    engine = make(num_slots=8, tiers=[MEMORY, {"type": "memory"}], **ALL_OF_IT)
    for prompt in (1, 2, 3, 4, 1):
        engine.run(f"{prompt}", keys_of(prompt, 3))
        engine.requests.clear()
    declared = KVTierSpec.build_metric_definitions({})
    kinds = {"counter": OffloadingCounterMetadata, "gauge": OffloadingGaugeMetadata}
    assert engine.metrics._values
    for name, series in engine.metrics._values.items():
        assert isinstance(declared[name], kinds[str(engine.metrics._types[name])])
        for labels in series:
            assert isinstance(labels, tuple)
            assert len(labels) == len(declared[name].labelnames)
            assert all(isinstance(label, str) for label in labels)
    pinned = engine.metrics._values["vllm:kvtier_pinned_slots"]
    assert set(pinned) == {("primary",), ("ram",), ("memory",)}


def test_the_figures_are_right(make: Make):
    engine = make(num_slots=12, tiers=[MEMORY], **ALL_OF_IT)
    for prompt in range(4):
        engine.run(f"store {prompt}", keys_of(prompt, 4))
    engine.run("from the tier", keys_of(0, 4))
    engine.run("from the pool", keys_of(0, 4))
    row = engine.region.slot_bytes
    assert total(engine, "vllm:kvtier_hit_blocks", ("ram",)) == 4
    assert total(engine, "vllm:kvtier_hit_blocks", ("primary",)) == 4
    assert total(engine, "vllm:kvtier_hit_tokens", ("ram",)) == 4 * TOKENS
    assert total(engine, "vllm:kvtier_read_bytes", ("ram",)) == 4 * row
    assert total(engine, "vllm:kvtier_write_bytes", ("ram",)) == 16 * row
    assert total(engine, "vllm:kvtier_total_slots", ("primary",)) == 12
    used = engine.offloader.core.pool.used
    assert total(engine, "vllm:kvtier_used_slots", ("primary",)) == used
    assert total(engine, "vllm:kvtier_jobs_in_flight", ("ram",)) == 0
    assert engine.manager.get_stats() is None, "nothing changed"


def test_a_load_of_a_block_that_is_gone_counts_as_no_hit(make: Make):
    engine = make(num_slots=4)
    spec = engine.manager.prepare_load(keys_of(1, 2), ReqContext("a"))
    assert isinstance(spec, PrimaryLoadStoreSpec)
    assert spec.block_ids.tolist() == [NO_SLOT, NO_SLOT]
    stats = engine.manager.get_stats()
    assert isinstance(stats, OffloadingConnectorStats)
    assert "vllm:kvtier_hit_blocks" not in stats._values or not any(
        stats._values["vllm:kvtier_hit_blocks"].values()
    )


# -- which tiers a request may load from ----------------------------------


@pytest.mark.parametrize(
    ("matchers", "hits"),
    [
        ((), 0),
        ((TierMatcher(medium=Medium.CPU),), 0),
        ((TierMatcher(locality=Locality.REMOTE),), 0),
        ((TierMatcher(medium=Medium.STORAGE),), 4),
        ((TierMatcher(medium=Medium.STORAGE, locality=Locality.LOCAL),), 4),
        ((TierMatcher(medium=Medium.CPU), TierMatcher(locality=Locality.LOCAL)), 4),
    ],
)
def test_a_request_may_name_the_tiers_that_it_loads_from(
    make: Make, matchers: tuple[TierMatcher, ...], hits: int
):
    engine = make(num_slots=12, tiers=[MEMORY], **ALL_OF_IT)
    for prompt in range(4):
        engine.run(f"store {prompt}", keys_of(prompt, 4))
    assert engine.run("filtered", keys_of(0, 4), tiers=TierFilter(matchers)).hits == hits


def test_the_primary_is_never_filtered(make: Make):
    engine = make(num_slots=12, tiers=[MEMORY])
    engine.run("store", keys_of(0, 4))
    assert engine.run("none", keys_of(0, 4), tiers=TierFilter(())).hits == 4


# -- the tests of the test ------------------------------------------------


def test_the_engine_of_these_tests_notices_a_wrong_byte(make: Make):
    engine = make(num_slots=8)
    engine.run("a", keys_of(1, 3))
    engine.region.rows[:, 5] ^= 1
    with pytest.raises(AssertionError, match="a wrong block was loaded"):
        engine.run("b", keys_of(1, 3))


def test_contents_differ(make: Make):
    contents = {content_of(key).tobytes() for p in range(5) for key in keys_of(p, 5)}
    assert len(contents) == 25
    assert all(group_of(BlockKey(key)) == 0 for key in keys_of(3, 3))
    assert isinstance(Asked(ReqContext("a"), []).state, str)
