"""What the world is told: KV events by tier, and metrics."""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path

import pytest

pytestmark = pytest.mark.engine


def test_arrivals_and_departures_by_tier(engines, prompt, tmp_path) -> None:
    with tempfile.TemporaryDirectory() as short:  # names of such sockets may not be long
        endpoint = f"ipc://{Path(short) / 'events'}"
        engine = engines.start(
            "gqa",
            engine={
                "kv_events_config": {
                    "enable_kv_cache_events": True,
                    "publisher": "zmq",
                    "endpoint": endpoint,
                }
            },
            secondary_tiers=[{"type": "fs", "name": "shelf", "root_dir": str(tmp_path)}],
            cpu_bytes_to_use="1MiB",  # 21 blocks
        )
        engine.call("subscribe", endpoint=endpoint)

        def told() -> dict[tuple[str, str, str | None], Counter]:
            engine.quiet()
            found: dict[tuple[str, str, str | None], Counter] = {}
            for event in engine.call("events"):
                if event["medium"] != "GPU":
                    key = event["kind"], event["medium"], event["ownership"]
                    found.setdefault(key, Counter()).update(event["hashes"])
            return found

        first = prompt(200)
        expected = engine.reference(first)
        events = told()
        on_cpu = events[("BlockStored", "CPU", None)]
        assert set(on_cpu.values()) == {1}
        assert len(on_cpu) == 6
        assert events[("BlockStored", "STORAGE", "shelf")] == on_cpu
        assert not any(kind == "BlockRemoved" for kind, _, _ in events)

        engine.generate(prompt(600))  # 18 blocks: some of the first have to go
        events = told()
        removed = events[("BlockRemoved", "CPU", None)]
        assert removed
        assert set(removed) <= set(on_cpu) | set(events[("BlockStored", "CPU", None)])
        assert ("BlockRemoved", "STORAGE", "shelf") not in events

        engine.drop_device()
        told()
        files = [p for p in tmp_path.glob("*/??/??/*") if p.name[:64] in on_cpu]
        engine.drop_pool()
        events = told()
        assert events[("BlockRemoved", "CPU", None)], "a reset tells what it takes"

        answer = engine.generate(first)
        assert answer.tokens == expected
        assert answer.disk == 192
        events = told()
        assert set(events[("BlockStored", "CPU", None)]) >= set(on_cpu), "promoted"

        engine.drop_pool()
        for path in tmp_path.glob("*/??/??/*"):
            path.unlink()
        told()
        answer = engine.generate(first)
        assert answer.tokens == expected
        assert answer.cached == 0
        events = told()
        assert set(events[("BlockRemoved", "STORAGE", "shelf")]) >= set(on_cpu), "found out"
        assert events[("BlockStored", "STORAGE", "shelf")] == on_cpu, "and written again"
        assert files is not None
        engine.stop()


def test_metrics_reach_vllms_own_reader(engines, prompt, tmp_path) -> None:
    engine = engines.start("gqa", tmp_path)
    asked = prompt(500)
    engine.reference(asked)
    engine.drop_device()
    engine.generate(asked)
    engine.drop_pool()
    engine.generate(asked)
    figures = engine.quiet()
    row = engine.call("look")["row_bytes"]
    expected = {
        "vllm:kvtier_hit_blocks{primary}": 15,
        "vllm:kvtier_hit_blocks{fs}": 15,
        "vllm:kvtier_hit_tokens{primary}": 480,
        "vllm:kvtier_hit_tokens{fs}": 480,
        "vllm:kvtier_read_bytes{fs}": 15 * row,
        "vllm:kvtier_write_bytes{fs}": 15 * row,
        "vllm:kvtier_used_slots{primary}": 15,
        "vllm:kvtier_total_slots{primary}": (64 << 20) // row,
        "vllm:kvtier_pinned_slots{primary}": 0,
        "vllm:kvtier_pinned_slots{fs}": 0,
        "vllm:kvtier_jobs_in_flight{fs}": 0,
    }
    assert {name: figures.get(name) for name in expected} == expected
    engine.stop()
