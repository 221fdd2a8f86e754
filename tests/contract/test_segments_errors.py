"""Single calls that fail, and stores that are not where they were."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from typing import TYPE_CHECKING, Any

import pytest
from descriptors import opened_below
from segments_world import (
    SMALL,
    Capacity,
    content_of,
    failure_of,
    get,
    held,
    on_disk,
    open_tier,
    put,
    segments_of,
    stores_of,
    vanish,
)

from kvtier.drivers.faults import Cause, cause_of
from kvtier.errors import MissingBlockError, TierFullError
from kvtier.testing.blocks import key_of
from kvtier.tiers.fs.segments import follower, segment, store

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvtier.tiers.fs.segments import SegmentsTier


@contextlib.contextmanager
def failing(name: str, number: int, nth: int = 0) -> Iterator[list[int]]:
    """A function of `os` fails from its call `nth` on if that is 0, else in that call alone. Yields
    a list whose length is the number of calls so far."""
    calls: list[int] = []
    whole = getattr(os, name)

    def call(*arguments: Any, **options: Any) -> Any:
        calls.append(1)
        if nth in (0, len(calls)):
            raise OSError(number, os.strerror(number))
        return whole(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, name, call)
        yield calls


def write_failure(tier: SegmentsTier, i: int) -> BaseException:
    error = failure_of(tier, i)
    assert error is not None
    return error


# --- one call fails


def test_a_block_of_another_length_costs_itself_alone(tmp_path: Path) -> None:
    """Though the log cannot say that it goes."""
    tier = open_tier(tmp_path)
    put(tier, 1, 2)
    into = [(memoryview(bytearray(SMALL + 1)),), (memoryview(bytearray(SMALL)),)]
    with failing("pwrite", errno.EROFS):
        short, good = tier.read_batch([key_of(1), key_of(2)], into)
    assert isinstance(short, MissingBlockError)
    assert good is None
    assert into[1][0] == content_of(2)
    tier._owned.slots.check()
    tier.close()


@pytest.mark.parametrize(
    ("number", "cause"), [(errno.EDQUOT, Cause.EDQUOT), (errno.ENOSPC, Cause.ENOSPC)]
)
def test_who_refuses_a_segment_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, cause: Cause
) -> None:
    capacity = Capacity(1 << 20)
    ticks = iter(range(10**6))
    tier = open_tier(tmp_path, capacity, clock=lambda: next(ticks) * 10.0)

    def refuse(descriptor: int, nbytes: int) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(segment, "allocate", refuse)
        error = write_failure(tier, 1)
    assert isinstance(error, TierFullError)
    assert cause_of(error) is cause
    assert capacity.used == 0
    capacity.nbytes = 0
    error = write_failure(tier, 1)
    assert isinstance(error, TierFullError)
    assert cause_of(error) is Cause.FULL, "it is the capacity now"
    tier.close()


@pytest.mark.parametrize(
    ("number", "cause"), [(errno.EDQUOT, Cause.EDQUOT), (errno.ENOSPC, Cause.ENOSPC)]
)
def test_why_a_log_takes_no_more_is_told(tmp_path: Path, number: int, cause: Cause) -> None:
    tier = open_tier(tmp_path)
    put(tier, 1)
    with failing("pwrite", number):
        assert cause_of(write_failure(tier, 2)) is cause
    put(tier, 2)
    assert held(tier, [2]) == {2}
    tier.close()


@pytest.mark.parametrize("durability", ["none", "data"])
@pytest.mark.parametrize("name", ["fstat", "open", "fsync", "stat", "rename", "mkdir"])
def test_nothing_leaks_when_making_a_segment_fails(
    tmp_path: Path, name: str, durability: str
) -> None:
    """In whichever call, the first segment or a later one."""
    nth = failures = 0
    while True:
        nth += 1
        root = tmp_path / str(nth)
        root.mkdir()
        before = opened_below(tmp_path)
        capacity = Capacity(1 << 20)
        tier = open_tier(root, capacity, durability=durability)
        with failing(name, errno.EIO, nth) as calls:
            for first in (0, 16):
                try:
                    put(tier, *range(first, first + 16))
                except OSError:
                    failures += 1
        assert capacity.used == on_disk(root)
        put(tier, *range(32))
        assert held(tier, range(32)) == set(range(32))
        assert capacity.used == on_disk(root)
        tier._owned.slots.check()
        tier.close()
        assert opened_below(tmp_path) == before
        if len(calls) < nth:
            break
    assert nth == 1 or failures or name == "open", "no call failed: O_DIRECT may"


@pytest.mark.parametrize(
    "name", ["listdir", "fstat", "stat", "pread", "ftruncate", "open", "unlink"]
)
def test_a_takeover_that_fails_is_tried_again(tmp_path: Path, name: str) -> None:
    """In whichever call: nothing is lost, and nothing stays open or locked."""
    nth = 0
    while True:
        nth += 1
        root = tmp_path / str(nth)
        root.mkdir()
        before = opened_below(tmp_path)
        orphan = open_tier(root, Capacity(1 << 20))
        put(orphan, *range(16))
        put(orphan, *range(16, 40))
        for i in range(16):
            orphan.delete(key_of(i))  # an empty segment, to be removed
        vanish(orphan)
        capacity = Capacity(1 << 20)
        capacity.used = on_disk(root)
        with failing(name, errno.ENOMEM, nth) as calls:
            try:
                tier = open_tier(root, capacity)
            except OSError:
                assert opened_below(tmp_path) == before
                tier = open_tier(root, capacity)
        tier.maintain()
        assert tier.figures()["stores"] == 1
        assert tier.figures()["lost_blocks"] == 0
        assert held(tier, range(40)) == set(range(16, 40))
        assert capacity.used == on_disk(root) == tier.owned_bytes()
        tier._owned.slots.check()
        tier.close()
        assert opened_below(tmp_path) == before
        if len(calls) < nth:
            break
    assert nth > 1, "no call failed"


@pytest.mark.parametrize("how", ["lookup", "upkeep"])
def test_a_log_that_cannot_be_read_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    owner, reader = open_tier(tmp_path), open_tier(tmp_path)
    put(owner, 1)
    before = opened_below(tmp_path)

    def broken(self: follower.LogReader, *arguments: object) -> None:
        raise OSError(errno.EIO, "bad sector")

    with monkeypatch.context() as patch:
        patch.setattr(follower.LogReader, "follow", broken)
        for _ in range(5):
            if how == "lookup":
                assert reader.exists([key_of(1)]) == [False]
            else:
                reader.maintain()
            assert opened_below(tmp_path) == before
    assert held(reader, [1]) == {1} or how == "lookup"
    reader.maintain()
    assert held(reader, [1]) == {1}
    owner.close()
    reader.close()


def test_an_owner_that_cannot_be_told_is_followed_on(tmp_path: Path) -> None:
    """A read-only file system takes no requests, and serves what lies there."""
    owner, reader = open_tier(tmp_path), open_tier(tmp_path)
    put(owner, *range(4))
    assert held(reader, range(4)) == set(range(4))
    whole = os.open

    def read_only(path: str, flags: int, *arguments: Any, **options: Any) -> int:
        if flags & os.O_CREAT:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return whole(path, flags, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "open", read_only)
        for _ in range(3):
            reader.maintain()
            assert held(reader, range(4)) == set(range(4))
        reader.delete(key_of(3))
        assert held(reader, range(4)) == set(range(3))
    shutil.rmtree(stores_of(tmp_path)[0])
    reader.maintain()
    assert held(reader, range(4)) == set()
    assert reader.figures()["upkeep_failures"] == 0
    owner.close()
    reader.close()


def test_a_segment_that_cannot_be_removed_is_removed_later(tmp_path: Path) -> None:
    capacity = Capacity(1 << 20)
    tier = open_tier(tmp_path, capacity)
    put(tier, *range(16))
    put(tier, *range(16, 32))
    with failing("unlink", errno.EROFS):
        for _ in range(2):
            with pytest.raises(OSError, match="Read-only"):
                tier._owned.shrink()
        tier.maintain()
        assert tier.figures()["upkeep_failures"] == 1
        assert capacity.used == on_disk(tmp_path) == 32 * SMALL
    tier.maintain()
    assert capacity.used == on_disk(tmp_path) == 0
    put(tier, 1)
    assert capacity.used == on_disk(tmp_path)
    tier.close()


# --- stores that are not where they were


def replaced(tier: SegmentsTier, root: Path) -> Path:
    """Have a copy lie where the store lay, which is elsewhere and still open: what one sees when
    its file system was unmounted, checked, and mounted again."""
    (directory,) = stores_of(root)
    aside = root / "aside"
    directory.rename(aside)
    shutil.copytree(aside, directory)
    return directory


def contents(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }


def test_a_store_that_came_back_is_taken_over_anew(tmp_path: Path) -> None:
    capacity = Capacity(1 << 20)
    tier = open_tier(tmp_path, capacity)
    put(tier, *range(16))
    directory = replaced(tier, tmp_path)
    tier.maintain()
    assert tier.figures()["stores"] == 1
    assert tier.figures()["lost_stores"] == tier.figures()["adopted_stores"] == 1
    assert held(tier, range(16)) == set(range(16))
    assert tier.take_dropped() == []
    put(tier, *range(16, 40))
    assert capacity.used == on_disk(tmp_path)
    assert len(contents(directory)) == 2 + len(segments_of(tmp_path)), "new ones lie there"
    assert len(contents(tmp_path / "aside")) == 3
    tier.close()
    tier = open_tier(tmp_path)
    assert held(tier, range(40)) == set(range(40))
    tier.close()


def test_a_store_that_went_away_comes_back(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    put(tier, *range(16))
    (directory,) = stores_of(tmp_path)
    directory.rename(tmp_path / "aside")
    tier.maintain()
    assert held(tier, range(16)) == set()
    put(tier, *range(8))
    (tmp_path / "aside").rename(directory)
    tier.maintain()
    assert held(tier, range(16)) == set(range(16))
    tier._owned.slots.check()
    tier.close()


@pytest.mark.parametrize("how", ["a segment goes", "closed while empty", "wiped", "rewritten"])
def test_what_lies_where_a_store_lay_is_left_alone(tmp_path: Path, how: str) -> None:
    """Before anybody noticed."""
    tier = open_tier(tmp_path)
    put(tier, *range(16))
    directory = replaced(tier, tmp_path)
    before = contents(directory)
    (mine,) = tier._owned.stores()
    if how == "a segment goes":
        tier._owned.shrink()
    elif how == "closed while empty":
        for i in range(16):
            tier.delete(key_of(i))
    elif how == "wiped":
        shutil.rmtree(tmp_path / "aside")
        tier._owned.abandon(mine)
    else:
        with pytest.raises(OSError, match="is not what it was"):
            mine.log.rewrite(lambda: tier._owned.slots.copies(mine), mine.next_segment)
    assert contents(directory) == before
    tier.close()
    assert contents(directory) == before
    tier = open_tier(tmp_path)
    assert held(tier, range(16)) == set(range(16))
    tier.close()


@pytest.mark.parametrize("how", ["its lock is not there yet", "its lock is another"])
def test_what_may_be_a_restored_store_is_left_alone(tmp_path: Path, how: str) -> None:
    """Another directory, or one that was given the number of the former one."""
    tier = open_tier(tmp_path)
    put(tier, *range(16))
    if how == "its lock is not there yet":
        directory = replaced(tier, tmp_path)
        (directory / "lock").unlink()
    else:
        (directory,) = stores_of(tmp_path)
        (directory / "lock").rename(tmp_path / "aside")
        (directory / "lock").touch()
    before = contents(directory)
    tier._owned.abandon(tier._owned.stores()[0])
    assert contents(directory) == before
    assert held(tier, range(16)) == set(range(16)), "it can be read"
    tier.close()


def test_the_next_segment_goes_to_the_store_that_is_there(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    put(tier, *range(16))
    directory = replaced(tier, tmp_path)
    before = contents(directory)
    put(tier, *range(20, 36))
    assert contents(directory) == before
    assert len(stores_of(tmp_path)) == 2
    tier.maintain()
    assert held(tier, range(36)) == {*range(16), *range(20, 36)}
    tier.close()


def test_a_store_that_its_server_does_not_know_is_let_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Network file systems say ESTALE of open files; asking again does not help."""
    tier = open_tier(tmp_path)
    put(tier, *range(16))
    (mine,) = tier._owned.stores()
    stale = mine._lock, mine.log._descriptor
    whole = os.fstat

    def fstat(descriptor: int) -> os.stat_result:
        if descriptor in stale and mine._lock >= 0:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return whole(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fstat", fstat)
        tier.maintain()
    assert tier.figures()["upkeep_failures"] == 0
    assert mine not in tier._owned.stores()
    tier.maintain()
    assert get(tier, 3) == content_of(3)
    assert held(tier, range(16)) == set(range(16))
    tier.close()


def test_a_segment_that_its_server_does_not_know_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = open_tier(tmp_path)
    put(tier, *range(16))
    put(tier, *range(16, 32))
    stale = tier._owned.slots.segments()[0].file._buffered
    whole = os.fstat

    def fstat(descriptor: int) -> os.stat_result:
        if descriptor == stale:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return whole(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fstat", fstat)
        tier.maintain()
    assert tier.figures()["upkeep_failures"] == 0
    assert held(tier, range(32)) == set(range(16, 32))
    tier.close()


def test_a_store_that_is_made_while_its_directory_cannot_be_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = opened_below(tmp_path)
    capacity = Capacity(1 << 20)
    tier = open_tier(tmp_path, capacity, durability="data")
    put(tier, *range(16))

    def broken(path: str) -> None:
        raise OSError(errno.EIO, "bad sector")

    with monkeypatch.context() as patch:
        patch.setattr(store, "sync_directory", broken)
        assert cause_of(write_failure(tier, 20)) is Cause.EIO
    assert capacity.used == on_disk(tmp_path) == 16 * SMALL
    tier.close()
    assert opened_below(tmp_path) == before
