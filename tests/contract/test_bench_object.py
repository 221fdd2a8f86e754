"""`kvtier bench object`: that it measures, leaves nothing, and refuses what cannot work."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("obstore")

from object_tiers import BUCKET, settings_for
from typer.testing import CliRunner, Result

from kvtier.cli import bench_object as module
from kvtier.cli.app import app
from kvtier.cli.tier_options import tier_options
from kvtier.errors import ConfigError, TierError
from kvtier.tiers.object.store import open_store

if TYPE_CHECKING:
    from kvtier.testing.s3_servers import S3Server

SMALL = ("--sizes", "64KiB", "--in-flight", "1,4", "--seconds", "1")


def run(server: S3Server, *arguments: str, url: str = f"s3://{BUCKET}/bench") -> Result:
    options = (f"--option=endpoint={server.url}", "-o", "allow_http=true")
    return CliRunner().invoke(app, ["bench", "object", url, *options, *arguments])


def left(server: S3Server) -> list[str]:
    import obstore

    store = open_store(settings_for(server, url=f"s3://{BUCKET}/bench"))
    return [entry["path"] for entry in obstore.list(store.client).collect()]


def test_measures_and_leaves_nothing(juice: S3Server, s3_credentials: None) -> None:
    done = run(juice, *SMALL, "--json")
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout)["rows"]
    assert {row["name"] for row in rows} == {
        *(f"object {what} 64KiB x {count}" for what in ("store", "load") for count in (1, 4)),
        "object main thread tick p99",
    }
    assert all(row["value"] > 0 and row["baseline"] > 0 for row in rows)
    assert left(juice) == []


def test_a_failure_leaves_nothing(juice, s3_credentials, monkeypatch) -> None:
    def fail(plan, bare, doing):
        bare.put("name", memoryview(b"x"))
        raise TierError("broken")

    monkeypatch.setattr(module, "measure", fail)
    done = run(juice, *SMALL)
    assert (done.exit_code, "broken" in done.stderr) == (1, True)
    assert left(juice) == []


def test_misuse_is_told(juice, s3_credentials) -> None:
    for arguments, message in (
        (("--sizes", "0"), "--sizes = '0' must be numbers from 1"),
        (("--in-flight", "1,x"), "--in-flight = '1,x' must be numbers"),
        (("-o", "endpoint"), "must be NAME=VALUE"),
        (("-o", "colour=red"), "colour is no option of this tier"),
    ):
        done = run(juice, *arguments)
        assert done.exit_code == 2, done.output
        assert message in done.stderr.replace("\n", " ")
    done = run(juice, url="s3://kvtier-nowhere/x")
    assert (done.exit_code, "does not exist" in done.stderr) == (2, True)


def test_options_have_the_values_of_settings() -> None:
    pairs = ["threads=8", "timeout_s=2.5", "allow_http=true", "region=eu-west-1", "endpoint=a=b"]
    assert tier_options("s3://b", pairs) == {
        "url": "s3://b",
        "threads": 8,
        "timeout_s": 2.5,
        "allow_http": True,
        "region": "eu-west-1",
        "endpoint": "a=b",
    }
    with pytest.raises(ConfigError, match="NAME=VALUE"):
        tier_options("s3://b", ["=x"])
