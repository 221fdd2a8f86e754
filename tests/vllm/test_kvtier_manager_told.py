"""What vLLM is told: events, metrics, figures."""

from __future__ import annotations

import manager_engines
from connector import TOKENS, Engine, keys_of
from manager_engines import ALL_OF_IT, MEMORY, Make, total
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    Locality,
    Medium,
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    ReqContext,
)

from kvtier.vllm.spec import KVTierSpec
from kvtier.vllm.worker import NO_SLOT, PrimaryLoadStoreSpec

make = manager_engines.make


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
