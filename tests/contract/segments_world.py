"""What the tests of the `segments` layout share: small blocks, a capacity, a way to be killed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import kvtier
from kvtier.errors import MissingBlockError
from kvtier.testing.blocks import NAMESPACE, block_of, key_of
from kvtier.tiers.fs.segments import SegmentsTier
from kvtier.tiers.fs.segments.store import STORES_NAME, store_directories

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvtier.core.types import BlockKey

SMALL = 8192
"""Length of a block here: a header and a page."""


class Capacity:
    """A `Space` for one process, with a debt that the test sets."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.used = 0
        self.debt = 0
        self.refusals = 0

    def take(self, nbytes: int) -> bool:
        if self.used + nbytes > self.nbytes:
            self.refusals += 1
            return False
        self.used += nbytes
        return True

    def give_back(self, nbytes: int) -> None:
        self.used -= nbytes
        self.debt = max(0, self.debt - nbytes)
        assert self.used >= 0, "more was given back than taken"

    def owed(self) -> int:
        return self.debt


def put(tier: SegmentsTier, *numbers: int, length: int = SMALL) -> None:
    """Write blocks in one batch; the first failure is raised."""
    keys = [key_of(i) for i in numbers]
    for error in tier.write_batch(keys, data_of(keys, length)):
        if error is not None:
            raise error


def failure_of(tier: SegmentsTier, i: int) -> BaseException | None:
    """Write a block, and say what it failed with."""
    (error,) = tier.write_batch([key_of(i)], data_of([key_of(i)]))
    return error


def content_of(i: int, length: int = SMALL) -> bytes:
    """The only right content of a block."""
    return block_of(key_of(i), length)


def data_of(keys: Sequence[BlockKey], length: int = SMALL) -> list[tuple[memoryview, memoryview]]:
    """What to write under keys."""
    return [buffers(block_of(key, length)) for key in keys]


def buffers(content: bytes | bytearray) -> tuple[memoryview, memoryview]:
    view = memoryview(content)
    return view[:4096], view[4096:]


def get(tier: SegmentsTier, i: int, length: int = SMALL) -> bytes:
    into = bytearray(length)
    tier.read(key_of(i), buffers(into))
    return bytes(into)


def held(tier: SegmentsTier, numbers: Sequence[int], length: int = SMALL) -> set[int]:
    """Which blocks are there; every byte of them is checked, and that `exists` says the same."""
    found = set()
    for i in numbers:
        try:
            assert get(tier, i, length) == content_of(i, length), f"wrong bytes of block {i}"
        except MissingBlockError:
            continue
        found.add(i)
    answers = tier.exists([key_of(i) for i in numbers])
    assert found == {i for i, answer in zip(numbers, answers, strict=True) if answer}
    return found


def vanish(tier: SegmentsTier) -> None:
    """What SIGKILL does to a tier: its descriptors are closed, and nothing else is done."""
    tier._closing.set()
    tier._followers.close()
    for lock in tier._upkeep._locks.values():
        os.close(lock)
    for segment in tier._owned.slots.segments():
        segment.file.retire()
    for store in tier._owned.stores():
        store.close()
    tier._owned.namespace_directory.close()


def open_tier(root: Path, capacity: Capacity | None = None, **options: object) -> SegmentsTier:
    """A tier whose upkeep is left to the test."""
    return SegmentsTier(root, NAMESPACE, space=capacity, upkeep_s=None, **options)


def stores_of(root: Path) -> list[Path]:
    return [Path(path) for path in store_directories(str(root / NAMESPACE / STORES_NAME))]


def segments_of(root: Path) -> list[Path]:
    return sorted(path for store in stores_of(root) for path in store.glob("*.segment"))


def on_disk(root: Path) -> int:
    """Bytes of segments."""
    return sum(path.stat().st_size for path in segments_of(root))


def rewrite_log(tier: SegmentsTier) -> None:
    """Of the only store that the tier owns."""
    (store,) = tier._owned.stores()
    store.log.rewrite(lambda: tier._owned.slots.copies(store), store.next_segment)


def python(code: str, *arguments: object) -> subprocess.Popen[str]:
    """A child that runs `code`, with kvtier and this module to import, its output to read."""
    source = os.pathsep.join([str(Path(kvtier.__file__).parents[1]), str(Path(__file__).parent)])
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": source},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[SegmentsTier]:
    tier = open_tier(tmp_path)
    yield tier
    tier.close()
