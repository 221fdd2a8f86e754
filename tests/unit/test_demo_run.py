"""The demo's course: what is asked of which engine, and what was emptied before.

The engine is a stand-in that keeps sets of prompts; directories are real.
"""

from __future__ import annotations

import io
import json
from contextlib import contextmanager
from pathlib import Path

import pytest
from rich.console import Console

from kvtier.cli import demo, demo_tiers
from kvtier.cli.demo_lines import Generated
from kvtier.cli.demo_plan import parse_tiers, plan_for
from kvtier.cli.demo_tiers import Place

SOURCE = {"device": "device", "primary": "host", "fs": "disk", "object": "external_unspecified"}


class StandIn:
    """An engine whose device cache holds one prompt, and whose tiers are directories."""

    def __init__(self, tiers: dict[str, Path], calls: list[str]) -> None:
        self.device: list[int] = []
        self.pool: set[str] = set()
        self.tiers = tiers
        self.calls = calls

    def generate(self, prompt: list[int], tokens: int) -> Generated:
        name = str(hash(tuple(prompt)))
        found = {
            "device": prompt == self.device,
            "primary": name in self.pool,
            **{tier: (place / name).exists() for tier, place in self.tiers.items()},
        }
        server = next((each for each, is_there in found.items() if is_there), None)
        self.device = prompt
        self.pool.add(name)
        for place in self.tiers.values():
            (place / name).touch()
        self.calls.append(f"from {server}")
        return Generated(
            tokens=[1] * tokens,
            ttft_s=0.1 if server else 1.0,
            hit_tokens={SOURCE[server]: len(prompt)} if server else {},
            tier_tokens={
                each: len(prompt) * (each == server) for each in found if each != "device"
            },
        )

    def settle(self, timeout_s: float) -> None:
        self.calls.append("settle")

    def drop_pool(self, timeout_s: float) -> None:
        self.calls.append("drop_pool")
        self.device = []
        self.pool.clear()


@pytest.fixture
def calls(monkeypatch, tmp_path) -> list[str]:
    """What was asked of engines; those are stand-ins, and so is the object store."""
    calls: list[str] = []

    @contextmanager
    def store(directory: Path):
        place = directory / "store"
        place.mkdir()
        calls.append("store starts")
        try:
            yield Place({"type": "object", "root_dir": str(place)}, environment={"STORE": "here"})
        finally:
            calls.append("store ends")

    @contextmanager
    def life(start, log, environment):
        tiers = {each["type"]: each["root_dir"] for each in start.connector["secondary_tiers"]}
        assert environment.get("STORE") == ("here" if "object" in tiers else None)
        calls.append("engine starts")
        yield StandIn({tier: Path(place) for tier, place in tiers.items()}, calls)
        calls.append("engine ends")

    monkeypatch.setattr(demo, "engine_life", life)
    monkeypatch.setitem(demo_tiers._KINDS, "object", store)
    return calls


@pytest.fixture
def model(tmp_path) -> Path:
    path = tmp_path / "some-model"
    path.mkdir()
    (path / "config.json").write_text('{"vocab_size": 5000, "max_position_embeddings": 400}')
    return path


def run(tiers: str, model: Path, keep: Path | None = None) -> dict[str, dict[str, int]]:
    options = demo.DemoOptions(keep=keep, model=model, plan=plan_for(parse_tiers(tiers)))
    report = demo.run_demo(options, Console(file=io.StringIO()))
    assert report.ok, report.problems()
    return {each["name"]: each["hit_tokens"] for each in json.loads(report.as_json())["phases"]}


def test_fs_alone(calls: list[str], model: Path) -> None:
    found = run("fs", model)
    hit = 384  # the longest sequence without its continuation
    assert found == {
        "cold": {"device": 0, "dram": 0, "fs": 0},
        "device": {"device": hit, "dram": 0, "fs": 0},
        "dram": {"device": 0, "dram": hit, "fs": 0},
        "disk": {"device": 0, "dram": 0, "fs": hit},
        "restart": {"device": 0, "dram": 0, "fs": hit},
    }
    none = "from None"
    assert calls == [
        *("engine starts", none, none, "from device", none, none, none, "settle", "from primary"),
        *("settle", "drop_pool", "from fs", "engine ends"),
        *("engine starts", none, "from fs", "engine ends"),
    ]


def test_a_lost_disk(calls: list[str], model: Path, tmp_path: Path) -> None:
    found = run("object,fs", model, tmp_path / "kept")
    assert list(found) == ["cold", "device", "dram", "disk", "restart", "object", "promoted"]
    assert found["object"] == {"device": 0, "dram": 0, "fs": 0, "object": 384}
    assert found["promoted"] == {"device": 0, "dram": 0, "fs": 384, "object": 0}
    assert (calls[0], calls[-2:]) == ("store starts", ["engine ends", "store ends"])
    assert calls[-8:-2] == [
        *("engine starts", "from None", "from object", "settle", "drop_pool", "from fs"),
    ]
    assert calls.count("engine starts") == 3
    assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == ["store", "tier"]


def test_places_end_when_an_engine_fails(calls: list[str], model: Path, monkeypatch) -> None:
    def fail(self: StandIn, timeout_s: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(StandIn, "drop_pool", fail)
    with pytest.raises(KeyboardInterrupt):
        run("object", model)
    assert calls[-1] == "store ends"
