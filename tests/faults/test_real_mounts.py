"""A small real ext4 that fills up, turns read-only, loses its medium or goes away under a tier:
what the tier answers, what is counted and logged, and that it recovers by itself."""

from __future__ import annotations

import os
import resource
import shutil
from pathlib import Path

import pytest
from conftest import MakeRig
from rig import BATCH, Outcome, Rig, recovers, warnings_of

from kvtier.core.types import Fault
from kvtier.testing.broken_medium import LoopMount, drop_caches

pytestmark = pytest.mark.faults

OLD = tuple(range(BATCH))
NEW = tuple(range(100, 100 + BATCH))

WORKS = Outcome(frozenset(OLD), None)


def start(make_rig: MakeRig, root: Path, **options: object) -> Rig:
    """A tier that holds `OLD`."""
    rig = make_rig(root, **options)
    assert rig.store(*OLD) == WORKS
    assert rig.load(*OLD) == WORKS
    assert rig.counters.faults == {}
    return rig


def stores_fail(rig: Rig, fault: Fault, *causes: str, jobs: int = 20) -> None:
    """So do they all, and each is counted."""
    for job in range(jobs):
        blocks = tuple(block + job * BATCH for block in NEW)
        before = rig.count(*causes)
        outcome = rig.store(*blocks)
        assert outcome.fault is fault
        assert rig.count(*causes) == before + BATCH - len(outcome.ok)


def stores_again(rig: Rig) -> None:
    blocks = tuple(range(1000, 1000 + BATCH))
    recovers(lambda: rig.store(*blocks) == Outcome(frozenset(blocks), None))
    assert rig.load(*blocks).ok == frozenset(blocks)


def is_quiet(rig: Rig, caplog: pytest.LogCaptureFixture, lines_max: int) -> None:
    """Few lines for many failures, and the tier's process is still the first one."""
    said = warnings_of(caplog)
    assert 1 <= len(said) <= lines_max, said
    assert rig.counters.process_starts == 1


def test_a_full_mount(
    make_rig: MakeRig, medium: LoopMount, caplog: pytest.LogCaptureFixture
) -> None:
    rig = start(make_rig, medium.point)
    medium.fill()
    # what was preallocated may take a few more
    for job in range(40):
        if rig.store(*(block + 10_000 + job * BATCH for block in NEW)).fault is Fault.FULL:
            break
    stores_fail(rig, Fault.FULL, "enospc", "full")
    assert rig.lookup(*OLD).fault is None
    assert rig.load(*OLD) == WORKS, "what it holds is still served"
    is_quiet(rig, caplog, 2)
    medium.make_room()
    stores_again(rig)
    assert rig.load(*OLD) == WORKS


def test_a_mount_that_turns_read_only(
    make_rig: MakeRig, medium: LoopMount, caplog: pytest.LogCaptureFixture
) -> None:
    rig = start(make_rig, medium.point)
    medium.make_read_only()
    stores_fail(rig, Fault.FULL, "erofs")
    assert rig.lookup(*OLD) == WORKS
    assert rig.load(*OLD) == WORKS, "what it holds is still served"
    is_quiet(rig, caplog, 2)
    medium.make_writable()
    stores_again(rig)


def test_a_mount_that_is_read_only_when_the_tier_opens(
    make_rig: MakeRig, medium: LoopMount
) -> None:
    start(make_rig, medium.point).close()
    medium.make_read_only()
    rig = make_rig(medium.point)
    assert rig.load(*OLD) == WORKS, "what it holds is served"
    stores_fail(rig, Fault.FULL, "erofs", jobs=2)
    medium.make_writable()
    stores_again(rig)


