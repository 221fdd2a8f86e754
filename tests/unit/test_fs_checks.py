"""What the fs tier refuses at start: real directories, real mounts, and a file system that is made
to behave like a lesser one."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvtier
from kvtier.config import Settings
from kvtier.errors import ConfigError
from kvtier.testing.broken_medium import HANG, BrokenCalls, LoopMount, UnavailableError
from kvtier.tiers.fs import abilities, locations
from kvtier.tiers.fs.checks import (
    SMALLEST_BLOCK,
    check_bounds,
    check_capacity,
    check_root,
    check_roots,
    foreign_entries,
    remarks,
)
from kvtier.tiers.fs.marker import MARKER_FILE

NOBODY = 65534
SETTING = "secondary_tiers[0].root_dir"

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only the superuser can do this")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    path = tmp_path / "root"
    path.mkdir(mode=0o700)
    return path


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[list[str]]:
    """Mount points to be unmounted at the end, the last one first."""
    points: list[str] = []
    yield points
    for point in reversed(points):
        subprocess.run(["umount", "-l", point], check=True)


def mount(mounted: list[str], point: Path, *options: str) -> Path:
    point.mkdir(exist_ok=True)
    done = subprocess.run(
        ["mount", *options, str(point)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"cannot mount: {done.stderr.strip()}")
    mounted.append(str(point))
    return point


@pytest.fixture
def as_nobody() -> Iterator[Path]:
    """A directory of an ordinary user, and that user's rights while the test runs."""
    with tempfile.TemporaryDirectory() as directory:
        if os.geteuid() != 0:
            yield Path(directory)
            return
        os.chown(directory, NOBODY, NOBODY)
        os.seteuid(NOBODY)
        try:
            yield Path(directory)
        finally:
            os.seteuid(0)


def refused(root: Path, pattern: str) -> str:
    """The root is refused with its setting and value, and nothing is left in it."""
    before = listed(root)
    with pytest.raises(ConfigError, match=pattern) as caught:
        check_root(root, SETTING)
    message = str(caught.value)
    assert message.startswith(f"{SETTING} = {str(root)!r} ")
    assert re.search(r"set secondary_tiers\[0\]\.root_dir to|set it to", message), "what to do"
    assert listed(root) == before
    return message


def listed(root: Path) -> list[str] | None:
    try:
        return sorted(os.listdir(root))
    except OSError:
        return None


def refused_all(roots: list[Path], pattern: str) -> None:
    with pytest.raises(ConfigError, match=pattern):
        check_roots(roots, lambda i: f"t.root_dirs[{i}]")


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


# --- the file system


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


# --- several roots


@pytest.fixture
def other(tmp_path: Path) -> Path:
    path = tmp_path / "root2"  # not below `root`, though its name begins with that
    path.mkdir(mode=0o700)
    return path


def test_roots_beside_each_other(root: Path, other: Path) -> None:
    check_roots([root, other], lambda i: f"t.root_dirs[{i}]")


def test_each_root_is_checked(root: Path, other: Path) -> None:
    other.chmod(0o777)
    refused_all([root, other], r"^t\.root_dirs\[1\] = '.*root2' may be written by everybody")


def test_named_twice(tmp_path: Path, root: Path, other: Path) -> None:
    (tmp_path / "link").symlink_to("root")
    twice = r"^t\.root_dirs\[2\] = .* is the same directory as t\.root_dirs\[0\] = .*root'"
    for again in (root, tmp_path / "link", tmp_path / "root2" / ".." / "root"):
        refused_all([root, other, again], twice)


@pytest.mark.parametrize("deep", ["x", "x/y/z"])
def test_inside_each_other(tmp_path: Path, root: Path, other: Path, deep: str) -> None:
    inner = root / deep
    inner.mkdir(parents=True)
    (tmp_path / "link").symlink_to(inner)
    for path in (inner, tmp_path / "link"):
        refused_all([root, other, path], r"^t\.root_dirs\[2\] = .* lies inside t\.root_dirs\[0\]")
        refused_all([path, other, root], r"^t\.root_dirs\[0\] = .* lies inside t\.root_dirs\[2\]")


@needs_root
def test_inside_each_other_by_a_bind_mount(
    tmp_path: Path, root: Path, other: Path, mounted: list[str]
) -> None:
    """No path and no inode on the way up tells: only the table of mounts does."""
    (root / "x" / "y").mkdir(parents=True)
    shown = mount(mounted, tmp_path / "shown here", "--bind", str(root / "x"))
    check_roots([other, shown], lambda i: f"t.root_dirs[{i}]")
    refused_all([root, shown], r"^t\.root_dirs\[1\] = .* lies inside t\.root_dirs\[0\]")
    refused_all([shown / "y", root], r"^t\.root_dirs\[0\] = .* lies inside t\.root_dirs\[1\]")
    refused_all([root / "x", shown], r"is the same directory as")


