"""Blocks of another model, dtype, block size, tenant or state of the weights are never served."""

from __future__ import annotations

import json
import shutil

import pytest
from conftest import connector_settings, engine_arguments, make_model

pytestmark = pytest.mark.engine


def run(engines, directory, root, asked, *, changes=None, **connector):
    """Tokens of a prompt in a new engine, computed or not, and of a hit of its own."""
    engine = engines.process()
    engine.call(
        "start",
        engine=engine_arguments(directory, changes),
        connector=connector_settings(root, connector),
    )
    answer = engine.generate(asked)
    engine.quiet()
    hit = engine.generate(asked)
    assert hit.device > 0
    engine.stop()
    return answer, hit.tokens


def test_what_is_another_model_and_what_is_not(engines, prompt, tmp_path) -> None:
    root, place = tmp_path / "tier", tmp_path / "model"
    root.mkdir()
    make_model("gqa", place)
    asked = prompt(500)
    first, expected = run(engines, place, root, asked)
    assert first.cached == 0

    shutil.copytree(place, tmp_path / "copy")
    answer, _ = run(engines, tmp_path / "copy", root, asked)
    assert answer.disk == 480, "the same weights elsewhere are the same model"
    assert answer.tokens == expected

    answer, own = run(engines, place, root, asked, changes={"dtype": "bfloat16"})
    assert answer.cached == 0, "another dtype"
    answer, own = run(engines, place, root, asked, changes={"block_size": 64})
    assert answer.cached == 0, "another block size"
    assert answer.tokens == own == expected
    answer, own = run(engines, place, root, asked, blocks_per_chunk=2)
    assert answer.cached == 0, "another size of blocks"
    assert answer.tokens == own == expected
    answer, own = run(engines, place, root, asked, weights_epoch="another")
    assert answer.cached == 0, "another state of the weights"
    answer, own = run(engines, place, root, asked, namespace="another")
    assert answer.cached == 0, "another label"

    make_model("gqa", place, seed=1)
    answer, own = run(engines, place, root, asked)
    assert answer.cached == 0, "other weights at the same path"
    assert answer.tokens == own != expected

    make_model("gqa", place)
    answer, _ = run(engines, place, root, asked)
    assert answer.disk == 480, "and these again"
    assert answer.tokens == expected

    described = [json.loads(path.read_text()) for path in root.glob("*/namespace.json")]
    assert len(described) == 7


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("identity")


@pytest.fixture(scope="module")
def engine(engines, root):
    return engines.start("gqa", root)


def test_a_salt_is_part_of_the_identity(engine, engines, root, prompt) -> None:
    asked = prompt(500)
    expected = engine.reference(asked)
    assert engine.generate(asked, salt="tenant").cached == 0
    engine.drop_device()
    assert engine.generate(asked, salt="other").cached == 0, "DRAM"
    answer = engine.generate(asked, salt="tenant")
    assert (answer.host, answer.tokens) == (480, expected)
    engine.drop_pool()
    assert engine.generate(asked, salt="third").cached == 0, "disk"
    answer = engine.generate(asked, salt="tenant")
    assert (answer.disk, answer.tokens) == (480, expected)
    engine.quiet()
    again = engines.start("gqa", root)
    assert again.generate(asked, salt="fourth").cached == 0, "after a restart"
    answer = again.generate(asked, salt="tenant")
    assert (answer.disk, answer.tokens) == (480, expected)
    again.stop()


def test_a_reset_without_connector_keeps_pool_and_disk(engine, prompt) -> None:
    asked = prompt(500)
    expected = engine.reference(asked)
    engine.quiet()
    assert engine.call("reset", connector=False)
    answer = engine.generate(asked)
    assert (answer.host, answer.tokens) == (480, expected)


def test_a_reset_hides_the_disk_unless_the_epoch_is_named(
    engine, engines, prompt, tmp_path
) -> None:
    asked = prompt(500)
    expected = engine.reference(asked)
    engine.drop_pool()
    answer = engine.generate(asked)
    assert (answer.disk, answer.tokens) == (480, expected)

    nameless = engines.start("gqa", tmp_path, weights_epoch=None)
    assert nameless.reference(asked) == expected
    nameless.drop_pool()
    answer = nameless.generate(asked)
    assert answer.cached == 0, "the weights may have changed with the reset"
    assert answer.tokens == expected
    nameless.drop_pool()
    answer = nameless.generate(asked)
    assert answer.cached == 0, "every reset begins another epoch"
    nameless.drop_device()
    answer = nameless.generate(asked)
    assert (answer.host, answer.tokens) == (480, expected)
    nameless.quiet()
    nameless.stop()
    again = engines.start("gqa", tmp_path, weights_epoch=None)
    answer = again.generate(asked)
    assert (answer.disk, answer.tokens) == (480, expected), (
        "loaded from disk, weights are the first"
    )
    again.stop()
