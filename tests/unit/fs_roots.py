"""Directories, mounts and users for the checks of the fs tier, and how a refusal looks."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.errors import ConfigError
from kvtier.tiers.fs.checks import check_root, check_roots

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


@pytest.fixture
def other(tmp_path: Path) -> Path:
    path = tmp_path / "root2"  # not below `root`, though its name begins with that
    path.mkdir(mode=0o700)
    return path
