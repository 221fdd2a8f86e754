"""Roots that fail, alone or together, and come back."""

from __future__ import annotations

import errno
import logging
import os
import subprocess
import threading
from typing import TYPE_CHECKING

import pytest
import striped_roots
from striped_roots import EIO, NAMES, Striped, files_root, get, put

from kvtier.errors import MissingBlockError, TierFullError
from kvtier.testing.blocks import BLOCK_BYTES, block_of, key_of
from kvtier.testing.faults import Fail, Hang
from kvtier.tiers.fs.roots import Backoff
from kvtier.tiers.fs.striped import StripedTier

if TYPE_CHECKING:
    from pathlib import Path

striped = striped_roots.striped

# --- roots that fail


def test_a_failing_root_is_misses_and_its_writes_go_on(striped: Striped) -> None:
    (old, new, _) = striped.keys_of("b")
    put(striped.tier, old)
    for operation in ("exists", "read", "write"):
        striped.faulty["b"].script(operation, Fail(EIO))  # type: ignore[arg-type]
    assert striped.tier.exists([old, new]) == [False, False]
    with pytest.raises(MissingBlockError):
        get(striped.tier, old)
    put(striped.tier, new)
    assert striped.holders(new) in (["a"], ["c"])
    assert get(striped.tier, new) == block_of(new)
    assert striped.tier.exists([old, new]) == [False, True]
    assert striped.faulty["b"].calls == {"exists": 1, "write": 1}, "left alone"
    assert striped.tier.figures() == {"roots": 3, "roots_failing": 1, "root_failures": 1}


def test_what_went_elsewhere_is_found_when_the_root_is_back(striped: Striped) -> None:
    (old, new, _) = striped.keys_of("b")
    put(striped.tier, old)
    striped.faulty["b"].script("write", Fail(EIO))
    put(striped.tier, new)
    striped.faulty["b"].heal()
    striped.now = 1.0
    assert striped.tier.exists([old, new, key_of(10**6)]) == [True, True, False]
    assert get(striped.tier, old) == block_of(old)
    assert get(striped.tier, new) == block_of(new)
    striped.tier.delete(new)
    assert striped.holders(new) == []
    with pytest.raises(MissingBlockError):
        get(striped.tier, new)


def test_one_call_tries_a_failing_root_after_a_while(striped: Striped) -> None:
    (key, _, _) = striped.keys_of("b")
    b = striped.faulty["b"]
    b.script("exists", Fail(EIO))
    tries = []
    for tenth in range(700):
        striped.now = tenth / 10
        before = b.calls["exists"]
        striped.tier.exists([key])
        striped.tier.exists([key])
        if b.calls["exists"] > before:
            assert b.calls["exists"] == before + 1
            tries.append(striped.now)
    assert tries == [0.0, 1.0, 3.0, 7.0, 15.0, 31.0, 63.0], "twice as long each time"
    b.heal()
    striped.now = 63.0 + 59.9
    striped.tier.exists([key])
    assert b.calls["exists"] == len(tries), "but not longer than 60 s"
    striped.now = 63.0 + 60.0
    striped.tier.exists([key])
    striped.tier.exists([key])
    assert b.calls["exists"] == len(tries) + 2, "it is used again"
    b.script("exists", Fail(EIO))
    striped.tier.exists([key])
    striped.now += 1.0
    striped.tier.exists([key])
    assert b.calls["exists"] == len(tries) + 4, "and the next wait is a short one"


def test_others_pass_by_while_one_tries(striped: Striped) -> None:
    (key, _, _) = striped.keys_of("b")
    b = striped.faulty["b"]
    b.script("exists", Fail(EIO), call=1)
    striped.tier.exists([key])
    striped.now = 1.0
    released = threading.Event()
    b.script("exists", Hang(released), call=2)
    thread = threading.Thread(target=striped.tier.exists, args=([key],))
    thread.start()
    try:
        while b.calls["exists"] < 2:
            threading.Event().wait(0.001)
        assert striped.tier.exists([key]) == [False]
        assert b.calls["exists"] == 2, "it did not wait for the one that hangs"
    finally:
        released.set()
        thread.join()
    striped.tier.exists([key])
    assert b.calls["exists"] == 3


