"""What grows with the number of blocks: time per step while requests wait, memory, lookups."""

from __future__ import annotations

import gc
import random
import statistics
import time
import tracemalloc
from collections.abc import Callable

from _report import Row
from _simulated import World
from vllm.v1.kv_offload.base import ReqContext, ScheduleEndContext
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

from kvtier.core.limits import Limits
from kvtier.core.manager import TieringManager
from kvtier.core.policies.lru import LRU
from kvtier.core.pool import BlockPool
from kvtier.core.presence import Presence
from kvtier.core.types import BlockKey, Lookup
from kvtier.testing.simulated_tiers import Hang

BASELINE = "vLLM stock tiering manager"
SIZES = (10**4, 10**5, 10**6)
SAMPLE = 20_000


def keys_of(count: int, first: int = 0) -> list[BlockKey]:
    return [BlockKey((first + i).to_bytes(32, "big") + bytes(4)) for i in range(count)]


def step_of_deferred(kvtier: bool, requests: int, blocks: int) -> float:
    """Microseconds of a step in which so many requests ask again; their reads hang."""
    run = World(kvtier, 16_384)
    run.tier.behave("read", Hang())
    prompts = {f"r{i}": keys_of(blocks, 10**6 * i) for i in range(requests)}
    for name, keys in prompts.items():
        run.tier.keep(0, keys)
        run.cache.open(name, keys)

    def step() -> None:
        for name, keys in prompts.items():
            for key in keys:
                if run.cache.lookup(name, key) is Lookup.MISS:
                    break
        run.cache.manager.on_schedule_end(ScheduleEndContext((), ()))
        run.cache.end_step()
        run.clock.now += 0.01

    for _ in range(4):
        step()
    times = []
    for _ in range(3 if not kvtier else 20):
        started = time.thread_time()
        step()
        times.append(time.thread_time() - started)
    run.close()
    return statistics.median(times) * 1e6


def grown(make: Callable[[], object]) -> tuple[object, int]:
    """What it makes, and the bytes that this took."""
    gc.collect()
    tracemalloc.start()
    made = make()
    gc.collect()
    taken = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return made, taken


def resident_kvtier(keys: list[BlockKey]) -> TieringManager:
    limits = Limits(promoting_max=len(keys), writing_max=1)
    manager = TieringManager(BlockPool(len(keys), LRU(len(keys))), 1, 0.0, limits)
    manager.begin_step(0.0)
    for start in range(0, len(keys), 1000):
        part = keys[start : start + 1000]
        manager.prepare_store("a", part)
        manager.complete_store(part)
    manager.take_events()
    manager.ledger.cascades.reset()
    return manager


def resident_stock(keys: list[BlockKey]) -> CPUOffloadingManager:
    manager = CPUOffloadingManager(num_chunks=len(keys))
    context = ReqContext(req_id="a")
    manager.on_new_request(context)
    for start in range(0, len(keys), 1000):
        part = keys[start : start + 1000]
        manager.prepare_store(part, context)
        manager.complete_store(set(part), context)
    manager.on_request_finished(context)
    return manager


def believed(keys: list[BlockKey]) -> Presence:
    presence = Presence(len(keys), 10.0)
    for start in range(0, len(keys), 1000):
        presence.set_present(keys[start : start + 1000])
    return presence


def lookup_us(lookup: Callable[[BlockKey], object], keys: list[BlockKey]) -> float:
    """Microseconds per key, in random order; the best of three."""
    sample = random.Random(1).sample(keys, min(SAMPLE, len(keys)))
    times = []
    for _ in range(3):
        started = time.thread_time()
        for key in sample:
            lookup(key)
        times.append(time.thread_time() - started)
    return min(times) / len(sample) * 1e6


def measure_scale() -> list[Row]:
    """Every figure, kvtier's beside the stock manager's."""
    rows = []
    for requests in (1, 8, 64):
        for blocks in (512, 8192):
            values = [step_of_deferred(side, requests, blocks) for side in (True, False)]
            name = f"step_{requests}_deferred_requests_of_{blocks}_blocks"
            rows.append(Row(name, values[0], "us", values[1], BASELINE, "lower"))
    for size in SIZES:
        keys = keys_of(size)
        ours, our_bytes = grown(lambda keys=keys: resident_kvtier(keys))
        request = ours.open_request("q")
        our_us = lookup_us(lambda key, m=ours, r=request: (m.lookup(r, key), r.scan.clear()), keys)
        del ours
        theirs, their_bytes = grown(lambda keys=keys: resident_stock(keys))
        context = ReqContext(req_id="q")
        theirs.on_new_request(context)
        their_us = lookup_us(lambda key, m=theirs, c=context: m.lookup(key, c), keys)
        del theirs
        presence, belief_bytes = grown(lambda keys=keys: believed(keys))
        _, dict_bytes = grown(lambda keys=keys: dict.fromkeys(keys, True))
        belief_us = lookup_us(lambda key, p=presence: p.get(key, 0.0), keys)
        dict_us = lookup_us(dict.fromkeys(keys).get, keys)
        del presence
        name = f"10^{len(str(size)) - 1}"
        rows += [
            Row(
                f"bytes_per_resident_block_{name}",
                our_bytes / size,
                "B",
                their_bytes / size,
                "vLLM stock primary manager",
                "lower",
            ),
            Row(
                f"bytes_per_believed_block_{name}",
                belief_bytes / size,
                "B",
                dict_bytes / size,
                "a bare dict of the keys",
                "lower",
            ),
            Row(f"lookup_resident_{name}", our_us, "us", their_us, BASELINE, "lower"),
            Row(f"lookup_believed_{name}", belief_us, "us", dict_us, "a bare dict", "lower"),
        ]
    return rows
