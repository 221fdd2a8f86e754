"""Eviction policies of the primary tier beside LRU: hit ratio, and time per block.

Replays requests through kvtier's manager as an engine without a prefix cache of its own calls it:
look a prompt up, load the head that is there, store the rest, end. Several requests are open at any
time, so that loads pin. The hit ratio is blocks loaded per block asked for; the time is that of the
scheduler's thread for everything, per block asked for.

The trace is made by this program with a fixed seed (conversations that come back longer, of uneven
popularity, between documents that are read once), or read with --trace: one JSON object a line,
whose `hash_ids` are the blocks of a prompt, as in the traces published with Mooncake.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from _report import Row, main

from kvtier.core.limits import Limits
from kvtier.core.manager import TieringManager
from kvtier.core.policies import POLICIES
from kvtier.core.pool import BlockPool
from kvtier.core.types import BlockKey, Lookup

BASELINE = "lru"
SHARES = (0.01, 0.05, 0.2, 0.5)
"""Slots of the pool, as a share of the distinct blocks of the trace."""

OPEN_REQUESTS = 8
Trace = list[list[BlockKey]]


@dataclass(frozen=True)
class Result:
    """Of one policy at one size."""

    hit_ratio: float
    us_per_block: float


def key_of(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(32, "big") + bytes(4))


def read(path: Path) -> Trace:
    with path.open() as lines:
        return [[key_of(i) for i in json.loads(line)["hash_ids"]] for line in lines]


def synthetic(num_requests: int = 8000, num_conversations: int = 1500) -> Trace:
    """Conversations by popularity, each turn a longer prefix; a quarter of all is read once."""
    chance = random.Random(1)
    weights = [1 / (i + 1) ** 0.9 for i in range(num_conversations)]
    sums = list(itertools.accumulate(weights))
    fresh = itertools.count()
    system = [key_of(next(fresh)) for _ in range(4)]
    conversations = [list(system) for _ in range(num_conversations)]
    trace = []
    for _ in range(num_requests):
        if chance.random() < 0.25:
            trace.append([key_of(next(fresh)) for _ in range(chance.randint(50, 200))])
            continue
        turns = chance.choices(conversations, cum_weights=sums)[0]
        if len(turns) > 120:
            del turns[len(system) :]  # it ended; another one takes its place
        turns += [key_of(next(fresh)) for _ in range(chance.randint(2, 20))]
        trace.append(list(turns))
    return trace


def head(manager: TieringManager, name: str, prompt: list[BlockKey]) -> int:
    """How many blocks are there, from the first one."""
    request = manager.open_request(name)
    for place, key in enumerate(prompt):
        if manager.lookup(request, key) is not Lookup.HIT:
            return place
    return len(prompt)


def replay(trace: Trace, policy: str, num_slots: int) -> Result:
    pool = BlockPool(num_slots, POLICIES[policy](num_slots))
    manager = TieringManager(pool, 0, 0.0, Limits(promoting_max=num_slots, writing_max=1))
    running: deque[str] = deque()
    asked = hits = 0
    started = time.thread_time()
    for number, prompt in enumerate(trace):
        manager.begin_step(float(number))
        name = str(number)
        found = head(manager, name, prompt)
        manager.prepare_load(name, prompt[:found])
        stored = manager.prepare_store(name, prompt[found:])
        manager.complete_store(stored)
        manager.end_step()
        manager.take_events()
        running.append(name)
        if len(running) > OPEN_REQUESTS:
            ended = running.popleft()
            manager.complete_load(ended)
            manager.finish_request(ended)
        asked += len(prompt)
        hits += found
    seconds = time.thread_time() - started
    return Result(hits / asked, seconds / asked * 1e6)


def measure(path: Path | None) -> list[Row]:
    trace = read(path) if path is not None else synthetic()
    distinct = len({key for prompt in trace for key in prompt})
    rows = []
    for share in SHARES:
        num_slots = max(1, int(distinct * share))
        base = replay(trace, BASELINE, num_slots)
        for policy in [name for name in POLICIES if name != BASELINE]:
            result = replay(trace, policy, num_slots)
            label = f"{policy}_{share * 100:g}_percent"
            ratios = result.hit_ratio, base.hit_ratio
            times = result.us_per_block, base.us_per_block
            rows.append(
                Row(f"{label}_hit_ratio", ratios[0], "share", ratios[1], BASELINE, "higher")
            )
            rows.append(Row(f"{label}_per_block", times[0], "us", times[1], BASELINE, "lower"))
    return rows


if __name__ == "__main__":
    options = argparse.ArgumentParser(add_help=False)
    options.add_argument("--trace", type=Path, help="replay this file instead")
    main(__doc__, lambda: measure(options.parse_known_args()[0].trace), options)
