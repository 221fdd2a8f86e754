"""Throughput of a tier's drivers beside an idle, an engine-like and a busy main thread.

The same blocks are stored and loaded by threads of this process and by an I/O process, in jobs of
several blocks, all submitted at once, while the main thread

    idle   sleeps for 4 ms between polls
    step   computes for 4 ms in Python, then waits for 1 ms, and polls once, as an engine does
    busy   computes in Python all the time, and polls every 4 ms

Loads read what was just written. A *GIL gap* is a gap in the main thread's computing in which it
slept, so neighbours do not count; the cost of the main thread is its own time on the processor in
submit and poll. Baselines are the same driver's idle figure, or the bound that was set.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from _report import Row, main

from kvtier.config import Settings
from kvtier.core.types import BlockKey, Done, JobId, Slot, TierId
from kvtier.drivers.base import JobMetadata, SecondaryTierManager, SlotViews
from kvtier.offloader import Assignment, configure_tiers, in_a_process, on_threads
from kvtier.region import Geometry, Region

MODES = ("idle", "step", "busy")
QUANTUM_GAP_S = 1e-4
STEP_S, PAUSE_S = 4e-3, 1e-3
MAIN_MAX_US = 10.0
GAP_MAX_MS = 1.0
PATIENCE_S = 120.0


@dataclass
class Measured:
    """One run of all jobs.

    Attributes:
        seconds: from the first submit to the last end.
        main_seconds: on the processor, in submit and poll.
        gaps: lengths of GIL gaps, in seconds.
    """

    seconds: float = 0.0
    main_seconds: float = 0.0
    gaps: list[float] = field(default_factory=list)


def compute(gaps: list[float]) -> None:
    """About 4 ms of Python, in quanta of 10 us."""
    slept = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
    last = time.perf_counter()
    until = last + STEP_S
    while last < until:
        total = 0
        for i in range(300):
            total += i & 7
        now = time.perf_counter()
        if now - last > QUANTUM_GAP_S:
            count = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
            if count != slept:
                gaps.append(now - last)
            slept = count
        last = time.perf_counter()


def run(driver: SecondaryTierManager, jobs: list[JobMetadata], store: bool, mode: str) -> Measured:
    measured = Measured()
    submit: Callable[[JobMetadata], None] = driver.submit_store if store else driver.submit_load
    begun = time.perf_counter()
    on_processor = time.thread_time()
    for job in jobs:
        submit(job)
    measured.main_seconds += time.thread_time() - on_processor
    left = {job.job_id: frozenset(job.block_hashes) for job in jobs}
    while left:
        assert time.perf_counter() - begun < PATIENCE_S, "jobs do not end"
        if mode == "idle":
            time.sleep(STEP_S)
        else:
            compute(measured.gaps)
            if mode == "step":
                time.sleep(PAUSE_S)
        on_processor = time.thread_time()
        finished = driver.get_finished()
        measured.main_seconds += time.thread_time() - on_processor
        for done in finished:
            if isinstance(done, Done):
                assert done.ok == left.pop(done.job), "a block failed"
    measured.seconds = time.perf_counter() - begun
    return measured


class Bench:
    """Blocks in a region, and the drivers that move them."""

    def __init__(self, folder: Path, layout: str, blocks: int, block_bytes: int, per_job: int):
        self.folder = folder
        self.layout = layout
        self.blocks = blocks
        self.block_bytes = block_bytes
        self.per_job = per_job
        self.region = Region.create(Geometry(blocks, block_bytes, 1))
        self.region.populate().join()
        generator = np.random.default_rng(1)
        for slot in range(blocks):
            self.region.rows[slot] = np.frombuffer(generator.bytes(block_bytes), np.uint8)
        self.round = 0

    def jobs(self, store: bool) -> list[JobMetadata]:
        prefix = self.round.to_bytes(8, "big") * 4
        jobs = []
        for first in range(0, self.blocks, self.per_job):
            slots = [Slot(i) for i in range(first, min(first + self.per_job, self.blocks))]
            keys = tuple(BlockKey(prefix[4:] + slot.to_bytes(8, "big")) for slot in slots)
            views = SlotViews(self.region, slots, readonly=store)
            jobs.append(JobMetadata(JobId(first), keys, views, "ab" * 32))
        return jobs

    def driver(self, kind: str, root: str) -> SecondaryTierManager:
        tier = {"type": "fs", "root_dir": root, "layout": self.layout}
        settings = Settings.decode({"cpu_bytes_to_use": 1 << 30, "secondary_tiers": [tier]})
        (configured,) = configure_tiers(settings.secondary_tiers)
        assignment = Assignment(configured, TierId(0), self.region, lambda _: {}, 60.0)
        return on_threads(assignment) if kind == "threads" else in_a_process(assignment)

    def measure(self, kind: str, mode: str) -> tuple[Measured, Measured]:
        """A store of all blocks under new keys, and a load of them."""
        self.round += 1
        with tempfile.TemporaryDirectory(dir=self.folder) as root:
            driver = self.driver(kind, root)
            warm = self.jobs(store=True)[0]
            driver.submit_lookup(JobMetadata(JobId(10**9), warm.block_hashes, (), warm.namespace))
            while not driver.get_finished():
                time.sleep(PAUSE_S)
            stored = run(driver, self.jobs(store=True), True, mode)
            loaded = run(driver, self.jobs(store=False), False, mode)
            driver.close(30.0)
        return stored, loaded

    def gigabytes(self, measured: Measured) -> float:
        return self.blocks * self.block_bytes / measured.seconds / 1e9


def measure(options: argparse.Namespace) -> list[Row]:
    rows: list[Row] = []
    for layout in options.layouts.split(","):
        bench = Bench(
            options.dir, layout, options.blocks, options.block_kib << 10, options.blocks_per_job
        )
        found: dict[tuple[str, str], list[tuple[Measured, Measured]]] = {}
        for _ in range(options.rounds):
            for kind in ("threads", "process"):
                for mode in MODES:
                    found.setdefault((kind, mode), []).append(bench.measure(kind, mode))
        rows += rows_of(bench, layout, found)
        bench.region.close()
    return rows


def rows_of(
    bench: Bench, layout: str, found: dict[tuple[str, str], list[tuple[Measured, Measured]]]
) -> Iterator[Row]:
    for kind in ("threads", "process"):
        for place, operation in enumerate(("store", "load")):
            speeds = {
                mode: statistics.median(bench.gigabytes(pair[place]) for pair in found[kind, mode])
                for mode in MODES
            }
            for mode in MODES:
                name = f"{layout}, {kind}, {operation}, {mode} main"
                yield Row(name, speeds[mode], "GB/s", speeds["idle"], "idle main", "higher")
    for kind in ("threads", "process"):
        for mode in MODES:
            runs = [each for pair in found[kind, mode] for each in pair]
            # neighbours that take the caches only add to it
            cost = min(each.main_seconds for each in runs) / bench.blocks * 1e6
            name = f"{layout}, {kind}, main's cost, {mode}"
            yield Row(name, cost, "us a block", MAIN_MAX_US, "bound", "lower")
            if mode == "idle":
                continue
            longest = max((gap for each in runs for gap in each.gaps), default=0.0) * 1e3
            name = f"{layout}, {kind}, longest GIL gap, {mode}"
            yield Row(name, longest, "ms", GAP_MAX_MS, "bound", "lower")
            waits = sum(sum(each.gaps) for each in runs) / len(runs) / bench.blocks * 1e6
            name = f"{layout}, {kind}, GIL gaps, {mode}"
            yield Row(name, waits, "ms per 1000 blocks", MAIN_MAX_US, "bound", "lower")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--dir", type=Path, default=None, help="where files are written")
    parser.add_argument("--layouts", default="files", help="of the fs tier, with commas between")
    parser.add_argument("--blocks", type=int, default=256)
    parser.add_argument("--block-kib", type=int, default=2048)
    parser.add_argument("--blocks-per-job", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    main(__doc__, lambda: measure(parser.parse_known_args()[0]), parser)
