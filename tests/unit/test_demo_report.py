"""The demo's verdict: its JSON, its table, and what makes it fail."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

from kvtier.cli.demo import connector_config, hit_tokens_by_tier
from kvtier.cli.demo_report import Phase, Report

OWN_TIER = {"cold": None, "device": "device", "dram": "dram", "disk": "fs", "restart": "fs"}


def good_report() -> Report:
    return Report(
        [
            Phase(
                name=name,
                ttft_s=3.0 if tier is None else 0.25,
                recompute_ttft_s=3.0,
                tokens_equal=True,
                hit_tokens={"device": 0, "dram": 0, "fs": 0} | ({tier: 5984} if tier else {}),
            )
            for name, tier in OWN_TIER.items()
        ]
    )


def with_phase(name: str, **changes: object) -> Report:
    return Report([replace(p, **changes) if p.name == name else p for p in good_report().phases])


HIT_PHASES = ["device", "dram", "disk", "restart"]


def test_a_run_in_which_every_tier_served_equal_tokens_is_good() -> None:
    assert good_report().ok
    assert good_report().problems() == []


def test_json_has_exactly_the_promised_fields() -> None:
    found = json.loads(good_report().as_json())
    assert set(found) == {"phases", "ok"}
    assert found["ok"] is True
    assert [phase["name"] for phase in found["phases"]] == [
        "cold",
        "device",
        "dram",
        "disk",
        "restart",
    ]
    for phase in found["phases"]:
        assert set(phase) == {
            "name",
            "ttft_s",
            "recompute_ttft_s",
            "ratio",
            "tokens_equal",
            "hit_tokens",
        }
    disk = found["phases"][3]
    assert disk["ratio"] == 12.0  # recompute / time to first token: how many times faster
    assert disk["tokens_equal"] is True
    assert disk["hit_tokens"] == {"device": 0, "dram": 0, "fs": 5984}


def test_json_is_one_line() -> None:
    assert "\n" not in good_report().as_json()


@pytest.mark.parametrize("name", HIT_PHASES)
def test_other_tokens_in_a_hit_are_a_failure(name: str) -> None:
    report = with_phase(name, tokens_equal=False)
    assert not report.ok
    assert json.loads(report.as_json())["ok"] is False
    assert report.problems() == [f"phase {name}: greedy tokens differ from those of the device hit"]


@pytest.mark.parametrize("name", HIT_PHASES)
def test_a_phase_that_its_own_tier_did_not_serve_is_a_failure(name: str) -> None:
    others = {tier: 5984 for tier in ("device", "dram", "fs") if tier != OWN_TIER[name]}
    report = with_phase(name, hit_tokens=others)
    assert not report.ok
    assert report.problems() == [f"phase {name}: no token was served by {OWN_TIER[name]}"]


def test_a_cold_prefill_may_differ_in_its_tokens_and_needs_no_hit() -> None:
    report = with_phase("cold", tokens_equal=False, hit_tokens={})
    assert report.ok
    assert json.loads(report.as_json())["phases"][0]["tokens_equal"] is False


@pytest.mark.parametrize("name", list(OWN_TIER))
def test_a_phase_that_was_not_measured_is_a_failure(name: str) -> None:
    report = Report([phase for phase in good_report().phases if phase.name != name])
    assert report.problems() == [f"phase {name} was not measured"]


def test_the_table_has_a_row_per_phase_and_fits_a_terminal() -> None:
    out = io.StringIO()
    report = with_phase("disk", tokens_equal=False)
    Console(file=out, width=80).print(report.as_table())
    rows = [line.split() for line in out.getvalue().splitlines() if line.startswith("│")]
    cells = [[cell for cell in row if cell != "│"] for row in rows]
    assert [row[0] for row in cells] == list(OWN_TIER)
    assert cells[3] == ["disk", "0.250", "s", "3.000", "s", "12.0", "x", "0", "0", "5,984", "no"]
    assert cells[4][-1] == "yes"


def test_hits_are_reported_by_tier() -> None:
    found = hit_tokens_by_tier(
        {"device": 32, "host": 64, "disk": 96, "p2p": 0, "external_unspecified": 8}
    )
    assert found == {"device": 32, "dram": 64, "fs": 96, "external_unspecified": 8}


def test_a_reset_keeps_what_is_on_disk(tmp_path) -> None:
    config = connector_config(tmp_path)
    assert config["weights_epoch"] == "demo"
    assert config["secondary_tiers"] == [{"type": "fs", "root_dir": str(tmp_path)}]
