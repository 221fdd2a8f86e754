"""Full disks, missing abilities, and hands that remove things."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest
from segments_world import (
    SMALL,
    Capacity,
    content_of,
    failure_of,
    get,
    held,
    open_tier,
    put,
    segments_of,
    stores_of,
    vanish,
)

from kvtier.errors import MissingBlockError, TierFullError
from kvtier.testing.blocks import NAMESPACE, key_of
from kvtier.tiers.fs.segments import log, paths

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvtier.tiers.fs.segments import SegmentsTier


@contextlib.contextmanager
def small_mount(place: Path, options: list[str], source: str) -> Iterator[None]:
    mounted = subprocess.run(
        ["mount", *options, source, place], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"it cannot be mounted: {mounted.stderr}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", place], check=True)


def fill(path: Path) -> None:
    """Leave nothing of a file system."""
    with open(path, "wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))


def try_to_put(tier: SegmentsTier, i: int) -> bool:
    """Whether there was room for a block."""
    error = failure_of(tier, i)
    if error is not None:
        assert isinstance(error, OSError), error
        assert error.errno == errno.ENOSPC
    return error is None


@pytest.mark.parametrize("kilobytes", [400, 600, 1000])
def test_a_full_disk_is_lived_with(tmp_path: Path, kilobytes: int) -> None:
    """No capacity is set: the disk alone says when it is full. Between two rounds of upkeep, the
    log may find no room.
    """
    with small_mount(tmp_path, ["-t", "tmpfs", "-o", f"size={kilobytes}k"], "tmpfs"):
        tier = open_tier(tmp_path)
        kept = 0
        for i in range(2000):
            if not try_to_put(tier, i):
                tier.maintain()
                put(tier, i)
            assert held(tier, [i]) == {i}
            kept = max(kept, int(tier.figures()["blocks"]))
        assert kept >= 16
        assert tier.figures()["full_disk"] > 0
        tier._owned.slots.check()
        before = held(tier, range(2000))
        tier.close()
        tier = open_tier(tmp_path)
        assert held(tier, range(2000)) == before
        assert tier.figures()["upkeep_failures"] == 0
        tier.close()


def test_a_disk_that_others_fill(tmp_path: Path) -> None:
    """Not a byte is left, so the log cannot grow: segments go until it can."""
    with small_mount(tmp_path, ["-t", "tmpfs", "-o", "size=3m"], "tmpfs"):
        tier = open_tier(tmp_path, Capacity(64 * SMALL))
        put(tier, *range(16))
        put(tier, *range(16, 32))
        put(tier, *range(32, 64))
        fill(tmp_path / "other")
        written = failed = 0
        for i in range(100, 8000):
            if try_to_put(tier, i):
                assert get(tier, i) == content_of(i)
                written += 1
            else:
                failed += 1
                tier.maintain()
        assert written > 50 * failed
        assert failed > 0, "the disk was not full"
        tier._owned.slots.check()
        before = held(tier, range(8000))
        tier.close()
        (tmp_path / "other").unlink()
        tier = open_tier(tmp_path)
        assert held(tier, range(8000)) == before
        tier.close()


def test_a_disk_too_small_for_anything(tmp_path: Path) -> None:
    with small_mount(tmp_path, ["-t", "tmpfs", "-o", "size=8k"], "tmpfs"):
        tier = open_tier(tmp_path)
        for i in range(5):
            with pytest.raises((OSError, TierFullError)):
                put(tier, i)
        assert held(tier, range(5)) == set()
        tier.close()


def test_a_file_system_without_preallocation(tmp_path: Path) -> None:
    """ext2 has none: segments are sparse, and a write finds the disk full."""
    if shutil.which("mkfs.ext2") is None:
        pytest.skip("mkfs.ext2 is not installed")
    image = tmp_path / "image"
    with open(image, "wb") as file:
        file.truncate(2 << 20)
    made = subprocess.run(
        ["mkfs.ext2", "-q", "-b", "1024", "-m", "0", image], capture_output=True, check=False
    )
    if made.returncode:
        pytest.skip("mkfs.ext2 does not work here")
    place = tmp_path / "mount"
    place.mkdir()
    with small_mount(place, ["-o", "loop"], str(image)):
        root = place / "root"
        root.mkdir()
        descriptor = os.open(root / "probe", os.O_RDWR | os.O_CREAT)
        assert paths._libc.fallocate(descriptor, 0, 0, 4096) != 0
        assert ctypes.get_errno() == errno.EOPNOTSUPP
        os.close(descriptor)
        tier = open_tier(root, Capacity(4 << 20))
        full = 0
        for i in range(600):
            if try_to_put(tier, i):
                assert held(tier, [i]) == {i}
            else:
                full += 1
        assert full > 0
        assert len(held(tier, range(600))) > 150
        tier._owned.slots.check()
        tier.close()


def test_a_log_keeps_room_on_the_disk(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    put(tier, 1)
    found = (stores_of(tmp_path)[0] / "index.log").stat()
    assert found.st_size < 1000
    if found.st_blocks * 512 < log.RESERVE_BYTES:
        pytest.skip("this file system keeps no room")
    tier.close()


# --- hands


def test_a_store_that_is_wiped_under_its_owner(tmp_path: Path) -> None:
    tier = open_tier(tmp_path, Capacity(1 << 20))
    put(tier, *range(10))
    shutil.rmtree(stores_of(tmp_path)[0])
    tier.maintain()
    assert set(tier.take_dropped()) == {key_of(i) for i in range(10)}
    assert held(tier, range(10)) == set()
    assert tier.figures()["lost_blocks"] == 10
    assert tier.figures()["lost_stores"] == 1
    put(tier, 1)
    assert len(stores_of(tmp_path)) == 1
    tier.close()
    tier = open_tier(tmp_path)
    assert held(tier, range(10)) == {1}
    tier.close()


def test_a_wiped_store_is_noticed_by_the_next_segment(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    put(tier, *range(16))
    shutil.rmtree(tmp_path / NAMESPACE)
    put(tier, 20)
    assert held(tier, range(30)) == {20}
    assert len(stores_of(tmp_path)) == 1
    assert (tmp_path / NAMESPACE / "namespace.json").exists()
    tier.close()


@pytest.mark.parametrize("how", ["truncated", "removed", "lock removed"])
def test_a_store_whose_log_or_lock_is_lost_is_given_up(tmp_path: Path, how: str) -> None:
    capacity = Capacity(1 << 20)
    tier = open_tier(tmp_path, capacity)
    put(tier, *range(10))
    (store,) = stores_of(tmp_path)
    if how == "truncated":
        os.truncate(store / "index.log", 400)
    elif how == "removed":
        (store / "index.log").unlink()
    else:
        (store / "lock").unlink()
    tier.maintain()
    assert held(tier, range(10)) == set()
    assert set(tier.take_dropped()) == {key_of(i) for i in range(10)}
    assert tier.figures()["lost_stores"] == 1
    assert capacity.used == 0
    assert not store.exists()
    put(tier, 1)
    assert held(tier, [1]) == {1}
    tier.close()


@pytest.mark.parametrize("how", ["truncated", "removed"])
def test_a_segment_that_is_lost(tmp_path: Path, how: str) -> None:
    tier, other = open_tier(tmp_path), open_tier(tmp_path)
    put(tier, *range(16))
    put(tier, *range(16, 32))
    first, _ = segments_of(tmp_path)
    assert first.name == "0.segment"
    if how == "removed":
        first.unlink()
    else:
        os.truncate(first, 5 * SMALL + 7)
    tier.maintain()
    assert held(tier, range(32)) == set(range(16, 32))
    assert held(other, range(32)) == set(range(16, 32))
    assert tier.figures()["lost_segments"] == 1
    assert tier.figures()["lost_blocks"] == 16
    assert set(tier.take_dropped()) == {key_of(i) for i in range(16)}
    tier.close()
    other.close()


def test_a_segment_that_was_cut_off_costs_what_is_cut(tmp_path: Path) -> None:
    """Before anybody looked for it: a read finds out; and so does a restart."""
    tier = open_tier(tmp_path)
    put(tier, *range(16))
    (segment,) = segments_of(tmp_path)
    os.truncate(segment, 5 * SMALL + 7)
    keys = [key_of(i) for i in range(16)]
    into = [(memoryview(bytearray(SMALL)),) for _ in keys]
    errors = tier.read_batch(keys, into)
    assert [type(e) for e in errors] == [type(None)] * 5 + [MissingBlockError] * 11
    assert held(tier, range(16)) == set(range(5))
    assert tier.figures()["lost_blocks"] == 11
    tier.close()
    tier = open_tier(tmp_path)
    assert held(tier, range(16)) == set(range(5))
    put(tier, *range(20, 30))
    assert held(tier, range(40)) == {*range(5), *range(20, 30)}
    tier.close()


def test_what_a_killed_owner_left_is_cleared_away(tmp_path: Path) -> None:
    """A temporary file, a segment without a block, and one that was cut off since."""
    capacity = Capacity(1 << 20)
    tier = open_tier(tmp_path, capacity)
    put(tier, *range(16))
    put(tier, *range(16, 32))
    for i in range(16, 32):
        tier.delete(key_of(i))
    vanish(tier)
    first, second = segments_of(tmp_path)
    temp = first.with_name("1-abc-0.tmp")
    temp.touch()
    os.truncate(first, 5 * SMALL + 7)
    tier = open_tier(tmp_path, capacity)
    assert not temp.exists()
    assert not second.exists()
    assert capacity.used == 16 * SMALL
    assert held(tier, range(32)) == set(range(5))
    assert tier.figures()["lost_blocks"] == 11
    assert tier.figures()["upkeep_failures"] == 0
    tier.close()


def test_a_segment_is_lost_while_nobody_looks(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    put(tier, *range(16))
    put(tier, *range(16, 32))
    tier.close()
    segments_of(tmp_path)[0].unlink()
    tier = open_tier(tmp_path)
    assert held(tier, range(32)) == set(range(16, 32))
    assert tier.figures()["lost_blocks"] == 16
    tier.close()


@pytest.mark.parametrize("damage", ["header", "removed", "empty"])
def test_a_store_whose_log_was_lost_goes_with_its_segments(tmp_path: Path, damage: str) -> None:
    tier = open_tier(tmp_path)
    put(tier, 1)
    tier.close()
    (store,) = stores_of(tmp_path)
    path = store / "index.log"
    if damage == "header":
        content = bytearray(path.read_bytes())
        content[30] ^= 1
        path.write_bytes(content)
    elif damage == "empty":
        os.truncate(path, 0)
    else:
        path.unlink()
    capacity = Capacity(1 << 30)
    capacity.used = 16 * SMALL
    tier = open_tier(tmp_path, capacity)
    assert held(tier, [1]) == set()
    assert not store.exists()
    assert capacity.used == 0
    put(tier, 1)
    tier.close()


def test_what_is_not_ours_stays(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    put(tier, 1)
    (store,) = stores_of(tmp_path)
    foreign = [store / "notes", store / "01.segment", store / "x.segment", store.parent / "README"]
    for path in foreign:
        path.write_text("mine")
    tier.delete(key_of(1))
    tier.maintain()
    tier.close()
    assert [path.read_text() for path in foreign] == ["mine"] * 4
    tier = open_tier(tmp_path)
    put(tier, 2)
    tier.maintain()
    assert tier.figures()["upkeep_failures"] == 0
    tier.close()
    assert [path.read_text() for path in foreign] == ["mine"] * 4


def test_a_broken_medium_costs_the_block_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log cannot be written for a while."""
    tier = open_tier(tmp_path, Capacity(16 * SMALL))
    put(tier, *range(16))

    def failing(fd: int, data: bytes, at: int) -> int:
        raise OSError(errno.EIO, "bad sector")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", failing)
        for i in range(20, 24):
            with pytest.raises(OSError, match="bad sector"):
                put(tier, i)
        with pytest.raises(OSError, match="bad sector"):
            tier.delete(key_of(3))
        tier.maintain()
        assert held(tier, range(30)) == set(range(16))
    tier._owned.slots.check()
    put(tier, 20)
    assert len(held(tier, range(30))) == 16
    tier.close()
