"""The optional abilities of a tier: batches, what it dropped, how full it is."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import mmap
import threading
from collections.abc import Mapping, Sequence

import pytest

from kvtier.core.types import BlockKey, Done, Dropped, Fault, Reason, TierId
from kvtier.drivers import threaded
from kvtier.drivers.base import SecondaryTierManager
from kvtier.drivers.moving import RUN_BLOCKS_MAX, RUN_BYTES_MAX, RUN_BYTES_MIN, run_length
from kvtier.drivers.threaded import ThreadedDriver
from kvtier.envelope import HEADER_BYTES
from kvtier.errors import MissingBlockError
from kvtier.testing.blocks import BLOCK_BYTES, ArraySlots, key_of
from kvtier.testing.contract import DriverContract
from kvtier.testing.driver_contract import until
from kvtier.tiers.base import Buffers, Tier
from kvtier.tiers.memory import MemoryTier

drive = DriverContract()


class BatchTier:
    """Any tier in batches.

    Attributes:
        batches: blocks of each batch that was moved, in order.
    """

    def __init__(self, inner: Tier) -> None:
        self.inner = inner
        self.batches: list[int] = []
        self.exists = inner.exists
        self.close = inner.close
        self.delete = getattr(inner, "delete", lambda key: None)

    def read(self, key: BlockKey, into: Buffers) -> None:
        raise AssertionError("batches are there to be used")

    write = read

    def read_batch(
        self, keys: Sequence[BlockKey], into: Sequence[Buffers]
    ) -> list[BaseException | None]:
        self.batches.append(len(keys))
        return [self._try(self.inner.read, key, buffers) for key, buffers in zip(keys, into)]

    def write_batch(
        self, keys: Sequence[BlockKey], data: Sequence[Buffers]
    ) -> list[BaseException | None]:
        self.batches.append(len(keys))
        for header, _ in data:
            address = ctypes.addressof(ctypes.c_char.from_buffer(header))
            assert address % mmap.PAGESIZE == 0
            assert header.nbytes == HEADER_BYTES
        return [self._try(self.inner.write, key, buffers) for key, buffers in zip(keys, data)]

    @staticmethod
    def _try(operation, key: BlockKey, buffers: Buffers) -> BaseException | None:
        try:
            operation(key, buffers)
        except BaseException as error:
            return error
        return None


class TestInBatches(DriverContract):
    def make_over(self, tier: Tier) -> SecondaryTierManager:
        batches = BatchTier(tier)
        return ThreadedDriver("test", lambda namespace: batches, num_threads=4)


def warm(driver: ThreadedDriver) -> None:
    """The tier is open, so that it is known to take batches."""
    drive.lookup(driver, 1000, [key_of(1)])


@pytest.mark.parametrize(
    ("blocks", "threads", "most"),
    [(1, 4, 1), (4, 4, 1), (5, 4, 2), (64, 4, 16), (1000, 4, RUN_BLOCKS_MAX)],
)
def test_a_job_keeps_all_threads_busy(
    blocks: int, threads: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier.drivers.moving.RUN_BYTES_MIN", BLOCK_BYTES)  # no small blocks
    tier = BatchTier(MemoryTier())
    driver = ThreadedDriver("x", lambda namespace: tier, num_threads=threads)
    warm(driver)
    keys = [key_of(i) for i in range(blocks)]
    assert drive.store(driver, 1, keys) == frozenset(keys)
    assert max(tier.batches) == most
    assert sum(tier.batches) == blocks
    assert len(tier.batches) >= min(blocks, threads) - 1
    assert drive.load(driver, 2, keys) == frozenset(keys)
    assert driver.close()


def test_many_small_jobs_are_not_cut_further() -> None:
    """While a lookup of the only other thread holds the queue up, jobs gather behind it."""
    tier = BatchTier(MemoryTier())
    held, released = threading.Event(), threading.Event()

    def exists(keys: Sequence[BlockKey]) -> list[bool]:
        if len(keys) == 2:
            held.set()
            released.wait()
        return [False] * len(keys)

    tier.exists = exists
    driver = ThreadedDriver("x", lambda namespace: tier, num_threads=2)
    warm(driver)
    for number in (1, 2):
        driver.submit_lookup(drive.job(number, [key_of(1), key_of(2)]))
    held.wait()
    slots = ArraySlots(8)
    for number in range(3, 15):
        keys = [key_of(100 * number + i) for i in range(8)]
        driver.submit_store(drive.job(number, keys, slots, readonly=True))
    released.set()
    drive.wait(driver, *range(1, 15))
    assert max(tier.batches) == 8, "as a whole while many are queued"
    assert sum(tier.batches) == 12 * 8
    assert driver.close()


def test_a_task_has_bounds_in_bytes() -> None:
    assert run_length(16, 64 << 10, 16) == RUN_BYTES_MIN // (64 << 10)
    assert run_length(16, RUN_BYTES_MIN + 4096, 16) == 1
    assert run_length(1000, 1 << 20, 2) == RUN_BYTES_MAX >> 20
    assert run_length(1000, RUN_BYTES_MAX + 4096, 2) == 1
    assert run_length(1, 4096, 16) == RUN_BLOCKS_MAX
    assert run_length(64, 256 << 10, 16, 2 << 20) == 8


@pytest.mark.parametrize(("wanted", "batches"), [(0, [2] * 4), (2 << 20, [8])])
def test_a_tier_says_how_many_bytes_are_worth_a_write(wanted: int, batches: list[int]) -> None:
    class Wishful(BatchTier):
        write_batch_bytes_min = wanted

    tier = Wishful(MemoryTier())
    driver = ThreadedDriver("tier", lambda _: tier, 16, TierId(0))
    warm(driver)
    slots = ArraySlots(8, 256 << 10)
    driver.submit_store(drive.job(1, [key_of(i) for i in range(8)], slots, readonly=True))
    drive.wait(driver, 1)
    assert tier.batches == batches
    tier.batches.clear()
    driver.submit_load(drive.job(2, [key_of(i) for i in range(8)], slots))
    drive.wait(driver, 2)
    assert tier.batches == [2] * 4, "a read waits for the medium, so it is spread"
    assert driver.close()


def test_the_first_job_waits_for_nothing_but_the_opening() -> None:
    """Whether there are batches is known once the tier is open: one block finds out."""
    tier = BatchTier(MemoryTier())
    driver = ThreadedDriver("x", lambda namespace: tier, num_threads=2)
    drive.store(driver, 1, [key_of(i) for i in range(101)])
    assert sorted(tier.batches) == [1, 49, 51]
    assert driver.close()


def test_each_block_of_a_batch_has_its_own_outcome() -> None:
    class Mixed(BatchTier):
        def write_batch(self, keys, data):
            outcomes = super().write_batch(keys, data)
            return [
                OSError(errno.ENOSPC, "full") if key == key_of(3) else outcome
                for key, outcome in zip(keys, outcomes, strict=True)
            ]

        def read_batch(self, keys, into):
            outcomes = super().read_batch(keys, into)
            for i, (key, (_, payload)) in enumerate(zip(keys, into, strict=True)):
                if key == key_of(4):
                    outcomes[i] = MissingBlockError("gone")
                elif key == key_of(5):
                    payload[17] ^= 1
                elif key == key_of(6):
                    outcomes[i] = OSError(errno.EIO, "broken")
            return outcomes

    driver = ThreadedDriver("x", lambda namespace: tier, num_threads=2)
    tier = Mixed(MemoryTier())
    warm(driver)
    keys = [key_of(i) for i in range(10)]
    slots = ArraySlots(10)
    driver.submit_store(drive.job(1, keys, slots, readonly=True))
    done = finished(driver)
    assert done == [Done(1, frozenset(set(keys) - {key_of(3)}), Fault.FULL)]
    driver.submit_load(drive.job(2, keys, slots))
    lost = {key_of(4), key_of(5), key_of(6)}
    assert finished(driver) == [Done(2, frozenset(set(keys) - lost), Fault.ERROR)]
    counters = driver.counters()
    assert counters.faults == {"enospc": 1, "eio": 1}
    assert (counters.write_blocks, counters.write_failures) == (9, 1)
    assert (counters.read_blocks, counters.read_failures, counters.corrupt_blocks) == (7, 1, 1)
    assert drive.lookup(driver, 3, keys) == frozenset(set(keys) - {key_of(5)})
    assert driver.close()


@pytest.mark.parametrize("short", [True, False])
def test_a_batch_that_fails_as_a_whole_fails_its_blocks(short: bool) -> None:
    class Broken(BatchTier):
        def write_batch(self, keys, data):
            if short:
                return [None]
            raise OSError(errno.EIO, "broken")

    driver = ThreadedDriver("x", lambda namespace: Broken(MemoryTier()), num_threads=2)
    warm(driver)
    assert drive.store(driver, 1, [key_of(i) for i in range(10)]) == frozenset()
    assert driver.counters().write_failures == 10
    assert driver.counters().faults == {"other" if short else "eio": 10}
    assert driver.close()


def finished(driver: ThreadedDriver, count: int = 1) -> list[object]:
    """So many completions, waited for by the callback's side of it."""
    found: list[object] = []

    def all_are_there() -> bool:
        found.extend(driver.get_finished())
        return len(found) >= count

    until(all_are_there)
    return found


