"""What the fs tier refuses at start: a directory that is missing, closed or somebody else's; what
lies in a good one."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import fs_roots
import pytest
from fs_roots import NOBODY, SETTING, mount, needs_root, refused

from kvtier.errors import ConfigError
from kvtier.tiers.fs.checks import check_root, foreign_entries, remarks

mounted = fs_roots.mounted
root = fs_roots.root

# --- the directory


def test_a_good_root_is_left_as_it_was(root: Path) -> None:
    (root / "file").touch()
    check_root(root, SETTING)
    assert os.listdir(root) == ["file"]


def test_missing(tmp_path: Path) -> None:
    refused(tmp_path / "absent", r"does not exist: .*mkdir -p")
    (tmp_path / "file").touch()
    refused(tmp_path / "file" / "below", "does not exist")
    (tmp_path / "dangling").symlink_to("nowhere")
    refused(tmp_path / "dangling", "does not exist")
    refused(Path("~/cache"), "`~` is not expanded")


def test_not_a_directory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    refused(tmp_path / "file", "is not a directory")


def test_what_is_no_path_at_all(tmp_path: Path) -> None:
    refused(tmp_path / ("x" * 300), "cannot be used .*File name too long")
    with pytest.raises(ConfigError, match=r"cannot be used .*null"):
        check_root(Path("a\0b"), SETTING)
    (tmp_path / "loop").symlink_to("loop")
    refused(tmp_path / "loop", "cannot be used .*symbolic links")


def test_a_link_to_a_directory_is_one(tmp_path: Path, root: Path) -> None:
    (tmp_path / "link").symlink_to(root)
    check_root(tmp_path / "link", SETTING)


@pytest.mark.parametrize("mode", [0o000, 0o300, 0o500, 0o600])
def test_not_readable_writable_or_searchable(as_nobody: Path, mode: int) -> None:
    root = as_nobody / "root"
    root.mkdir()
    check_root(root, SETTING)
    root.chmod(mode)
    try:
        refused(root, "cannot be used by user .*Permission denied.*chmod")
    finally:
        root.chmod(0o700)
    assert list(root.iterdir()) == []


def test_below_a_closed_directory(as_nobody: Path) -> None:
    root = as_nobody / "closed" / "root"
    root.mkdir(parents=True)
    root.parent.chmod(0o000)
    try:
        refused(root, "cannot be used by user .*Permission denied")
    finally:
        root.parent.chmod(0o700)


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o702])
def test_writable_by_everybody(root: Path, mode: int) -> None:
    root.chmod(mode)
    refused(root, rf"by everybody \(mode {mode:o}\).*chmod o-w.*mkdir -m 700")


@pytest.mark.parametrize("mode", [0o700, 0o755, 0o770, 0o2775])
def test_modes_that_are_allowed(root: Path, mode: int) -> None:
    root.chmod(mode)
    check_root(root, SETTING)


@needs_root
def test_somebody_elses(root: Path) -> None:
    os.chown(root, NOBODY, NOBODY)
    message = refused(root, f"belongs to user {NOBODY}, .*user 0, as which this process runs")
    assert f"chown 0 {root}" in message


@needs_root
def test_of_the_superuser_given_to_a_group(as_nobody: Path) -> None:
    """How container platforms hand over volumes."""
    os.seteuid(0)
    os.chown(as_nobody, 0, NOBODY)
    as_nobody.chmod(0o2770)
    groups, group = os.getgroups(), os.getegid()
    os.setgroups([NOBODY])
    os.seteuid(NOBODY)
    try:
        check_root(as_nobody, SETTING)
    finally:
        os.seteuid(0)
        os.setgroups(groups)
        os.setegid(group)
        os.chown(as_nobody, NOBODY, NOBODY)


@needs_root
def test_of_the_superuser_and_not_writable(as_nobody: Path) -> None:
    os.seteuid(0)
    os.chown(as_nobody, 0, 0)
    as_nobody.chmod(0o755)
    os.seteuid(NOBODY)
    refused(as_nobody, "cannot be used by user 65534")
    os.seteuid(0)


def test_where_even_the_superuser_cannot_make_a_file() -> None:
    refused(Path("/proc"), "cannot be used by user")


@needs_root
def test_mounted_read_only(tmp_path: Path, root: Path, mounted: list[str]) -> None:
    point = mount(mounted, tmp_path / "bound", "--bind", str(root))
    subprocess.run(["mount", "-o", "remount,ro,bind", str(point)], check=True)
    refused(point, "Read-only file system.*mount it read-write")


# --- what lies there besides


def test_foreign_entries_are_told_and_left_alone(root: Path) -> None:
    ours = [root / ("ab" * 32), root / ".kvtier", root / "lost+found"]
    for path in ours:
        path.mkdir()
    (root / "kvtier.json").touch()
    assert foreign_entries(root).count == 0
    assert remarks(root) == []
    foreign = {
        "notes.txt": Path.touch,
        "AB" * 32: Path.mkdir,
        "ab" * 31: Path.mkdir,
        "cd" * 32: Path.touch,
        "ef" * 32: lambda path: path.symlink_to("ab" * 32),
        "kvtier.json.bak": Path.touch,
    }
    for name, make in foreign.items():
        make(root / name)
    found = foreign_entries(root)
    assert found.count == len(foreign)
    assert found.all_seen
    assert found.names == tuple(sorted(foreign)[:5])
    [said] = remarks(root)
    assert "holds 6 entries that are not kvtier's" in said
    assert repr("AB" * 32) in said
    assert said.endswith(", ...")
    assert len(os.listdir(root)) == 4 + len(foreign)


def test_the_scan_is_bounded(root: Path) -> None:
    for i in range(20):
        (root / f"{i:02}").touch()
    found = foreign_entries(root, scanned_max=20)
    assert (found.count, found.all_seen) == (20, True)
    found = foreign_entries(root, scanned_max=19)
    assert (found.count, found.all_seen) == (19, False)


def test_a_group_that_may_write_is_remarked(root: Path) -> None:
    root.chmod(0o770)
    [said] = remarks(root)
    assert "may be written by its group" in said
