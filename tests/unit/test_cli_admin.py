"""The admin commands as a person or a script meets them: output, JSON, exit codes, refusals."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from kvtier.cli import admin_archive
from kvtier.cli.admin_options import age_text, parse_age, sample_size, size_text
from kvtier.cli.app import app
from kvtier.envelope import HEADER_BYTES
from kvtier.errors import ConfigError
from kvtier.testing.blocks import BLOCK_BYTES, NAMESPACE, key_of
from kvtier.testing.fs_blocks import make_namespace, put_block
from kvtier.tiers.fs.marker import mark

OTHER = "f" * 64
BLOCK = HEADER_BYTES + BLOCK_BYTES


def run(*arguments: object, stdin: str | bytes | None = None) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], input=stdin)


def run_json(*arguments: object, code: int = 0):
    done = run(*arguments, "--json")
    assert done.exit_code == code, done.output
    return json.loads(done.stdout)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Ten blocks, block `i` last used `i` days ago; beside an empty namespace."""
    directory = tmp_path / "root"
    directory.mkdir()
    namespace = make_namespace(directory, label="prod")
    now = time.time()
    for i in range(10):
        put_block(namespace, i, used_s=now - i * 86_400)
    make_namespace(directory, OTHER)
    return directory


def files(root: Path) -> set[str]:
    return {path.name for path in root.rglob("*") if path.is_file() and len(path.name) == 72}


class TestLs:
    def test_as_a_table(self, root: Path) -> None:
        (root / "notes.txt").write_bytes(b"")
        done = run("ls", root)
        assert done.exit_code == 0
        for words in (NAMESPACE[:16], OTHER[:16], "prod", "TinyForCausalLM bfloat16", "files"):
            assert words in done.stdout
        assert "2 namespaces, 10 blocks, 680.0 KiB" in done.stdout
        assert "1 foreign file," in done.stderr
        assert str(root / "notes.txt") in done.stderr

    def test_as_json(self, root: Path) -> None:
        (root / "notes.txt").write_bytes(b"")
        found = run_json("ls", root)
        assert found["total"] == {"namespaces": 2, "blocks": 10, "bytes": 10 * BLOCK}
        assert found["foreign"] == {"count": 1, "paths": [str(root / "notes.txt")]}
        first, second = found["namespaces"]
        assert first["namespace"] == NAMESPACE
        assert first["layouts"] == {
            "files": {"blocks": 10, "bytes": 10 * BLOCK, "disk_bytes": 10 * BLOCK}
        }
        assert first["description"]["facts"]["layout"] == {"row_bytes": BLOCK_BYTES}
        assert abs(first["last_use_s"] - time.time()) < 60
        assert not first["live"]
        assert (second["namespace"], second["blocks"], second["last_use_s"]) == (OTHER, 0, None)

    def test_a_live_namespace(self, root: Path) -> None:
        with open(root / OTHER / "namespace.json", "rb") as held:
            fcntl.flock(held, fcntl.LOCK_SH)
            live = {row["namespace"]: row["live"] for row in run_json("ls", root)["namespaces"]}
        assert live == {NAMESPACE: False, OTHER: True}

    def test_several_roots(self, root: Path, tmp_path: Path) -> None:
        second = tmp_path / "second"
        second.mkdir()
        put_block(make_namespace(second), 77)
        found = run_json("ls", root, second)
        assert found["total"]["blocks"] == 11
        assert {row["root"] for row in found["namespaces"]} == {str(root), str(second)}
        assert str(second) in run("ls", root, second).stdout

    def test_an_empty_directory(self, tmp_path: Path) -> None:
        assert run_json("ls", tmp_path)["total"] == {"namespaces": 0, "blocks": 0, "bytes": 0}

    def test_the_blocks_of_one(self, root: Path) -> None:
        found = run_json("ls", root, "--blocks", NAMESPACE[:4])
        assert [block["key"] for block in found["blocks"]] == [key_of(i).hex() for i in range(10)]
        assert found["blocks"][0]["created_s"] == 1_700_000_000
        assert found["blocks"][0]["bytes"] == BLOCK
        lines = run("ls", root, "--blocks", NAMESPACE[:4]).stdout.splitlines()
        assert [line.split()[-1] for line in lines[1:]] == [key_of(i).hex() for i in range(10)]

    @pytest.mark.parametrize(
        "arguments", [("ls",), ("ls", "/no/such"), ("ls", "{root}", "--blocks", "0123")]
    )
    def test_misuse(self, root: Path, arguments: tuple[str, ...]) -> None:
        done = run(*(argument.format(root=root) for argument in arguments))
        assert (done.exit_code, done.stdout) == (2, "")
        assert done.stderr

    def test_an_unknown_namespace_names_those_that_there_are(self, root: Path) -> None:
        done = run("ls", root, "--blocks", "0123")
        assert NAMESPACE[:16] in done.stderr
        assert "prod" in done.stderr


