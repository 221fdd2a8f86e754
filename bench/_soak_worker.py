"""One process of the soak: stores and loads blocks of one root through the driver, and verifies.

Prints a JSON object with its totals every half a second, and ends when its input ends.
"""

from __future__ import annotations

import argparse
import json
import random
import select
import sys
import time
from collections import Counter
from pathlib import Path

from kvtier.core.types import BlockKey, Done, JobId, Slot
from kvtier.drivers.base import JobMetadata, SlotViews
from kvtier.drivers.threaded import ThreadedDriver
from kvtier.envelope import HEADER_BYTES
from kvtier.testing.blocks import NAMESPACE, ArraySlots, block_of, key_of
from kvtier.tiers.fs.settings import FsSettings
from kvtier.tiers.fs.tier_type import FsTierType

THREADS = 4
SLOTS = 16
JOB_BLOCKS_MAX = 8
JOB_SECONDS_MAX = 30.0


class Worker:
    """Runs one job at a time."""

    def __init__(self, driver: ThreadedDriver, row_bytes: int, num_keys: int, seed: int) -> None:
        self.driver = driver
        self.row_bytes = row_bytes
        self.num_keys = num_keys
        self.choice = random.Random(seed)
        self.slots = ArraySlots(SLOTS, row_bytes)
        self.totals: Counter[str] = Counter()
        self.job = 0

    def keys(self) -> list[BlockKey]:
        """A run of blocks, as of one prompt; some prompts are asked for more often."""
        count = self.choice.randint(1, JOB_BLOCKS_MAX)
        first = int(self.num_keys * self.choice.random() ** 2)
        return [key_of((first + i) % self.num_keys) for i in range(count)]

    def run(self, submit: str, keys: list[BlockKey]) -> frozenset[BlockKey]:
        """Run a job to its end; keys that went well."""
        self.job += 1
        slots = [Slot(i) for i in range(len(keys))]
        views = SlotViews(self.slots, slots, submit == "submit_store")
        started = time.monotonic()
        getattr(self.driver, submit)(JobMetadata(JobId(self.job), tuple(keys), views, NAMESPACE))
        while True:
            for done in self.driver.get_finished():
                if isinstance(done, Done):  # the others tell what was evicted
                    assert done.job == self.job
                    return done.ok
            if time.monotonic() - started > JOB_SECONDS_MAX:
                self.totals["stuck_jobs"] += 1
                return frozenset()
            time.sleep(0.0005)

    def store(self) -> None:
        keys = self.keys()
        for i, key in enumerate(keys):
            self.slots.fill(i, block_of(key, self.row_bytes))
        stored = self.run("submit_store", keys)
        self.totals["stored_blocks"] += len(stored)
        self.totals["refused_blocks"] += len(keys) - len(stored)

    def load(self) -> None:
        keys = self.keys()
        loaded = self.run("submit_load", keys)
        for i, key in enumerate(keys):
            if key in loaded:
                self.totals["loaded_blocks"] += 1
                right = self.slots.content(i) == block_of(key, self.row_bytes)
                self.totals["wrong_blocks"] += not right
            else:
                self.totals["missed_blocks"] += 1


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", type=Path)
    parser.add_argument("--layout")
    parser.add_argument("--capacity", type=int)
    parser.add_argument("--row-bytes", type=int)
    parser.add_argument("--seed", type=int)
    options = parser.parse_args()
    settings = FsSettings(
        root_dir=str(options.root), layout=options.layout, capacity=options.capacity, min_free=0
    )
    kind = FsTierType()
    kind.preflight(settings, "soak")
    tier = kind.open(settings, NAMESPACE, {})
    driver = ThreadedDriver("fs", lambda _: tier, THREADS)
    num_keys = 4 * options.capacity // (options.row_bytes + HEADER_BYTES)
    worker = Worker(driver, options.row_bytes, num_keys, options.seed)
    told = 0.0
    while not select.select([sys.stdin], [], [], 0)[0]:
        worker.store()
        worker.load()
        if time.monotonic() - told > 0.5:
            told = time.monotonic()
            counters = driver.counters()
            worker.totals["corrupt_blocks"] = counters.corrupt_blocks
            print(json.dumps({**tier.figures(), **worker.totals}), flush=True)
    if not driver.close(JOB_SECONDS_MAX):
        worker.totals["stuck_jobs"] += 1
    print(json.dumps({**tier.figures(), **worker.totals}), flush=True)


if __name__ == "__main__":
    main()
