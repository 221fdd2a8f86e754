"""An fs tier in an I/O process of its own, with slots, as an engine has it; and what it said."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgspec

from kvtier.core.types import BlockKey, Done, Fault, JobId, Slot
from kvtier.drivers.base import JobMetadata, SlotViews, TierCounters
from kvtier.drivers.process.driver import ProcessDriver
from kvtier.drivers.process.process import Launch
from kvtier.region import Geometry, Region
from kvtier.testing.blocks import BLOCK_BYTES, NAMESPACE, UNTOUCHED, block_of, key_of
from kvtier.tiers.fs.home import prepare
from kvtier.tiers.fs.settings import FsSettings

WAIT_S = 30.0
"""A job that takes longer is lost."""

BATCH = 8
"""Blocks of one job here."""

LAYOUTS = [name for name in get_args(get_type_hints(FsSettings)["layout"]) if name != "auto"]

_OPTIONS = {"threads": 4, "segment_bytes": "2MiB", "min_free": "4KiB"}


class LostJobError(AssertionError):
    """A job did not end."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Of one job: which blocks were ok, by number, and the fault."""

    ok: frozenset[int]
    fault: Fault | None


class Rig:
    """See the module. Blocks are numbered; block i has key and content of that number."""

    def __init__(self, root: Path, layout: str, hang_s: float = 20.0, **options: Any) -> None:
        known = FsSettings.__struct_fields__
        extra = {name: value for name, value in _OPTIONS.items() if name in known}
        settings = {"root_dir": str(root), "layout": layout, **extra, **options}
        if root.is_dir():
            prepare(root, msgspec.convert(settings, FsSettings))  # as the engine does at its start
        self.region = Region.create(Geometry(64, BLOCK_BYTES, 1))
        self.driver = ProcessDriver(
            Launch("disk", "fs", settings), self.region, lambda _: {"model": "tiny"}, hang_s
        )
        self._jobs = 0
        self._slots = 0

    def close(self) -> None:
        self.driver.close(5.0)
        self.region.close()

    def store(self, *blocks: int) -> Outcome:
        return self.end(self.submit_store(*blocks))

    def load(self, *blocks: int) -> Outcome:
        """Load blocks, and see that the good ones have every byte and no other slot changed."""
        return self.end(self.submit_load(*blocks))

    def lookup(self, *blocks: int) -> Outcome:
        job = self._job(blocks, 0)
        self.driver.submit_lookup(job)
        return self.end((job, blocks, []))

    def submit_store(self, *blocks: int) -> Any:
        job, slots = self._with_slots(blocks, readonly=True)
        for block, slot in zip(blocks, slots, strict=True):
            self.region.slot(slot)[:] = block_of(key_of(block))
        self.driver.submit_store(job)
        return job, blocks, []

    def submit_load(self, *blocks: int) -> Any:
        job, slots = self._with_slots(blocks, readonly=False)
        for slot in slots:
            self.region.rows[slot] = UNTOUCHED
        self.driver.submit_load(job)
        return job, blocks, slots

    def end(self, submitted: Any, wait_s: float = WAIT_S) -> Outcome:
        """Poll as an engine does until a job ends."""
        job, blocks, slots = submitted
        until = time.monotonic() + wait_s
        while time.monotonic() < until:
            for completion in self.driver.get_finished():
                if isinstance(completion, Done) and completion.job == job.job_id:
                    ok = frozenset(block for block in blocks if key_of(block) in completion.ok)
                    for block, slot in zip(blocks, slots, strict=False):
                        if block in ok:
                            assert bytes(self.region.slot(slot)) == block_of(key_of(block))
                    return Outcome(ok, completion.fault)
            time.sleep(0.002)
        raise LostJobError(f"job {job.job_id} has not ended within {wait_s} s")

    @property
    def counters(self) -> TierCounters:
        return self.driver.counters()

    def count(self, *causes: str) -> int:
        """Failures that were counted under these causes."""
        return sum(self.counters.faults.get(cause, 0) for cause in causes)

    def slot_of(self, submitted: Any, index: int) -> memoryview:
        return self.region.slot(submitted[2][index])

    def _with_slots(
        self, blocks: tuple[int, ...], readonly: bool
    ) -> tuple[JobMetadata, list[Slot]]:
        slots = [Slot((self._slots + i) % 64) for i in range(len(blocks))]
        self._slots += len(blocks)
        job = self._job(blocks, 0)
        views = SlotViews(self.region, slots, readonly)
        return dataclasses.replace(job, spec=views), slots

    def _job(self, blocks: tuple[int, ...], _: int) -> JobMetadata:
        self._jobs += 1
        keys: tuple[BlockKey, ...] = tuple(map(key_of, blocks))
        return JobMetadata(JobId(self._jobs), keys, (), NAMESPACE)


MakeRig = Callable[..., Rig]


def recovers(attempt: Any, within_s: float = WAIT_S) -> float:
    """Seconds until something works again, tried again and again as the engine would.

    Raises:
        AssertionError: it does not.
    """
    began = time.monotonic()
    while time.monotonic() - began < within_s:
        if attempt():
            return time.monotonic() - began
        time.sleep(0.05)
    raise AssertionError(f"no recovery within {within_s:g} s")


def warnings_of(caplog: Any, word: str = "") -> list[str]:
    """What was logged as a warning or worse, if it has this in it."""
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    return [message for message in said if word in message]


def is_no_storm(caplog: Any, lines_max: int = 8) -> None:
    """Whatever failed, and however often: few lines, and none again and again."""
    said = Counter(warnings_of(caplog))
    assert 1 <= said.total() <= lines_max, said
    assert max(said.values()) <= 2, said
