"""What vLLM loads: settings are refused before anything is made, and nothing is left behind."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from kv_caches import Model, caches_of
from vllm.v1.kv_offload import base
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)

from kvtier.errors import (
    ConfigError,
    KVTierError,
    LayoutError,
    NamespaceError,
    RegionError,
    VersionError,
)
from kvtier.metrics import METRICS
from kvtier.region import available_memory, total_memory
from kvtier.tiers.memory import MemoryTierType
from kvtier.vllm import compat, spec
from kvtier.vllm.engine_facts import engine_facts, require_known
from kvtier.vllm.manager import KVTierManager
from kvtier.vllm.spec import KVTierSpec

MODEL = Model(heads=4, block_size=16, head_bytes=8, layers=2)
ROW = 4096


def config_of(extra: dict[str, Any], *, tp: int = 1, **more: Any) -> OffloadingConfig:
    values: dict[str, Any] = {
        "groups": (OffloadingGroupConfig(16, ("layers.0", "layers.1"), 0),),
        "worker_kv_bytes_per_block": 2 * MODEL.page_bytes // tp,
        "enable_kv_cache_events": False,
        "extra_config": extra,
        "engine_id": f"spec-{os.getpid()}-{secrets.token_hex(8)}",
        "model": OffloadingModelConfig("some/model", "float16"),
        "cache": OffloadingCacheConfig(16, 1),
        "parallel": OffloadingParallelConfig(0, tp, tp, 1, 1, 1, 0, 1, None, True),
        "kv_cache_layout": "LBHNC",
    }
    return OffloadingConfig(**{**values, **more})


def engine_of(**changes: Any) -> SimpleNamespace:
    """As much of vLLM's configuration as kvtier looks at."""
    hf_config = {"architectures": ["LlamaForCausalLM"], "rope_theta": 10000.0, "hidden_size": 64}
    cache = {
        "prefix_caching_hash_algo": "sha256",
        "cache_dtype": "auto",
        "calculate_kv_scales": False,
        **changes,
    }
    layer = SimpleNamespace(sliding_window=None)
    return SimpleNamespace(
        model_config=SimpleNamespace(
            model="some/model",
            revision=None,
            dtype="torch.float16",
            quantization=None,
            max_model_len=512,
            hf_config=SimpleNamespace(to_dict=lambda: dict(hf_config)),
        ),
        cache_config=SimpleNamespace(**cache),
        compilation_config=SimpleNamespace(
            static_forward_context={"layers.0": layer, "layers.1": layer}
        ),
        load_config=SimpleNamespace(load_format="auto", download_dir="/models"),
    )


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    assert not [name for name in os.listdir("/dev/shm") if "kvtier" in name]
    deadline = time.monotonic() + 20
    while f"/spec-{os.getpid()}-" in Path("/proc/net/unix").read_text():
        assert time.monotonic() < deadline, "a socket is left"
        os.sched_yield()  # the thread that handed out the region is about to close it


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """vLLM's configuration, as workers see it."""
    engine = engine_of()
    monkeypatch.setattr(spec, "current_engine_config", lambda: engine)
    return engine


GOOD = {"cpu_bytes_to_use": "1MiB"}


def storage(path: Path, **more: Any) -> dict[str, Any]:
    tier = {"type": "fs", "root_dir": str(path)}
    return {**GOOD, "secondary_tiers": [tier], "weights_fingerprint": "w1", **more}


