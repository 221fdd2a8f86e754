"""Small random-weight models on disk, for engines that run with `skip_tokenizer_init=True`.

A model is a directory with `config.json`, `generation_config.json` and `model.safetensors`; there
is no tokenizer, prompts are token ids. Weights are a function of seed and parameter name alone, so
the same call gives the same bytes everywhere.

Random weights must make greedy tokens depend on the KV cache, or a test that compares tokens could
not fail. So every matrix is scaled by its fan-in, queries and keys are scaled up (attention picks
tokens instead of averaging them away), embeddings weigh as much as a layer's output (less, and deep
models collapse to a few tokens), and the output matrix is not tied to the embedding (a tied one
repeats the last token for ever).

Making a model is atomic (temporary directory, then rename). A directory that already holds the same
model is used as it is; one that holds something else that was made here is replaced; anything else
is refused.

Needs torch, safetensors and transformers, which every vLLM installation has; they are imported when
a model is made.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from kvtier.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

DType = Literal["bfloat16", "float16", "float32"]

RECIPE_VERSION: Final = 2
"""Raised whenever the same arguments give other bytes, so that models kept on disk are remade."""

_MARKER: Final = "kvtier-model.json"

# Gain over 1/sqrt(fan-in), by the last part of a matrix' name; 1 where not named.
_GAINS: Final[Mapping[str, float]] = {
    "q_proj": 1.7,
    "k_proj": 1.7,
    "kv_a_proj_with_mqa": 1.7,
    "kv_b_proj": 1.7,
}


def make_gqa_model(
    path: str | os.PathLike[str],
    layers: int = 4,
    hidden: int = 256,
    heads: int = 8,
    kv_heads: int = 4,
    vocab: int = 2048,
    max_len: int = 4096,
    seed: int = 0,
    dtype: DType = "bfloat16",
) -> Path:
    """A dense Llama with grouped-query attention: one cache group of full attention.

    Args:
        path: The directory to make.
        layers: Transformer layers.
        hidden: Width; `hidden / heads` is the head size, which vLLM's CPU backend wants to be a
            multiple of 16.
        heads: Query heads.
        kv_heads: Key and value heads; divides `heads`.
        vocab: Number of token ids.
        max_len: Longest sequence in tokens.
        seed: Other seeds give other weights.
        dtype: Type of weights, activations and KV cache.

    Returns:
        The directory.

    Raises:
        ConfigError: `path` exists and was not made by this module.
    """
    options = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": hidden,
        "intermediate_size": hidden * 3,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "max_position_embeddings": max_len,
        "tie_word_embeddings": False,
    }
    return _make(Path(path), "llama", options, seed, dtype)


def make_hybrid_model(
    path: str | os.PathLike[str],
    layers: int = 6,
    hidden: int = 256,
    heads: int = 8,
    kv_heads: int = 4,
    vocab: int = 2048,
    max_len: int = 4096,
    seed: int = 0,
    dtype: DType = "bfloat16",
    window: int = 128,
) -> Path:
    """A Gemma 3 text model: every third layer attends fully, the others to `window` tokens.

    With six layers vLLM makes three cache groups of two layers each. Other arguments, result and
    errors are those of `make_gqa_model`.
    """
    options = {
        "architectures": ["Gemma3ForCausalLM"],
        "hidden_size": hidden,
        "intermediate_size": hidden * 3,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        # Queries and keys are normalised in this model, so attention is sharpened here.
        "query_pre_attn_scalar": max(1, hidden // heads // 6),
        "sliding_window": window,
        "layer_types": [
            "full_attention" if layer % 3 == 2 else "sliding_attention" for layer in range(layers)
        ],
        "vocab_size": vocab,
        "max_position_embeddings": max_len,
        "tie_word_embeddings": False,
    }
    return _make(Path(path), "gemma3_text", options, seed, dtype)


def make_mla_model(
    path: str | os.PathLike[str],
    layers: int = 2,
    hidden: int = 256,
    heads: int = 4,
    vocab: int = 2048,
    max_len: int = 4096,
    seed: int = 0,
    dtype: DType = "bfloat16",
) -> Path:
    """A dense DeepSeek-V2 with multi-head latent attention: one latent of 512 + 64 values a token.

    The latent's size is DeepSeek's own, since vLLM's CPU kernel knows no other. Other arguments,
    result and errors are those of `make_gqa_model`.
    """
    options = {
        "architectures": ["DeepseekV2ForCausalLM"],
        "hidden_size": hidden,
        "intermediate_size": hidden * 3,
        "num_hidden_layers": layers,
        "first_k_dense_replace": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
        "vocab_size": vocab,
        "max_position_embeddings": max_len,
        "tie_word_embeddings": False,
    }
    return _make(Path(path), "deepseek_v2", options, seed, dtype)


def make_demo_model(path: str | os.PathLike[str]) -> Path:
    """The model of `kvtier demo`: 12 layers, 4 KV heads, about 85 million parameters.

    In float32, so that a prompt computed whole and one computed from a cached prefix give the same
    tokens: in bfloat16 the order of sums decides between close ones.
    """
    return make_gqa_model(
        path, layers=12, hidden=768, heads=12, kv_heads=4, max_len=8192, dtype="float32"
    )


def _make(path: Path, model_type: str, options: Mapping[str, Any], seed: int, dtype: DType) -> Path:
    marker = {
        "version": RECIPE_VERSION,
        "model_type": model_type,
        "options": dict(options),
        "seed": seed,
        "dtype": dtype,
    }
    if _present(path, marker):
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
    try:
        _write(scratch, model_type, options, seed, dtype)
        (scratch / _MARKER).write_text(json.dumps(marker, indent=2) + "\n")
        _install(scratch, path, marker)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return path


def _present(path: Path, marker: Mapping[str, Any]) -> bool:
    """Whether `path` is this very model; refuses what was not made here."""
    if not path.exists():
        return False
    try:
        found = json.loads((path / _MARKER).read_text())
    except (OSError, ValueError):
        if path.is_dir() and not any(path.iterdir()):
            return False
        raise ConfigError(
            f"path = {str(path)!r} exists and was not made by kvtier; a new or empty directory, or "
            f"one that holds such a model (with {_MARKER}), is allowed: choose another path"
        ) from None
    return bool(found == marker)


def _install(scratch: Path, path: Path, marker: Mapping[str, Any]) -> None:
    try:
        os.rename(scratch, path)
    except OSError:
        if _present(path, marker):  # somebody else made the same model meanwhile
            return
        shutil.rmtree(path)
        os.rename(scratch, path)


def _write(
    path: Path, model_type: str, options: Mapping[str, Any], seed: int, dtype: DType
) -> None:
    # Heavy, and no dependency of kvtier: only a caller who makes a model pays for them.
    import torch  # noqa: PLC0415
    from safetensors.torch import save_file  # noqa: PLC0415
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig  # noqa: PLC0415

    config = AutoConfig.for_model(
        model_type,
        **options,
        dtype=dtype,
        # No token ends a sequence: tests choose how many tokens they want.
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    with torch.device("meta"):
        shapes = {
            name: tuple(parameter.shape)
            for name, parameter in AutoModelForCausalLM.from_config(config).named_parameters()
        }
    # Gemma's norms multiply by one plus their weight, and it scales embeddings up itself.
    gemma = model_type == "gemma3_text"
    norm, embedding = (0.0, options["hidden_size"] ** -0.5) if gemma else (1.0, 1.0)
    weights = {}
    for name, shape in shapes.items():
        if len(shape) == 1:
            weight = torch.full(shape, norm)
        else:
            # Seeded by name, so that no weight depends on how the library orders them.
            generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{name}".encode()))
            weight = torch.randn(shape, generator=generator)
            weight *= embedding if "embed_tokens" in name else _std(name, fan_in=shape[1])
        weights[name] = weight.to(getattr(torch, dtype)).contiguous()
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(path)
    GenerationConfig().save_pretrained(path)


def _std(name: str, fan_in: int) -> float:
    part = name.removesuffix(".weight").rpartition(".")[2]
    return _GAINS.get(part, 1.0) / math.sqrt(fan_in)
