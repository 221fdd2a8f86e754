"""How many threads a directory is worth: measured once, with a file of its own, and remembered.

Too few leave a network file system or a striped disk waiting; too many cost memory, and processor
time when they take turns. So: the smallest number within 5 % of the best, for reads and for writes,
and of the larger one the double, since a tier's threads also seal and verify: half of them keep the
medium busy meanwhile.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import threading
import time
from typing import TYPE_CHECKING

import msgspec

from kvtier.tiers.fs.io import open_file, read_all, scratch, write_all
from kvtier.tiers.fs.medium import Medium
from kvtier.tiers.fs.members import CONTROL_DIRECTORY
from kvtier.tiers.fs.namespace_directory import FILE_MODE, WRITE_FLAGS, make_directory, own_mode
from kvtier.tiers.fs.temporary import TempNames

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

logger = logging.getLogger(__name__)

PROBE_FILE = "probe.json"

LOCAL_THREADS = 8
NETWORK_THREADS = 16
"""Without a measurement."""

BLOCK_BYTES = 1 << 20
NUM_BLOCKS = 64
BUDGET_S = 0.4
COUNTS = (1, 2, 4, 8, 16)

_GOOD_ENOUGH = 0.95
_MIN_THREADS = 8  # what is measured does not make files either, which overlaps with I/O
_MAX_THREADS = max(COUNTS)
_VERSION = 2


class ThreadProbe(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured.

    Attributes:
        threads: the number to use, at least 2.
        medium: identity of what the directory was on.
        direct: whether past the page cache.
        write: bytes per second by number of threads.
        read: likewise.
        version: of this record.
    """

    threads: int
    medium: str
    direct: bool
    write: dict[int, float]
    read: dict[int, float]
    version: int = _VERSION


def threads_of(root: Path | str, direct: bool) -> int:
    """Threads for the tier of a root: remembered, or measured, or a default. Raises nothing.

    Takes up to `BUDGET_S` where the medium answers; callers bound the time where it may not.

    Args:
        root: an existing directory.
        direct: whether the tier uses `O_DIRECT` there.
    """
    try:
        medium = Medium.of(root)
    except OSError as error:
        logger.info("%s cannot be asked what it is on: %s", root, error)
        return LOCAL_THREADS
    found = recall(root)
    if found is not None and (found.medium, found.direct) == (medium.identity, direct):
        return found.threads
    default = NETWORK_THREADS if medium.shared else LOCAL_THREADS
    if medium.read_only or medium.free_bytes < 4 * NUM_BLOCKS * BLOCK_BYTES:
        return default
    try:
        found = measure(root, direct, medium.identity)
    except Exception as error:  # noqa: BLE001 - a tier opens without it
        logger.info("%s: the number of threads cannot be measured: %s", root, error)
        return default
    with contextlib.suppress(OSError):
        remember(root, found)
    logger.info("%s: %d threads (%s)", root, found.threads, _in_words(found))
    return found.threads


def measure(
    root: Path | str,
    direct: bool,
    medium: str,
    clock: Callable[[], float] = time.perf_counter,
) -> ThreadProbe:
    """Write and read a file of `NUM_BLOCKS` MiB in `root` with several numbers of threads.

    Raises:
        OSError: the medium failed. No file is left.
    """
    path = os.path.join(root, TempNames().new())
    descriptor = open_file(path, WRITE_FLAGS & ~os.O_WRONLY | os.O_RDWR, direct, FILE_MODE)
    try:
        own_mode(descriptor)
        os.unlink(path)  # nothing is left, also when this process is killed
        blocks = [scratch(BLOCK_BYTES) for _ in range(max(COUNTS))]
        for block in blocks:
            block[:8] = os.urandom(8)
        share_s = BUDGET_S / (2 * len(COUNTS) + 2)
        write = _Mover(descriptor, blocks, _write, clock)
        read = _Mover(descriptor, blocks, _read, clock)
        # a file that grows is written more slowly than one that is there
        num_blocks = write.run(4, 2 * share_s, NUM_BLOCKS)[0]
        writes = write.rates(share_s, num_blocks)
        reads = read.rates(share_s, num_blocks)
    finally:
        os.close(descriptor)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
    threads = threads_for(writes, reads)
    return ThreadProbe(threads=threads, medium=medium, direct=direct, write=writes, read=reads)


