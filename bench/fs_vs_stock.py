"""kvtier's fs tier, in both layouts, beside vLLM's own fs tier: throughput and existence, one run.

Every tier moves blocks out of and into one region of memory, on one mount, in turn. kvtier's runs
as below an engine: in its process, with envelope and checksums. vLLM's is driven as its tiering
manager does it: submit and poll; lookups are asked again until they are answered. What is loaded is
not in the page cache. Each figure is the best of a few repetitions.

ext4 passes over inodes that were freed in the last minutes, one by one, so a run just after many
deletions (an earlier run's, too) measures that. A file system of its own is best.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import itertools
import os
import secrets
import sys
import tempfile
import time
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from _report import Row, main

from kvtier.cli.bench_fs import scratch
from kvtier.cli.bench_fs_jobs import BenchTier, drop_cached, filled_region
from kvtier.errors import ConfigError
from kvtier.region import Region

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

KIB, MIB = 1 << 10, 1 << 20
SIZES = (256 * KIB, MIB, 2 * MIB, 4 * MIB, 8 * MIB)
ONE_JOB = 64
MANY_JOBS, BLOCKS_PER_JOB = 32, 8
NUM_KEYS = 8192
REPETITIONS = 3
THREADS = 16
LAYOUTS = ("files", "segments")
_POLL_S = 0.0001
_STEP_S = 0.001  # of an engine: asking again without a pause would take the lookup's time

options = argparse.ArgumentParser(add_help=False)
options.add_argument("--directory", default=tempfile.gettempdir(), help="where to measure")
options.add_argument("--threads", type=int, help="of kvtier's tiers; measured unless given")
options.add_argument("--sizes", help="block sizes in KiB, with commas between")
options.add_argument("--quick", action="store_true", help="one block size, one repetition")


class Side(Protocol):
    """One tier under test."""

    def fresh_keys(self, count: int) -> list[Any]: ...

    def jobs_seconds(self, operation: str, jobs: Sequence[Sequence[Any]]) -> float: ...

    def lookup_seconds(self, keys: Sequence[Any], expected: int) -> float: ...


class StockTier:
    """vLLM's fs tier, driven as its tiering manager drives it."""

    def __init__(self, root: Path, region: Region) -> None:
        from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager

        self._root = root
        self._token = secrets.token_bytes(16)
        self._numbers = itertools.count()
        self._jobs = itertools.count(1)
        self._tier = FileSystemTierManager(
            _stock_spec(region.slot_bytes),
            memoryview(region.rows),
            "fs",
            root_dir=str(root),
            n_read_threads=THREADS,
            n_write_threads=THREADS,
        )

    def close(self) -> None:
        self._tier.shutdown()

    def fresh_keys(self, count: int) -> list[Any]:
        from vllm.v1.kv_offload.base import make_offload_key

        return [
            make_offload_key(
                hashlib.sha256(self._token + next(self._numbers).to_bytes(8, "big")).digest(), 0
            )
            for _ in range(count)
        ]

    def jobs_seconds(self, operation: str, jobs: Sequence[Sequence[Any]]) -> float:
        import numpy as np
        from vllm.v1.kv_offload.base import ReqContext
        from vllm.v1.kv_offload.tiering.base import TransferJob

        if operation == "load":
            drop_cached(self._root)
        submit = self._tier.submit_store if operation == "store" else self._tier.submit_load
        first, transfers = 0, []
        for keys in jobs:
            transfers.append(
                TransferJob(
                    job_id=next(self._jobs),
                    keys=keys,
                    chunk_ids=np.arange(first, first + len(keys), dtype=np.int32),
                    is_promotion=operation == "load",
                    req_context=ReqContext("bench"),
                )
            )
            first += len(keys)
        started = time.perf_counter()
        for transfer in transfers:
            submit(transfer)
        left = {transfer.job_id for transfer in transfers}
        while left:
            for result in self._tier.get_finished_jobs():
                assert result.success, f"vLLM's tier failed to {operation}"
                left.discard(result.job_id)
            if left:
                time.sleep(_POLL_S)
        return time.perf_counter() - started

    def lookup_seconds(self, keys: Sequence[Any], expected: int) -> float:
        from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext

        context, end = ReqContext(f"lookup-{next(self._jobs)}"), ScheduleEndContext((), ())
        started = time.perf_counter()
        while True:
            answers = [self._tier.lookup(key, context) for key in keys]
            if LookupResult.RETRY not in answers:
                break
            self._tier.on_schedule_end(end)
            time.sleep(_STEP_S)
        seconds = time.perf_counter() - started
        self._tier.on_request_finished(context)
        assert answers.count(LookupResult.HIT) == expected, "vLLM's tier found something else"
        return seconds

    def c_lookup_seconds(self, keys: Sequence[Any], expected: int) -> float:
        """Its lookup alone, on this thread: paths and one call into C."""
        from vllm.v1.kv_offload.base import ReqContext

        started = time.perf_counter()
        found = sum(self._tier._lookup_manager.batch_lookup(list(keys), ReqContext("bench")))
        seconds = time.perf_counter() - started
        assert found == expected, "vLLM's tier found something else"
        return seconds


