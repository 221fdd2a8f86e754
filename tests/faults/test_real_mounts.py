"""A small real ext4 that fills up, loses its medium or goes away under a tier: what the tier
answers, what is counted and logged, and that it recovers by itself. (An open tier keeps the kernel
from making it read-only; see `test_failing_calls` for that.)"""

from __future__ import annotations

import itertools
import os
import resource
import shutil
import time
from pathlib import Path

import pytest
from rig import BATCH, MakeRig, Outcome, Rig, is_no_storm, recovers

from kvtier.core.types import Fault
from kvtier.testing.broken_medium import LoopMount, drop_caches

pytestmark = pytest.mark.faults

OLD = tuple(range(BATCH))
NEW = tuple(range(100, 100 + BATCH))

LONG_S = 2.5
"""Long enough that what is done about once a second shows whether it says so each time."""

WORKS = Outcome(frozenset(OLD), None)


def start(make_rig: MakeRig, root: Path, **options: object) -> Rig:
    """A tier that holds `OLD`."""
    rig = make_rig(root, **options)
    assert rig.store(*OLD) == WORKS
    assert rig.load(*OLD) == WORKS
    assert rig.counters.faults == {}
    return rig


def stores_fail(rig: Rig, fault: Fault, *causes: str, jobs: int = 10) -> None:
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


def is_quiet(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    """Few lines for many failures, and the tier's process is still the first one."""
    is_no_storm(caplog)
    assert rig.counters.process_starts == 1


def keeps_failing(rig: Rig, seconds: float = LONG_S) -> None:
    """Jobs go on to come, as an engine has them that does not notice."""
    until = time.monotonic() + seconds
    for job in itertools.count():
        if time.monotonic() > until:
            return
        rig.store(*(block + 50_000 + job * BATCH for block in NEW))
        rig.load(*OLD)
        rig.lookup(*OLD)
        time.sleep(0.02)


def test_a_full_mount(
    make_rig: MakeRig, medium: LoopMount, caplog: pytest.LogCaptureFixture
) -> None:
    """Somebody else took all there was. A tier that may evict makes room of its own."""
    rig = start(make_rig, medium.point)
    medium.fill()
    faults = set()
    for job in range(60):
        blocks = tuple(block + 10_000 + job * BATCH for block in NEW)
        before, outcome = rig.count("enospc", "full"), rig.store(*blocks)
        faults.add(outcome.fault)
        assert rig.count("enospc", "full") == before + BATCH - len(outcome.ok)
        assert rig.load(*blocks).fault is None
        assert rig.load(*OLD).fault is None, "what it holds is still served"
    assert faults <= {None, Fault.FULL}
    if faults != {None}:
        is_quiet(rig, caplog)
    medium.make_room()
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


def test_a_mount_that_is_full_when_the_tier_opens(make_rig: MakeRig, medium: LoopMount) -> None:
    start(make_rig, medium.point).close()
    medium.fill()
    rig = make_rig(medium.point)
    assert rig.load(*OLD) == WORKS, "what it holds is served"
    medium.make_room()
    stores_again(rig)


def test_a_medium_that_cannot_be_read(
    make_rig: MakeRig, medium: LoopMount, caplog: pytest.LogCaptureFixture
) -> None:
    rig = start(make_rig, medium.point)
    medium.lose_medium()
    for _ in range(10):
        outcome = rig.load(*OLD)
        assert not outcome.ok
        # now and then the loop device makes zeros of what it cannot read, and that is damage
        assert outcome.fault is Fault.ERROR or rig.counters.corrupt_blocks
    if not rig.counters.corrupt_blocks:
        assert rig.count("eio") >= 10
    is_quiet(rig, caplog)
    medium.restore_medium()
    intact = not rig.counters.corrupt_blocks  # unreadable is not damaged: nothing was dropped
    recovers(lambda: rig.load(*OLD) == WORKS if intact else rig.load(*OLD).fault is None)


def test_a_mount_that_goes_away(
    make_rig: MakeRig, medium: LoopMount, caplog: pytest.LogCaptureFixture
) -> None:
    """Files that are open stay usable; the path does not, and shows the disk below."""
    rig = start(make_rig, medium.point)
    medium.take_away()
    assert os.listdir(medium.point) == []
    keeps_failing(rig)
    stores_fail(rig, Fault.UNREACHABLE, "vanished", "estale")
    assert rig.lookup(*OLD).ok == frozenset()
    assert rig.load(*OLD).ok == frozenset()
    is_quiet(rig, caplog)
    assert os.listdir(medium.point) == [], "nothing is written to the disk below"
    medium.bring_back()
    stores_again(rig)
    recovers(lambda: rig.load(*OLD) == WORKS)


def test_a_directory_that_is_removed(
    make_rig: MakeRig, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rig = start(make_rig, root)
    shutil.rmtree(root)
    keeps_failing(rig)  # a layout with open files notices within a second or two
    stores_fail(rig, Fault.UNREACHABLE, "vanished", "estale")
    assert rig.load(*OLD).ok == frozenset()
    assert not root.exists(), "a root is never made"
    is_quiet(rig, caplog)
    root.mkdir(mode=0o700)
    stores_again(rig)
    assert rig.load(*OLD) == Outcome(frozenset(), None), "they are gone, and that is no fault"


def test_a_wiped_namespace_is_no_fault(make_rig: MakeRig, root: Path) -> None:
    rig = start(make_rig, root)
    for entry in root.iterdir():
        if entry.is_dir():
            shutil.rmtree(entry)
    recovers(lambda: rig.load(*OLD).ok == frozenset())
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
    is_quiet(rig, caplog)
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
    is_quiet(rig, caplog)
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
