"""`kvtier bench fs`: that it measures, cleans up whatever happens, and refuses what cannot work."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from kvtier.cli import bench_fs
from kvtier.cli.app import app
from kvtier.cli.bench_fio import FioBest, find_fio, measure_fio, total_bytes
from kvtier.cli.bench_fs import Measured, Plan, check_free, repetitions
from kvtier.cli.bench_fs_jobs import JobTimes
from kvtier.cli.bench_report import Row, rows_json
from kvtier.errors import ConfigError, TierError

MIB = 1 << 20
SMALL = ("--sizes", "64KiB,256KiB", "--jobs", "1,4")


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["bench", "fs", *map(str, arguments)])


@pytest.fixture
def without_fio(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))


@pytest.fixture
def place(tmp_path: Path) -> Path:
    directory = tmp_path / "place"
    directory.mkdir()
    (directory / "mine.txt").write_bytes(b"mine")
    return directory


def test_measures_and_leaves_nothing(place: Path, without_fio: None) -> None:
    done = run(place, *SMALL, "--json")
    assert done.exit_code == 0, done.output
    assert "fio is not installed" in done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert {row["name"] for row in rows} == {
        f"fs {what} {size} x {job}"
        for what in ("store", "load", "lookup present", "lookup absent")
        for size in ("64KiB", "256KiB")
        for job in (1, 4)
    }
    assert all(row["value"] > 0 for row in rows)
    assert {row["ratio"] for row in rows} == {None}
    assert [path.name for path in place.iterdir()] == ["mine.txt"]


@pytest.mark.skipif(find_fio() is None, reason="fio is not installed")
def test_beside_fio(place: Path) -> None:
    done = run(place, "--sizes", "1MiB", "--jobs", "2", "--json")
    assert done.exit_code == 0, done.output
    rows = {row["name"]: row for row in json.loads(done.stdout)["rows"]}
    for name in ("fs store 1MiB x 2", "fs load 1MiB x 2"):
        row = rows[name]
        assert row["baseline_name"].startswith("fio ")
        assert row["baseline_name"].endswith("depth 2")
        assert row["ratio"] == row["value"] / row["baseline"]
    assert [path.name for path in place.iterdir()] == ["mine.txt"]


def test_a_failing_fio_says_why(place: Path, tmp_path: Path) -> None:
    program = tmp_path / "fio"
    program.write_text("#!/bin/sh\necho no such engine >&2\nexit 3\n")
    program.chmod(0o700)
    with pytest.raises(TierError, match="no such engine"):
        measure_fio(str(program), place, MIB, 1, False)


def test_an_interrupt_just_after_fio_was_started_ends_it(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[subprocess.Popen[str]] = []

    class Interrupted(subprocess.Popen[str]):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            started.append(self)
            os.kill(os.getpid(), signal.SIGINT)

    program = tmp_path / "fio"
    program.write_text("#!/bin/sh\nexec sleep 600\n")
    program.chmod(0o700)
    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        measure_fio(str(program), place, MIB, 1, False)
    assert [process.returncode for process in started] == [-signal.SIGKILL]


def test_a_table_and_a_picture(place: Path, tmp_path: Path, without_fio: None) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "p.png"
    done = run(place, *SMALL, "--plot", picture)
    assert done.exit_code == 0, done.output
    assert "fs store 64KiB x 4" in done.stdout
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_without_matplotlib_the_message_names_the_extra_at_once(place: Path) -> None:
    program = (
        "import sys; sys.modules['matplotlib'] = None\nfrom kvtier.cli.main import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "bench", "fs", str(place), "--plot", "p.png"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "kvtier[plot]" in done.stderr
    assert "Traceback" not in done.stderr
    assert [path.name for path in place.iterdir()] == ["mine.txt"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_leaves_nothing(place: Path, number: signal.Signals) -> None:
    """Stopped once blocks lie on the disk."""
    program = "from kvtier.cli.main import main; main()"
    process = subprocess.Popen(
        [sys.executable, "-c", program, "bench", "fs", str(place), *SMALL],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    between_looks = threading.Event()
    while not any("namespace.json" in names for _, _, names in os.walk(place)):
        assert process.poll() is None, process.communicate()
        between_looks.wait(0.001)  # which leaves the processor to it
    process.send_signal(number)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    assert "Interrupted" in stderr
    assert [path.name for path in place.iterdir()] == ["mine.txt"]


@pytest.mark.parametrize(
    "options",
    [
        ("--sizes", "5"),
        ("--sizes", "64 parsecs"),
        ("--sizes", ""),
        ("--sizes", "2GiB"),
        ("--jobs", "0"),
        ("--jobs", "-1"),
        ("--jobs", "one"),
        ("--jobs", "100000"),
        ("--threads", "1"),
        ("--layout", "heap"),
        ("--sizes", "1GiB", "--jobs", "65536"),  # more than any disk has
    ],
)
def test_misuse(place: Path, options: tuple[str, ...]) -> None:
    done = run(place, *options)
    assert done.exit_code == 2, done.output
    assert done.stderr
    assert [path.name for path in place.iterdir()] == ["mine.txt"]


def test_a_directory_that_is_not_there() -> None:
    done = run("/no/such/directory")
    assert done.exit_code == 2
    assert "/no/such/directory" in done.stderr


def test_a_disk_without_room_is_refused_before_anything_is_written(place: Path) -> None:
    free = os.statvfs(place).f_bavail * os.statvfs(place).f_frsize
    with pytest.raises(ConfigError, match="to spare"):
        check_free(place, free)
    check_free(place, 0)


def test_no_time_means_no_shape(place: Path, without_fio: None) -> None:
    plan = Plan([64 << 10], [1, 4], "auto", None, seconds=-1.0)
    notes: list[str] = []
    measured = bench_fs.measure(plan, place, lambda _: None, notes.append)
    assert measured.times == {}
    assert list(place.iterdir()) == [place / "mine.txt"]
    assert [note for note in notes if "2 shapes were left out" in note]


def test_rows_compare_with_the_best_of_fio() -> None:
    times = JobTimes(store=0.5, load=0.25, present=0.001, absent=0.002)
    measured = Measured(
        {(1_000_000, 1000): times}, {(1_000_000, 1000): FioBest(4.0, 8.0, "fio a", "fio b")}
    )
    store, load, present, absent = measured.rows()
    assert (store.value, store.baseline, store.ratio, store.baseline_name) == (
        2.0,
        4.0,
        0.5,
        "fio a",
    )
    assert (load.value, load.baseline, load.ratio, load.baseline_name) == (4.0, 8.0, 0.5, "fio b")
    assert (present.value, absent.value) == (pytest.approx(1.0), pytest.approx(2.0))
    assert present.better == "lower"


def test_the_best_of_two_is_taken_per_direction() -> None:
    one, two = FioBest(1.0, 5.0, "a", "a"), FioBest(2.0, 4.0, "b", "b")
    assert one.better(two) == FioBest(2.0, 5.0, "b", "a")


def test_small_shapes_are_repeated_and_large_ones_are_not() -> None:
    assert repetitions(65_536, 1) == 5
    assert repetitions(16 * MIB, 256) == 1
    assert total_bytes(16 * MIB) % (16 * MIB) == 0
    assert total_bytes(12_288) % 12_288 == 0


def test_json_has_the_fields_of_every_benchmark() -> None:
    row = Row("x", 2.0, "GB/s", 4.0, "y", "higher")
    assert rows_json([row]) == {
        "rows": [
            {
                "name": "x",
                "value": 2.0,
                "unit": "GB/s",
                "baseline": 4.0,
                "baseline_name": "y",
                "better": "higher",
                "ratio": 0.5,
            }
        ]
    }