def threads_for(writes: Mapping[int, float], reads: Mapping[int, float]) -> int:
    """The number for a tier whose medium has these rates by number of threads."""
    moving = max(smallest_good(writes), smallest_good(reads))
    return min(max(2 * moving, _MIN_THREADS), _MAX_THREADS)


def smallest_good(rates: Mapping[int, float]) -> int:
    """The smallest number of threads whose rate is within 5 % of the best."""
    best = max(rates.values())
    return min(count for count, rate in rates.items() if rate >= _GOOD_ENOUGH * best)


def recall(root: Path | str) -> ThreadProbe | None:
    """What was measured before; None if nothing was, or it cannot be read."""
    try:
        with open(_file_of(root), "rb") as file:
            found = msgspec.json.decode(file.read(1 << 16), type=ThreadProbe)
    except (OSError, msgspec.DecodeError):
        return None
    usable = found.version == _VERSION and found.threads in COUNTS
    return found if usable else None


def remember(root: Path | str, probe: ThreadProbe) -> None:
    """Keep a measurement for the next start.

    Raises:
        OSError: it cannot be written.
    """
    path = _file_of(root)
    make_directory(os.path.dirname(path))
    temp = os.path.join(os.path.dirname(path), TempNames().new())
    descriptor = os.open(temp, WRITE_FLAGS, FILE_MODE)
    try:
        try:
            own_mode(descriptor)
            write_all(descriptor, (memoryview(msgspec.json.encode(probe)),))
        finally:
            os.close(descriptor)
        os.rename(temp, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temp)
        raise


class _Mover:
    """Moves the blocks of one file with several threads, in one direction."""

    def __init__(
        self,
        descriptor: int,
        blocks: list[memoryview],
        move: Callable[[int, memoryview, int], None],
        clock: Callable[[], float],
    ) -> None:
        self._descriptor = descriptor
        self._blocks = blocks
        self._move = move
        self._clock = clock

    def rates(self, share_s: float, num_blocks: int) -> dict[int, float]:
        """Bytes per second by number of threads, the larger ones first; those that a slow medium
        has no time for are left out.
        """
        rates: dict[int, float] = {}
        started = self._clock()
        for count in reversed(COUNTS):
            if rates and self._clock() - started > share_s * len(COUNTS):
                break
            moved, seconds = self.run(count, share_s, num_blocks)
            rates[count] = moved * BLOCK_BYTES / seconds
        return rates

    def run(self, count: int, limit_s: float, num_blocks: int) -> tuple[int, float]:
        """Move blocks, each once, until all are moved or the time is over; at least one a thread.

        Returns:
            How many, the first ones of the file, and how long it took.

        Raises:
            OSError: the medium failed.
        """
        numbers = itertools.count()  # its next is atomic
        moved = [0] * count
        failures: list[OSError] = []
        started = self._clock()

        def work(thread: int) -> None:
            try:
                while (number := next(numbers)) < num_blocks:
                    self._move(self._descriptor, self._blocks[thread], number * BLOCK_BYTES)
                    moved[thread] += 1
                    if self._clock() - started > limit_s:
                        break
            except OSError as error:
                failures.append(error)

        threads = [
            threading.Thread(target=work, args=(i,), name="kvtier-fs-probe") for i in range(count)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]
        return sum(moved), max(self._clock() - started, 1e-9)


def _write(descriptor: int, block: memoryview, offset: int) -> None:
    write_all(descriptor, (block,), offset)


def _read(descriptor: int, block: memoryview, offset: int) -> None:
    read_all(descriptor, (block,), offset)


def _file_of(root: Path | str) -> str:
    return os.path.join(root, CONTROL_DIRECTORY, PROBE_FILE)


def _in_words(probe: ThreadProbe) -> str:
    both = {"written": probe.write, "read": probe.read}
    return "; ".join(
        f"GB/s {name}: "
        + ", ".join(f"{rate / 1e9:.2f} with {count}" for count, rate in sorted(rates.items()))
        for name, rates in both.items()
    )
