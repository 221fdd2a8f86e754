"""One process that uses a root: a tier, and its capacity."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from capacity_process import QUICK
from capacity_processes import books_of, usage

from kvtier.errors import TierFullError
from kvtier.testing.blocks import BLOCK_BYTES, NAMESPACE, block_of, key_of
from kvtier.tiers.fs import shared_space
from kvtier.tiers.fs.capacity import Capacity
from kvtier.tiers.fs.files import FilesTier
from kvtier.tiers.fs.namespace_directory import FAN_OUT_DIGITS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

OTHER = "ab" * 32


class Use:
    """A tier, and its capacity."""

    def __init__(
        self, root: Path, blocks: int | None, min_free: int = 0, namespace: str = NAMESPACE
    ) -> None:
        size = None if blocks is None else blocks * BLOCK_BYTES
        self.root = root
        self.capacity = Capacity(root, size, min_free, settings=QUICK)
        self.tier = FilesTier(root, namespace, {}, self.capacity.space, touch_age_s=0)

    def write(self, first: int, count: int) -> int:
        """How many were written."""
        written = 0
        for i in range(first, first + count):
            with contextlib.suppress(TierFullError):
                self.tier.write(key_of(i), (memoryview(block_of(key_of(i))),))
                written += 1
        return written

    def here(self, first: int, count: int) -> set[int]:
        found = self.tier.exists([key_of(i) for i in range(first, first + count)])
        return {first + i for i, there in enumerate(found) if there}

    def file(self, i: int) -> Path:
        name = key_of(i).hex()
        return self.root / NAMESPACE / name[:FAN_OUT_DIGITS] / name

    def figure(self, name: str) -> float:
        return self.capacity.figures().get(name, 0)

    def is_exact(self) -> bool:
        accounts = books_of(self.root)
        spare = sum(entry.spare for entry in accounts.members.values())
        return accounts.known and accounts.granted == usage(self.root) + spare

    def close(self) -> None:
        self.tier.close()
        self.capacity.close()


@pytest.fixture(autouse=True)
def short_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or exact books would take half a minute of quiet."""
    monkeypatch.setattr(shared_space, "RECENT_S", 0.5)


@pytest.fixture
def use(tmp_path: Path) -> Iterator[Callable[..., Use]]:
    opened: list[Use] = []

    def make(*args: object, **kwargs: object) -> Use:
        opened.append(Use(tmp_path, *args, **kwargs))  # type: ignore[arg-type]
        return opened[-1]

    yield make
    for each in opened:
        with contextlib.suppress(OSError):
            each.close()


def age(path: Path, seconds: float) -> None:
    """Have a file be used last so long ago."""
    then = time.time() - seconds
    os.utime(path, (then, then))
