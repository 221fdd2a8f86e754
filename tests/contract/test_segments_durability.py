"""What is synced, in which order, and how threads share a sync."""

from __future__ import annotations

import errno
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
from segments_world import SMALL, Capacity, held, open_tier, put, stores_of, vanish

from kvtier.testing.blocks import NAMESPACE
from kvtier.tiers.fs.segments.sync import GroupSync

if TYPE_CHECKING:
    from pathlib import Path


def test_threads_share_a_sync() -> None:
    """Seven come while one runs: one more serves them all."""
    entered, release = threading.Event(), threading.Event()
    calls = []

    def slow() -> None:
        calls.append(None)
        entered.set()
        assert release.wait(30)

    group = GroupSync(slow)
    with ThreadPoolExecutor(8) as pool:
        futures = [pool.submit(group.sync)]
        assert entered.wait(30)
        futures += [pool.submit(group.sync) for _ in range(7)]
        while group._asked < 8:
            threading.Event().wait(0.001)
        assert not any(future.done() for future in futures)
        release.set()
        for future in futures:
            future.result(30)
    assert len(calls) == 2


def test_who_shares_a_sync_that_fails_is_told() -> None:
    entered, release = threading.Event(), threading.Event()
    calls = []

    def failing() -> None:
        calls.append(None)
        if len(calls) == 1:
            entered.set()
            assert release.wait(30)
        if len(calls) == 2:
            raise OSError(errno.EIO, "lost a page")

    group = GroupSync(failing)
    with ThreadPoolExecutor(4) as pool:
        first = pool.submit(group.sync)
        assert entered.wait(30)
        others = [pool.submit(group.sync) for _ in range(3)]
        while group._asked < 4:
            threading.Event().wait(0.001)
        release.set()
        first.result(30)
        for future in others:
            with pytest.raises(OSError, match="lost a page"):
                future.result(30)
    assert len(calls) == 2
    group.sync()


class Trace:
    """Names the calls that change the disk, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[str, str]] = []
        for name in ("pwritev", "pwrite", "fdatasync", "fsync"):
            monkeypatch.setattr(os, name, self._noting(name, getattr(os, name)))
        whole = os.rename

        def rename(source: str, target: str) -> None:
            self.calls.append(("rename", os.path.basename(target)))
            whole(source, target)

        monkeypatch.setattr(os, "rename", rename)

    def _noting(self, name, whole):
        def noting(fd, *arguments):
            path = os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))
            self.calls.append((name, path))
            return whole(fd, *arguments)

        return noting

    def take(self) -> list[tuple[str, str]]:
        calls, self.calls = self.calls, []
        return calls


def test_the_order_in_which_data_becomes_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = Trace(monkeypatch)
    tier = open_tier(tmp_path, Capacity(16 * SMALL), durability="data", direct=False)
    assert trace.take()[-2:] == [("fsync", NAMESPACE), ("fsync", tmp_path.name)]
    put(tier, *range(16))
    calls = trace.take()
    store = stores_of(tmp_path)[0]
    write = [
        ("fsync", store.name),  # the name of the segment
        ("pwritev", "0.segment"),
        ("fdatasync", "0.segment"),
        ("pwrite", "index.log"),
        ("fdatasync", "index.log"),
    ]
    assert calls[-5:] == write
    made = calls[:-5]
    assert made[:2] == [("pwrite", "index.log"), ("fdatasync", "index.log")]
    born = made.index(("rename", store.name))
    assert ("fsync", "stores") in made[born:]
    assert ("fsync", NAMESPACE) in made[born:]
    put(tier, 20)
    evict = [("pwrite", "index.log"), ("fdatasync", "index.log")]
    assert trace.take() == evict + write[1:]
    tier._owned.stores()[0].log.rewrite(list, 1)
    synced, renamed, named = trace.take()[-3:]
    assert (synced[0], synced[1][-4:]) == ("fdatasync", ".tmp")
    assert (renamed, named) == (("rename", "index.log"), ("fsync", store.name))
    tier.close()


def test_without_durability_nothing_is_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = open_tier(tmp_path, Capacity(16 * SMALL))
    trace = Trace(monkeypatch)
    put(tier, *range(16))
    put(tier, 20)
    tier._owned.stores()[0].log.rewrite(list, 1)
    tier.close()
    assert not [call for call in trace.take() if "sync" in call[0]]


def test_a_block_whose_segment_cannot_be_synced_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = open_tier(tmp_path, durability="data")
    put(tier, 1)
    whole = os.fdatasync

    def failing(fd: int) -> None:
        if os.readlink(f"/proc/self/fd/{fd}").endswith(".segment"):
            raise OSError(errno.EIO, "lost a page")
        whole(fd)

    monkeypatch.setattr(os, "fdatasync", failing)
    with pytest.raises(OSError, match="lost a page"):
        put(tier, 2)
    monkeypatch.undo()
    vanish(tier)
    tier = open_tier(tmp_path)
    assert held(tier, [1, 2]) == {1}
    tier.close()
