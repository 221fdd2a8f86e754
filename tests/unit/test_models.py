"""Models for tests: the same bytes every time, made whole or not at all, never over somebody's."""

from __future__ import annotations

import json
from importlib.util import find_spec

import pytest

from kvtier.errors import ConfigError
from kvtier.testing.models import make_gqa_model, make_hybrid_model, make_mla_model

if find_spec("transformers") is None:  # every process that collects would import it for seconds
    pytest.skip("needs transformers", allow_module_level=True)

MAKERS = [make_gqa_model, make_hybrid_model, make_mla_model]


def weights(path) -> bytes:
    return (path / "model.safetensors").read_bytes()


@pytest.mark.parametrize("make", MAKERS)
def test_seed_decides_the_weights(make, tmp_path) -> None:
    first = make(tmp_path / "first", seed=1, vocab=256)
    assert weights(first) == weights(make(tmp_path / "again", seed=1, vocab=256))
    assert weights(first) != weights(make(tmp_path / "other", seed=2, vocab=256))
    assert (first / "generation_config.json").exists()


def test_dtype_and_shape_reach_the_configuration(tmp_path) -> None:
    path = make_gqa_model(tmp_path / "m", layers=3, heads=4, kv_heads=2, vocab=64, dtype="float32")
    config = json.loads((path / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["dtype"] == "float32"
    assert config["num_hidden_layers"] == 3
    assert config["num_key_value_heads"] == 2
    assert config["vocab_size"] == 64


def test_the_hybrid_model_has_both_kinds_of_attention(tmp_path) -> None:
    config = json.loads((make_hybrid_model(tmp_path / "m") / "config.json").read_text())
    assert config["layer_types"].count("full_attention") == 2
    assert config["layer_types"].count("sliding_attention") == 4


def test_the_same_model_is_used_again(tmp_path) -> None:
    path = make_gqa_model(tmp_path / "m")
    inode = (path / "model.safetensors").stat().st_ino
    make_gqa_model(path)
    assert (path / "model.safetensors").stat().st_ino == inode


def test_another_model_of_ours_is_replaced(tmp_path) -> None:
    before = weights(make_gqa_model(tmp_path / "m", seed=1))
    assert weights(make_gqa_model(tmp_path / "m", seed=2)) != before


def test_what_was_not_made_here_is_refused_and_kept(tmp_path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match=str(tmp_path)):
        make_gqa_model(tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_an_empty_directory_is_filled(tmp_path) -> None:
    assert (make_gqa_model(tmp_path) / "config.json").exists()


def test_a_failure_leaves_nothing_behind(tmp_path) -> None:
    with pytest.raises(Exception, match=r"."):
        make_gqa_model(tmp_path / "m", hidden=100, heads=7)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("make", MAKERS)
def test_tokens_depend_on_one_block_of_the_prompt_and_do_not_collapse(make, tmp_path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(make(tmp_path / "m")).eval()
    # Pairs of prompts that differ in one block of 32 tokens only, far from their end.
    prompts = torch.randint(0, 2048, (6, 256), generator=torch.Generator().manual_seed(0))
    prompts[1::2, :128] = prompts[::2, :128]
    prompts[1::2, 160:] = prompts[::2, 160:]
    with torch.no_grad():
        found = model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=16,
            do_sample=False,
        )[:, 256:].tolist()
    for one, other in zip(found[::2], found[1::2], strict=True):
        assert one != other
        assert len(set(one)) > 8
