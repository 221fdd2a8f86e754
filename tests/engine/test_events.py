"""What the world is told: KV events by tier, and metrics."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from small_engines import block_files

from kvtier.tiers.fs.marker import mark

pytestmark = pytest.mark.engine


class Told:
    """Replays the events of an engine.

    Attributes:
        resident: blocks that are there if one believes the events, by medium and ownership.
    """

    def __init__(self, engine) -> None:
        self._engine = engine
        self.resident: dict[tuple[str, str | None], set[str]] = {CPU: set(), SHELF: set()}

    def more(self) -> dict[tuple[str, str, str | None], list[str]]:
        """Blocks of new events, by kind, medium and ownership; checked against what is there."""
        self._engine.call("nudge")  # like vLLM's own, events of a reset wait for a step
        self._engine.quiet()
        found: dict[tuple[str, str, str | None], list[str]] = {}
        for event in self._engine.call("events"):
            if event["medium"] == "GPU" or event["kind"] == "AllBlocksCleared":
                continue
            place = event["medium"], event["ownership"]
            found.setdefault((event["kind"], *place), []).extend(event["hashes"])
            for block in event["hashes"]:
                if event["kind"] == "BlockStored":
                    assert block not in self.resident[place], "it was there already"
                    self.resident[place].add(block)
                else:
                    self.resident[place].remove(block)
        assert len(self.resident[CPU]) == self._engine.call("look")["used"]
        return found


CPU = ("CPU", None)
SHELF = ("STORAGE", "shelf")
STORED, REMOVED = "BlockStored", "BlockRemoved"


def test_arrivals_and_departures_by_tier(engines, prompt, tmp_path) -> None:
    mark(tmp_path, "files")
    with tempfile.TemporaryDirectory() as short:  # names of such sockets may not be long
        endpoint = f"ipc://{Path(short) / 'events'}"
        events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": endpoint}
        engine = engines.start(
            "gqa",
            engine={"kv_events_config": events},
            secondary_tiers=[{"type": "fs", "name": "shelf", "root_dir": str(tmp_path)}],
            cpu_bytes_to_use="1MiB",
        )
        engine.call("subscribe", endpoint=endpoint)
        engine.drop_pool()
        engine.call("nudge")
        engine.call("events")
        told = Told(engine)

        first = prompt(165)
        expected = engine.reference(first)
        news = told.more()
        blocks = set(news[STORED, *CPU])
        assert len(blocks) == 5
        assert set(news[STORED, *SHELF]) == blocks
        assert not any(kind == REMOVED for kind, _, _ in news)

        engine.generate(prompt(330))  # 10 blocks, where 21 have room
        assert (REMOVED, *CPU) not in told.more()
        engine.generate(prompt(330))
        news = told.more()
        assert set(news[REMOVED, *CPU]) <= blocks
        assert len(news[REMOVED, *CPU]) == 4
        assert (REMOVED, *SHELF) not in news

        engine.drop_pool()
        news = told.more()
        assert len(news[REMOVED, *CPU]) == 21, "a reset tells what it takes"
        assert (REMOVED, *SHELF) not in news, "and that the tier keeps it"

        answer = engine.generate(first)
        assert (answer.disk, answer.tokens) == (160, expected)
        assert set(told.more()[STORED, *CPU]) == blocks, "promoted"

        engine.drop_pool()
        for path in block_files(tmp_path):
            path.unlink()
        told.more()
        answer = engine.generate(first)
        assert (answer.cached, answer.tokens) == (0, expected)
        news = told.more()
        assert set(news[REMOVED, *SHELF]) == blocks, "noticed"
        assert set(news[STORED, *SHELF]) == blocks, "written again"
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