@pytest.fixture
def collects_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threaded, "COLLECT_S", 0.05)


class TellingTier(MemoryTier):
    def __init__(self, told: list[Sequence[BlockKey]], level: float = 5.0) -> None:
        super().__init__()
        self.told = told
        self.level = level

    def take_dropped(self) -> Sequence[BlockKey]:
        return self.told.pop(0) if self.told else ()

    def figures(self) -> Mapping[str, float]:
        return {"used_bytes": self.level}


@pytest.mark.usefixtures("collects_often")
def test_what_a_tier_drops_is_told_with_its_name_and_wakes_the_owner() -> None:
    woken = threading.Event()
    tier = TellingTier([])
    driver = ThreadedDriver("x", lambda _: tier, 2, TierId(3), on_finished=woken.set)
    drive.lookup(driver, 1, [key_of(1)])
    tier.told.append((key_of(1), key_of(2)))
    found = finished(driver)
    assert found == [Dropped(TierId(3), (key_of(1), key_of(2)), Reason.EVICTED)]
    assert driver.counters().figures == {"used_bytes": 5.0}
    woken.clear()
    tier.told.append((key_of(9),))
    assert woken.wait(30), "nobody submits anything any more"
    assert driver.get_finished() == [Dropped(TierId(3), (key_of(9),), Reason.EVICTED)]
    woken.clear()
    tier.level = 7.0
    assert woken.wait(30)
    assert driver.counters().figures == {"used_bytes": 7.0}
    assert driver.close()