@needs_root
def test_another_file_system_mounted_inside(root: Path, mounted: list[str]) -> None:
    """It shares no byte with the outer one, but a wipe of that would go through it."""
    point = mount(mounted, root / "x", "-t", "tmpfs", "-o", "mode=700", "tmpfs")
    refused_all([root, point], r"^t\.root_dirs\[1\] = .* lies inside t\.root_dirs\[0\]")


@needs_root
def test_a_mount_that_another_one_covers(tmp_path: Path, mounted: list[str]) -> None:
    """The table still lists what nobody can reach any more."""
    low = mount(mounted, tmp_path / "a", "-t", "tmpfs", "-o", "mode=700", "tmpfs")
    mount(mounted, low / "b", "-t", "tmpfs", "-o", "mode=700", "tmpfs")
    (tmp_path / "top" / "b").mkdir(parents=True)
    mount(mounted, low, "--bind", str(tmp_path / "top"))
    there, here = locations.location_of(low / "b"), locations.location_of(tmp_path / "top" / "b")
    assert there.is_at(here)
    mounted.reverse()  # the covered ones cannot be unmounted by name before the covering one
    mounted[:] = [str(low), str(low / "b"), str(low)][::-1]


@needs_root
def test_the_last_mount_on_a_directory_is_the_one_that_shows(
    tmp_path: Path, root: Path, other: Path, mounted: list[str]
) -> None:
    point = mount(mounted, tmp_path / "point", "--bind", str(root))
    mount(mounted, point, "--bind", str(other))
    check_roots([root, point], lambda i: f"t.root_dirs[{i}]")
    refused_all([other, point], "is the same directory as")


def test_inside_a_root_of_whomever(root: Path) -> None:
    (root / MARKER_FILE).write_text("{}")
    inner = root / "x" / "y"
    inner.mkdir(parents=True)
    refused(inner, f"lies inside {str(root)!r}, which is a root itself")
    check_root(root, SETTING)


# --- bounds


def test_a_capacity_below_one_block() -> None:
    check_capacity(SMALLEST_BLOCK, SMALLEST_BLOCK, "t")
    with pytest.raises(ConfigError, match=r"^t\.capacity = 8191 bytes .* at least 8192 bytes"):
        check_capacity(8191, SMALLEST_BLOCK, "t")
    with pytest.raises(ConfigError, match=r"^t\.capacity = 1048576 bytes \(1\.00 MiB\)"):
        check_capacity(1 << 20, (1 << 20) + 1, "t")


def test_a_capacity_above_the_mount(root: Path) -> None:
    found = os.statvfs(root)
    size = found.f_blocks * found.f_frsize
    check_bounds([root], size, 0, "t")
    check_bounds([root], None, 0, "t")
    above = (
        rf"^t\.capacity = {size + 1} bytes .* is more than the mount of '.*root', which has {size}"
    )
    with pytest.raises(ConfigError, match=above):
        check_bounds([root], size + 1, 0, "t")
    with pytest.raises(ConfigError, match=r"^t\.capacity = '9 EiB' = "):
        check_bounds([root], 2**62, 0, "t", given="9 EiB")
    with pytest.raises(ConfigError, match="cannot hold one block"):
        check_bounds([root], 100, 0, "t")


def test_roots_on_one_mount_share_it(root: Path, other: Path) -> None:
    found = os.statvfs(root)
    size = found.f_blocks * found.f_frsize
    check_bounds([root, other], size // 2, 0, "t")
    with pytest.raises(ConfigError, match=rf"for each of 2 roots .* at most {size // 2}"):
        check_bounds([root, other], size // 2 + 1, 0, "t")


def test_more_free_than_there_is(root: Path) -> None:
    found = os.statvfs(root)
    size = found.f_blocks * found.f_frsize
    check_bounds([root], None, size - SMALLEST_BLOCK, "t")
    for min_free in (size - SMALLEST_BLOCK + 1, size, 2 * size):
        with pytest.raises(ConfigError, match=rf"^t\.min_free = {min_free} bytes .*no room"):
            check_bounds([root], None, min_free, "t")


def test_a_mount_that_tells_no_size() -> None:
    assert os.statvfs("/proc").f_blocks == 0
    check_bounds([Path("/proc")], 2**60, 2**60, "t")


@pytest.mark.parametrize("label", ["a/b", "/a", "..", "a..b", "../x", "a\\b", ".", "", "a\0"])
def test_labels_that_would_be_paths(label: str) -> None:
    with pytest.raises(ConfigError, match=r"^namespace = .* is not allowed: it must be"):
        Settings.decode({"cpu_bytes_to_use": 1, "namespace": label})


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


def test_the_probe_says_what_the_file_system_says(root: Path) -> None:
    assert abilities.probe_directory(str(root)) == os.geteuid()
