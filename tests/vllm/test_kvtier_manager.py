"""The scheduler's side with real tiers, threads, memory and workers, called as vLLM calls it."""

from __future__ import annotations

from pathlib import Path

import manager_engines
import pytest
from connector import Asked, content_of, keys_of
from manager_engines import ALL_OF_IT, MEMORY, Make
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    ReqContext,
    TierFilter,
    TierMatcher,
)

from kvtier.core.types import BlockKey, group_of
from kvtier.region import Mark

make = manager_engines.make
newest = manager_engines.newest

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