# -- bad settings ---------------------------------------------------------


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"cpu_bytes_to_use": "1MiB", "max_wait_s": 5}, "did you mean `max_wait_ms`"),
        ({"cpu_bytes_to_us": "1MiB"}, "did you mean `cpu_bytes_to_use`"),
        ({}, "cpu_bytes_to_use is not set"),
        ({"cpu_bytes_to_use": 0}, "between 1 and"),
        ({"cpu_bytes_to_use": -1}, "between 1 and"),
        ({"cpu_bytes_to_use": "-1GiB"}, "between 1 and"),
        ({"cpu_bytes_to_use": "much"}, "cpu_bytes_to_use = 'much'"),
        ({**GOOD, "canonical_layout": False}, "canonical_layout = False"),
        ({**GOOD, "secondary_tiers": [{"type": "fs"}]}, r"secondary_tiers\[0\].*root_dir"),
        ({**GOOD, "secondary_tiers": [{"type": "ffs"}]}, "did you mean 'fs'"),
        (
            {**GOOD, "secondary_tiers": [{"type": "memory"}, {"type": "fs", "root_dri": "/"}]},
            r"secondary_tiers\[1\]\.root_dri .*did you mean 'root_dir'",
        ),
        (
            {**GOOD, "secondary_tiers": [{"type": "fs", "root_dir": "/no/such/directory"}]},
            r"secondary_tiers\[0\]\.root_dir.*/no/such/directory",
        ),
        (
            {**GOOD, "secondary_tiers": [{"type": "fs", "root_dir": "/proc"}]},
            r"secondary_tiers\[0\]\.root_dir.*/proc",
        ),
        (
            {**GOOD, "secondary_tiers": [{"type": "fs", "root_dir": "/etc/hostname"}]},
            r"secondary_tiers\[0\]\.root_dir.*/etc/hostname",
        ),
    ],
)
def test_a_bad_setting_is_refused_at_construction(extra: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        KVTierSpec(config_of(extra))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_that_may_not_be_written_is_refused(tmp_path: Path):
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match="root_dir"):
        KVTierSpec(config_of(storage(tmp_path)))


class Submarine(MemoryTierType):
    medium = "WATER"


def test_a_tier_at_a_place_that_vllm_has_no_word_for_is_refused():
    tier = {"type": f"{__name__}:Submarine"}
    with pytest.raises(ConfigError, match=r"secondary_tiers\[0\].*medium is 'WATER'.*STORAGE"):
        KVTierSpec(config_of({**GOOD, "secondary_tiers": [tier]}))


def test_a_pool_smaller_than_a_block_is_refused():
    made = KVTierSpec(config_of({"cpu_bytes_to_use": ROW - 1}))
    with pytest.raises(ConfigError, match=rf"cpu_bytes_to_use = {ROW - 1} .*cannot hold one block"):
        made.get_worker(caches_of(MODEL, 1, 0, 8))


def test_a_pool_larger_than_the_machine_is_refused():
    size = total_memory() + (1 << 30)
    made = KVTierSpec(config_of({"cpu_bytes_to_use": size}))
    with pytest.raises(ConfigError, match=f"cpu_bytes_to_use = {size} .*more than"):
        made.get_worker(caches_of(MODEL, 1, 0, 8))


def test_a_pool_larger_than_what_is_free_is_refused(monkeypatch: pytest.MonkeyPatch):
    size = (available_memory() + total_memory()) // 2
    if size > total_memory() - (64 << 20):
        pytest.skip("all memory is free here")
    made = KVTierSpec(config_of({"cpu_bytes_to_use": size}))
    with pytest.raises(RegionError, match="memory are available here; lower cpu_bytes_to_use"):
        made.get_worker(caches_of(MODEL, 1, 0, 8))


def test_the_second_worker_does_not_count_the_pool_of_the_first_one_as_lost(
    monkeypatch: pytest.MonkeyPatch,
):
    """The first worker fills the pool; what is free then is no measure for the others."""
    first = config_of(GOOD, tp=2)
    second = replace(first, parallel=replace(first.parallel, rank=1))
    workers = [KVTierSpec(first).get_worker(caches_of(MODEL, 2, 0, 8))]
    monkeypatch.setattr("kvtier.region.memory.available_memory", lambda: 1)
    workers.append(KVTierSpec(second).get_worker(caches_of(MODEL, 2, 1, 8)))
    manager = KVTierSpec(first).get_manager()
    manager.shutdown()
    for worker in workers:
        worker.shutdown()


def test_a_layout_that_contradicts_itself_is_refused():
    caches = caches_of(MODEL, 1, 0, 8)
    bad = replace(caches.group_data_refs[0][0].mapping, local_page_size_bytes=1)
    caches.group_data_refs[0][0].mapping = bad
    with pytest.raises(LayoutError):
        KVTierSpec(config_of(GOOD)).get_worker(caches)


