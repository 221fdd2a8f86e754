"""Roots that cannot be opened or closed at once."""

from __future__ import annotations

import errno
import threading
from typing import TYPE_CHECKING

import pytest
from striped_roots import put

from kvtier.errors import TierUnreachableError
from kvtier.testing.blocks import key_of
from kvtier.tiers.base import Tier
from kvtier.tiers.fs.roots import Root
from kvtier.tiers.fs.striped import StripedTier
from kvtier.tiers.memory import MemoryTier

if TYPE_CHECKING:
    from collections.abc import Callable


def test_a_root_that_cannot_be_opened_is_opened_later() -> None:
    now = 0.0
    attempts: list[float] = []
    ended = threading.Semaphore(0)

    def fail_twice() -> Tier:
        attempts.append(now)
        try:
            if len(attempts) < 3:
                raise OSError(errno.ENODEV, "not mounted")
            return MemoryTier()
        finally:
            ended.release()

    tier = StripedTier([Root("a", MemoryTier), Root("b", fail_twice)], clock=lambda: now)
    ended.acquire()
    for second in (0.5, 1.0, 1.5, 2.9, 3.0):
        now = second
        if second < 3.0:
            for i in range(10):
                put(tier, key_of(i))
        else:
            tier.exists([key_of(0)])
        if second in (1.0, 3.0):
            ended.acquire()
            wait_for(lambda: not tier._places[1].is_opening)
    assert attempts == [0.0, 1.0, 3.0]
    assert all(tier.exists([key_of(i) for i in range(10)])), "also what b would have had"
    assert tier.figures()["roots_failing"] == 0
    tier.close()


def test_roots_that_hang_do_not_stop_the_others() -> None:
    released = threading.Event()
    closed = threading.Event()

    class Closing(MemoryTier):
        def close(self) -> None:
            closed.set()

    def hang() -> Tier:
        released.wait()
        return Closing()

    tier = StripedTier([Root("a", MemoryTier), Root("b", hang)], open_wait_s=0.01)
    for i in range(10):
        put(tier, key_of(i))
    assert all(tier.exists([key_of(i) for i in range(10)]))
    assert tier.figures()["roots_failing"] == 1
    tier.close()
    released.set()
    assert closed.wait(30), "opened too late, and closed"


def test_no_root_can_be_opened() -> None:
    def fail() -> Tier:
        raise OSError(errno.ENODEV, "not mounted")

    with pytest.raises(OSError, match="not mounted"):
        StripedTier([Root("a", fail), Root("b", fail)])
    released = threading.Event()

    def hang() -> Tier:
        released.wait()
        return MemoryTier()

    with pytest.raises(TierUnreachableError, match="none of 2"):
        StripedTier([Root("a", hang), Root("b", hang)], open_wait_max_s=0.01)
    released.set()


def test_a_root_that_hangs_does_not_stop_closing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.tiers.fs.striped.CLOSE_WAIT_S", 0.05)
    released = threading.Event()
    closed: list[str] = []

    class Closing(MemoryTier):
        def close(self) -> None:
            closed.append("b")

    class Hanging(MemoryTier):
        def close(self) -> None:
            released.wait()

    StripedTier([Root("a", Hanging), Root("b", Closing)]).close()
    assert closed == ["b"]
    released.set()


def wait_for(condition: Callable[[], bool]) -> None:
    while not condition():
        threading.Event().wait(0.001)
