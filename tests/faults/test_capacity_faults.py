"""The share in a root's capacity, while the root is full, read-only, gone, or not what it was."""

from __future__ import annotations

import errno
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from rig import recovers, warnings_of

from kvtier.testing.broken_medium import LoopMount
from kvtier.tiers.fs.shared_space import SharedSpace

pytestmark = pytest.mark.faults

CAPACITY = 1 << 20


@pytest.fixture
def member() -> Iterator[list[SharedSpace]]:
    made: list[SharedSpace] = []
    yield made
    for space in made:
        space.close()


def reports(space: SharedSpace) -> int | None:
    """The errno of a report; None if it went well."""
    try:
        space.report()
    except OSError as error:
        return error.errno
    return None


def takes(space: SharedSpace) -> bool:
    reports(space)
    try:
        return space.take(4096)
    except OSError:
        return False


@pytest.mark.parametrize("state", ["full", "read_only"])
def test_it_starts_where_nothing_can_be_written(
    medium: LoopMount, member: list[SharedSpace], state: str
) -> None:
    come, go, number = {
        "full": (medium.fill, medium.make_room, errno.ENOSPC),
        "read_only": (medium.make_read_only, medium.make_writable, errno.EROFS),
    }[state]
    come()
    space = SharedSpace(medium.point, CAPACITY, 0)
    member.append(space)
    for _ in range(3):
        with pytest.raises(OSError, match=os.strerror(number)):
            space.take(4096)
        assert reports(space) == number
    go()
    recovers(lambda: takes(space))


def test_a_root_that_vanishes_is_told_once(
    root: Path, member: list[SharedSpace], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "kvtier")
    space = SharedSpace(root, CAPACITY, 0)
    member.append(space)
    assert takes(space)
    shutil.rmtree(root)
    assert [reports(space) for _ in range(5)] == [errno.ENOENT] * 5
    assert not root.exists()
    assert len(warnings_of(caplog)) == 1
    root.mkdir(mode=0o700)
    assert takes(space)


def test_the_disk_below_a_lost_mount_is_left_alone(
    medium: LoopMount, member: list[SharedSpace]
) -> None:
    space = SharedSpace(medium.point, CAPACITY, 0)
    member.append(space)
    assert takes(space)
    medium.take_away()
    assert [reports(space) for _ in range(3)] == [errno.ESTALE] * 3
    with pytest.raises(OSError, match="Stale"):
        space.take(CAPACITY // 2)
    assert os.listdir(medium.point) == []
    medium.bring_back()
    assert takes(space)
