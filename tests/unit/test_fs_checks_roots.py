"""Several roots that get in each other's way, and sizes that do not fit their mounts."""

from __future__ import annotations

import os
from pathlib import Path

import fs_roots
import pytest
from fs_roots import SETTING, mount, needs_root, refused, refused_all

from kvtier.config import Settings
from kvtier.errors import ConfigError
from kvtier.tiers.fs import locations
from kvtier.tiers.fs.checks import (
    SMALLEST_BLOCK,
    check_bounds,
    check_capacity,
    check_root,
    check_roots,
)
from kvtier.tiers.fs.marker import MARKER_FILE

mounted = fs_roots.mounted
other = fs_roots.other
root = fs_roots.root

# --- several roots


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
