"""The assembly: settings become bounds; a tier that fails or raises is told of and contained."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvtier.config import Settings
from kvtier.core.health import State
from kvtier.core.types import Completion, Done, Fault, JobId, Lookup, TierId, Wanted
from kvtier.drivers.base import JobMetadata, SecondaryTierManager, TierCounters
from kvtier.drivers.process.driver import ProcessDriver
from kvtier.drivers.threaded import ThreadedDriver
from kvtier.errors import TierFullError
from kvtier.namespace import Namespace
from kvtier.offloader import (
    Assignment,
    ConfiguredTier,
    Offloader,
    configure_tiers,
    limits_of,
    make_driver_for,
    targets_of,
)
from kvtier.region import Geometry, Region
from kvtier.testing.engine import key_of
from kvtier.tiers.memory import MemoryTierType

ROW = 4096


def settings_of(root: Path, **more: Any) -> Settings:
    return Settings.decode(
        {
            "cpu_bytes_to_use": "1MiB",
            "secondary_tiers": [{"type": "fs", "name": "disk", "root_dir": str(root)}],
            **more,
        }
    )


class ScriptedDriver(SecondaryTierManager):
    """Ends every job as it is told to: with a fault, or well; or raises."""

    def __init__(self) -> None:
        self.fault: Fault | None = None
        self.raises: Exception | None = None
        self.finished: list[Completion] = []

    def _take(self, job: JobMetadata) -> None:
        if self.raises is not None:
            raise self.raises
        ok = frozenset() if self.fault else frozenset(job.block_hashes)
        self.finished.append(Done(job.job_id, ok, self.fault))

    submit_store = submit_load = submit_lookup = _take

    def get_finished(self) -> list[Completion]:
        finished, self.finished = self.finished, []
        return finished

    def counters(self) -> TierCounters:
        return TierCounters()

    def close(self, timeout_s: float = 5.0) -> bool:
        return True


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


Make = Callable[..., tuple[Offloader, ScriptedDriver, Clock]]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[Offloader] = []

    def offloader(**more: Any) -> tuple[Offloader, ScriptedDriver, Clock]:
        settings = settings_of(tmp_path, **more)
        driver, clock = ScriptedDriver(), Clock()
        made.append(
            Offloader(
                settings,
                configure_tiers(settings.secondary_tiers),
                Region.create(Geometry(32, ROW, 1)),
                Namespace.of({"weights": "of the tests"}),
                clock=clock,
                make_driver=lambda *_: driver,
            )
        )
        return made[-1], driver, clock

    yield offloader
    for each in made:
        each.close()


@dataclasses.dataclass
class Placed:
    """A kind of tier of which only the place matters."""

    locality: str


@pytest.mark.parametrize(
    ("tiers", "targets"),
    [
        ([("L", None)], [set()]),
        ([("L", None), ("R", None)], [set(), {0}]),
        ([("R", None), ("L", None)], [{1}, set()]),
        ([("R", None), ("R", None), ("L", None), ("L", None)], [{2, 3}, {0, 2, 3}, set(), {2}]),
        ([("L", None), ("R", ())], [set(), set()]),
        ([("L", ("1",)), ("R", ("0",))], [{1}, {0}]),
    ],
)
def test_what_is_found_below_goes_to_what_is_faster(
    tiers: list[tuple[str, tuple[str, ...] | None]], targets: list[set[int]]
) -> None:
    configured = [
        ConfiguredTier(
            name=str(place),
            tier_type=Placed({"L": "LOCAL", "R": "REMOTE"}[where]),  # type: ignore[arg-type]
            options=msgspec.defstruct("Nothing", [])(),
            type_name="x",
            plain_options={},
            promote_to=promote_to,
        )
        for place, (where, promote_to) in enumerate(tiers)
    ]
    assert targets_of(configured) == targets


def test_a_configured_tier_raises(tmp_path: Path) -> None:
    """From the settings to a write: what only the second tier has comes to the first one."""
    for name in ("fast", "slow"):
        (tmp_path / name).mkdir()
    settings = Settings.decode(
        {
            "cpu_bytes_to_use": "1MiB",
            "secondary_tiers": [
                {"type": "fs", "name": name, "root_dir": str(tmp_path / name)}
                for name in ("fast", "slow")
            ],
        }
    )
    fast, slow = ScriptedDriver(), ScriptedDriver()
    drivers = iter((fast, slow))
    written: list[JobMetadata] = []
    fast.submit_lookup = lambda job: fast.finished.append(Done(job.job_id))  # type: ignore[method-assign]
    fast.submit_store = written.append  # type: ignore[method-assign]
    offloader = Offloader(
        settings,
        configure_tiers(settings.secondary_tiers),
        Region.create(Geometry(32, ROW, 1)),
        Namespace.of({"weights": "of the tests"}),
        clock=Clock(),
        make_driver=lambda *_: next(drivers),
    )
    offloader.begin()
    request = offloader.core.open_request("a")
    for _ in range(4):
        offloader.core.lookup(request, key_of(1))
        offloader.end()
        offloader.begin()
    assert [job.block_hashes for job in written] == [(key_of(1),)]
    offloader.close()


def store(offloader: Offloader, block: int) -> None:
    """Store one block and let its cascade end."""
    offloader.begin()
    offloader.core.complete_store(offloader.core.prepare_store("?", [key_of(block)]))
    offloader.end()
    offloader.begin()


def test_a_tier_that_fails_is_told_of_once_and_again_when_it_works(
    make: Make, caplog: pytest.LogCaptureFixture
):
    offloader, driver, clock = make(tier_backoff_ms=1000, tier_backoff_max_ms=1000)
    caplog.set_level(logging.WARNING, "kvtier")
    driver.fault = Fault.FULL
    for block in range(6):
        store(offloader, block)
        clock.now += 1.5  # each time it may be tried again
    assert offloader.core.ledger.writes[0].state is not State.CLOSED
    assert offloader.core.ledger.writes[0].opened > 2
    told = [record.getMessage() for record in caplog.records]
    assert told == ["No writes to tier disk for a while: full"]
    driver.fault = None
    store(offloader, 10)
    assert offloader.core.ledger.writes[0].state is State.CLOSED
    told = [record.getMessage() for record in caplog.records]
    assert told[1:] == ["Again writes to tier disk"]
    assert offloader.core.ledger.reads[0].opened == 0, "a full disk still serves"


def test_a_driver_that_raises_fails_its_job_and_nothing_else(
    make: Make, caplog: pytest.LogCaptureFixture
):
    offloader, driver, _ = make()
    driver.raises = TierFullError("the shelf is full")
    for block in range(5):
        store(offloader, block)
    assert offloader.drivers[0].errors >= 1
    assert offloader.core.ledger.writes[0].fault is Fault.FULL
    assert sum("raised in submit_store" in r.getMessage() for r in caplog.records) == 1
    assert offloader.core.pool.pinned == 0
    request = offloader.core.open_request("a")
    assert offloader.core.lookup(request, key_of(0)) is Lookup.HIT, "the primary has it"


def test_a_reset_opens_a_namespace_of_its_own_unless_the_weights_are_named(make: Make):
    seen: list[str] = []
    for epoch, namespaces in ((None, 2), ("7", 1)):
        offloader, driver, _ = make(**({"weights_epoch": epoch} if epoch else {}))
        take = driver._take

        def note(job: JobMetadata, take: Callable[[JobMetadata], None] = take) -> None:
            seen.append(job.namespace)
            take(job)

        driver.submit_store = note  # type: ignore[method-assign]
        store(offloader, 1)
        offloader.reset()
        offloader.core.fence_passed()
        store(offloader, 2)
        assert len(set(seen)) == namespaces
        seen.clear()


@pytest.mark.parametrize("takes", [True, False])
def test_a_driver_that_asks_for_blocks_gets_them_until_it_is_done(make: Make, takes: bool):
    offloader, driver, _ = make(lending_share=0.1)
    for block in (1, 2):
        store(offloader, block)
    lent: list[tuple[int, list[bytes], tuple[object, ...]]] = []

    def take(ticket: int, job: JobMetadata, missing: Any) -> None:
        assert all(view.readonly for view in job.spec)
        lent.append((job.job_id, [bytes(view[:4]) for view in job.spec], tuple(missing)))

    if takes:
        driver.submit_lend = take  # type: ignore[method-assign]
    for block in (1, 2):
        slot = offloader.core.pool.blocks[key_of(block)].slot
        offloader.region.rows[slot][:] = block
    driver.finished.append(Wanted(TierId(0), 5, (key_of(1), key_of(9), key_of(2))))
    offloader.begin()
    offloader.end()
    if takes:
        ((job, bytes_lent, missing),) = lent
        assert bytes_lent == [b"\1" * 4, b"\2" * 4]
        assert missing == (key_of(9),)
        assert offloader.core.pool.pinned == 2
        driver.finished.append(Done(JobId(job)))
    offloader.begin()
    assert offloader.core.pool.pinned == 0
    assert offloader.drivers[0].errors == (not takes)


class HereTierType(MemoryTierType):
    """A type that asks for the engine's own process."""

    in_process = True


