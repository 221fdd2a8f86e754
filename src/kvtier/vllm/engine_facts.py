"""What a worker knows of its engine that decides whether bytes may be shared.

Collected in the worker, which alone sees vLLM's configuration, and sent to the scheduler with the
region. Every value is JSON-able.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from kvtier.errors import NamespaceError
from kvtier.namespace import cpu_facts, rope_facts


def engine_facts(
    engine: Any | None, groups: Mapping[int, Sequence[str]], device_type: str
) -> dict[str, Any]:
    """Facts of one engine, the same in all its workers.

    Args:
        engine: vLLM's configuration; None if it cannot be seen.
        groups: cache group -> names of its layers on this worker.
        device_type: torch's name of the kind of device that holds the KV cache.

    Returns:
        `known` tells whether the configuration was seen. `model` is how to find the weights.
        `identity` belongs in the namespace. `windows` are the groups that look back only so far.
        `refusals` are reasons why blocks of this engine must not be shared, if any.
    """
    if engine is None:
        return {"known": False, "identity": {}, "windows": [], "refusals": []}
    model, cache = engine.model_config, engine.cache_config
    layers = engine.compilation_config.static_forward_context
    hf_config = {str(k): _plain(v) for k, v in model.hf_config.to_dict().items()}
    algorithm = str(cache.prefix_caching_hash_algo)
    seed = os.environ.get("PYTHONHASHSEED")
    refusals = []
    if algorithm.startswith("xxhash") and seed is None:
        refusals.append(
            f"block hashes by {algorithm} differ in every process unless PYTHONHASHSEED is set; "
            "set it to the same value everywhere, or use --prefix-caching-hash-algo sha256"
        )
    if getattr(cache, "calculate_kv_scales", False):
        refusals.append(
            "calculate_kv_scales derives the KV scales from the first requests, so stored blocks "
            "mean something else in every process; use scales of the checkpoint"
        )
    identity = {
        "architectures": hf_config.get("architectures"),
        "model_dtype": str(model.dtype).removeprefix("torch."),
        "kv_cache_dtype": str(cache.cache_dtype),
        "kv_cache_dtype_skip_layers": [str(x) for x in _get(cache, "kv_cache_dtype_skip_layers")],
        "quantization": str(model.quantization),
        "quantization_config": hf_config.get("quantization_config"),
        "load_format": _load_format(engine),
        "rope": rope_facts(hf_config, model.max_model_len),
        "hash": {"algorithm": algorithm, "seed": seed},
        "attention": sorted({_backend(layer) for layer in layers.values()}),
        "device": device_type,
        **({"cpu": cpu_facts()} if device_type == "cpu" else {}),
    }
    return {
        "known": True,
        "model": {
            "name": str(model.model),
            # The commit that was loaded: a branch may have moved since.
            "revision": getattr(model.hf_config, "_commit_hash", None) or model.revision,
            "cache_dir": engine.load_config.download_dir,
        },
        "identity": identity,
        "windows": sorted(
            group
            for group, names in groups.items()
            if any(_is_windowed(layers[name]) for name in names if name in layers)
        ),
        "refusals": refusals,
    }


def require_known(facts: Mapping[str, Any]) -> None:
    """Check that blocks of this engine may be shared at all.

    Raises:
        NamespaceError: with the reasons.
    """
    if not facts["known"]:
        raise NamespaceError(
            "this vLLM does not show its configuration to the offloading interface, so kvtier "
            "cannot tell which model, quantisation and attention backend wrote a block; remove "
            "secondary_tiers (the CPU pool alone needs no identity)"
        )
    if facts["refusals"]:
        raise NamespaceError("; ".join(facts["refusals"]))


def _load_format(engine: Any) -> str:
    # "auto" and "safetensors" read the same weights; only made-up weights differ from the files.
    return "dummy" if str(engine.load_config.load_format) == "dummy" else "files"


def _backend(layer: Any) -> str:
    backend = getattr(layer, "attn_backend", None)
    name = getattr(backend, "get_name", None)
    return str(name()) if callable(name) else type(layer).__name__


def _is_windowed(layer: Any) -> bool:
    return getattr(layer, "sliding_window", None) is not None


def _get(settings: Any, name: str) -> Any:
    return getattr(settings, name, None) or ()


def _plain(value: object) -> object:
    """A JSON-able copy: what is not plain data is named by its text."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return value if value is None or isinstance(value, str | int | float | bool) else str(value)
