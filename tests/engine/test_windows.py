"""A model with sliding windows beside full attention: three cache groups."""

from __future__ import annotations

import pytest
from small_engines import BLOCK

from kvtier.tiers.fs.marker import mark

pytestmark = pytest.mark.engine

WINDOW = 64
FULL_GROUP_BLOCKS = 20  # of a prompt of 660 tokens
WINDOW_BLOCKS = -(-(WINDOW - 1) // BLOCK)
"""Blocks that the next token of a window layer looks at, when it begins a block."""


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("windows")
    mark(root, "files")  # as the scripted tier keeps blocks
    return root


def scripted(root):
    return [{"type": "scripted_tier:ScriptedTierType", "name": "slow", "root_dir": str(root)}]


@pytest.fixture(scope="module")
def engine(engines, root):
    return engines.start("hybrid", secondary_tiers=scripted(root))


def test_dram_then_disk(engine, prompt) -> None:
    asked = prompt(660)
    expected = engine.reference(asked)
    engine.drop_device()
    answer = engine.generate(asked)
    assert answer.tokens == expected
    assert (answer.device, answer.host, answer.disk) == (0, 640, 0)
    engine.drop_pool()
    answer = engine.generate(asked)
    assert answer.tokens == expected
    assert (answer.device, answer.host, answer.disk) == (0, 0, 640)


def test_windows_read_their_window_and_no_more(engine, prompt) -> None:
    asked = prompt(660)
    expected = engine.reference(asked)
    engine.drop_pool()
    engine.call("script", method="forget")
    assert engine.generate(asked).tokens == expected
    reads = engine.call("script", method="describe")["reads_by_group"]
    windows = engine.call("look")["windows"]
    assert len(reads) == 3
    assert len(windows) == 2
    for group, blocks in reads.items():
        if int(group) in windows:
            assert 0 < blocks <= WINDOW_BLOCKS
        else:
            assert blocks == FULL_GROUP_BLOCKS


def test_tokens_show_one_wrong_byte_from_disk(engine, prompt) -> None:
    asked = prompt(660)
    expected = engine.reference(asked)
    engine.drop_pool()
    engine.call("script", method="flip", offset=3)
    answer = engine.generate(asked)
    engine.call("script", method="flip", offset=None)
    assert answer.disk == 640
    assert answer.tokens != expected
    engine.drop_pool()
    assert engine.generate(asked).tokens == expected


@pytest.mark.parametrize("length", [63, 64, 65, 66, 95, 96, 97, 127, 128, 129, 130])
def test_every_length_around_a_boundary(engine, prompt, length) -> None:
    asked = prompt(length)
    expected = engine.reference(asked)
    cached = (length - 1) // BLOCK * BLOCK  # with windows vLLM asks for no more
    engine.drop_device()
    answer = engine.generate(asked)
    assert answer.tokens == expected
    assert (answer.host, answer.disk) == (cached, 0)
    engine.drop_pool()
    answer = engine.generate(asked)
    assert answer.tokens == expected
    assert (answer.host, answer.disk) == (0, cached)


def test_a_restart(engine, engines, root, prompt) -> None:
    asked = prompt(660)
    expected = engine.reference(asked)
    engine.quiet()
    again = engines.start("hybrid", root)
    answer = again.generate(asked)
    assert answer.tokens == expected
    assert (answer.device, answer.host, answer.disk) == (0, 0, 640)
    again.stop()
