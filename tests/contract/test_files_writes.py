"""Writes of the files layout: batches, what they take and give back, and last uses."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from files_world import (
    DURABILITIES,
    Counted,
    bytes_under,
    file_of,
    files_under,
    get,
    put,
    write_many,
)

from kvtier.errors import MissingBlockError, TierFullError
from kvtier.testing.blocks import BLOCK_BYTES, NAMESPACE, block_of, key_of
from kvtier.tiers.fs.files import Durability, FilesTier

if TYPE_CHECKING:
    from collections.abc import Callable


# --- batches


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("durability", DURABILITIES)
def test_a_batch_is_like_its_blocks(tmp_path: Path, durability: Durability, direct: bool) -> None:
    """More of them than are synced together, and one that is there."""
    space = Counted()
    tier = FilesTier(tmp_path, NAMESPACE, space=space, durability=durability, direct=direct)
    put(tier, key_of(7))
    assert write_many(tier, range(40)) == [None] * 40
    assert sorted(files_under(tmp_path)) == sorted(file_of(tmp_path, i) for i in range(40))
    assert space.taken == 40 * BLOCK_BYTES == bytes_under(tmp_path)
    keys = [key_of(i) for i in range(41)]
    into = [bytearray(BLOCK_BYTES) for _ in keys]
    outcomes = tier.read_batch(keys, [(memoryview(b)[:4096], memoryview(b)[4096:]) for b in into])
    assert outcomes[:40] == [None] * 40
    assert isinstance(outcomes[40], MissingBlockError)
    assert [bytes(b) for b in into[:40]] == [block_of(key) for key in keys[:40]]


@pytest.mark.parametrize("durability", DURABILITIES)
def test_one_block_of_a_batch_may_fail_alone(tmp_path: Path, durability: Durability) -> None:
    tier = FilesTier(tmp_path, NAMESPACE, space=Counted(), durability=durability)
    file_of(tmp_path, 3).parent.touch()  # a file where a directory should be
    outcomes = write_many(tier, range(6))
    assert [type(outcome) for outcome in outcomes] == [
        *[type(None)] * 3,
        NotADirectoryError,
        *[type(None)] * 2,
    ]
    assert tier.exists([key_of(i) for i in range(6)]) == [True, True, True, False, True, True]


def test_all_of_a_batch_is_synced_before_the_first_is_renamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And each directory once afterwards, with the one that new directories are in."""
    tier = FilesTier(tmp_path, NAMESPACE, durability="data")
    calls: list[str] = []

    def note(name: str) -> None:
        inner: Callable[..., Any] = getattr(os, name)

        def call(*arguments: Any) -> Any:
            calls.append(name)
            return inner(*arguments)

        monkeypatch.setattr(os, name, call)

    for name in ("pwritev", "fdatasync", "rename", "fsync"):
        note(name)
    assert write_many(tier, range(10)) == [None] * 10
    directories = {file_of(tmp_path, i).parent for i in range(10)}
    expected = [*["pwritev"] * 10, *["fdatasync"] * 10, *["rename"] * 10]
    assert calls == [*expected, *["fsync"] * (len(directories) + 1)]
    calls.clear()
    os.unlink(file_of(tmp_path, 1))
    put(tier, key_of(1))
    assert calls == ["pwritev", "fdatasync", "rename", "fsync"], "its directory is synced already"


def test_nothing_is_synced_without_durability(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int) -> None:
        raise AssertionError("a sync")

    monkeypatch.setattr(os, "fsync", refuse)
    monkeypatch.setattr(os, "fdatasync", refuse)
    tier = FilesTier(tmp_path, NAMESPACE)
    assert write_many(tier, range(3)) == [None] * 3


# --- room


def test_what_is_taken_is_what_is_there(tmp_path: Path) -> None:
    space = Counted()
    tier = FilesTier(tmp_path, NAMESPACE, space=space)
    for i in range(4):
        put(tier, key_of(i))
        put(tier, key_of(i))  # there already
        assert space.taken == (i + 1) * BLOCK_BYTES == bytes_under(tmp_path)
    os.truncate(file_of(tmp_path, 0), 999)
    put(tier, key_of(0))  # replaces 999 bytes that were taken
    assert space.taken == 5 * BLOCK_BYTES - 999
    space.taken = bytes_under(tmp_path)
    os.truncate(file_of(tmp_path, 1), 999)
    space.taken = bytes_under(tmp_path)
    with pytest.raises(MissingBlockError):
        get(tier, key_of(1))
    assert space.taken == 3 * BLOCK_BYTES == bytes_under(tmp_path)
    tier.delete(key_of(2))
    tier.delete(key_of(2))
    tier.delete(key_of(77))
    assert space.taken == 2 * BLOCK_BYTES == bytes_under(tmp_path)
    assert tier.figures() == {"removed_blocks": 1}


@pytest.mark.parametrize("durability", DURABILITIES)
def test_without_room_nothing_is_written(tmp_path: Path, durability: Durability) -> None:
    space = Counted(3 * BLOCK_BYTES + 1)
    tier = FilesTier(tmp_path, NAMESPACE, space=space, durability=durability)
    outcomes = write_many(tier, range(5))
    assert [type(outcome) for outcome in outcomes] == [*[type(None)] * 3, *[TierFullError] * 2]
    assert bytes_under(tmp_path) == space.taken == 3 * BLOCK_BYTES
    with pytest.raises(TierFullError, match="capacity"):
        put(tier, key_of(9))
    put(tier, key_of(1))  # there already: needs none
    tier.delete(key_of(0))
    put(tier, key_of(9))


def test_threads_that_write_and_delete_keep_the_account(tmp_path: Path) -> None:
    """Each has keys of its own, deleted by two: one of them gives back."""
    space = Counted()
    tiers = [FilesTier(tmp_path, NAMESPACE, space=space) for _ in range(2)]
    start = threading.Barrier(8)
    failures: list[BaseException] = []

    def work(number: int) -> None:
        pair = number // 2
        try:
            for i in range(100 * pair, 100 * pair + 60):
                if number % 2:
                    put(tiers[0], key_of(i))
                start.wait(30)
                tiers[number % 2].delete(key_of(i))
        except BaseException as error:
            failures.append(error)
            start.abort()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert space.taken == 0 == bytes_under(tmp_path)


# --- recency


def test_the_last_use_is_the_mtime(tmp_path: Path) -> None:
    tier = FilesTier(tmp_path, NAMESPACE, touch_age_s=60)
    uses: list[Callable[[], object]] = [
        lambda: get(tier, key_of(1)),
        lambda: put(tier, key_of(1)),
    ]
    put(tier, key_of(1))
    path = file_of(tmp_path, 1)
    now = path.stat().st_mtime
    for use in uses:
        for written_down, then in ((False, now - 40), (True, now - 80), (True, now + 9999)):
            os.utime(path, (then, then))
            use()
            assert (abs(path.stat().st_mtime - then) > 1) == written_down
            assert not written_down or path.stat().st_mtime >= now
    os.utime(path, (1.0, 1.0))
    tier.exists([key_of(1)])
    assert path.stat().st_mtime == 1.0, "a lookup is no use"


def test_a_use_that_cannot_be_written_down_is_a_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = FilesTier(tmp_path, NAMESPACE)
    put(tier, key_of(1))
    os.utime(file_of(tmp_path, 1), (1.0, 1.0))

    def refuse(*_: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "utime", refuse)
    assert get(tier, key_of(1)) == block_of(key_of(1))