@pytest.mark.usefixtures("collects_often")
def test_only_the_namespace_in_use_tells() -> None:
    first, second = "a" * 64, "b" * 64
    tiers = {first: TellingTier([], 1.0), second: TellingTier([], 2.0)}
    driver = ThreadedDriver("x", tiers.__getitem__, 2)
    drive.lookup(driver, 1, [key_of(1)], first)
    drive.lookup(driver, 2, [key_of(1)], second)
    tiers[first].told.append((key_of(1),))
    tiers[second].told.append((key_of(2),))
    assert finished(driver) == [Dropped(TierId(0), (key_of(2),))]
    until(lambda: not tiers[first].told)  # taken, so that it does not grow
    assert driver.get_finished() == []
    assert driver.counters().figures == {"used_bytes": 2.0}
    assert driver.close()


@pytest.mark.usefixtures("collects_often")
def test_a_tier_that_fails_to_tell_harms_nothing() -> None:
    class Mute(TellingTier):
        def figures(self) -> Mapping[str, float]:
            self.level += 1
            raise OSError(errno.EIO, "broken")

    tier = Mute([])
    driver = ThreadedDriver("x", lambda _: tier, 2)
    drive.store(driver, 1, [key_of(1)])
    until(lambda: tier.level >= 6.5)
    assert drive.load(driver, 2, [key_of(1)]) == {key_of(1)}
    assert driver.close()


def test_an_opening_that_hangs_holds_up_its_namespace_alone() -> None:
    hung, other = (hashlib.sha256(name).hexdigest() for name in (b"hung", b"other"))
    released = threading.Event()
    opening = threading.Semaphore(0)

    def open_tier(namespace: str) -> Tier:
        if namespace == hung:
            opening.release()
            released.wait()
        return MemoryTier()

    driver = ThreadedDriver("x", open_tier, num_threads=2)
    keys = [key_of(i) for i in range(20)]
    driver.submit_load(drive.job(1, keys, ArraySlots(20), namespace=hung))
    driver.submit_store(drive.job(2, keys, ArraySlots(20), readonly=True, namespace=hung))
    assert opening.acquire(timeout=30)
    assert drive.store(driver, 3, keys, other) == frozenset(keys)
    assert drive.load(driver, 4, keys, other) == frozenset(keys)
    assert driver.oldest_running_s() > 0
    assert not opening.acquire(blocking=False), "one attempt"
    released.set()
    assert drive.wait(driver, 1, 2)[2] == frozenset(keys)
    assert driver.close()


def test_the_age_of_the_oldest_task() -> None:
    now = 10.0
    inside, released = threading.Semaphore(0), threading.Event()

    class Slow(MemoryTier):
        def exists(self, keys: Sequence[BlockKey]) -> list[bool]:
            inside.release()
            released.wait()
            return super().exists(keys)

    driver = ThreadedDriver("x", lambda _: Slow(), 2, clock=lambda: now)
    assert driver.oldest_running_s() == 0
    driver.submit_lookup(drive.job(1, [key_of(1)]))
    assert inside.acquire(timeout=30)
    now = 12.0
    driver.submit_lookup(drive.job(2, [key_of(1)]))
    assert inside.acquire(timeout=30)
    now = 15.0
    assert driver.oldest_running_s() == 5.0
    released.set()
    drive.wait(driver, 1, 2)
    assert driver.close()
    assert driver.oldest_running_s() == 0
