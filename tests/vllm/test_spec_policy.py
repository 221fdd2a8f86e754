"""What `KVTierSpec` refuses before anything is made, in workers and in the scheduler alike."""

from __future__ import annotations

import pytest

from kvtier.errors import ConfigError

vllm_config = pytest.importorskip("vllm.v1.kv_offload.config")


def spec(**extra_config: object) -> object:
    from kvtier.vllm.spec import KVTierSpec

    return KVTierSpec(
        vllm_config.OffloadingConfig(
            groups=(),
            worker_kv_bytes_per_block=4096,
            enable_kv_cache_events=False,
            extra_config={"cpu_bytes_to_use": 4096} | extra_config,
            engine_id="of a test",
            model=vllm_config.OffloadingModelConfig("m", "float16"),
            cache=vllm_config.OffloadingCacheConfig(16, 1),
            parallel=vllm_config.OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, 0, True),
        )
    )


def test_an_eviction_policy_of_the_operators_own_is_made_sure_of() -> None:
    assert spec(eviction_policy="kvtier.core.policies.arc:ARC") is not None
    with pytest.raises(ConfigError, match="cannot be imported"):
        spec(eviction_policy="kvtier_absent:Policy")
    with pytest.raises(ConfigError, match="it lacks"):
        spec(eviction_policy="builtins:range")