def _stock_spec(block_bytes: int) -> Any:
    """What vLLM's tier wants to know of its engine."""
    from vllm.v1.kv_offload.base import OffloadingKVEventsConfig
    from vllm.v1.kv_offload.config import (
        OffloadingCacheConfig,
        OffloadingConfig,
        OffloadingGroupConfig,
        OffloadingModelConfig,
        OffloadingParallelConfig,
    )

    config = OffloadingConfig(
        groups=(OffloadingGroupConfig(16, ("layer",), 0),),
        worker_kv_bytes_per_block=block_bytes,
        enable_kv_cache_events=False,
        extra_config={},
        engine_id="bench",
        model=OffloadingModelConfig("bench", "bfloat16"),
        cache=OffloadingCacheConfig(16, 1),
        parallel=OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, True),
    )
    return types.SimpleNamespace(
        config=config,
        extra_config={},
        blocks_per_chunk=1,
        tokens_per_block=(16,),
        tokens_per_hash=16,
        kv_events_config=OffloadingKVEventsConfig(False, False),
    )


@contextlib.contextmanager
def sides(place: Path, region: Region, threads: int | None) -> Iterator[dict[str, Side]]:
    """Every tier over a directory of its own; a layout that this release lacks is left out."""
    with contextlib.ExitStack() as until_done:
        found: dict[str, Side] = {}
        for layout in LAYOUTS:
            root = Path(tempfile.mkdtemp(prefix=layout, dir=place))
            with contextlib.suppress(ConfigError):
                chosen = {"layout": layout} | ({} if threads is None else {"threads": threads})
                tier = BenchTier(root, chosen, region)
                found[layout] = until_done.enter_context(tier)
        stock = StockTier(Path(tempfile.mkdtemp(prefix="stock", dir=place)), region)
        until_done.callback(stock.close)
        found["stock"] = stock
        yield found


def _layouts(found: dict[str, Side]) -> list[str]:
    return [layout for layout in LAYOUTS if layout in found]


def compare_moves(place: Path, size: int, repetitions: int, threads: int | None) -> Iterator[Row]:
    """Store and load: one large job, and many small ones."""
    region = filled_region(size, max(ONE_JOB, MANY_JOBS * BLOCKS_PER_JOB))
    shapes = {f"1 job of {ONE_JOB}": (1, ONE_JOB)}
    shapes[f"{MANY_JOBS} jobs of {BLOCKS_PER_JOB}"] = (MANY_JOBS, BLOCKS_PER_JOB)
    text = f"{size // MIB}MiB" if size >= MIB else f"{size // KIB}KiB"
    with sides(place, region, threads) as found:
        for shape, (num_jobs, blocks) in shapes.items():
            best: dict[tuple[str, str], float] = {}
            for _ in range(repetitions):
                for name, side in found.items():
                    jobs = [side.fresh_keys(blocks) for _ in range(num_jobs)]
                    for operation in ("store", "load"):
                        seconds = side.jobs_seconds(operation, jobs)
                        former = best.get((name, operation), seconds)
                        best[name, operation] = min(former, seconds)
            gigabytes = num_jobs * blocks * size / 1e9
            for layout in _layouts(found):
                for operation in ("store", "load"):
                    yield Row(
                        f"{layout} {operation} {text}, {shape}",
                        gigabytes / best[layout, operation],
                        "GB/s",
                        gigabytes / best["stock", operation],
                        "vLLM's fs tier",
                        "higher",
                    )
    region.close()


def compare_lookups(place: Path, repetitions: int, threads: int | None) -> Iterator[Row]:
    """Existence of many keys: all absent, all present."""
    batch = 256
    region = filled_region(4096, batch)
    with sides(place, region, threads) as found:
        best: dict[tuple[str, str], float] = {}
        for name, side in found.items():
            keys = side.fresh_keys(NUM_KEYS)
            for start in range(0, NUM_KEYS, batch):
                side.jobs_seconds("store", [keys[start : start + batch]])
            for _ in range(repetitions):
                for what, asked in (("absent", side.fresh_keys(NUM_KEYS)), ("present", keys)):
                    seconds = side.lookup_seconds(asked, len(keys) if what == "present" else 0)
                    best[name, what] = min(best.get((name, what), seconds), seconds)
                    if isinstance(side, StockTier):
                        alone = side.c_lookup_seconds(asked, len(keys) if what == "present" else 0)
                        best["C", what] = min(best.get(("C", what), alone), alone)
        for layout in _layouts(found):
            for what in ("absent", "present"):
                for baseline, baseline_name, suffix in (
                    ("stock", "vLLM's fs tier", ""),
                    ("C", "vLLM's fs tier, its C call alone", " (C)"),
                ):
                    yield Row(
                        f"{layout} lookup {NUM_KEYS} {what}{suffix}",
                        best[layout, what] * 1e3,
                        "ms",
                        best[baseline, what] * 1e3,
                        baseline_name,
                        "lower",
                    )
    region.close()


def measure() -> list[Row]:
    given = options.parse_known_args()[0]
    sizes, repetitions = ((2 * MIB,), 1) if given.quick else (SIZES, REPETITIONS)
    if given.sizes:
        sizes = tuple(int(size) * KIB for size in given.sizes.split(","))
    rows: list[Row] = []
    with scratch(Path(given.directory)) as place:
        for size in sizes:
            rows += compare_moves(place, size, repetitions, given.threads)
        rows += compare_lookups(place, repetitions, given.threads)
    return rows


if __name__ == "__main__":
    try:
        import vllm.v1.kv_offload.tiering.fs.manager  # noqa: F401
    except ImportError as error:
        sys.exit(f"vLLM 0.32 with its fs tier is needed beside kvtier: {error}")
    main(__doc__ or "", measure, options)
