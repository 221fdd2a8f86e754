"""What it costs to publish a block: one thread, both layouts, both durabilities.

A block is written through the fs tier alone, and in batches of 16, under new keys; its cost is the
median over all calls, per block. The baseline is a `pwrite` of the same bytes into a file that is
there already, with `fdatasync` for `data`.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from _report import Row, main

from kvtier.core.types import BlockKey
from kvtier.envelope import HEADER_BYTES
from kvtier.tiers.base import SupportsBatch
from kvtier.tiers.fs.io import scratch
from kvtier.tiers.fs.tier_type import FsTierType
from kvtier.tiers.registry import decode_settings

SIZES = {"64 KiB": 64 << 10, "1 MiB": 1 << 20, "4 MiB": 4 << 20}
BATCH = 16
WRITTEN_BYTES_MAX = 256 << 20
NAMESPACE = "cd" * 32


def median_us(call: Callable[[], None], calls: int, blocks: int) -> float:
    """Microseconds a block."""
    seconds = []
    for _ in range(calls):
        begun = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds) / blocks * 1e6


def bare(folder: str, size: int, durable: bool, calls: int) -> float:
    """Of a file that is there: a write in place."""
    data = [scratch(HEADER_BYTES), scratch(size)]
    path = os.path.join(folder, "bare")
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, HEADER_BYTES + size)

        def call() -> None:
            os.pwritev(descriptor, data, 0)
            if durable:
                os.fdatasync(descriptor)

        call()
        return median_us(call, calls, 1)
    finally:
        os.close(descriptor)
        os.unlink(path)


def measure(options: argparse.Namespace) -> Iterator[Row]:
    for durability, (label, size) in itertools.product(("none", "data"), SIZES.items()):
        calls = max(8, min(options.calls, WRITTEN_BYTES_MAX // size // BATCH))
        with tempfile.TemporaryDirectory(dir=options.dir) as folder:
            baseline = bare(folder, size, durability == "data", calls)
        for layout in ("files", "segments"):
            with tempfile.TemporaryDirectory(dir=options.dir) as folder:
                one, batch = publish(folder, layout, durability, size, calls)
            for name, cost in (("alone", one), (f"of {BATCH}", batch)):
                name = f"{layout}, {durability}, {label}, {name}"
                yield Row(name, cost, "us a block", baseline, "write in place", "lower")


def publish(
    folder: str, layout: str, durability: str, size: int, calls: int
) -> tuple[float, float]:
    """Microseconds a block: alone, and in batches."""
    tier_type = FsTierType()
    plain: dict[str, object] = {"root_dir": folder, "layout": layout, "durability": durability}
    settings = decode_settings(tier_type, plain, "bench")
    tier_type.preflight(settings, "bench")
    tier = tier_type.open(settings, NAMESPACE, {})
    assert isinstance(tier, SupportsBatch), "both layouts take batches"
    data = (scratch(HEADER_BYTES), scratch(size))
    numbers = itertools.count()

    def keys(count: int) -> list[BlockKey]:
        return [BlockKey(os.urandom(24) + next(numbers).to_bytes(8, "big")) for _ in range(count)]

    def write(count: int) -> None:
        errors = tier.write_batch(keys(count), [data] * count)
        assert not any(errors), errors

    try:
        write(BATCH)
        return (
            median_us(lambda: write(1), calls, 1),
            median_us(lambda: write(BATCH), max(4, calls // 4), BATCH),
        )
    finally:
        tier.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--dir", type=Path, default=None, help="where files are written")
    parser.add_argument("--calls", type=int, default=100)
    main(__doc__, lambda: list(measure(parser.parse_known_args()[0])), parser)
