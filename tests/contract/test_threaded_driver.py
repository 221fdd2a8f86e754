from __future__ import annotations

import errno
import hashlib
import logging
import os
import threading
from typing import TYPE_CHECKING

import pytest

from kvtier.drivers.moving import LOOKUP_KEYS_MAX, LOOKUP_KEYS_MIN
from kvtier.drivers.places import OPEN_TIERS_MAX
from kvtier.drivers.threaded import ThreadedDriver
from kvtier.testing.blocks import BLOCK_BYTES, NAMESPACE, ArraySlots, block_of, key_of
from kvtier.testing.contract import DriverContract
from kvtier.testing.driver_contract import until
from kvtier.testing.faults import Fail, FaultyTier, Hang
from kvtier.tiers.fs.files import FilesTier
from kvtier.tiers.memory import MemoryTier

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtier.core.types import BlockKey
    from kvtier.drivers.base import SecondaryTierManager
    from kvtier.tiers.base import Buffers, Tier

drive = DriverContract()


def namespace_of(i: int) -> str:
    return hashlib.sha256(str(i).encode()).hexdigest()


class TestThreadedDriver(DriverContract):
    def make_over(self, tier: Tier) -> SecondaryTierManager:
        return ThreadedDriver("test", lambda namespace: tier, num_threads=4)


class TestThreadedDriverWithTwoThreads(DriverContract):
    def make_over(self, tier: Tier) -> SecondaryTierManager:
        return ThreadedDriver("test", lambda namespace: tier, num_threads=2)


class TestThreadedDriverOverFiles(DriverContract):
    @pytest.fixture(autouse=True)
    def place(self, tmp_path) -> None:
        self.root = tmp_path

    def make(self) -> SecondaryTierManager:
        return ThreadedDriver("fs", lambda namespace: FilesTier(self.root, namespace), 4)


class MeetingTier(MemoryTier):
    """The first calls of all threads meet. Then they are held, but for `num_free` of the kind that
    `free` names; what their threads do after that is noted."""

    def __init__(self, parties: int, free: str = "", num_free: int = 1) -> None:
        super().__init__()
        self.meeting = threading.Barrier(parties)
        self.met = threading.local()
        self.free = [free] * num_free
        self.held: list[str] = []
        self.released = threading.Event()
        self.done: list[str] = []

    def note(self, what: str) -> None:
        if hasattr(self.met, "once"):
            self.done.append(what)
            return
        self.met.once = True
        self.meeting.wait(30)
        try:
            self.free.remove(what)
        except ValueError:
            self.held.append(what)
            self.released.wait()

    def read(self, key: BlockKey, into: Buffers) -> None:
        self.note("urgent")
        super().read(key, into)

    def write(self, key: BlockKey, data: Buffers) -> None:
        self.note("bulk")
        super().write(key, data)

    def exists(self, keys: Sequence[BlockKey]) -> list[bool]:
        self.note("urgent")
        return super().exists(keys)


def test_loads_and_lookups_go_first() -> None:
    tier = MeetingTier(parties=5, free="bulk")
    driver = ThreadedDriver("x", lambda namespace: tier, num_threads=3)
    keys = [key_of(i) for i in range(10)]
    slots = ArraySlots(len(keys))
    driver.submit_load(drive.job(1, keys[:2], slots))
    driver.submit_store(drive.job(2, keys[:2], slots, readonly=True))
    while tier.meeting.n_waiting < 4:
        pass  # all threads are in it now
    driver.submit_store(drive.job(3, keys, slots, readonly=True))
    driver.submit_load(drive.job(4, keys, slots))
    driver.submit_lookup(drive.job(5, keys))
    tier.meeting.wait(30)
    drive.wait(driver, 3, 4, 5)  # by the one thread that is free
    assert tier.done == ["urgent"] * 11 + ["bulk"] * 10
    tier.released.set()
    assert driver.close()


@pytest.mark.parametrize("held", ["bulk", "urgent"])
def test_what_hangs_leaves_a_thread_to_the_other_direction(held: str) -> None:
    tier = MeetingTier(parties=3)
    driver = ThreadedDriver("x", lambda namespace: tier, num_threads=2)
    keys = [key_of(i) for i in range(10)]
    slots = ArraySlots(len(keys))

    def submit(number: int, what: str) -> None:
        job = drive.job(number, keys, slots, readonly=what == "bulk")
        (driver.submit_store if what == "bulk" else driver.submit_load)(job)

    submit(1, held)
    tier.meeting.wait(30)
    while len(tier.held) < 2:
        pass  # two of its blocks hang then, and the others wait
    tier.meeting = threading.Barrier(1)
    tier.free = ["urgent", "bulk"]
    submit(2, "urgent" if held == "bulk" else "bulk")
    drive.wait(driver, 2)
    assert held not in tier.done
    tier.released.set()
    drive.wait(driver, 1)
    assert driver.close()


