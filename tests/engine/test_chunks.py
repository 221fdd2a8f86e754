"""Blocks of several GPU blocks: `blocks_per_chunk` 4, dense and with sliding windows."""

from __future__ import annotations

import pytest
from conftest import BLOCK

pytestmark = pytest.mark.engine

CHUNK = 4 * BLOCK


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("chunks")


@pytest.fixture(scope="module")
def dense(engines, root):
    return engines.start("gqa", root, blocks_per_chunk=4)


@pytest.mark.parametrize("length", [97, 127, 128, 129, 255, 256, 257, 258, 383, 384, 385])
def test_every_length_around_a_chunk_boundary(dense, prompt, length) -> None:
    asked = prompt(length)
    (expected,) = dense.reference(asked)
    cached = length // CHUNK * CHUNK
    dense.drop_device()
    answer = dense.generate(asked)
    assert answer.tokens == [expected]
    assert (answer.host, answer.disk) == (cached, 0)
    dense.drop_pool()
    answer = dense.generate(asked)
    assert answer.tokens == [expected]
    assert (answer.host, answer.disk) == (0, cached)


@pytest.mark.parametrize("kept", [1, 2, 3])
def test_a_hit_that_begins_inside_a_chunk(dense, prompt, kept) -> None:
    """The device still has the first GPU blocks of a chunk; only the rest of it is loaded."""
    asked = prompt(3 * CHUNK + 5)
    expected = dense.reference(asked)
    dense.drop_device()
    start = asked[: (4 + kept) * BLOCK + 1]  # its last blocks fill no chunk, so are computed
    dense.generate(start)
    dense.quiet()
    answer = dense.generate(asked)
    assert answer.tokens == expected
    assert answer.device + answer.host == 3 * CHUNK
    assert answer.device == (4 + kept) * BLOCK


def test_a_restart(dense, engines, root, prompt) -> None:
    asked = prompt(3 * CHUNK + 5)
    expected = dense.reference(asked)
    again = engines.start("gqa", root, blocks_per_chunk=4)
    answer = again.generate(asked)
    assert answer.tokens == expected
    assert (answer.device, answer.host, answer.disk) == (0, 0, 3 * CHUNK)
    again.stop()


def test_windows(engines, root, prompt) -> None:
    engine = engines.start("hybrid", root, blocks_per_chunk=4)
    for length in (CHUNK + 5, 3 * CHUNK - 1, 3 * CHUNK, 3 * CHUNK + 1, 5 * CHUNK + 40):
        asked = prompt(length)
        expected = engine.reference(asked)
        cached = (length - 1) // CHUNK * CHUNK  # with windows vLLM asks for no more
        engine.drop_device()
        answer = engine.generate(asked)
        assert answer.tokens == expected
        assert (answer.host, answer.disk) == (cached, 0)
        engine.drop_pool()
        answer = engine.generate(asked)
        assert answer.tokens == expected
        assert (answer.host, answer.disk) == (0, cached)
