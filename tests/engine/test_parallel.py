"""Two tensor-parallel ranks, alone and sharing a directory with one rank; dense and latent."""

from __future__ import annotations

import json

import pytest

pytestmark = pytest.mark.engine


def row_bytes_on_disk(root) -> set[int]:
    files = list(root.glob("*/namespace.json"))
    assert len(files) == 1, "one rank and two ranks share a namespace"
    return {json.loads(path.read_text())["facts"]["layout"]["row_bytes"] for path in files}


def reference(engine, kind, asked) -> list[list[int]]:
    """vLLM has no prefix cache for latent attention on the CPU: there it is computed."""
    return engine.generate(asked).tokens if kind == "mla" else engine.reference(asked)


@pytest.mark.parametrize(("kind", "cached"), [("gqa", 480), ("mla", 496)])  # blocks of 32 and 16
def test_one_rank_and_two_ranks_share_blocks(engines, prompt, tmp_path, kind, cached) -> None:
    one = engines.start(kind, tmp_path)
    first = prompt(500)
    expected_first = reference(one, kind, first)
    one.quiet()

    two = engines.start(kind, tmp_path, engine={"tensor_parallel_size": 2})
    answer = two.generate(first)
    assert answer.tokens == expected_first, "what one rank wrote"
    assert (answer.device, answer.host, answer.disk) == (0, 0, cached)

    second = prompt(500)
    expected_second = reference(two, kind, second)
    two.drop_device()
    answer = two.generate(second)
    assert answer.tokens == expected_second
    assert (answer.device, answer.host, answer.disk) == (0, cached, 0)
    two.drop_pool()
    answer = two.generate(second)
    assert answer.tokens == expected_second
    assert (answer.device, answer.host, answer.disk) == (0, 0, cached)

    answer = one.generate(second)
    assert answer.tokens == expected_second, "what two ranks wrote"
    assert (answer.device, answer.host, answer.disk) == (0, 0, cached)

    assert one.call("look")["row_bytes"] == two.call("look")["row_bytes"]
    assert row_bytes_on_disk(tmp_path) == {one.call("look")["row_bytes"]}

    # The comparison can fail: heads of the wrong rank are other bytes.
    two.drop_device()
    two.call("flip_pool", offset=3, mask=0x80, whole=True)
    answer = two.generate(second)
    assert answer.host == cached
    assert answer.tokens != expected_second
    two.stop()
    one.stop()