class TestVerify:
    def test_good(self, root: Path) -> None:
        found = run_json("verify", root)
        assert (found["ok"], found["blocks"], found["damaged"]) == (True, 10, [])
        assert "10 good blocks" in run("verify", root).stdout

    def test_damage_is_told_and_the_exit_code_says_so(self, root: Path) -> None:
        path = put_block(root / NAMESPACE, 3)
        os.truncate(path, 5000)
        found = run_json("verify", root, code=1)
        assert not found["ok"]
        ((damage),) = found["damaged"]
        assert (damage["key"], damage["removed"]) == (key_of(3).hex(), False)
        assert damage["reason"].startswith("length")
        done = run("verify", root)
        assert done.exit_code == 1
        assert key_of(3).hex() in done.stdout

    def test_repair(self, root: Path) -> None:
        path = put_block(root / NAMESPACE, 3)
        os.truncate(path, 5000)
        assert run_json("verify", root, "--repair", code=1)["damaged"][0]["removed"]
        assert not path.exists()
        assert run_json("verify", root)["blocks"] == 9

    def test_one_namespace_only(self, root: Path) -> None:
        os.truncate(put_block(root / OTHER, 3), 5000)
        assert run_json("verify", root, "--namespace", NAMESPACE[:8])["blocks"] == 10
        assert run("verify", root, "--namespace", OTHER).exit_code == 1

    @pytest.mark.parametrize(
        ("sample", "blocks"), [("3", 3), ("100", 10), ("50%", 5), ("0.1%", 1), ("100%", 10)]
    )
    def test_a_sample(self, root: Path, sample: str, blocks: int) -> None:
        assert run_json("verify", root, "--sample", sample)["blocks"] == blocks

    @pytest.mark.parametrize("sample", ["0", "-1", "0%", "101%", "some", "5 %%", ""])
    def test_no_sample(self, root: Path, sample: str) -> None:
        done = run("verify", root, f"--sample={sample}")
        assert done.exit_code == 2
        assert "--sample" in done.stderr

    def test_files_of_dead_writers_are_told_and_removed_by_repair(self, root: Path) -> None:
        block = put_block(root / NAMESPACE, 1)
        old, new = (block.with_name(f"9999999-{i:02x}-0.tmp") for i in (1, 2))
        for path in (old, new):
            path.write_bytes(b"abc")
        os.utime(old, (1.0, 1.0))
        found = run_json("verify", root)
        assert [file["path"] for file in found["stale_temporary_files"]] == [str(old)]
        assert old.exists()
        found = run_json("verify", root, "--repair")
        assert [file["removed"] for file in found["stale_temporary_files"]] == [True]
        assert not old.exists()
        assert new.exists()

    def test_the_progress_is_only_for_a_terminal(self, root: Path) -> None:
        program = "from kvtier.cli.main import main; main()"
        command = [sys.executable, "-c", program, "verify", str(root)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert done.stderr == ""
        ours, theirs = pty.openpty()
        try:
            shown = subprocess.run(command, stdout=subprocess.PIPE, stderr=theirs, check=True)
            os.close(theirs)
            seen = os.read(ours, 1 << 16)
        finally:
            os.close(ours)
        assert b"verify" in seen
        assert b"10 good blocks" in shown.stdout


class TestEvict:
    def test_by_age(self, root: Path) -> None:
        found = run_json("evict", root, "--older-than", "7d")
        assert found["removed"]["blocks"] == 3  # 7, 8 and 9 days; the first by some moments
        assert files(root) == {key_of(i).hex() for i in range(7)}

    def test_by_size_oldest_first(self, root: Path) -> None:
        found = run_json("evict", root, "--to-size", 4 * BLOCK)
        assert (found["removed"]["blocks"], found["removed"]["bytes"]) == (6, 6 * BLOCK)
        assert files(root) == {key_of(i).hex() for i in range(4)}

    def test_to_nothing(self, root: Path) -> None:
        assert run_json("evict", root, "--to-size", "0")["removed"]["blocks"] == 10
        assert files(root) == set()
        assert run("evict", root, "--to-size", "0").stdout == "nothing to evict\n"

    def test_both(self, root: Path) -> None:
        found = run_json("evict", root, "--older-than", "5d", "--to-size", "300KiB")
        assert found["removed"]["blocks"] == 5
        assert files(root) == {key_of(i).hex() for i in range(5)}

    def test_a_dry_run_says_the_same_and_does_nothing(self, root: Path) -> None:
        dry = run_json("evict", root, "--to-size", "300KiB", "--dry-run")
        assert dry["removed"]["blocks"] == 0
        assert len(files(root)) == 10
        assert (
            "would evict 6 blocks, 408.0 KiB"
            in run("evict", root, "--to-size", "300KiB", "--dry-run").stdout
        )
        wet = run_json("evict", root, "--to-size", "300KiB")
        assert wet["chosen"] == dry["chosen"]
        assert wet["removed"]["blocks"] == dry["chosen"]["blocks"] == 6

    def test_one_namespace_only(self, root: Path) -> None:
        put_block(root / OTHER, 50, used_s=1.0)
        run_json("evict", root, "--namespace", NAMESPACE[:8], "--to-size", "0")
        assert files(root) == {key_of(50).hex()}

    @pytest.mark.parametrize(
        "options",
        [
            (),
            ("--older-than", "7"),
            ("--older-than", "7 parsecs"),
            ("--older-than=-7d",),
            ("--to-size", "much"),
            ("--to-size=-1",),
            ("--namespace", "0123", "--to-size", "0"),
        ],
    )
    def test_misuse_removes_nothing(self, root: Path, options: tuple[str, ...]) -> None:
        done = run("evict", root, *options)
        assert done.exit_code == 2
        assert done.stderr
        assert len(files(root)) == 10


class TestWipe:
    def test_one(self, root: Path) -> None:
        put_block(root / OTHER, 50)
        found = run_json("wipe", root, "--namespace", NAMESPACE[:8], "--yes")
        assert [(row["blocks"], row["gone"]) for row in found["namespaces"]] == [(10, True)]
        assert [path.name for path in root.iterdir()] == [OTHER]
        assert files(root) == {key_of(50).hex()}

    def test_all(self, root: Path) -> None:
        assert run("wipe", root, "--all", "--yes").exit_code == 0
        assert list(root.iterdir()) == []

    def test_foreign_files_stay(self, root: Path) -> None:
        (root / NAMESPACE / "notes.txt").write_bytes(b"mine")
        (root / "notes.txt").write_bytes(b"mine")
        done = run("wipe", root, "--all", "--yes")
        assert "emptied, not removed" in done.stdout
        assert (root / NAMESPACE / "notes.txt").read_bytes() == b"mine"
        assert (root / "notes.txt").read_bytes() == b"mine"
        assert files(root) == set()

    def test_without_a_terminal_it_wants_yes(self, root: Path) -> None:
        done = run("wipe", root, "--all", stdin="y\n")
        assert done.exit_code == 2
        assert "--yes" in done.stderr
        assert len(files(root)) == 10

    @pytest.mark.parametrize(("answer", "code", "left"), [("y", 0, 0), ("n", 1, 10), ("", 1, 10)])
    def test_it_asks_on_a_terminal(self, root: Path, answer: str, code: int, left: int) -> None:
        ours, theirs = pty.openpty()
        program = "from kvtier.cli.main import main; main()"
        command = [sys.executable, "-c", program, "wipe", str(root), "--all"]
        os.write(ours, f"{answer}\n".encode())
        try:
            done = subprocess.run(
                command, stdin=theirs, capture_output=True, text=True, check=False
            )
        finally:
            os.close(ours)
            os.close(theirs)
        assert done.returncode == code
        assert "Remove 2 namespaces?" in done.stderr
        assert str(root / NAMESPACE) in done.stderr
        assert len(files(root)) == left

    @pytest.mark.parametrize("options", [("--yes",), ("--all", "--namespace", "7f", "--yes")])
    def test_either_one_or_all(self, root: Path, options: tuple[str, ...]) -> None:
        assert run("wipe", root, *options).exit_code == 2
        assert len(files(root)) == 10


class TestExportAndImport:
    def test_there_and_back(self, root: Path, tmp_path: Path) -> None:
        archive, target = tmp_path / "a.tar", tmp_path / "target"
        target.mkdir()
        found = run_json("export", root, "--namespace", NAMESPACE[:8], archive)
        assert (found["blocks"], found["namespace"]) == (10, NAMESPACE)
        assert archive.stat().st_mode & 0o777 == 0o600
        assert run_json("import", archive, target, "--layout", "files")["blocks"] == 10
        assert files(target) == files(root)
        for path in (root / NAMESPACE).rglob("*"):
            if path.is_file() and len(path.name) == 72:
                (copy,) = target.rglob(path.name)
                assert copy.read_bytes() == path.read_bytes()
        assert run_json("import", archive, target)["skipped"] == 10
        assert run_json("verify", target)["blocks"] == 10

    @pytest.mark.parametrize("layout", ["files", "segments"])
    def test_the_layout_is_the_directorys(self, root: Path, tmp_path: Path, layout: str) -> None:
        archive, target = tmp_path / "a.tar", tmp_path / "target"
        target.mkdir()
        run_json("export", root, "--namespace", NAMESPACE[:8], archive)
        mark(target, layout)
        assert run_json("import", archive, target)["blocks"] == 10
        (found,) = run_json("ls", target)["namespaces"]
        assert list(found["layouts"]) == [layout]
        assert run_json("verify", target)["blocks"] == 10
        assert run_json("import", archive, target)["skipped"] == 10

    def test_through_pipes(self, root: Path, tmp_path: Path) -> None:
        target = tmp_path / "target"
        target.mkdir()
        sent = run("export", root, "--namespace", NAMESPACE[:8], "-")
        assert sent.exit_code == 0
        assert "exported 10 blocks" in sent.stderr
        got = run("import", "-", target, "--layout", "files", stdin=sent.stdout_bytes)
        assert got.exit_code == 0
        assert files(target) == files(root)

    def test_an_archive_is_never_overwritten(self, root: Path, tmp_path: Path) -> None:
        archive = tmp_path / "a.tar"
        archive.write_bytes(b"mine")
        assert run("export", root, "--namespace", NAMESPACE, archive).exit_code == 2
        assert archive.read_bytes() == b"mine"

    def test_nor_one_that_appears_meanwhile(self, tmp_path: Path) -> None:
        archive = tmp_path / "a.tar"
        destination = admin_archive._destination(archive)
        destination.__enter__().write(b"ours")
        archive.write_bytes(b"mine")
        with pytest.raises(FileExistsError):
            destination.__exit__(None, None, None)
        assert archive.read_bytes() == b"mine"
        assert list(tmp_path.iterdir()) == [archive]

    def test_an_export_that_fails_leaves_nothing(self, root: Path, tmp_path: Path) -> None:
        done = run("export", root, "--namespace", NAMESPACE, tmp_path / "no" / "a.tar")
        assert done.exit_code == 1
        assert sorted(path.name for path in tmp_path.iterdir()) == ["root"]

    def test_a_damaged_block_is_left_out(self, root: Path, tmp_path: Path) -> None:
        os.truncate(put_block(root / NAMESPACE, 3), 5000)
        found = run_json("export", root, "--namespace", NAMESPACE, tmp_path / "a.tar", code=1)
        assert found["blocks"] == 9
        assert [refused["name"] for refused in found["refused"]] == [key_of(3).hex()]

    def test_a_damaged_archive(self, root: Path, tmp_path: Path) -> None:
        archive, target = tmp_path / "a.tar", tmp_path / "target"
        target.mkdir()
        run_json("export", root, "--namespace", NAMESPACE, archive)
        whole = archive.read_bytes()
        archive.write_bytes(whole[:200_000])
        done = run("import", archive, target, "--layout", "files")
        assert done.exit_code == 1
        assert "again" in done.stderr
        kept = files(target)
        assert 0 < len(kept) < 10
        archive.write_bytes(whole)
        assert run_json("import", archive, target)["skipped"] == len(kept)
        assert files(target) == files(root)

    @pytest.mark.parametrize(
        "arguments",
        [
            ("import", "{tmp}/none.tar", "{root}"),
            ("import", "{tmp}", "{root}"),
            ("import", "{tmp}/x.tar", "/no/such"),
            ("export", "{root}", "--namespace", "0123", "{tmp}/a.tar"),
            ("export", "{root}", "{tmp}/a.tar"),
            ("export", "/no/such", "--namespace", "0123", "{tmp}/a.tar"),
        ],
    )
    def test_misuse(self, root: Path, tmp_path: Path, arguments: tuple[str, ...]) -> None:
        (tmp_path / "x.tar").write_bytes(b"")
        done = run(*(argument.format(root=root, tmp=tmp_path) for argument in arguments))
        assert done.exit_code == 2, done.output
        assert done.stderr
        assert not (tmp_path / "a.tar").exists()


class TestWords:
    @pytest.mark.parametrize(
        ("text", "seconds"),
        [("90s", 90), ("30m", 1800), ("12h", 43_200), ("7d", 604_800), ("2w", 1_209_600)],
    )
    def test_ages(self, text: str, seconds: float) -> None:
        assert parse_age(text, "x") == seconds

    @pytest.mark.parametrize("text", ["", "7", "d", "7D", "-7d", "7d7d", "1e3s", "٣d "])
    def test_what_is_no_age(self, text: str) -> None:
        with pytest.raises(ConfigError, match="--older-than"):
            parse_age(text, "--older-than")

    def test_sample_of_nothing(self) -> None:
        assert sample_size("5%", 0, "x") == 0
        assert sample_size("5", 0, "x") == 0

    @pytest.mark.parametrize(
        ("nbytes", "text"),
        [
            (0, "0 B"),
            (1023, "1023 B"),
            (1536, "1.5 KiB"),
            (2**40, "1.0 TiB"),
            (2**52, "4096.0 TiB"),
        ],
    )
    def test_sizes(self, nbytes: int, text: str) -> None:
        assert size_text(nbytes) == text

    def test_spans(self) -> None:
        texts = [age_text(seconds) for seconds in (None, -5.0, 3.0, 130.0, 7300.0, 86_400.0 * 3)]
        assert texts == ["-", "0 s", "3 s", "2 m", "2 h", "3 d"]