def test_blocks_of_a_job_move_in_parallel() -> None:
    tier = MeetingTier(parties=4, free="bulk", num_free=4)  # all four are in it at once
    driver = ThreadedDriver("x", lambda namespace: tier, num_threads=4)
    assert len(drive.store(driver, 1, [key_of(i) for i in range(4)])) == 4
    assert driver.close()


@pytest.mark.parametrize(
    ("num_keys", "calls"),
    [
        (1, 1),
        (2 * LOOKUP_KEYS_MIN + 1, 3),
        (8 * LOOKUP_KEYS_MIN, 8),
        (8 * LOOKUP_KEYS_MIN + 1, 8),
        (8 * LOOKUP_KEYS_MAX, 8),
        (8 * LOOKUP_KEYS_MAX + 1, 9),
    ],
)
def test_lookups_are_spread_over_the_threads(num_keys: int, calls: int) -> None:
    tier = FaultyTier(MemoryTier())
    driver = ThreadedDriver("x", lambda namespace: tier, num_threads=8)
    drive.lookup(driver, 1, [key_of(i) for i in range(num_keys)])
    assert tier.calls["exists"] == calls
    assert driver.close()


def test_a_namespace_is_opened_by_its_first_job_on_a_tier_thread() -> None:
    opened: list[tuple[str, str]] = []

    def open_tier(namespace: str) -> Tier:
        opened.append((namespace, threading.current_thread().name))
        return MemoryTier()

    driver = ThreadedDriver("x", open_tier, num_threads=4)
    assert opened == []
    for job_id in range(3):
        drive.store(driver, job_id, [key_of(i) for i in range(8)])
    assert [namespace for namespace, _ in opened] == [NAMESPACE]
    assert opened[0][1].startswith("kvtier-x-")
    assert driver.close()


def test_namespaces_are_kept_apart() -> None:
    driver = ThreadedDriver("x", lambda namespace: MemoryTier())
    drive.store(driver, 1, [key_of(1)], namespace_of(1))
    assert drive.lookup(driver, 2, [key_of(1)], namespace_of(2)) == frozenset()
    assert drive.lookup(driver, 3, [key_of(1)], namespace_of(1)) == {key_of(1)}
    assert driver.close()


class ClosingTier(MemoryTier):
    def __init__(self, closed: list[str], namespace: str) -> None:
        super().__init__()
        self.closed = closed
        self.namespace = namespace

    def close(self) -> None:
        self.closed.append(self.namespace)


def test_old_namespaces_are_closed_once_unused_longest_first() -> None:
    closed: list[str] = []
    driver = ThreadedDriver("x", lambda namespace: ClosingTier(closed, namespace))
    for i in range(OPEN_TIERS_MAX):
        drive.lookup(driver, i, [key_of(1)], namespace_of(i))
    drive.lookup(driver, 50, [key_of(1)], namespace_of(0))
    assert closed == []
    drive.lookup(driver, 51, [key_of(1)], namespace_of(99))
    assert closed == [namespace_of(1)]
    assert driver.close()
    assert sorted(closed) == sorted([*map(namespace_of, range(OPEN_TIERS_MAX)), namespace_of(99)])


def test_a_namespace_is_not_closed_under_a_running_job() -> None:
    closed: list[str] = []
    released = threading.Event()
    first = FaultyTier(ClosingTier(closed, namespace_of(0)))
    first.script("exists", Hang(released))
    driver = ThreadedDriver(
        "x",
        lambda namespace: first if namespace == namespace_of(0) else ClosingTier(closed, namespace),
    )
    driver.submit_lookup(drive.job(0, [key_of(1)], namespace=namespace_of(0)))
    until(lambda: first.calls["exists"])
    for i in range(1, OPEN_TIERS_MAX + 2):
        drive.lookup(driver, i, [key_of(1)], namespace_of(i))
    assert closed == [namespace_of(1), namespace_of(2)]
    released.set()
    drive.wait(driver, 0)
    drive.lookup(driver, 50, [key_of(1)], namespace_of(50))
    assert closed == [namespace_of(1), namespace_of(2), namespace_of(0)]
    assert driver.close()


def test_a_failure_to_open_is_tried_again_with_backoff(caplog: pytest.LogCaptureFixture) -> None:
    now = 100.0
    attempts: list[float] = []
    broken = True

    def open_tier(namespace: str) -> Tier:
        attempts.append(now)
        if broken:
            raise OSError(errno.EACCES, "no")
        return MemoryTier()

    driver = ThreadedDriver("x", open_tier, num_threads=2, clock=lambda: now)
    with caplog.at_level(logging.WARNING):
        for job_id, later in enumerate([0, 0.5, 0.5, 1.9, 0.2, 3.8, 0.3, 59]):
            now += later
            assert drive.store(driver, job_id, [key_of(1), key_of(2)]) == frozenset()
    assert attempts == pytest.approx([100, 101, 103.1, 107.2, 166.2])
    assert len(caplog.records) == 1
    assert "EACCES" in caplog.text or "PermissionError" in caplog.text
    assert driver.counters().write_failures == 16
    broken = False
    now += 60
    assert drive.store(driver, 90, [key_of(1)]) == {key_of(1)}
    assert driver.close()


