"""A dense model on one rank: hits from DRAM, from disk, and after a restart."""

from __future__ import annotations

import pytest
from conftest import BLOCK

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("dense")


@pytest.fixture(scope="module")
def engine(engines, root):
    return engines.start("gqa", root)


def test_dram_serves_what_the_device_lost_to_other_requests(engine, prompt) -> None:
    asked = prompt(500)
    expected = engine.reference(asked)
    for _ in range(4):  # 124 blocks, more than the device has
        engine.generate(prompt(1000))
    answer = engine.generate(asked)
    assert answer.tokens == expected
    assert (answer.device, answer.host, answer.disk) == (0, 480, 0)
    assert answer.tiers == {"primary": 480}


def test_disk_serves_what_the_pool_dropped(engine, prompt) -> None:
    asked = prompt(500)
    expected = engine.reference(asked)
    engine.drop_pool()
    answer = engine.generate(asked)
    assert answer.tokens == expected
    assert (answer.device, answer.host, answer.disk) == (0, 0, 480)
    engine.drop_device()
    answer = engine.generate(asked)
    assert answer.tokens == expected
    assert (answer.device, answer.host, answer.disk) == (0, 480, 0), "promoted blocks stay"


def test_tokens_show_one_wrong_byte_in_dram(engine, prompt) -> None:
    asked = prompt(500)
    expected = engine.reference(asked)
    engine.drop_device()
    assert engine.call("flip_pool", offset=3, mask=0x40) >= 15
    answer = engine.generate(asked)
    assert answer.host == 480
    assert answer.tokens != expected
    engine.drop_pool()
    assert engine.generate(asked).tokens == expected, "the disk still has the right ones"


def test_a_restart_in_another_process_finds_everything(engine, engines, root, prompt) -> None:
    prompts = [prompt(500), prompt(300)]
    expected = engine.reference(*prompts)
    again = engines.start("gqa", root, fresh=True)  # with another seed of Python's hashes
    answer = again.generate(*prompts)
    assert answer.tokens == expected
    assert (answer.device, answer.host, answer.disk) == (0, 0, 480 + 288)
    assert answer.tiers == {"fs": 480 + 288}
    again.stop()


@pytest.mark.parametrize("length", [31, 32, 33, 34, 63, 64, 65, 66, 95, 96, 97, 127, 128, 129])
def test_every_length_around_a_boundary(engine, prompt, length) -> None:
    asked = prompt(length)
    tokens = engine.generate(asked).tokens
    hit = engine.generate(asked)
    # The last token is always computed: the device loses the block for it, a tier does not.
    assert hit.device == (length - 1) // BLOCK * BLOCK
    if hit.device:
        tokens = hit.tokens
    cached = length // BLOCK * BLOCK
    engine.drop_device()
    answer = engine.generate(asked)
    assert answer.tokens == tokens
    assert (answer.host, answer.disk) == (cached, 0)
    engine.drop_pool()
    answer = engine.generate(asked)
    assert answer.tokens == tokens
    assert (answer.host, answer.disk) == (0, cached)


def test_many_prompts_at_once_that_share_a_prefix(engine, prompt) -> None:
    shared = prompt(320)
    prompts = [shared + prompt(100) for _ in range(6)]
    expected = engine.reference(*prompts)
    engine.drop_pool()
    before = engine.quiet()
    answer = engine.generate(*prompts)
    assert answer.tokens == expected
    assert answer.cached == 6 * (320 + 96)
    after = engine.quiet()
    row = engine.call("look")["row_bytes"]
    read = after["vllm:kvtier_read_bytes{fs}"] - before["vllm:kvtier_read_bytes{fs}"]
    assert read == (10 + 6 * 3) * row, "what they share is read once"