@pytest.mark.parametrize(
    ("kind", "driver_type"),
    [("memory", ProcessDriver), ("test_offloader:HereTierType", ThreadedDriver)],
)
def test_a_tier_runs_in_a_process_unless_its_type_asks_not_to(kind: str, driver_type: type):
    settings = Settings.decode(
        {
            "cpu_bytes_to_use": "1MiB",
            "job_deadline_ms": 7000,
            "secondary_tiers": [
                {"type": "memory", "name": "first"},
                {"type": kind, "name": "ram", "threads": 3},
            ],
        }
    )
    namespace = Namespace.of({"weights": "of the tests"})
    seen: list[Assignment] = []

    def make(assignment: Assignment) -> SecondaryTierManager:
        seen.append(assignment)
        return make_driver_for(assignment)

    tiers = configure_tiers(settings.secondary_tiers)
    region = Region.create(Geometry(8, ROW, 1))
    offloader = Offloader(settings, tiers, region, namespace, make_driver=make)
    assignment = seen[1]
    assert assignment.tier_id == 1
    assert assignment.hang_s == 14.0
    assert assignment.tier.type_name == kind
    assert assignment.tier.plain_options == {"threads": 3}
    assert "threads': 3" not in repr(assignment.tier), "options may be secret"
    assert assignment.facts_of(namespace.digest) == namespace.describe()
    driver = offloader.drivers[1]._driver
    assert type(driver) is driver_type
    store(offloader, 1)
    deadline = time.monotonic() + 30
    while offloader.drivers[1].counters().write_blocks < 1:
        assert time.monotonic() < deadline
        offloader.begin()
        offloader.end()
    assert driver.counters().process_starts == (driver_type is ProcessDriver)
    offloader.close()


@pytest.mark.parametrize("num_tiers", [0, 1, 2, 3])
@pytest.mark.parametrize("num_slots", [1, 2, 3, 8, 64, 1000])
def test_shares_become_bounds_that_leave_room_for_each_other(
    tmp_path: Path, num_slots: int, num_tiers: int
):
    limits = limits_of(settings_of(tmp_path, lending_share=0.1), num_slots, num_tiers)
    assert limits.promoting_max <= max(1, num_slots // 2)
    assert limits.storing_max is not None
    assert limits.reading_max is not None
    if num_tiers == 0:
        assert limits.storing_max == max(1, num_slots - limits.lending_max)
    if num_slots >= 8 and num_tiers:
        cascades = limits.writing_max * num_tiers
        taken = limits.promoting_max + cascades + limits.lending_max
        assert taken < num_slots, "running stores always get a share"
        kept = num_slots - limits.storing_max - cascades - limits.lending_max
        assert kept >= 1, "promotions always get a share"
    if num_tiers > 1:
        assert limits.reading_max <= max(1, limits.promoting_max // 2), "one that hangs leaves half"
