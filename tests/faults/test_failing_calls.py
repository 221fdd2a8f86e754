"""Every state of a failing medium, made by failing its calls: each has a fault, a counter, few
lines in the log, and an end as soon as its cause has one."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from rig import BATCH, MakeRig, Outcome, recovers, warnings_of

from kvtier.core.types import Fault
from kvtier.testing.broken_medium import BrokenCalls, Group

pytestmark = pytest.mark.faults

OLD = tuple(range(BATCH))
JOBS = 10

STATES = {
    errno.ENOSPC: ("enospc", Fault.FULL),
    errno.EDQUOT: ("edquot", Fault.FULL),
    errno.EROFS: ("erofs", Fault.FULL),
    errno.EIO: ("eio", Fault.ERROR),
    errno.EUCLEAN: ("eio", Fault.ERROR),
    errno.EMFILE: ("emfile", Fault.THROTTLED),
    errno.ENFILE: ("enfile", Fault.THROTTLED),
    errno.ESTALE: ("estale", Fault.UNREACHABLE),
    errno.ENOTCONN: ("unreachable", Fault.UNREACHABLE),
    errno.ETIMEDOUT: ("timeout", Fault.UNREACHABLE),
    errno.EACCES: ("denied", Fault.DENIED),
    errno.EPERM: ("denied", Fault.DENIED),
}

OPENING = [errno.ENOSPC, errno.EACCES]

STORE_PHASES: list[tuple[Group, ...]] = [("create", "write"), ("write",), ("rename",), ("mkdir",)]


def blocks_of(job: int) -> tuple[int, ...]:
    return tuple(range(1000 * (job + 1), 1000 * (job + 1) + BATCH))


def temporary(root: Path) -> list[Path]:
    return [path for path in root.rglob("*.tmp") if path.is_file()]


def test_stores(
    make_rig: MakeRig,
    root: Path,
    layout: str,
    calls: BrokenCalls,
    caplog: pytest.LogCaptureFixture,
) -> None:
    rig = make_rig(root)
    for turn, (number, (cause, fault)) in enumerate(STATES.items()):
        assert rig.store(*OLD).fault is None
        caplog.clear()
        # a layout that evicts for itself says "full" once it has tried that
        evicts = layout != "files" and fault is Fault.FULL
        causes = {cause, "full"} if evicts else {cause}
        before, failures = rig.count(*causes), rig.counters.write_failures
        calls.answer({"create": number, "write": number})
        for job in range(JOBS):
            assert rig.store(*blocks_of(100 * turn + job)) == Outcome(frozenset(), fault), cause
        assert rig.count(*causes) == before + JOBS * BATCH, cause
        assert rig.counters.write_failures == failures + JOBS * BATCH
        loaded = rig.load(*OLD)
        assert loaded.fault is None, "reads do not mind"
        assert loaded.ok == frozenset(OLD) or evicts
        assert evicts or os.strerror(number) in warnings_of(caplog, "store failed")[0]
        assert len(warnings_of(caplog, "Tier disk")) <= len(causes)
        assert len(warnings_of(caplog)) <= 4
        calls.heal()
        blocks = blocks_of(100 * turn + JOBS)
        recovers(lambda: rig.store(*blocks) == Outcome(frozenset(blocks), None))
        assert rig.load(*blocks).ok == frozenset(blocks)
    assert rig.counters.process_starts == 1
    assert temporary(root) == []


@pytest.mark.parametrize("groups", STORE_PHASES, ids="+".join)
def test_stores_that_fail_at_any_step(
    make_rig: MakeRig, root: Path, calls: BrokenCalls, groups: tuple[Group, ...]
) -> None:
    """What is there after a failed store was stored before, or is a whole block."""
    rig = make_rig(root)
    assert rig.store(*OLD).fault is None
    calls.answer(dict.fromkeys(groups, errno.ENOSPC))
    blocks = blocks_of(0)
    outcome = rig.store(*blocks)
    calls.heal()
    assert (outcome.fault is None) == (outcome.ok == frozenset(blocks))
    assert rig.load(*blocks).ok >= outcome.ok
    recovers(lambda: rig.store(*blocks) == Outcome(frozenset(blocks), None))
    assert rig.load(*blocks) == Outcome(frozenset(blocks), None)
    assert rig.load(*OLD) == Outcome(frozenset(OLD), None)
    assert temporary(root) == []


def test_loads(
    make_rig: MakeRig, root: Path, calls: BrokenCalls, caplog: pytest.LogCaptureFixture
) -> None:
    rig = make_rig(root)
    assert rig.store(*OLD).fault is None
    for number, (cause, fault) in STATES.items():
        caplog.clear()
        before, failures = rig.count(cause), rig.counters.read_failures
        calls.answer({"open": number, "read": number})
        for _ in range(JOBS):
            assert rig.load(*OLD) == Outcome(frozenset(), fault), cause
        assert rig.count(cause) == before + JOBS * BATCH, cause
        assert rig.counters.read_failures == failures + JOBS * BATCH
        [said] = warnings_of(caplog, "Tier disk")
        assert os.strerror(number) in said
        assert len(warnings_of(caplog)) <= 4
        calls.heal()
        recovers(lambda: rig.load(*OLD) == Outcome(frozenset(OLD), None))
    assert rig.counters.corrupt_blocks == 0, "unreadable is not damaged: nothing is dropped"
    assert rig.counters.process_starts == 1


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE], ids=errno.errorcode.__getitem__)
def test_reads_of_open_files(
    make_rig: MakeRig, root: Path, calls: BrokenCalls, number: int
) -> None:
    rig = make_rig(root)
    assert rig.store(*OLD).fault is None
    calls.answer({"read": number})
    outcome = rig.load(*OLD)
    assert outcome.ok == frozenset()
    calls.heal()
    recovers(lambda: rig.load(*OLD) == Outcome(frozenset(OLD), None))


def test_lookups(
    make_rig: MakeRig,
    root: Path,
    layout: str,
    calls: BrokenCalls,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if layout != "files":
        pytest.skip("this layout looks keys up in memory")
    rig = make_rig(root)
    assert rig.store(*OLD).fault is None
    for number, (cause, fault) in STATES.items():
        caplog.clear()
        before, failures = rig.count(cause), rig.counters.lookup_failures
        calls.answer({"open": number, "stat": number})
        for _ in range(JOBS):
            assert rig.lookup(*OLD) == Outcome(frozenset(), fault), cause
        assert rig.count(cause) == before + JOBS, cause
        assert rig.counters.lookup_failures == failures + JOBS
        [said] = warnings_of(caplog, "Tier disk")
        assert os.strerror(number) in said
        assert len(warnings_of(caplog)) <= 4
        calls.heal()
        recovers(lambda: rig.lookup(*OLD) == Outcome(frozenset(OLD), None))


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES], ids=errno.errorcode.__getitem__)
def test_what_stat_alone_meets_is_no_absence(
    make_rig: MakeRig, root: Path, layout: str, calls: BrokenCalls, number: int
) -> None:
    if layout != "files":
        pytest.skip("this layout looks keys up in memory")
    rig = make_rig(root)
    assert rig.store(*OLD).fault is None
    calls.answer({"stat": number})
    assert rig.lookup(*OLD).fault is STATES[number][1]


@pytest.mark.parametrize("number", OPENING, ids=errno.errorcode.__getitem__)
def test_a_tier_that_cannot_be_opened(
    make_rig: MakeRig,
    root: Path,
    calls: BrokenCalls,
    caplog: pytest.LogCaptureFixture,
    number: int,
) -> None:
    cause, fault = STATES[number]
    calls.answer({"create": number, "mkdir": number})
    rig = make_rig(root)
    assert rig.store(*OLD) == Outcome(frozenset(), fault)
    assert rig.count(cause) == BATCH
    assert len(warnings_of(caplog, "Tier disk")) == 1
    assert len(warnings_of(caplog)) <= 4
    calls.heal()
    recovers(lambda: rig.store(*OLD) == Outcome(frozenset(OLD), None))