def test_a_medium_that_cannot_be_read(
    make_rig: MakeRig, medium: LoopMount, caplog: pytest.LogCaptureFixture
) -> None:
    rig = start(make_rig, medium.point)
    medium.lose_medium()
    failed = 0
    for _ in range(10):
        outcome = rig.load(*OLD)
        failed += outcome.fault is not None
        assert outcome.fault in (None, Fault.ERROR)
    assert failed == 10
    assert rig.count("eio") >= 10
    assert rig.counters.corrupt_blocks == 0, "unreadable is not damaged: nothing is dropped"
    is_quiet(rig, caplog, 3)
    medium.restore_medium()
    recovers(lambda: rig.load(*OLD) == WORKS)


def test_a_mount_that_goes_away(
    make_rig: MakeRig, medium: LoopMount, caplog: pytest.LogCaptureFixture
) -> None:
    rig = start(make_rig, medium.point)
    medium.take_away()
    assert os.listdir(medium.point) == []
    stores_fail(rig, Fault.UNREACHABLE, "vanished", "estale")
    assert rig.lookup(*OLD).ok == frozenset()
    assert rig.load(*OLD).ok == frozenset()
    assert os.listdir(medium.point) == [], "nothing is written to the disk below"
    is_quiet(rig, caplog, 4)
    medium.bring_back()
    stores_again(rig)
    recovers(lambda: rig.load(*OLD) == WORKS)


def test_a_directory_that_is_removed(
    make_rig: MakeRig, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rig = start(make_rig, root)
    shutil.rmtree(root)
    stores_fail(rig, Fault.UNREACHABLE, "vanished")
    for outcome in (rig.lookup(*OLD), rig.load(*OLD)):
        assert outcome == Outcome(frozenset(), Fault.UNREACHABLE)
    assert not root.exists(), "a root is never made"
    is_quiet(rig, caplog, 4)
    root.mkdir(mode=0o700)
    stores_again(rig)
    assert rig.load(*OLD) == Outcome(frozenset(), None), "they are gone, and that is no fault"


def test_a_wiped_namespace_is_no_fault(make_rig: MakeRig, root: Path) -> None:
    rig = start(make_rig, root)
    for entry in root.iterdir():
        if entry.is_dir():
            shutil.rmtree(entry)
    stores_again(rig)
    assert rig.load(*OLD) == Outcome(frozenset(), None)


def test_a_process_without_descriptors(
    make_rig: MakeRig, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rig = start(make_rig, root)
    pid = rig.driver.pid
    assert pid is not None
    limit = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    used = max(map(int, os.listdir(f"/proc/{pid}/fd")))
    # all numbers below are in use or were left by somebody: none is free in any case at 3
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, limit[1]))
    assert used >= 3
    failed = [rig.store(*NEW) for _ in range(10)]
    if all(outcome.fault is None for outcome in failed):
        pytest.skip("this layout needs no new descriptor for a store")
    assert {outcome.fault for outcome in failed} == {Fault.THROTTLED}
    assert rig.count("emfile") >= 10
    is_quiet(rig, caplog, 4)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, limit)
    stores_again(rig)
    assert rig.load(*OLD) == WORKS


@pytest.mark.skipif(os.geteuid() == 0, reason="permissions do not bind the superuser")
def test_a_directory_that_is_closed(
    make_rig: MakeRig, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rig = start(make_rig, root)
    root.chmod(0o000)
    try:
        stores_fail(rig, Fault.DENIED, "denied")
        assert rig.load(*OLD).fault is Fault.DENIED
    finally:
        root.chmod(0o700)
    is_quiet(rig, caplog, 4)
    stores_again(rig)


def test_the_page_cache_is_not_what_was_tested(medium: LoopMount) -> None:
    """A medium that is lost fails reads, so the test above sees errors and no cached bytes."""
    path = medium.point / "file"
    path.write_bytes(bytes(1 << 20))
    medium.lose_medium()
    with pytest.raises(OSError, match="Input/output error"):
        path.read_bytes()
    medium.restore_medium()
    drop_caches()
    assert path.read_bytes() == bytes(1 << 20)