# -- vLLM's version -------------------------------------------------------


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (base.OffloadingSpec, "get_worker"),
        (base.OffloadingManager, "get_stats"),
        (base.OffloadingWorker, "wait"),
        (base.ReqContext, "get_offload_key_position"),
    ],
)
def test_a_vllm_that_lacks_something_is_refused(
    owner: type, name: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delattr(owner, name)
    with pytest.raises(VersionError) as refused:
        KVTierSpec(config_of(GOOD))
    assert f"{owner.__name__}.{name}" in str(refused.value)
    assert compat.installed_version() in str(refused.value)
    assert compat.SUPPORTED in str(refused.value)


@pytest.mark.parametrize("name", ["LookupResult", "CanonicalPageMapping", "TransferResult"])
def test_a_vllm_that_lacks_a_whole_class_is_refused(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delattr(base, name)
    with pytest.raises(VersionError, match=rf"{name}\."):
        compat.require_supported()


def test_this_vllm_is_supported():
    compat.require_supported()
    assert compat.installed_version() != "(unknown)"
    assert compat.batch_copy_op("cpu") is None


# -- identity -------------------------------------------------------------


def namespace_of(config: OffloadingConfig, caches: base.CanonicalKVCaches) -> dict[str, Any]:
    """Start one engine and end it again; what its blocks are known under."""
    made = KVTierSpec(config)
    worker, manager = made.get_worker(caches), made.get_manager()
    assert isinstance(manager, KVTierManager)
    namespace = manager._offloader._namespaces[0]
    manager.shutdown()
    worker.shutdown()
    return {"digest": namespace.digest, **namespace.describe()["facts"]}


def test_a_certified_layout_has_a_namespace_without_topology(tmp_path: Path, seen: SimpleNamespace):
    facts = namespace_of(config_of(storage(tmp_path)), caches_of(MODEL, 1, 0, 8))
    assert facts["layout"]["portable"] is True
    assert "topology" not in facts["layout"]
    assert facts["weights"] == "w1"


def test_a_layout_that_nobody_certifies_has_one_with_topology(
    tmp_path: Path, seen: SimpleNamespace
):
    caches = caches_of(MODEL, 1, 0, 8, mapped=False)
    facts = namespace_of(config_of(storage(tmp_path)), caches)
    assert facts["layout"]["portable"] is False
    assert facts["layout"]["topology"] == {
        "world": 1, "tensor": 1, "pipeline": 1, "prefill_context": 1, "decode_context": 1,
    }  # fmt: skip
    certified = namespace_of(config_of(storage(tmp_path)), caches_of(MODEL, 1, 0, 8))
    assert facts["digest"] != certified["digest"]


def test_two_ranks_and_one_share_a_namespace(tmp_path: Path, seen: SimpleNamespace):
    config = config_of(storage(tmp_path), tp=2)
    second = replace(config, parallel=replace(config.parallel, rank=1))
    workers = [
        KVTierSpec(config).get_worker(caches_of(MODEL, 2, 0, 8)),
        KVTierSpec(second).get_worker(caches_of(MODEL, 2, 1, 8)),
    ]
    manager = KVTierSpec(config).get_manager()
    assert isinstance(manager, KVTierManager)
    digest = manager._offloader._namespaces[0].digest
    manager.shutdown()
    for worker in workers:
        worker.shutdown()
    alone = namespace_of(config_of(storage(tmp_path)), caches_of(MODEL, 1, 0, 8))
    assert digest == alone["digest"]


@pytest.mark.parametrize(
    "change",
    [
        {"weights_fingerprint": "w2"},
        {"namespace": "other"},
        {"weights_epoch": "e2"},
    ],
)
def test_what_the_operator_says_is_part_of_the_namespace(
    tmp_path: Path, seen: SimpleNamespace, change: dict[str, Any]
):
    caches = caches_of(MODEL, 1, 0, 8)
    plain = namespace_of(config_of(storage(tmp_path)), caches)["digest"]
    assert namespace_of(config_of(storage(tmp_path)), caches)["digest"] == plain
    assert namespace_of(config_of(storage(tmp_path, **change)), caches)["digest"] != plain


def test_what_the_engine_is_is_part_of_the_namespace(
    tmp_path: Path, seen: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
):
    caches = caches_of(MODEL, 1, 0, 8)
    digests = [namespace_of(config_of(storage(tmp_path)), caches)["digest"]]
    windowed = SimpleNamespace(sliding_window=128)
    for owner, name, value in [
        (seen.model_config, "dtype", "torch.bfloat16"),
        (seen.model_config, "quantization", "fp8"),
        (seen.cache_config, "cache_dtype", "fp8"),
        (seen.cache_config, "prefix_caching_hash_algo", "sha256_cbor"),
        (seen.compilation_config, "static_forward_context", {"layers.0": object()}),
    ]:
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, value)
            digests.append(namespace_of(config_of(storage(tmp_path)), caches)["digest"])
    digests.append(
        namespace_of(config_of(storage(tmp_path), kv_cache_layout="LBNHC"), caches)["digest"]
    )
    assert len(set(digests)) == len(digests)
    monkeypatch.setattr(seen.compilation_config, "static_forward_context", {"layers.1": windowed})
    made = KVTierSpec(config_of(GOOD))
    worker, manager = made.get_worker(caches), made.get_manager()
    assert manager._offloader.core.windows == frozenset({0})  # type: ignore[attr-defined]
    manager.shutdown()
    worker.shutdown()


def refused_manager(extra: dict[str, Any], error: type[KVTierError], message: str) -> None:
    made = KVTierSpec(config_of(extra))
    worker = made.get_worker(caches_of(MODEL, 1, 0, 8))
    with pytest.raises(error, match=message):
        made.get_manager()
    worker.shutdown()


def test_a_tier_is_refused_where_the_engine_cannot_be_seen(tmp_path: Path):
    refused_manager(storage(tmp_path), NamespaceError, "does not show its configuration")


def test_without_tiers_no_identity_is_needed():
    made = KVTierSpec(config_of(GOOD))
    worker, manager = made.get_worker(caches_of(MODEL, 1, 0, 8)), made.get_manager()
    assert made.get_manager() is manager
    assert made.get_worker(caches_of(MODEL, 1, 0, 8)) is worker
    manager.shutdown()
    worker.shutdown()


def test_hashes_that_differ_in_every_process_are_refused(
    tmp_path: Path, seen: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    seen.cache_config.prefix_caching_hash_algo = "xxhash"
    refused_manager(storage(tmp_path), NamespaceError, "PYTHONHASHSEED")
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    facts = namespace_of(config_of(storage(tmp_path)), caches_of(MODEL, 1, 0, 8))
    assert facts["hash"] == {"algorithm": "xxhash", "seed": "7"}


def test_scales_of_the_first_requests_are_refused(tmp_path: Path, seen: SimpleNamespace):
    seen.cache_config.calculate_kv_scales = True
    refused_manager(storage(tmp_path), NamespaceError, "calculate_kv_scales")


def test_made_up_weights_need_a_fingerprint(tmp_path: Path, seen: SimpleNamespace):
    seen.load_config.load_format = "dummy"
    extra = storage(tmp_path)
    del extra["weights_fingerprint"]
    refused_manager(extra, NamespaceError, "load_format dummy")
    namespace_of(config_of(storage(tmp_path)), caches_of(MODEL, 1, 0, 8))


def test_engine_facts_are_plain_and_complete(monkeypatch: pytest.MonkeyPatch):
    facts = engine_facts(engine_of(), {}, "cuda")
    require_known(facts)
    assert facts["model"] == {"name": "some/model", "revision": None, "cache_dir": "/models"}
    assert "cpu" not in facts["identity"]
    assert "cpu" in engine_facts(engine_of(), {}, "cpu")["identity"]
    both = engine_of(calculate_kv_scales=True, prefix_caching_hash_algo="xxhash_cbor")
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with pytest.raises(NamespaceError, match=r"PYTHONHASHSEED.*; calculate_kv_scales"):
        require_known(engine_facts(both, {}, "cuda"))


# -- all of it ------------------------------------------------------------


def test_a_worker_and_a_manager_meet():
    made = KVTierSpec(config_of({"cpu_bytes_to_use": 10 * ROW + 5}))
    worker, manager = made.get_worker(caches_of(MODEL, 1, 0, 8)), made.get_manager()
    region = manager._offloader.region  # type: ignore[attr-defined]
    assert (region.geometry.num_slots, region.slot_bytes) == (10, ROW)
    region.rows[3] = 8
    assert (np.asarray(worker._region.rows[3]) == 8).all()  # type: ignore[attr-defined]
    assert manager._tokens == {0: 16}  # type: ignore[attr-defined]
    manager.shutdown()
    worker.shutdown()


def test_every_metric_is_declared():
    declared = KVTierSpec.build_metric_definitions({})
    assert set(declared) == set(METRICS)
    for name, metric in METRICS.items():
        assert declared[name].labelnames == metric.labels
        assert declared[name].documentation == metric.documentation
