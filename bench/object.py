"""The object tier over a real S3 server on this machine: lookups by added latency, stores, loads.

A lookup of 8,192 blocks that are there, and of as many that are not: cold (nothing believed; by the
tier's choice, and by one HEAD per block for comparison), then warm. Latency is added by a proxy.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from _proxy import ProxyProcess
from _report import Row, main

from kvtier.cli.bench_object import measure_object
from kvtier.cli.bench_remote import Plan, fresh_keys
from kvtier.core.types import BlockKey
from kvtier.testing.s3_servers import (
    ACCESS_KEY,
    SECRET_KEY,
    JuiceServer,
    S3Server,
    SeaweedServer,
)
from kvtier.tiers.object.objects import ObjectTier
from kvtier.tiers.object.settings import ObjectSettings
from kvtier.tiers.object.store import open_store

BUCKET = "kvtier-bench"
NAMESPACE = hashlib.sha256(b"bench").hexdigest()
LOOKUP_KEYS = 8192
DELAYS_MS = (0, 5, 20)
MIB = 1 << 20

options = argparse.ArgumentParser(add_help=False)
options.add_argument("--server", choices=["seaweed", "juice"], default="seaweed")
options.add_argument("--seconds", type=float, default=60.0, help="for stores and loads")
options.add_argument("--only", choices=["lookups", "moves"], help="one half of it")


def measure() -> list[Row]:
    chosen = options.parse_known_args()[0]
    os.environ["AWS_ACCESS_KEY_ID"], os.environ["AWS_SECRET_ACCESS_KEY"] = ACCESS_KEY, SECRET_KEY
    kind = SeaweedServer if chosen.server == "seaweed" else JuiceServer
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as directory, kind(Path(directory)) as server:
        server.make_bucket(BUCKET)
        if chosen.only != "moves":
            rows += lookup_rows(server)
        if chosen.only != "lookups":
            plan = Plan(
                "object",
                {
                    "url": f"s3://{BUCKET}/moves",
                    "endpoint": server.url,
                    "allow_http": True,
                    "timeout_s": 120.0,  # one machine serves and asks
                },
                (64 << 10, 512 << 10, 2 * MIB, 8 * MIB),
                (1, 8, 64),
                chosen.seconds,
            )
            rows += measure_object(plan, lambda text: print(text, file=sys.stderr))
    return rows


def lookup_rows(server: S3Server) -> list[Row]:
    rows: list[Row] = []
    present, absent = fresh_keys(LOOKUP_KEYS), fresh_keys(LOOKUP_KEYS)
    with closing_tier(settings_for(server.address[1])) as tier:
        errors = tier.write_batch(present, [(memoryview(b"tiny"),)] * LOOKUP_KEYS)
        assert not any(errors), next(filter(None, errors))
    with ProxyProcess(server.address, "http") as proxy:
        for delay_ms in DELAYS_MS:
            proxy.behave(delay_s=delay_ms / 1000)
            for name, keys in (("present", present), ("absent", absent)):
                rows += _lookups(proxy.address[1], name, keys, delay_ms)
    return rows


def _lookups(port: int, name: str, keys: list[BlockKey], delay_ms: int) -> list[Row]:
    """Seconds and round trips of a cold lookup, beside one HEAD per key; then of a warm one."""
    with closing_tier(settings_for(port)) as tier:
        heads_s = timed(lambda: tier._lookups.run(tier._existence._head, keys, True))
    with closing_tier(settings_for(port)) as tier:
        before = tier.figures()["round_trips"]
        cold_s = timed(lambda: tier.exists(keys))
        cold_trips = tier.figures()["round_trips"] - before
        warm_s = timed(lambda: tier.exists(keys))
        warm_trips = tier.figures()["round_trips"] - before - cold_trips
    shape = f"{LOOKUP_KEYS} {name} +{delay_ms}ms"
    heads = "a HEAD per block"
    return [
        Row(f"object lookup cold {shape}", cold_s * 1e3, "ms", heads_s * 1e3, heads, "lower"),
        Row(f"object trips cold {shape}", cold_trips, "requests", len(keys), heads, "lower"),
        Row(f"object lookup warm {shape}", warm_s * 1e3, "ms", cold_s * 1e3, "cold", "lower"),
        Row(f"object trips warm {shape}", warm_trips, "requests", cold_trips, "cold", "lower"),
    ]


def timed(call) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def settings_for(port: int) -> ObjectSettings:
    return ObjectSettings(
        url=f"s3://{BUCKET}/lookups",
        endpoint=f"http://127.0.0.1:{port}",
        allow_http=True,
        timeout_s=60.0,
    )


@contextlib.contextmanager
def closing_tier(settings: ObjectSettings) -> Iterator[ObjectTier]:
    tier = ObjectTier(open_store(settings), NAMESPACE, {}, settings)
    yield tier
    tier.close()


if __name__ == "__main__":
    main(__doc__, measure, options)