def test_a_try_that_no_key_needed_is_none(striped: Striped) -> None:
    (key, _, _) = striped.keys_of("b")
    (other, _, _) = striped.keys_of("a")
    striped.faulty["b"].script("exists", Fail(EIO), call=1)
    striped.tier.exists([key])
    striped.now = 1.0
    striped.tier.exists([other])
    striped.tier.exists([key])
    assert striped.faulty["b"].calls["exists"] == 2


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "full"),
        OSError(errno.EDQUOT, "quota"),
        OSError(errno.EROFS, "read-only"),
        TierFullError("capacity"),
    ],
)
def test_a_root_that_takes_no_writes_is_still_read(striped: Striped, error: Exception) -> None:
    (old, new, last) = striped.keys_of("b")
    put(striped.tier, old)
    b = striped.faulty["b"]
    b.script("write", Fail(error))
    put(striped.tier, new)
    put(striped.tier, last)
    assert b.calls["write"] == 2
    assert striped.holders(new) != ["b"]
    assert get(striped.tier, old) == block_of(old)
    assert striped.tier.exists([old, new]) == [True, True]
    for second in range(1, 5):
        striped.now = float(second)
        put(striped.tier, key_of(10**6 + second))  # of whatever root
        put(striped.tier, new)
    assert b.calls["write"] >= 5, "room is made all the time: tried every second"


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENOMEM, errno.EINVAL])
def test_what_is_not_the_roots_is_raised(striped: Striped, number: int) -> None:
    (key, _, _) = striped.keys_of("b")
    error = OSError(number, "ours")
    for operation in ("exists", "read", "write", "delete"):
        striped.faulty["b"].script(operation, Fail(error))  # type: ignore[arg-type]
    for fails in (
        lambda: striped.tier.exists([key]),
        lambda: get(striped.tier, key),
        lambda: put(striped.tier, key),
        lambda: striped.tier.delete(key),
    ):
        with pytest.raises(OSError, match="ours"):
            fails()
    assert striped.tier.figures()["roots_failing"] == 0


@pytest.mark.parametrize("number", [errno.ENODEV, errno.ESTALE, errno.ENOENT, errno.EACCES])
def test_with_all_roots_failing_the_last_error_is_raised(number: int) -> None:
    striped = Striped()
    keys = [key for name in NAMES for key in striped.keys_of(name, 1)]
    for i, name in enumerate(NAMES):
        striped.now = i / 10
        for operation in ("exists", "read", "write"):
            error = OSError(number, f"of {name}")
            striped.faulty[name].script(operation, Fail(error))  # type: ignore[arg-type]
        if name != "c":
            assert striped.tier.exists(keys) == [False] * 3
    totals: list[list[int]] = []
    for _ in range(2):  # as it fails, and while all are left alone
        with pytest.raises(OSError, match="of c"):
            striped.tier.exists(keys)
        with pytest.raises(OSError, match="of c") as caught:
            get(striped.tier, keys[0])
        assert caught.value.errno == number
        with pytest.raises(OSError, match="of c"):
            put(striped.tier, keys[0])
        totals.append([faulty.calls.total() for faulty in striped.faulty.values()])
    assert totals[0] == totals[1], "nobody was asked again"
    assert striped.tier.exists([]) == []


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
def test_a_read_that_fails_as_writes_do(striped: Striped, number: int) -> None:
    """It says nothing about the root."""
    striped.faulty["b"].script("exists", Fail(OSError(number, "odd")))
    with pytest.raises(OSError, match="odd"):
        striped.tier.exists(striped.keys_of("b"))
    assert striped.tier.figures()["roots_failing"] == 0


