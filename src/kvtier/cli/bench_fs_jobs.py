"""Times jobs of an fs tier that runs as it does below an engine: process, region, envelope."""

from __future__ import annotations

import hashlib
import itertools
import os
import secrets
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvtier.cli.bench_driver import MeasuredTier
from kvtier.core.types import BlockKey, Done, JobId, Slot
from kvtier.drivers.base import JobMetadata, SlotViews
from kvtier.errors import TierError
from kvtier.offloader import ConfiguredTier
from kvtier.region import Geometry, Region
from kvtier.tiers.registry import decode_settings, load_tier_type

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

_JOB_S = 120.0
_READY_S = 30.0
_POLL_S = 0.0001
_PATTERN_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class JobTimes:
    """Best times of one shape, seconds per job.

    Attributes:
        store: from submit until `Done` is polled.
        load: likewise; nothing of it is in the page cache.
        present: a lookup of keys that are all there.
        absent: a lookup of keys of which none is there.
    """

    store: float
    load: float
    present: float
    absent: float


class BenchTier(MeasuredTier):
    """An fs tier over a fresh namespace, with slots full of data.

    Args:
        root: directory of the tier, empty, its own.
        options: of the tier, without `root_dir`.
        region: whose slots are stored and loaded; stays the caller's.

    Raises:
        ConfigError: the tier has no such options.
        TierError: the tier does not take blocks.
    """

    def __init__(self, root: Path, options: Mapping[str, object], region: Region) -> None:
        self._root = root
        self._keys = itertools.count()
        self._token = secrets.token_bytes(16)
        tier_type = load_tier_type("fs", "bench.type")
        plain = {"root_dir": str(root), **options}
        settings = decode_settings(tier_type, plain, "bench")
        tier_type.preflight(settings, "bench")
        self.num_threads = tier_type.num_threads(settings)
        # its process would measure their number once more, and perhaps choose another
        plain = {**plain, "threads": self.num_threads}
        settings = decode_settings(tier_type, plain, "bench")
        super().__init__(ConfiguredTier("bench", tier_type, settings, "fs", plain), region)

    def times(self, job_blocks: int, repetitions: int) -> JobTimes:
        """Store, look up and load fresh blocks, `repetitions` times.

        Raises:
            TierError: a block was not stored, found or loaded.
        """
        runs = []
        for _ in range(repetitions):
            keys = self.fresh_keys(job_blocks)
            absent = self.lookup_seconds(self.fresh_keys(job_blocks), expected=0)
            store = self.jobs_seconds("store", [keys])
            present = self.lookup_seconds(keys, expected=job_blocks)
            runs.append(JobTimes(store, self.jobs_seconds("load", [keys]), present, absent))
        return JobTimes(
            min(run.store for run in runs),
            min(run.load for run in runs),
            min(run.present for run in runs),
            min(run.absent for run in runs),
        )

    def jobs_seconds(self, operation: str, jobs: Sequence[Sequence[BlockKey]]) -> float:
        """Seconds for jobs that are submitted at once, each over slots of its own.

        Args:
            operation: `store` or `load`; of what is loaded nothing is in the page cache.
            jobs: keys of each.

        Raises:
            TierError: a block was not moved.
        """
        if operation == "load":
            drop_cached(self._root)
        first = 0
        metadata = []
        for keys in jobs:
            metadata.append(self._job(operation, keys, first))
            first += len(keys)
        started = time.perf_counter()
        for job in metadata:
            (self._driver.submit_store if operation == "store" else self._driver.submit_load)(job)
        ok = self._wait({job.job_id for job in metadata})
        seconds = time.perf_counter() - started
        if ok != first:
            raise TierError(f"{operation}: only {ok} of {first} blocks; see the log")
        return seconds

    def fresh_keys(self, count: int) -> list[BlockKey]:
        """Keys that were not used before."""
        return [
            BlockKey(
                hashlib.sha256(self._token + next(self._keys).to_bytes(8, "big")).digest()
                + bytes(4)
            )
            for _ in range(count)
        ]

    def _prepare(self) -> None:
        """Store one block, again and again until that works: the directory is counted first."""
        until = time.monotonic() + _READY_S
        while True:
            job = self._job("store", self.fresh_keys(1), 0)
            self._driver.submit_store(job)
            if self._wait({job.job_id}) == 1:
                return
            if time.monotonic() > until:
                raise TierError(f"the tier in {self._root} takes no block; see the log")
            time.sleep(0.02)

    def lookup_seconds(self, keys: Sequence[BlockKey], expected: int) -> float:
        """Seconds of one lookup. Raises TierError: it found another number than expected."""
        job = JobMetadata(JobId(next(self._job_ids)), tuple(keys), (), self._namespace)
        started = time.perf_counter()
        self._driver.submit_lookup(job)
        ok = self._wait({job.job_id})
        seconds = time.perf_counter() - started
        if ok != expected:
            raise TierError(f"lookup: {ok} of {expected} blocks; see the log")
        return seconds

    def _job(self, operation: str, keys: Sequence[BlockKey], first: int) -> JobMetadata:
        slots = [Slot(slot) for slot in range(first, first + len(keys))]
        views = SlotViews(self._region, slots, readonly=operation == "store")
        return JobMetadata(JobId(next(self._job_ids)), tuple(keys), views, self._namespace)

    def _wait(self, jobs: set[JobId]) -> int:
        """Poll until the jobs are done; how many blocks succeeded."""
        ok = 0
        until = time.monotonic() + _JOB_S
        while jobs:
            for completion in self._driver.get_finished():
                if isinstance(completion, Done) and completion.job in jobs:
                    jobs.discard(completion.job)
                    ok += len(completion.ok)
            if time.monotonic() > until:
                raise TierError(f"a job did not end in {_JOB_S:g} s")
            if jobs:
                time.sleep(_POLL_S)
        return ok


def drop_cached(root: Path) -> None:
    """Have what lies below `root` on the disk, and out of the page cache."""
    for directory, _, names in os.walk(root):
        for name in names:
            with suppress(OSError):
                descriptor = os.open(os.path.join(directory, name), os.O_RDONLY | os.O_CLOEXEC)
                try:
                    os.fdatasync(descriptor)
                    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                finally:
                    os.close(descriptor)


def filled_region(row_bytes: int, num_slots: int) -> Region:
    """A region with data that no disk can compress in every row.

    Raises:
        RegionError: there is no memory for so many slots.
    """
    region = Region.create(Geometry(num_slots, row_bytes, 1))
    region.populate().join()
    flat = region.rows.reshape(-1)
    pattern = np.frombuffer(secrets.token_bytes(min(_PATTERN_BYTES, flat.nbytes)), np.uint8)
    for start in range(0, flat.nbytes, pattern.nbytes):
        piece = flat[start : start + pattern.nbytes]
        np.copyto(piece, pattern[: piece.nbytes])
    return region
