"""The demo's verdict: its JSON, its table, and what makes it fail."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

from kvtier.cli.demo import PATIENCE_MS, connector_config
from kvtier.cli.demo_plan import plan_for
from kvtier.cli.demo_report import DEFAULT_PLAN, Phase, Report, hit_tokens_of
from kvtier.config import Settings

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


def report_for(*tiers: str) -> Report:
    """A good one of other tiers."""
    plan = plan_for(tiers)
    phases = [
        Phase(
            name=step.name,
            ttft_s=12.345 if step.tier is None else 0.1,
            recompute_ttft_s=12.345,
            tokens_equal=True,
            hit_tokens=dict.fromkeys(plan.sources, 0) | ({step.tier: 5984} if step.tier else {}),
        )
        for step in plan.steps
    ]
    return Report(phases, plan)


def lines_of(report: Report) -> list[str]:
    """The table in a terminal of 80 columns."""
    out = io.StringIO()
    Console(file=out, width=80).print(report.as_table())
    return [line.rstrip() for line in out.getvalue().splitlines()]


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


def test_the_default_needs_no_notes() -> None:
    assert [line.split("│")[1].strip() for line in lines_of(good_report()) if "│" in line] == list(
        OWN_TIER
    )
    assert not any("emptied" in line for line in lines_of(good_report()))


def test_other_tiers_have_columns_of_their_own_and_phases_that_are_explained() -> None:
    report = report_for("fs", "valkey", "object")
    assert report.ok
    lines = lines_of(report)
    assert max(map(len, lines)) <= 80
    rows = {line.split()[0]: line.split()[1:] for line in lines if line.endswith(("yes", "no"))}
    assert list(rows) == [*OWN_TIER, "valkey", "object", "promoted"]
    own = ["5,984" if tier == "valkey" else "0" for tier in report.plan.sources]
    assert rows["valkey"] == ["0.100", "s", "12.35", "s", "123", "x", *own, "yes"]
    assert rows["cold"] == ["12.35", "s", "12.35", "s", "1.0", "x", *["0"] * 5, "yes"]
    notes = [line for line in lines if "emptied" in line]
    assert "object    the engine ended, fs and valkey were emptied, another one began" in notes
    for step in report.plan.steps:
        assert any(line.startswith(step.name) and step.note in line for line in lines), step


def test_json_of_other_tiers_has_the_same_shape() -> None:
    found = json.loads(report_for("fs", "object").as_json())
    assert set(found) == {"phases", "ok"}
    assert [phase["name"] for phase in found["phases"]] == [*OWN_TIER, "object", "promoted"]
    default = json.loads(good_report().as_json())["phases"][0]
    for phase in found["phases"]:
        assert set(phase) == set(default)
    assert found["phases"][-2]["hit_tokens"] == {"device": 0, "dram": 0, "fs": 0, "object": 5984}


@pytest.mark.parametrize("name", ["valkey", "restart", "object", "promoted"])
def test_phases_of_other_tiers_are_judged_alike(name: str) -> None:
    good = report_for("valkey", "object")
    tier = {step.name: step.tier for step in good.plan.steps}[name]
    for changes, problem in (
        ({"hit_tokens": {"device": 5, "fs": 5}}, f"phase {name}: no token was served by {tier}"),
        (
            {"tokens_equal": False},
            f"phase {name}: greedy tokens differ from those of the device hit",
        ),
    ):
        phases = [replace(p, **changes) if p.name == name else p for p in good.phases]
        assert Report(phases, good.plan).problems() == [problem]
    missing = Report([p for p in good.phases if p.name != name], good.plan)
    assert missing.problems() == [f"phase {name} was not measured"]


def test_hits_are_counted_by_vllm_for_the_device_and_by_kvtier_for_the_rest() -> None:
    by_source = {"device": 32, "host": 64, "disk": 96, "external_unspecified": 8, "p2p": 0}
    by_tier = {"primary": 64, "fs": 96, "object": 8, "valkey": 0}
    assert hit_tokens_of(by_source, by_tier, plan_for(("fs", "object"))) == {
        "device": 32,
        "dram": 64,
        "fs": 96,
        "object": 8,
    }
    assert hit_tokens_of({"device": 32}, {}, DEFAULT_PLAN) == {"device": 32, "dram": 0, "fs": 0}


def test_a_hit_that_vllm_counts_and_kvtier_does_not_is_told() -> None:
    found = hit_tokens_of({"device": 32, "disk": 96}, {"fs": 64}, DEFAULT_PLAN)
    assert found == {"device": 32, "dram": 0, "fs": 64, "unattributed": 32}


def test_a_reset_keeps_what_is_in_the_tiers() -> None:
    one = {"type": "fs", "root_dir": "/place"}
    config = connector_config([one])
    assert config["weights_epoch"] == "demo"
    assert config["secondary_tiers"] == [one]
    assert not {"cascade_share", "tier_stall_ms", "job_deadline_ms"} & set(config)


@pytest.mark.parametrize("kinds", [("fs",), ("object",), ("valkey", "object"), ("fs", "object")])
def test_the_configuration_is_one_that_kvtier_takes(kinds: tuple[str, ...]) -> None:
    settings = Settings.decode(connector_config([{"type": kind} for kind in kinds]))
    assert [tier.type for tier in settings.secondary_tiers] == list(kinds)
    patient = settings.tier_stall_ms == settings.job_deadline_ms == PATIENCE_MS
    assert patient == (kinds != ("fs",))


def test_a_prompt_fits_the_share_of_each_of_several_tiers() -> None:
    config = connector_config([{"type": "fs"}, {"type": "valkey"}, {"type": "object"}])
    shares = config["cascade_share"], config["promotion_share"]
    assert sum(shares) <= 0.9  # what the settings allow
    prompt_bytes = 6000 * 12 * 2 * 4 * 64 * 4  # tokens, layers, K and V, heads, width, float32
    assert shares[0] / 3 * (1 << 30) > prompt_bytes
    assert shares[1] / 2 * (1 << 30) > prompt_bytes
