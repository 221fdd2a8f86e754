"""What every driver must do, as tests: see `contract`."""

# The names of the tests say what they test.
# ruff: noqa: D102
from __future__ import annotations

import errno
import hashlib
import threading
import time
from typing import TYPE_CHECKING

import pytest

from kvtier.core.types import BlockKey, Done, JobId
from kvtier.drivers.base import JobMetadata, SecondaryTierManager
from kvtier.envelope import HEADER_BYTES
from kvtier.testing.blocks import (
    BLOCK_BYTES,
    NAMESPACE,
    UNTOUCHED,
    ArraySlots,
    Slots,
    block_of,
    key_of,
)
from kvtier.testing.faults import Corrupt, Fail, FaultyTier, Hang, Lie, Short
from kvtier.tiers.memory import MemoryTier

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvtier.tiers.base import Tier

PATIENCE_S = 30.0
"""How long a job may take before a test gives up on it."""


def until(condition: Callable[[], object]) -> None:
    """Wait for something that another thread or process does.

    Raises:
        AssertionError: it does not, for `PATIENCE_S`.
    """
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it does not happen"
        time.sleep(0.0005)


class DriverContract:
    """Tests of a `SecondaryTierManager`. Each makes a new one and closes it."""

    def make(self) -> SecondaryTierManager:
        """A driver whose tier is empty, for slots of `BLOCK_BYTES`."""
        return self._over(MemoryTier())

    def make_slots(self, num_slots: int) -> Slots:
        """New slots of `BLOCK_BYTES`, where the jobs of this driver have theirs."""
        return ArraySlots(num_slots)

    def make_over(self, tier: Tier) -> SecondaryTierManager | None:
        """A driver that runs `tier`, the same for every namespace; None if it runs no `Tier`."""
        del tier
        return None

    def _over(self, tier: Tier) -> SecondaryTierManager:
        driver = self.make_over(tier)
        if driver is None:
            pytest.skip("this driver does not run a Tier")
        return driver

    @pytest.fixture
    def driver(self) -> Iterator[SecondaryTierManager]:
        """A driver over an empty tier."""
        driver = self.make()
        yield driver
        assert driver.close(), "something still runs"

    @pytest.fixture
    def faulty(self) -> FaultyTier:
        """The tier of `shaky`, to be scripted."""
        return FaultyTier(MemoryTier())

    @pytest.fixture
    def shaky(self, faulty: FaultyTier) -> Iterator[SecondaryTierManager]:
        """A driver over `faulty`."""
        driver = self._over(faulty)
        yield driver
        assert driver.close(), "something still runs"

    @staticmethod
    def job(
        job_id: int,
        keys: Sequence[BlockKey],
        slots: Slots | None = None,
        *,
        readonly: bool = False,
        namespace: str = NAMESPACE,
    ) -> JobMetadata:
        """A job over `keys[i]` and slot i."""
        views = slots.views(len(keys), readonly) if slots else ()
        return JobMetadata(JobId(job_id), tuple(keys), views, namespace)

    @staticmethod
    def wait(driver: SecondaryTierManager, *job_ids: int) -> dict[int, frozenset[BlockKey]]:
        """Poll until each job has ended, and see that each ended once."""
        ended: dict[int, frozenset[BlockKey]] = {}
        deadline = time.monotonic() + PATIENCE_S
        pause = threading.Event()  # never set
        while not ended.keys() >= set(job_ids):
            assert time.monotonic() < deadline, f"jobs {set(job_ids) - ended.keys()} do not end"
            for completion in driver.get_finished():
                if isinstance(completion, Done):
                    assert completion.job not in ended, f"job {completion.job} ended twice"
                    ended[completion.job] = completion.ok
            pause.wait(0.001)
        return ended

    def store(
        self,
        driver: SecondaryTierManager,
        job_id: int,
        keys: Sequence[BlockKey],
        namespace: str = NAMESPACE,
    ) -> frozenset[BlockKey]:
        """Store the right bytes of `keys`; which were kept."""
        slots = self.make_slots(len(keys))
        for i, key in enumerate(keys):
            slots.fill(i, block_of(key))
        driver.submit_store(self.job(job_id, keys, slots, readonly=True, namespace=namespace))
        return self.wait(driver, job_id)[job_id]

    def load(
        self,
        driver: SecondaryTierManager,
        job_id: int,
        keys: Sequence[BlockKey],
        namespace: str = NAMESPACE,
    ) -> frozenset[BlockKey]:
        """Load `keys` and check every byte of those that are said to be good."""
        slots = self.make_slots(len(keys))
        driver.submit_load(self.job(job_id, keys, slots, namespace=namespace))
        ok = self.wait(driver, job_id)[job_id]
        for i, key in enumerate(keys):
            assert key not in ok or slots.content(i) == block_of(key), "a wrong byte was served"
        return ok

    def lookup(
        self,
        driver: SecondaryTierManager,
        job_id: int,
        keys: Sequence[BlockKey],
        namespace: str = NAMESPACE,
    ) -> frozenset[BlockKey]:
        """Which of `keys` are there."""
        driver.submit_lookup(self.job(job_id, keys, namespace=namespace))
        return self.wait(driver, job_id)[job_id]

    def test_nothing_submitted_nothing_finished(self, driver: SecondaryTierManager) -> None:
        assert driver.get_finished() == []

    def test_a_job_without_keys_ends(self, driver: SecondaryTierManager) -> None:
        assert self.lookup(driver, 1, []) == frozenset()
        assert self.load(driver, 2, []) == frozenset()
        assert self.store(driver, 3, []) == frozenset()

    def test_stores_are_found_and_loaded(self, driver: SecondaryTierManager) -> None:
        keys = [key_of(i) for i in range(40)]
        assert self.lookup(driver, 1, keys) == frozenset()
        assert self.store(driver, 2, keys[::2]) == frozenset(keys[::2])
        assert self.lookup(driver, 3, keys) == frozenset(keys[::2])
        assert self.load(driver, 4, keys) == frozenset(keys[::2])

    def test_a_lookup_of_many_keys(self, driver: SecondaryTierManager) -> None:
        keys = [key_of(i) for i in range(2000)]
        present = [*keys[:3], *keys[255:258], *keys[-3:]]
        self.store(driver, 1, present)
        assert self.lookup(driver, 2, keys) == frozenset(present)

    def test_a_second_store_is_harmless(self, driver: SecondaryTierManager) -> None:
        for job_id in (1, 2):
            assert self.store(driver, job_id, [key_of(1)]) == {key_of(1)}
        assert self.load(driver, 3, [key_of(1)]) == {key_of(1)}

    def test_every_job_ends_once(self, driver: SecondaryTierManager) -> None:
        """Jobs of all kinds in flight at once, on the same keys."""
        keys = [key_of(i) for i in range(6)]
        self.store(driver, 0, keys)
        sources, targets = (
            self.make_slots(len(keys)),
            [self.make_slots(len(keys)) for _ in range(20)],
        )
        for i, key in enumerate(keys):
            sources.fill(i, block_of(key))
        for i, slots in enumerate(targets):
            driver.submit_load(self.job(3 * i + 1, keys, slots))
            driver.submit_store(self.job(3 * i + 2, keys, sources, readonly=True))
            driver.submit_lookup(self.job(3 * i + 3, keys))
        ended = self.wait(driver, *range(1, 61))
        assert all(ok == frozenset(keys) for ok in ended.values())
        assert driver.get_finished() == []
        for slots in targets:
            assert [slots.content(i) for i in range(6)] == [block_of(key) for key in keys]

    def test_no_slot_is_touched_after_its_job_ended(self, driver: SecondaryTierManager) -> None:
        keys = [key_of(i) for i in range(16)]
        self.store(driver, 0, keys)
        slots = self.make_slots(len(keys))
        mark = bytes([UNTOUCHED]) * BLOCK_BYTES
        for job_id in range(1, 20):
            driver.submit_load(self.job(job_id, keys, slots))
            self.wait(driver, job_id)
            for i in range(len(keys)):
                slots.fill(i, mark)
        assert driver.close()
        assert all(slots.content(i) == mark for i in range(len(keys)))

    def test_a_store_does_not_change_its_slots(self, driver: SecondaryTierManager) -> None:
        slots = self.make_slots(1)
        slots.fill(0, block_of(key_of(1)))
        driver.submit_store(self.job(1, [key_of(1)], slots, readonly=True))
        self.wait(driver, 1)
        assert slots.content(0) == block_of(key_of(1))

    def test_another_namespace_is_never_served(self, driver: SecondaryTierManager) -> None:
        other = hashlib.sha256(b"another").hexdigest()
        self.store(driver, 1, [key_of(1)])
        assert self.load(driver, 2, [key_of(1)], other) == frozenset()

    def test_counts_what_it_moved(self, driver: SecondaryTierManager) -> None:
        keys = [key_of(i) for i in range(5)]
        self.store(driver, 1, keys)
        self.load(driver, 2, keys)
        self.lookup(driver, 3, [*keys, key_of(99)])
        counters = driver.counters()
        assert (counters.write_blocks, counters.write_bytes) == (5, 5 * BLOCK_BYTES)
        assert (counters.read_blocks, counters.read_bytes) == (5, 5 * BLOCK_BYTES)
        assert (counters.lookup_blocks, counters.lookup_hits) == (6, 5)
        assert counters.read_failures == counters.write_failures == counters.corrupt_blocks == 0

    def test_after_close_jobs_end_empty(self, driver: SecondaryTierManager) -> None:
        assert self.store(driver, 1, [key_of(1)]) == {key_of(1)}
        assert driver.close()
        assert driver.close(), "a second close does nothing"
        assert self.load(driver, 2, [key_of(1)]) == frozenset()

    def test_close_ends_every_job(self, driver: SecondaryTierManager) -> None:
        keys = [key_of(i) for i in range(64)]
        slots = self.make_slots(len(keys))
        for job_id in range(8):
            driver.submit_store(self.job(job_id, keys, slots, readonly=True))
        assert driver.close(PATIENCE_S)
        ended = self.wait(driver, *range(8))
        assert len(ended) == 8

    def test_who_sees_that_a_job_ended_sees_what_it_did(self, driver: SecondaryTierManager) -> None:
        slots = self.make_slots(1)
        for job_id in range(200):
            driver.submit_store(self.job(job_id, [key_of(job_id)], slots, readonly=True))
        seen = 0
        deadline = time.monotonic() + PATIENCE_S
        while seen < 200:
            assert time.monotonic() < deadline
            seen += len(driver.get_finished())
            counters = driver.counters()
            assert counters.write_blocks + counters.write_failures >= seen

    @pytest.mark.parametrize(
        ("error", "cause"),
        [
            (OSError(errno.ENOSPC, "full"), "enospc"),
            (RuntimeError("?"), "other"),
            (KeyboardInterrupt(), "other"),
        ],
    )
    def test_a_failure_costs_one_block(
        self, faulty: FaultyTier, shaky: SecondaryTierManager, error: BaseException, cause: str
    ) -> None:
        keys = [key_of(i) for i in range(6)]
        faulty.script("write", Fail(error), call=3)
        faulty.script("read", Fail(error), call=2)
        kept = self.store(shaky, 1, keys)
        assert len(kept) == 5
        assert len(self.load(shaky, 2, sorted(kept))) == 4
        assert self.load(shaky, 3, sorted(kept)) == kept
        counters = shaky.counters()
        assert (counters.write_failures, counters.read_failures) == (1, 1)
        assert counters.faults == {cause: 2}
        assert counters.corrupt_blocks == 0

    def test_a_failed_lookup_finds_nothing(
        self, faulty: FaultyTier, shaky: SecondaryTierManager
    ) -> None:
        self.store(shaky, 1, [key_of(1)])
        faulty.script("exists", Fail(OSError(errno.EIO, "gone")), call=1)
        assert self.lookup(shaky, 2, [key_of(1)]) == frozenset()
        assert self.lookup(shaky, 3, [key_of(1)]) == {key_of(1)}
        assert shaky.counters().lookup_failures == 1

    @pytest.mark.parametrize(
        "offset", [0, 9, 70, 100, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + BLOCK_BYTES - 1]
    )
    @pytest.mark.parametrize("operation", ["read", "write"])
    def test_a_damaged_block_is_dropped(
        self, faulty: FaultyTier, shaky: SecondaryTierManager, operation: str, offset: int
    ) -> None:
        if operation == "read":
            faulty.script("read", Corrupt(offset), call=2)
        else:
            faulty.script("write", Corrupt(offset), call=2)
        self.store(shaky, 1, [key_of(1)])
        assert self.load(shaky, 2, [key_of(1)]) == {key_of(1)}
        self.store(shaky, 3, [key_of(1)])
        assert self.load(shaky, 4, [key_of(1)]) == frozenset()
        assert shaky.counters().corrupt_blocks == 1
        assert self.lookup(shaky, 5, [key_of(1)]) == frozenset()

    @pytest.mark.parametrize("length", [0, 100, HEADER_BYTES, HEADER_BYTES + BLOCK_BYTES - 1])
    def test_a_short_read_is_noticed(
        self, faulty: FaultyTier, shaky: SecondaryTierManager, length: int
    ) -> None:
        faulty.script("read", Short(length))
        self.store(shaky, 1, [key_of(1)])
        assert self.load(shaky, 2, [key_of(1)]) == frozenset()

    def test_a_short_write_is_noticed(
        self, faulty: FaultyTier, shaky: SecondaryTierManager
    ) -> None:
        faulty.script("write", Short(HEADER_BYTES + 10))
        self.store(shaky, 1, [key_of(1)])
        assert self.load(shaky, 2, [key_of(1)]) == frozenset()

    def test_a_block_under_another_key_is_never_served(self) -> None:
        tier = MemoryTier()
        driver = self._over(tier)
        self.store(driver, 1, [key_of(1)])
        content = memoryview(bytearray(HEADER_BYTES + BLOCK_BYTES))
        tier.read(key_of(1), (content,))
        tier.write(key_of(2), (content,))
        assert self.load(driver, 2, [key_of(2)]) == frozenset()
        assert driver.counters().corrupt_blocks == 1
        assert driver.close()

    def test_a_lie_costs_a_load(self, faulty: FaultyTier, shaky: SecondaryTierManager) -> None:
        faulty.script("exists", Lie(answer=True))
        assert self.lookup(shaky, 1, [key_of(1)]) == {key_of(1)}
        assert self.load(shaky, 2, [key_of(1)]) == frozenset()
        counters = shaky.counters()
        assert counters.read_failures == counters.corrupt_blocks == 0

    def test_a_hung_block_holds_up_its_job_alone(
        self, faulty: FaultyTier, shaky: SecondaryTierManager
    ) -> None:
        released = threading.Event()
        keys = [key_of(i) for i in range(4)]
        self.store(shaky, 1, keys)
        faulty.script("read", Hang(released), call=1)
        slots = self.make_slots(1)
        try:
            shaky.submit_load(self.job(2, keys[:1], slots))
            until(lambda: faulty.calls["read"])
            assert self.load(shaky, 3, keys[1:]) == frozenset(keys[1:])
            assert self.store(shaky, 4, [key_of(9)]) == {key_of(9)}
            assert slots.content(0) == bytes([UNTOUCHED]) * BLOCK_BYTES
        finally:
            released.set()
        assert self.wait(shaky, 2)[2] == {keys[0]}
        assert slots.content(0) == block_of(keys[0])

    def test_close_does_not_wait_for_a_hung_block(
        self, faulty: FaultyTier, shaky: SecondaryTierManager
    ) -> None:
        released = threading.Event()
        faulty.script("write", Hang(released))
        keys = [key_of(i) for i in range(200)]
        try:
            shaky.submit_store(self.job(1, keys, self.make_slots(200), readonly=True))
            until(lambda: faulty.calls["write"])
            assert not shaky.close(0.01), "it says that nothing runs"
            assert shaky.get_finished() == [], "its slots are still in use"
        finally:
            released.set()
        assert shaky.close(PATIENCE_S)
        ok = self.wait(shaky, 1)[1]
        assert 1 <= len(ok) == faulty.calls["write"] < 200