def test_one_warning_per_cause(caplog: pytest.LogCaptureFixture) -> None:
    tier = FaultyTier(MemoryTier())
    driver = ThreadedDriver("x", lambda namespace: tier)
    keys = [key_of(i) for i in range(10)]
    with caplog.at_level(logging.WARNING):
        tier.script("write", Fail(OSError(errno.ENOSPC, "full")))
        drive.store(driver, 1, keys)
        tier.heal()
        tier.script("write", Fail(OSError(errno.EIO, "broken")))
        drive.store(driver, 2, keys)
        tier.heal()
        tier.script("exists", Fail(ValueError("what")))
        drive.lookup(driver, 3, keys)
        drive.lookup(driver, 4, keys)
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 3
    assert driver.counters().write_failures == 20
    assert driver.close()


def test_a_tier_that_answers_for_too_few_keys_is_a_failure() -> None:
    class Curt(MemoryTier):
        def exists(self, keys: Sequence[BlockKey]) -> list[bool]:
            return [True]

    driver = ThreadedDriver("x", lambda namespace: Curt())
    assert drive.lookup(driver, 1, [key_of(1), key_of(2)]) == frozenset()
    assert driver.counters().lookup_failures == 1
    assert driver.close()


def test_a_failing_delete_or_close_harms_nothing() -> None:
    class Stubborn(MemoryTier):
        def delete(self, key: BlockKey) -> None:
            raise OSError(errno.EROFS, "read-only")

        def close(self) -> None:
            raise OSError(errno.EIO, "broken")

    tier = Stubborn()
    driver = ThreadedDriver("x", lambda namespace: tier)
    tier.write(key_of(1), (memoryview(bytes(4096 + BLOCK_BYTES)),))
    assert drive.load(driver, 1, [key_of(1)]) == frozenset()
    assert driver.counters().corrupt_blocks == 1
    assert driver.counters().read_failures == 0
    assert driver.close()


def test_seconds_are_those_of_the_clock() -> None:
    now = 0.0

    class Slow(MemoryTier):
        def write(self, key: BlockKey, data: Buffers) -> None:
            nonlocal now
            now += 2.0
            super().write(key, data)

        def read(self, key: BlockKey, into: Buffers) -> None:
            nonlocal now
            now += 3.0
            super().read(key, into)

    tier = Slow()
    driver = ThreadedDriver("x", lambda namespace: tier, clock=lambda: now)
    drive.store(driver, 1, [key_of(1)])
    drive.load(driver, 2, [key_of(1)])
    assert (driver.counters().write_seconds, driver.counters().read_seconds) == (2.0, 3.0)
    assert driver.close()


def test_a_slot_view_that_cannot_be_made_fails_its_block() -> None:
    driver = ThreadedDriver("x", lambda namespace: MemoryTier())
    driver.submit_store(drive.job(1, [key_of(1), key_of(2)]))  # no slots at all
    assert drive.wait(driver, 1)[1] == frozenset()
    assert driver.close()


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core")
def test_threads_leave_a_pinned_core() -> None:
    allowed = os.sched_getaffinity(0)
    seen: list[set[int]] = []

    def open_tier(namespace: str) -> Tier:
        seen.append(os.sched_getaffinity(0))
        return MemoryTier()

    os.sched_setaffinity(0, {min(allowed)})
    try:
        driver = ThreadedDriver("x", open_tier)
        drive.lookup(driver, 1, [key_of(1)])
        assert os.sched_getaffinity(0) == {min(allowed)}, "the caller stays where it was"
    finally:
        os.sched_setaffinity(0, allowed)
    assert seen == [allowed]
    assert driver.close()


def test_a_fresh_driver_finds_what_the_last_one_stored(tmp_path) -> None:
    keys = [key_of(i) for i in range(10)]
    for attempt in range(2):
        driver = ThreadedDriver("fs", lambda namespace: FilesTier(tmp_path, namespace))
        if attempt == 0:
            drive.store(driver, 1, keys)
        else:
            assert drive.lookup(driver, 1, keys) == frozenset(keys)
            assert drive.load(driver, 2, keys) == frozenset(keys)
        assert driver.close()


def test_a_file_damaged_on_disk_is_a_miss_and_goes(tmp_path) -> None:
    driver = ThreadedDriver("fs", lambda namespace: FilesTier(tmp_path, namespace))
    drive.store(driver, 1, [key_of(1)])
    (path,) = [path for path in tmp_path.rglob("*") if path.name == key_of(1).hex()]
    content = bytearray(path.read_bytes())
    assert bytes(content[4096:]) == block_of(key_of(1))
    content[5000] ^= 4
    path.write_bytes(content)
    assert drive.load(driver, 2, [key_of(1)]) == frozenset()
    assert not path.exists()
    assert driver.close()
