"""Blocks that are damaged, cut or gone: recomputed, told, and not met again."""

from __future__ import annotations

import pytest
from small_engines import block_files

from kvtier.tiers.fs.marker import mark

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("damage")
    mark(root, "files")
    return root


@pytest.fixture(scope="module")
def engine(engines, root):
    return engines.start("gqa", root)


def flip(path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def flip_header(path) -> None:
    data = bytearray(path.read_bytes())
    data[8] ^= 1
    path.write_bytes(data)


def cut(path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def empty(path) -> None:
    path.write_bytes(b"")


def lengthen(path) -> None:
    path.write_bytes(path.read_bytes() + b"\\0")


def remove(path) -> None:
    path.unlink()


def exchange(path) -> None:
    """Another block's file, whole and sealed."""
    other = next(p for p in block_files(path.parents[2]) if p != path)
    path.write_bytes(other.read_bytes())


@pytest.mark.parametrize(
    ("damage", "is_corrupt"),
    [
        (flip, True),
        (flip_header, True),
        (exchange, True),
        (cut, False),
        (lengthen, False),
        (empty, False),
        (remove, False),
    ],
)
def test_one_damaged_file(engine, root, prompt, damage, is_corrupt) -> None:
    asked = prompt(500)
    old = set(block_files(root))
    expected = engine.reference(asked)
    engine.drop_pool()
    files = sorted(set(block_files(root)) - old)
    assert len(files) == 15
    sizes = [path.stat().st_size for path in files]
    before = engine.quiet()
    damage(files[7])

    answer = engine.generate(asked)
    assert answer.tokens == expected
    assert 0 <= answer.disk < 480, "the hit ends in front of the damaged block"
    after = engine.quiet()
    corrupt = "vllm:kvtier_corrupt_blocks{fs}"
    assert after.get(corrupt, 0) - before.get(corrupt, 0) == is_corrupt
    assert [path.stat().st_size for path in files] == sizes, "what was recomputed replaced it"

    engine.drop_pool()
    answer = engine.generate(asked)
    assert answer.tokens == expected
    assert answer.disk == 480


def test_every_file_is_damaged(engine, root, prompt) -> None:
    asked = prompt(500)
    old = set(block_files(root))
    expected = engine.reference(asked)
    engine.drop_pool()
    for path in set(block_files(root)) - old:
        flip(path)
    answer = engine.generate(asked)
    assert answer.tokens == expected
    assert answer.cached == 0
    engine.drop_pool()
    answer = engine.generate(asked)
    assert answer.tokens == expected
    assert answer.disk == 480


def test_damaged_segments(engines, tmp_path, prompt) -> None:
    engine = engines.start("gqa", tmp_path)
    asked = prompt(500)
    expected = engine.reference(asked)
    engine.drop_pool()
    before = engine.quiet()
    (segment,) = tmp_path.glob("*/stores/*/*.segment")
    data = bytearray(segment.read_bytes())
    middle = len(data) // 2  # of all of its blocks but the zeros of slots that are free
    for offset in range(0, len(data), 4096):
        data[offset + 100] ^= offset < middle
    segment.write_bytes(data)

    answer = engine.generate(asked)
    assert answer.tokens == expected
    assert answer.disk < 480
    after = engine.quiet()
    corrupt = "vllm:kvtier_corrupt_blocks{fs}"
    assert after.get(corrupt, 0) > before.get(corrupt, 0)
    engine.drop_pool()
    answer = engine.generate(asked)
    assert answer.tokens == expected
    assert answer.disk == 480
