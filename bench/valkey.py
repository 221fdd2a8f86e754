"""The valkey tier over a real server on this machine: lookups by added latency, stores, loads.

A lookup of 8,192 blocks that are there, and of as many that are not, by as many threads as the tier
has; beside one EXISTS per block by the bare client on as many connections. Latency is added by a
proxy.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from _proxy import ProxyProcess
from _report import Row, main

from kvtier.cli.bench_remote import Plan, fresh_keys
from kvtier.cli.bench_valkey import measure_valkey
from kvtier.core.types import BlockKey
from kvtier.drivers.moving import lookup_length
from kvtier.envelope import HEADER_BYTES
from kvtier.testing.valkey_servers import ValkeyServer
from kvtier.tiers.valkey.settings import DEFAULT_THREADS, ValkeySettings
from kvtier.tiers.valkey.tier import ValkeyTier
from kvtier.tiers.valkey.tier_type import ValkeyTierType

NAMESPACE = hashlib.sha256(b"bench").hexdigest()
LOOKUP_KEYS = 8192
DELAYS_MS = (0, 5, 20)
MIB = 1 << 20
SERVER = {
    "maxmemory": "4gb",
    "maxmemory-policy": "allkeys-lru",
    "notify-keyspace-events": "Egxe",
}

options = argparse.ArgumentParser(add_help=False)
options.add_argument("--seconds", type=float, default=60.0, help="for stores and loads")
options.add_argument("--only", choices=["lookups", "moves"], help="one half of it")


def measure() -> list[Row]:
    chosen = options.parse_known_args()[0]
    rows: list[Row] = []
    with (
        tempfile.TemporaryDirectory() as directory,
        ValkeyServer(Path(directory), SERVER) as server,
    ):
        if chosen.only != "moves":
            rows += lookup_rows(server)
        if chosen.only != "lookups":
            plan = Plan(
                *("valkey", {"url": server.url}),
                *((64 << 10, 512 << 10, 2 * MIB, 8 * MIB), (1, 8, 64), chosen.seconds),
            )
            rows += measure_valkey(plan, lambda text: print(text, file=sys.stderr))
    return rows


def lookup_rows(server: ValkeyServer) -> list[Row]:
    rows: list[Row] = []
    present, absent = fresh_keys(LOOKUP_KEYS), fresh_keys(LOOKUP_KEYS)
    content = (memoryview(bytes(HEADER_BYTES)), memoryview(b"tiny"))
    with open_tier(server.port) as tier:
        failed = tier.write_batch(present, [content] * LOOKUP_KEYS)
        assert not any(failed), next(filter(None, failed))
    with ProxyProcess(("127.0.0.1", server.port), "resp") as proxy:
        for delay_ms in DELAYS_MS:
            proxy.behave(delay_s=delay_ms / 1000)
            with (
                open_tier(proxy.address[1]) as tier,
                ThreadPoolExecutor(DEFAULT_THREADS) as threads,
            ):
                for name, keys in (("present", present), ("absent", absent)):
                    rows += _lookups(tier, threads, name, keys, delay_ms)
    return rows


def _lookups(
    tier: ValkeyTier, threads: ThreadPoolExecutor, name: str, keys: list[BlockKey], delay_ms: int
) -> list[Row]:
    def bare(key: BlockKey) -> None:
        tier._connections.run(lambda client: client.exists([key]))

    bare_s = timed(lambda: list(threads.map(bare, keys)))
    before = tier.figures()["round_trips"]
    length = lookup_length(len(keys), DEFAULT_THREADS)
    batches = [keys[i : i + length] for i in range(0, len(keys), length)]
    answers: list[bool] = []
    tier_s = timed(
        lambda: answers.extend(a for some in threads.map(tier.exists, batches) for a in some)
    )
    trips = tier.figures()["round_trips"] - before
    assert answers == [name == "present"] * len(keys), "a wrong answer"
    shape = f"{LOOKUP_KEYS} {name} +{delay_ms}ms"
    alone = "an EXISTS per block"
    return [
        Row(f"valkey lookup {shape}", tier_s * 1e3, "ms", bare_s * 1e3, alone, "lower"),
        Row(f"valkey trips {shape}", trips, "round trips", len(keys), alone, "lower"),
    ]


def timed(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


@contextlib.contextmanager
def open_tier(port: int) -> Iterator[ValkeyTier]:
    settings = ValkeySettings(url=f"valkey://127.0.0.1:{port}", request_timeout_ms=60_000)
    tier = ValkeyTierType().open(settings, NAMESPACE, {})
    yield tier
    tier.close()


if __name__ == "__main__":
    main(__doc__, measure, options)
