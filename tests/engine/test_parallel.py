"""Two tensor-parallel ranks, alone and sharing a directory with one rank; dense and latent."""

from __future__ import annotations

import json

import pytest

pytestmark = pytest.mark.engine


def row_bytes_on_disk(root) -> set[int]:
    files = list(root.glob("*/namespace.json"))
    assert len(files) == 1, "one rank and two ranks share a namespace"
    return {json.loads(path.read_text())["facts"]["layout"]["row_bytes"] for path in files}


@pytest.mark.parametrize(("kind", "cached"), [("gqa", 480), ("mla", 496)])  # blocks of 32 and 16
def test_one_rank_and_two_ranks_share_blocks(engines, prompt, tmp_path, kind, cached) -> None:
    def reference(engine, prompts):
        """vLLM has no prefix cache for latent attention on the CPU: there they are computed."""
        return generate(engine, prompts).tokens if latent else engine.reference(*prompts)

    def generate(engine, prompts):
        """On two ranks vLLM decodes latent attention wrongly on the CPU, so only first tokens, which
        depend on the whole cache, count there.
        """
        return engine.generate(*prompts, max_tokens=1 if latent else 8)

    latent = kind == "mla"
    number = 8 if latent else 1
    cached *= number
    one = engines.start(kind, tmp_path)
    first = [prompt(500) for _ in range(number)]
    expected_first = reference(one, first)
    one.quiet()

    two = engines.start(kind, tmp_path, engine={"tensor_parallel_size": 2})
    answer = generate(two, first)
    assert answer.tokens == expected_first, "what one rank wrote"
    assert (answer.device, answer.host, answer.disk) == (0, 0, cached)

    second = [prompt(500) for _ in range(number)]
    expected_second = reference(two, second)
    two.drop_device()
    answer = generate(two, second)
    assert answer.tokens == expected_second
    assert (answer.device, answer.host, answer.disk) == (0, cached, 0)
    two.drop_pool()
    answer = generate(two, second)
    assert answer.tokens == expected_second
    assert (answer.device, answer.host, answer.disk) == (0, 0, cached)

    answer = generate(one, second)
    assert answer.tokens == expected_second, "what two ranks wrote"
    assert (answer.device, answer.host, answer.disk) == (0, 0, cached)

    assert one.call("look")["row_bytes"] == two.call("look")["row_bytes"]
    assert row_bytes_on_disk(tmp_path) == {one.call("look")["row_bytes"]}

    # The comparison can fail: these are other bytes.
    two.drop_device()
    two.call("flip_pool", offset=3, mask=0x80, whole=True)
    answer = generate(two, second)
    assert answer.host == cached
    assert answer.tokens != expected_second
    two.stop()
    one.stop()


def test_latent_attention_on_one_rank(engines, prompt, tmp_path) -> None:
    engine = engines.start("mla", tmp_path)
    asked = prompt(500)
    expected = engine.generate(asked).tokens
    engine.drop_device()
    answer = engine.generate(asked)
    assert answer.tokens == expected
    assert (answer.device, answer.host, answer.disk) == (0, 496, 0)
    engine.drop_pool()
    answer = engine.generate(asked)
    assert answer.tokens == expected
    assert (answer.device, answer.host, answer.disk) == (0, 0, 496)
    engine.call("flip_pool", offset=3, mask=0x40)
    engine.drop_device()
    answer = engine.generate(asked)
    assert answer.host == 496
    assert answer.tokens != expected
    again = engines.start("mla", tmp_path)
    answer = again.generate(asked)
    assert answer.tokens == expected
    assert (answer.device, answer.host, answer.disk) == (0, 0, 496)
    again.stop()
    engine.stop()
