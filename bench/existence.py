"""Which of 8,192 blocks exist: time and round trips until an engine knows, by added latency.

An engine above the object or the valkey tier, in its I/O process, through a proxy to a real server
on this machine that holds 8,192 blocks. The blocks that are asked for are all absent, all present,
or present up to about the middle; they are asked for by an engine that knows nothing (cold), again
by the same engine (warm), and again when it believes no more that blocks are absent (later; what it
saw is believed until a read fails). Round trips are counted by the proxy and by the tier, and have
to agree. Cold times include the connections that are made then.

    <tier> <blocks> +<latency>ms <state>            milliseconds, beside the added latency
    <tier> trips <blocks> +<latency>ms <state>      round trips, beside one for each block
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from _proxy import ProxyProcess
from _report import Row, main

from kvtier.cli.bench_remote import fresh_keys
from kvtier.config import Settings
from kvtier.core.presence import Belief
from kvtier.core.types import BlockKey
from kvtier.envelope import HEADER_BYTES
from kvtier.namespace import Namespace
from kvtier.offloader import Offloader, configure_tiers
from kvtier.region import Geometry, Region
from kvtier.testing.s3_servers import ACCESS_KEY, SECRET_KEY, JuiceServer, SeaweedServer
from kvtier.testing.valkey_servers import ValkeyServer
from kvtier.tiers.registry import decode_settings, load_tier_type

BUCKET = "kvtier-bench"
NUM_KEYS = 8192
ROW_BYTES = 4096
NUM_SLOTS = 64
ABSENT_TTL_S = 2.5  # longer than the tier takes to tell its figures
SETTLE_MAX_S = 5.0
OPENED_S = 1.5
PATIENCE_S = 120.0
NAMESPACE = Namespace.of({"weights": "of the benchmark"})
ASKING = {"object": ("HEAD", "GET"), "valkey": ("EXISTS",)}

options = argparse.ArgumentParser(add_help=False)
options.add_argument("--tier", choices=list(ASKING), help="one of them")
options.add_argument("--server", choices=["seaweed", "juice"], default="seaweed", help="for S3")
options.add_argument("--quick", action="store_true", help="at 5 ms alone")


@dataclass(frozen=True)
class Asked:
    """One question: how long it took, and the round trips that the proxy and the tier counted."""

    seconds: float
    seen: int
    counted: int


class Engine:
    """Asks a tier for blocks, and loads none of them."""

    def __init__(self, tier: str, proxy: ProxyProcess) -> None:
        entry = {"type": tier, "name": "store", **options_of(tier, proxy.address[1])}
        settings = Settings.decode(
            {
                "cpu_bytes_to_use": NUM_SLOTS * ROW_BYTES,
                "absent_ttl_ms": int(ABSENT_TTL_S * 1e3),
                "secondary_tiers": [entry],
            }
        )
        self._region = Region.create(Geometry(NUM_SLOTS, ROW_BYTES, 1))
        tiers = configure_tiers(settings.secondary_tiers)
        self._offloader = Offloader(settings, tiers, self._region, NAMESPACE)
        self._asking = ASKING[tier]
        self._proxy = proxy
        self._requests = 0
        self._counted = (0, 0)

    def open(self) -> None:
        """Ask for one block, which opens the tier, and wait until it has told what that took."""
        self._resolve(fresh_keys(1))
        self._counted = self._counts(lambda *_: False, OPENED_S)

    def ask(self, keys: list[BlockKey], expected: list[bool]) -> Asked:
        """Have one request ask for all of them, until it is known of each."""
        seen, counted = self._counted
        seconds, answers = self._resolve(keys)
        wrong = [i for i in range(len(keys)) if answers[i] is not expected[i]]
        assert not wrong, f"{len(wrong)} wrong answers, the first for block {wrong[0]}"
        self._counted = self._counts(
            lambda seen_now, counted_now: seen_now - seen == counted_now - counted, SETTLE_MAX_S
        )
        return Asked(seconds, self._counted[0] - seen, self._counted[1] - counted)

    def _resolve(self, keys: list[BlockKey]) -> tuple[float, list[bool]]:
        """Seconds, and whether each is there."""
        core = self._offloader.core
        presence = core.ledger.presence[0]
        self._requests += 1
        name = f"request {self._requests}"
        started = time.monotonic()
        self._offloader.begin()
        request = core.open_request(name)
        for key in keys:
            core.lookup(request, key)
        known = (Belief.PRESENT, Belief.ABSENT)
        # the end of a step would promote what is known to be there
        while presence.get(keys[-1], time.monotonic()) not in known:
            self._offloader.end()
            assert time.monotonic() < started + PATIENCE_S, "no answer"
            time.sleep(0.0002)
            self._offloader.begin()
        seconds = time.monotonic() - started
        now = time.monotonic()
        answers = [presence.get(key, now) is Belief.PRESENT for key in keys]
        core.finish_request(name)
        self._offloader.end()
        return seconds, answers

    def _counts(self, until: Callable[[int, int], bool], max_s: float) -> tuple[int, int]:
        """Round trips by proxy and tier. The tier tells once a second, so wait until it has."""
        began = time.monotonic()
        while True:
            self._offloader.begin()
            self._offloader.end()
            figures = self._offloader.drivers[0].counters().figures
            seen, counted = self._seen(), int(figures.get("round_trips", 0))
            if until(seen, counted) or time.monotonic() > began + max_s:
                return seen, counted
            time.sleep(0.01)

    def _seen(self) -> int:
        counts = self._proxy.counts()
        return sum(counts.get(word, 0) for word in self._asking)

    def close(self) -> None:
        self._offloader.close()


def options_of(tier: str, port: int) -> dict[str, object]:
    if tier == "object":
        endpoint = f"http://127.0.0.1:{port}"
        place = {"url": f"s3://{BUCKET}/existence", "endpoint": endpoint, "allow_http": True}
        return {**place, "timeout_s": 60.0}
    return {"url": f"valkey://127.0.0.1:{port}", "request_timeout_ms": 60_000}


@contextmanager
def server_of(tier: str, kind: str) -> Iterator[tuple[str, int]]:
    """A server's address."""
    with tempfile.TemporaryDirectory() as directory:
        if tier == "valkey":
            with ValkeyServer(Path(directory)) as valkey:
                yield "127.0.0.1", valkey.port
            return
        with (SeaweedServer if kind == "seaweed" else JuiceServer)(Path(directory)) as store:
            store.make_bucket(BUCKET)
            yield store.address


