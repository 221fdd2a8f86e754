"""What the tests of the `files` layout share: a room that counts, and a look at the files."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import kvtier
from kvtier.envelope import HEADER_BYTES
from kvtier.testing.blocks import BLOCK_BYTES, NAMESPACE, block_of, key_of
from kvtier.testing.contract import TierContract
from kvtier.tiers.fs.files import Durability, FilesTier
from kvtier.tiers.fs.namespace_directory import FAN_OUT_DIGITS
from kvtier.tiers.fs.temporary import is_stale_temp

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtier.core.types import BlockKey

put = TierContract.put
get = TierContract.get

DURABILITIES: tuple[Durability, ...] = ("none", "data")


class Counted:
    """Room for so many bytes, and what is taken of it."""

    def __init__(self, room: int = 1 << 40) -> None:
        self.room = room
        self.taken = 0
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> bool:
        with self._lock:
            if self.taken + nbytes > self.room:
                return False
            self.taken += nbytes
            return True

    def give_back(self, nbytes: int) -> None:
        with self._lock:
            self.taken -= nbytes

    def owed(self) -> int:
        return 0


def file_of(root: Path, i: int) -> Path:
    """Where the layout puts a block: written down here a second time, as a reader of it would."""
    name = key_of(i).hex()
    return root / NAMESPACE / name[:FAN_OUT_DIGITS] / name


def files_under(root: Path) -> list[Path]:
    return [path for path in root.rglob("*") if not path.is_dir() and path.name != "namespace.json"]


def bytes_under(root: Path) -> int:
    return sum(path.stat().st_size for path in files_under(root))


def sweep(root: Path, now: float) -> int:
    """Remove what a sweeper may; how many files."""
    stale = [path for path in files_under(root) if is_stale_temp(path.name, path.stat(), now)]
    for path in stale:
        path.unlink()
    return len(stale)


def cut(key: BlockKey, nbytes: int = BLOCK_BYTES) -> tuple[memoryview, memoryview]:
    content = memoryview(block_of(key, nbytes))
    return content[:HEADER_BYTES], content[HEADER_BYTES:]


def write_many(tier: FilesTier, numbers: Sequence[int]) -> list[BaseException | None]:
    keys = [key_of(i) for i in numbers]
    return tier.write_batch(keys, [cut(key) for key in keys])


def python(code: str, *arguments: object) -> subprocess.Popen[str]:
    """A child that runs `code`, with kvtier to import and its output to read."""
    source = str(Path(kvtier.__file__).parents[1])
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": source},
        stdout=subprocess.PIPE,
        text=True,
    )
