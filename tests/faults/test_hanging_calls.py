"""Calls that never return, in each phase of a job: the process is killed, its jobs end only then,
its slots are not touched afterwards, and the tier comes back."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
from rig import BATCH, LostJobError, MakeRig, Outcome, is_no_storm, recovers, warnings_of

from kvtier.core.types import Fault
from kvtier.drivers.process import driver as process_driver
from kvtier.testing.broken_medium import HANG, BrokenCalls, Group, wait_until_hanging
from kvtier.tiers.fs.tier_type import FsSettings

pytestmark = pytest.mark.faults

OLD = tuple(range(BATCH))
NEW = tuple(range(100, 100 + BATCH))
HANG_S = 0.6

LOAD_PHASES: list[Group] = ["open", "read"]
STORE_PHASES: list[Group] = ["create", "write", "sync", "rename"]
LOOKUP_PHASES: list[Group] = ["stat"]


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_driver, "AGAIN_S", 0.2)
    monkeypatch.setattr(process_driver, "FIRST_BACKOFF_S", 0.2)


def hang(rig: Any, calls: BrokenCalls, group: Group, submit: Any) -> Any:
    """Submit a job that hangs in calls of a group."""
    calls.answer({group: HANG})
    submitted = submit()
    began = time.monotonic()
    while not calls.is_hanging(group):
        try:
            rig.end(submitted, 0.05)
        except LostJobError:
            if time.monotonic() - began > 20:
                wait_until_hanging(calls, group, 0)
        else:
            pytest.skip(f"this layout makes no such call ({group}) there")
    return submitted


def is_killed(rig: Any, submitted: Any) -> None:
    """The job ends with its process, and as stalled."""
    pid = rig.driver.pid
    outcome = rig.end(submitted)
    assert outcome == Outcome(frozenset(), Fault.UNREACHABLE)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    counters = rig.counters
    assert counters.process_kills == 1
    assert rig.count("stalled") == BATCH


@pytest.mark.parametrize("group", LOAD_PHASES)
def test_a_load(
    make_rig: MakeRig,
    root: Path,
    calls: BrokenCalls,
    caplog: pytest.LogCaptureFixture,
    group: Group,
) -> None:
    rig = make_rig(root, hang_s=HANG_S)
    assert rig.store(*OLD).fault is None
    submitted = hang(rig, calls, group, lambda: rig.submit_load(*OLD))
    is_killed(rig, submitted)
    for i in range(BATCH):
        rig.slot_of(submitted, i)[:] = bytes([i]) * rig.region.slot_bytes
    calls.heal()
    recovers(lambda: rig.lookup(*OLD) == Outcome(frozenset(OLD), None))
    for i in range(BATCH):
        assert bytes(rig.slot_of(submitted, i)) == bytes([i]) * rig.region.slot_bytes, "touched"
    assert rig.load(*OLD) == Outcome(frozenset(OLD), None)
    is_no_storm(caplog)
    assert rig.counters.process_starts == 2


@pytest.mark.parametrize("group", STORE_PHASES)
def test_a_store(make_rig: MakeRig, root: Path, calls: BrokenCalls, group: Group) -> None:
    durability = {"durability": "data"} if group == "sync" else {}
    if not durability.keys() <= set(FsSettings.__struct_fields__):
        pytest.skip("nothing is synced")
    rig = make_rig(root, hang_s=HANG_S, **durability)
    assert rig.store(*OLD).fault is None
    submitted = hang(rig, calls, group, lambda: rig.submit_store(*NEW))
    is_killed(rig, submitted)
    calls.heal()
    recovers(lambda: rig.load(*OLD) == Outcome(frozenset(OLD), None))
    found = rig.load(*NEW)  # whole blocks or none
    assert found.fault is None
    recovers(lambda: rig.store(*NEW) == Outcome(frozenset(NEW), None))
    assert rig.load(*NEW) == Outcome(frozenset(NEW), None)
    assert rig.counters.corrupt_blocks == 0


@pytest.mark.parametrize("group", LOOKUP_PHASES)
def test_a_lookup(
    make_rig: MakeRig, root: Path, layout: str, calls: BrokenCalls, group: Group
) -> None:
    if layout != "files":
        pytest.skip("this layout looks keys up in memory")
    rig = make_rig(root, hang_s=HANG_S)
    assert rig.store(*OLD).fault is None
    calls.answer({group: HANG})
    outcome = rig.lookup(*OLD)
    assert outcome == Outcome(frozenset(), Fault.UNREACHABLE)
    assert rig.counters.process_kills == 1
    calls.heal()
    recovers(lambda: rig.lookup(*OLD) == Outcome(frozenset(OLD), None))


def test_opening_the_tier(make_rig: MakeRig, root: Path, calls: BrokenCalls) -> None:
    calls.answer({"mkdir": HANG})
    rig = make_rig(root, hang_s=HANG_S)
    assert rig.store(*OLD) == Outcome(frozenset(), Fault.UNREACHABLE)
    assert rig.counters.process_kills == 1
    calls.heal()
    recovers(lambda: rig.store(*OLD) == Outcome(frozenset(OLD), None))
    assert rig.load(*OLD) == Outcome(frozenset(OLD), None)


def test_a_hang_that_ends_in_time_costs_nothing(
    make_rig: MakeRig, root: Path, calls: BrokenCalls, caplog: pytest.LogCaptureFixture
) -> None:
    rig = make_rig(root, hang_s=20.0)
    assert rig.store(*OLD).fault is None
    submitted = hang(rig, calls, "read", lambda: rig.submit_load(*OLD))
    calls.heal()
    assert rig.end(submitted) == Outcome(frozenset(OLD), None)
    assert rig.counters.process_starts == 1
    assert warnings_of(caplog) == []


def test_reads_that_hang_do_not_hold_up_close(
    make_rig: MakeRig, root: Path, calls: BrokenCalls
) -> None:
    rig = make_rig(root, hang_s=60.0)
    assert rig.store(*OLD).fault is None
    hang(rig, calls, "read", lambda: rig.submit_load(*OLD))
    pid = rig.driver.pid
    assert rig.driver.close(1.0), "it is confirmed gone"
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_hang_that_does_not_end_is_no_storm(
    make_rig: MakeRig, root: Path, calls: BrokenCalls, caplog: pytest.LogCaptureFixture
) -> None:
    """Each process that is started into it hangs too: few starts, few lines, every job ends."""
    rig = make_rig(root, hang_s=HANG_S)
    assert rig.store(*OLD).fault is None
    calls.answer({"all": HANG})
    began = time.monotonic()
    jobs = 0
    while time.monotonic() - began < 3:
        assert rig.store(*(block + jobs * BATCH for block in NEW)).ok == frozenset()
        jobs += 1
        time.sleep(0.01)
    assert rig.counters.process_starts <= 4
    is_no_storm(caplog)
    calls.heal()
    recovers(lambda: rig.load(*OLD) == Outcome(frozenset(OLD), None))