def test_calls_that_fail_together_are_one_failure() -> None:
    """They began before the first of them failed: the root was not tried again."""
    backoff = Backoff()
    assert backoff.fail(0.0, doubling=True)
    assert not backoff.fail(0.5, doubling=True)
    assert (backoff.failed, backoff.admits(0.9)) == (1, False)
    assert backoff.admits(1.0)
    assert not backoff.admits(1.0), "one tries"
    assert not backoff.fail(1.0, doubling=True)
    assert (backoff.failed, backoff.admits(2.9), backoff.admits(3.0)) == (2, False, True)
    assert backoff.work()
    assert backoff.admits(3.0)


def test_a_bad_sector_is_not_a_bad_root(striped: Striped) -> None:
    """Of several blocks read at once one fails: that one is missing, the root goes on."""
    keys = striped.keys_of("b")
    for key in keys:
        put(striped.tier, key)
    striped.faulty["b"].script("read", Fail(EIO), call=2)
    into = [(memoryview(bytearray(BLOCK_BYTES)),) for _ in keys]
    outcomes = striped.tier.read_batch(keys, into)
    assert (outcomes[0], outcomes[2]) == (None, None)
    assert isinstance(outcomes[1], MissingBlockError)
    assert striped.tier.figures()["roots_failing"] == 0


def test_a_root_is_told_of_once(striped: Striped, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    (key, _, _) = striped.keys_of("b")
    striped.faulty["b"].script("exists", Fail(EIO))
    for second in range(20):
        striped.now = float(second)
        striped.tier.exists([key])
    striped.faulty["b"].heal()
    striped.now = 100.0
    striped.tier.exists([key])
    assert [record.getMessage() for record in caplog.records] == [
        "b is left alone by reads and writes for a while: OSError: [Errno 5] disk",
        "b is read again",
    ]


# --- real roots


def test_a_root_that_vanishes_and_comes_back(tmp_path: Path) -> None:
    now = 0.0
    for name in NAMES:
        (tmp_path / name).mkdir()
    roots = [files_root(tmp_path / name) for name in NAMES]
    tier = StripedTier(roots, clock=lambda: now)
    keys = [key_of(i) for i in range(30)]
    for key in keys:
        put(tier, key)
    (tmp_path / "b").rename(tmp_path / "gone")
    found = list(tier.exists(keys))
    assert 0 < sum(found) < 30
    for key, there in zip(keys, found, strict=True):
        if there:
            assert get(tier, key) == block_of(key)
        else:
            with pytest.raises(MissingBlockError):
                get(tier, key)
    late = [key_of(i) for i in range(100, 130)]
    for key in late:
        put(tier, key)
    assert all(tier.exists(late))
    assert not (tmp_path / "b").exists(), "a mount that is gone is not replaced"
    (tmp_path / "gone").rename(tmp_path / "b")
    now = 1.0
    assert all(tier.exists([*keys, *late]))
    assert all(get(tier, key) == block_of(key) for key in [*keys, *late])
    tier.close()


def test_a_root_that_is_unmounted_and_mounted_again(tmp_path: Path) -> None:
    now = 0.0
    for name in NAMES:
        (tmp_path / name).mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(tmp_path / "b")]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a tmpfs cannot be mounted")
    mounted = True
    try:
        (tmp_path / "b" / "kvtier.json").touch()
        tier = StripedTier([files_root(tmp_path / name) for name in NAMES], clock=lambda: now)
        keys = [key_of(i) for i in range(30)]
        for key in keys:
            put(tier, key)
        subprocess.run(["umount", "-l", tmp_path / "b"], check=True)
        mounted = False
        assert 0 < sum(tier.exists(keys)) < 30
        for key in keys:
            put(tier, key)
        assert all(tier.exists(keys))
        assert os.listdir(tmp_path / "b") == [], "nothing went to the disk below"
        subprocess.run(mount, check=True)
        mounted = True
        (tmp_path / "b" / "kvtier.json").touch()
        now = 1.0
        assert all(tier.exists(keys))
        late = [key_of(i) for i in range(100, 130)]
        for key in late:
            put(tier, key)
        assert len(os.listdir(tmp_path / "b")) == 2, "it is written again"
        assert all(get(tier, key) == block_of(key) for key in [*keys, *late])
        tier.close()
    finally:
        if mounted:
            subprocess.run(["umount", "-l", tmp_path / "b"], check=True)
