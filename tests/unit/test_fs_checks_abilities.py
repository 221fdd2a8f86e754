"""What a file system has to be able to do: real mounts, and calls that are made to fail."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import fs_roots
import pytest
from fs_roots import SETTING, mount, needs_root

import kvtier
from kvtier.testing.broken_medium import HANG, BrokenCalls, LoopMount, UnavailableError
from kvtier.tiers.fs import abilities
from kvtier.tiers.fs.checks import check_root, check_roots, foreign_entries, remarks

mounted = fs_roots.mounted
root = fs_roots.root


@needs_root
@pytest.mark.parametrize("mode", ["0755", "0700"])
def test_a_file_system_in_memory(tmp_path: Path, mounted: list[str], mode: str) -> None:
    point = mount(mounted, tmp_path / "memory", "-t", "tmpfs", "-o", f"mode={mode}", "tmpfs")
    check_root(point, SETTING)
    assert [line for line in remarks(point) if "in memory (tmpfs)" in line]


@pytest.fixture
def full_mount(tmp_path: Path) -> Iterator[Path]:
    try:
        medium = LoopMount(tmp_path, 8 << 20)
    except UnavailableError as error:
        pytest.skip(str(error))
    with medium:
        medium.fill()
        yield medium.point


def test_a_full_mount_is_a_state_and_no_mistake(full_mount: Path) -> None:
    before = set(os.listdir(full_mount))
    with pytest.raises(OSError, match="No space left"):
        (full_mount / "file").write_bytes(bytes(4096))
    (full_mount / "file").unlink()
    check_root(full_mount, SETTING)
    assert set(os.listdir(full_mount)) == before


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        return BrokenCalls.build(tmp_path_factory.mktemp("library"))
    except UnavailableError as error:
        pytest.skip(str(error))


@pytest.fixture
def calls(root: Path, tmp_path: Path, library: Path) -> BrokenCalls:
    return BrokenCalls(root, tmp_path, library)


def check_below(calls: BrokenCalls, root: Path, answer_s: float = 20.0) -> str:
    """What a process says that checks the root while calls below it fail; empty if nothing."""
    code = f"""
import os, sys
from pathlib import Path
from kvtier.errors import ConfigError
from kvtier.tiers.fs.checks import check_roots
try:
    check_roots([Path(sys.argv[1])], lambda _: {SETTING!r}, {answer_s})
except ConfigError as error:
    print(error, flush=True)
os._exit(0)
"""
    source = str(Path(kvtier.__file__).parents[1])
    return subprocess.run(
        [sys.executable, "-c", code, root],
        env={**os.environ, **calls.environment, "PYTHONPATH": source},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout


def test_calls_that_do_not_fail(calls: BrokenCalls, root: Path) -> None:
    assert check_below(calls, root) == ""


@pytest.mark.parametrize(
    ("group", "number", "said"),
    [
        ("rename", errno.ENOSYS, "cannot rename files (Function not implemented)"),
        ("rename", errno.EPERM, "cannot rename files (Operation not permitted)"),
        ("sync", errno.EINVAL, "cannot sync files"),
        ("sync", errno.EIO, "cannot be used by user"),
        ("lock", errno.ENOLCK, "has no file locks (No locks available)"),
        ("mkdir", errno.EROFS, "Read-only file system"),
        ("mkdir", errno.ENAMETOOLONG, "does not keep names of 72 characters"),
        ("create", errno.EACCES, "Permission denied"),
        ("list", errno.EACCES, "Permission denied"),
        ("mkdir", errno.ENOSPC, ""),
        ("create", errno.EDQUOT, ""),
        ("write", errno.ENOSPC, ""),
    ],
)
def test_a_file_system_that_cannot(
    calls: BrokenCalls, root: Path, group: str, number: int, said: str
) -> None:
    calls.answer({group: number})
    message = check_below(calls, root)
    assert said in message
    assert bool(message) == bool(said)
    assert os.listdir(root) == []


@pytest.mark.parametrize("kept", [8, 60, 71])
def test_short_names(calls: BrokenCalls, root: Path, kept: int) -> None:
    """Names of 8 characters, as old file systems keep them: blocks would overwrite each other."""
    calls.answer({}, names=kept)
    assert "does not keep names of 72 characters as they are" in check_below(calls, root)
    assert os.listdir(root) == []
    calls.answer({}, names=72)
    assert check_below(calls, root) == ""


@pytest.mark.parametrize("group", ["stat", "mkdir", "sync"])
def test_a_mount_that_hangs_does_not_hang_the_start(
    calls: BrokenCalls, root: Path, group: str
) -> None:
    calls.answer({group: HANG})
    message = check_below(calls, root, answer_s=0.5)
    assert message.startswith(f"{SETTING} = {str(root)!r} does not answer for 0.5 s: ")


def test_a_defect_of_the_check_is_not_swallowed(root: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        check_roots([root, root], lambda _: str(1 // 0))


def test_what_killed_checks_left_goes_once_it_is_old(root: Path) -> None:
    old, young, other = (
        root / f"1-{'a' * 16}.probe.tmp",
        root / f"2-{'b' * 16}.probe.tmp",
        root / "1-a.probe.tmp",
    )
    for path in (old, young, other):
        path.mkdir()
        (path / "0.tmp").touch()
    os.utime(old, (0, 0))
    os.utime(other, (0, 0))
    check_root(root, SETTING)
    assert set(root.iterdir()) == {young, other}
    assert foreign_entries(root).names == (other.name,)


def test_checks_at_the_same_time_do_not_disturb_each_other(root: Path) -> None:
    failures: list[BaseException] = []

    def check() -> None:
        try:
            for _ in range(10):
                check_root(root, SETTING)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=check) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert os.listdir(root) == []


def test_the_probe_says_what_the_file_system_says(root: Path) -> None:
    assert abilities.probe_directory(str(root)) == os.geteuid()
