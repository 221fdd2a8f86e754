"""A directory of many blocks: time to ready, time to the full inventory, memory, cost of eviction.

Makes `--files` block files (sparse, 4 KiB each), opens the capacity of the directory as a tier does
without a ledger (as after a loss) and with one, and then halves the capacity, so that half of the
files have to go. `--files 1000000` is the size that the figures are meant for.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from _report import Row, main

from kvtier.testing.blocks import NAMESPACE, key_of
from kvtier.tiers.fs.capacity import Capacity
from kvtier.tiers.fs.inventory import Inventory
from kvtier.tiers.fs.namespace_directory import FAN_OUT_DIGITS, block_path
from kvtier.tiers.fs.scan import Scanner
from kvtier.tiers.fs.term import SweepSettings

FILE_BYTES = 4096
TARGET_BYTES = 100.0
PATIENCE_S = 600.0


def fill(root: Path, count: int) -> None:
    place = root / NAMESPACE
    place.mkdir()
    (place / "namespace.json").write_text("{}")
    for i in range(16**FAN_OUT_DIGITS):
        (place / f"{i:0{FAN_OUT_DIGITS}x}").mkdir()
    now = time.time()
    for i in range(count):
        path = f"{place}/{block_path(key_of(i))}"
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
        os.ftruncate(descriptor, FILE_BYTES)
        os.utime(descriptor, (now - count + i, now - count + i))
        os.close(descriptor)


def until(condition: Callable[[], object]) -> float:
    """Seconds until it holds."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < PATIENCE_S, "it never came to that"
        time.sleep(0.005)
    return time.monotonic() - started


def resident_bytes() -> int:
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * resource.getpagesize()


def listing_seconds(root: Path) -> float:
    """The bare minimum: list every directory and look at every file."""
    started = time.monotonic()
    for directory in os.scandir(root / NAMESPACE):
        if directory.is_dir():
            for entry in os.scandir(directory.path):
                entry.stat(follow_symlinks=False)
    return time.monotonic() - started


def inventory_bytes(root: Path) -> tuple[float, float]:
    """Seconds of a bare scan, and bytes that it keeps per file."""
    before = resident_bytes()
    inventory = Inventory()
    scanner = Scanner(str(root), inventory)
    started = time.monotonic()
    for _ in scanner.scan(True, time.time_ns):
        pass
    return time.monotonic() - started, (resident_bytes() - before) / inventory.num_files


def measure(count: int, directory: str | None) -> list[Row]:
    root = Path(tempfile.mkdtemp(prefix="kvtier-inventory-", dir=directory))
    settings = SweepSettings()
    rows: list[Row] = []
    try:
        fill(root, count)
        listing_seconds(root)
        bare = listing_seconds(root)
        seconds, per_file = inventory_bytes(root)
        rows += [
            Row("scan", seconds, "s", bare, "list and stat", "lower"),
            Row("memory_per_file", per_file, "B", TARGET_BYTES, "target", "lower"),
        ]
        total = count * FILE_BYTES
        for name in ("without_ledger", "with_ledger"):
            started = time.monotonic()
            capacity = Capacity(root, 2 * total, 0, settings=settings)
            ready = time.monotonic() - started
            until(lambda c=capacity: c.figures().get("inventory_blocks", 0) == count)
            full = time.monotonic() - started
            writable = full
            if capacity.space.take(FILE_BYTES):
                capacity.space.give_back(FILE_BYTES)
            until(lambda c=capacity: c.figures()["used_bytes"] > 0)
            capacity.close()
            rows += [
                Row(f"ready_{name}", ready, "s", bare, "list and stat", "lower"),
                Row(f"inventory_{name}", writable, "s", bare, "list and stat", "lower"),
            ]
        capacity = Capacity(root, total // 2, 0, settings=settings)
        until(lambda: capacity.figures().get("inventory_blocks", 0) == count)
        cpu = time.process_time()
        started = time.monotonic()
        before = capacity.figures()["evicted_blocks"]
        until(lambda: capacity.figures()["used_bytes"] <= total // 2 * settings.high)
        wall, cpu = time.monotonic() - started, time.process_time() - cpu
        evicted = capacity.figures()["evicted_blocks"] - before
        capacity.close()
        scale = 100_000 / evicted
        unlinks = bare_unlinks(root, min(2000, count // 4))
        rows += [
            Row("evict_100k_wall", wall * scale, "s", unlinks * 1e5, "bare unlinks", "lower"),
            Row("evict_100k_cpu", cpu * scale, "s", unlinks * 1e5, "bare unlinks (wall)", "lower"),
        ]
    finally:
        shutil.rmtree(root, ignore_errors=True)
    return rows


def bare_unlinks(root: Path, count: int) -> float:
    """Seconds per file that one thread needs to delete it."""
    paths = []
    for path in (root / NAMESPACE).glob("*/*"):
        paths.append(str(path))
        if len(paths) == count:
            break
    started = time.monotonic()
    for path in paths:
        os.unlink(path)
    return (time.monotonic() - started) / len(paths)


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(add_help=False)
    arguments.add_argument("--files", type=int, default=100_000)
    arguments.add_argument("--dir", help="where to make the directory")
    options = arguments.parse_known_args()[0]
    main(__doc__ or "", lambda: measure(options.files, options.dir), arguments)