def fill(tier: str, port: int, keys: list[BlockKey]) -> None:
    """Put blocks there, without the proxy."""
    tier_type = load_tier_type(tier, "type")
    given = decode_settings(tier_type, options_of(tier, port), "tier")
    opened = tier_type.open(given, NAMESPACE.digest, {})
    content = (memoryview(bytes(HEADER_BYTES)), memoryview(b"tiny"))
    failed = opened.write_batch(keys, [content] * len(keys))
    opened.close()
    assert not any(failed), next(filter(None, failed))


def rows_of(tier: str, delays_ms: list[int], kind: str) -> list[Row]:
    rows: list[Row] = []
    present, absent = fresh_keys(NUM_KEYS), fresh_keys(NUM_KEYS)
    half = NUM_KEYS // 2 + 5  # not where what is asked for together ends
    cases = {
        "absent": (absent, [False] * NUM_KEYS),
        "present": (present, [True] * NUM_KEYS),
        "half": (present[:half] + absent[half:], [True] * half + [False] * (NUM_KEYS - half)),
    }
    with server_of(tier, kind) as address:
        fill(tier, address[1], present)
        speaks = "http" if tier == "object" else "resp"
        with ProxyProcess(address, speaks) as proxy:
            for delay_ms in delays_ms:
                proxy.behave(delay_s=delay_ms / 1000)
                for case, (keys, expected) in cases.items():
                    engine = Engine(tier, proxy)
                    try:
                        rows += _states(engine, tier, case, keys, expected, delay_ms)
                    finally:
                        engine.close()
    return rows


def _states(
    engine: Engine, tier: str, case: str, keys: list[BlockKey], expected: list[bool], delay_ms: int
) -> list[Row]:
    rows: list[Row] = []
    engine.open()
    for state in ("cold", "warm") if all(expected) else ("cold", "warm", "later"):
        if state == "later":
            time.sleep(ABSENT_TTL_S)
        asked = engine.ask(keys, expected)
        shape = f"{NUM_KEYS} {case} +{delay_ms}ms {state}"
        if asked.seen != asked.counted:
            what = f"{tier} {shape}: the proxy counted {asked.seen} round trips"
            print(f"{what}, the tier {asked.counted}", file=sys.stderr)
            # without latency, answers may overtake the rest of a pipeline
            assert delay_ms == 0, "they do not agree"
        ms = asked.seconds * 1e3
        rows.append(Row(f"{tier} {shape}", ms, "ms", delay_ms, "added latency", "lower"))
        trips = (asked.counted, "round trips", NUM_KEYS, "a HEAD or an EXISTS per block")
        rows.append(Row(f"{tier} trips {shape}", *trips, "lower"))
    return rows


def measure() -> list[Row]:
    chosen = options.parse_known_args()[0]
    logging.disable(logging.WARNING)
    os.environ["AWS_ACCESS_KEY_ID"], os.environ["AWS_SECRET_ACCESS_KEY"] = ACCESS_KEY, SECRET_KEY
    delays_ms = [5] if chosen.quick else [0, 5, 20]
    rows: list[Row] = []
    for tier in [chosen.tier] if chosen.tier else list(ASKING):
        rows += rows_of(tier, delays_ms, chosen.server)
    return rows


if __name__ == "__main__":
    main(__doc__, measure, options)
