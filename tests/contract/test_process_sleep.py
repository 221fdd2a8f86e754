"""A process in uninterruptible sleep, as a hung mount makes them: SIGKILL does nothing to it yet.

A small file system of its own is frozen, which puts its writers to sleep; it is thawed by a process
that nothing can keep from it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from process_stage import Clock, Stage, drive

from kvtier.core.types import Done, Fault
from kvtier.drivers.process.driver import POLL_GAP_S, ProcessDriver
from kvtier.drivers.process.process import Launch
from kvtier.testing.blocks import SlotsOfRegion, block_of, key_of
from kvtier.tiers.fs.home import prepare
from kvtier.tiers.fs.settings import FsSettings

THAW_S = 30


class Mount:
    """A mounted file system that can be frozen."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._guard: subprocess.Popen[bytes] | None = None

    def freeze(self) -> None:
        script = f"sleep {THAW_S}; fsfreeze -u {self.path}"
        self._guard = subprocess.Popen(["sh", "-c", script], start_new_session=True)
        subprocess.run(["fsfreeze", "-f", self.path], check=True)

    def thaw(self) -> None:
        if self._guard is not None:
            assert self._guard.poll() is None, "thawed too early: the test shows nothing"
            subprocess.run(["fsfreeze", "-u", self.path], check=False, capture_output=True)
            self._guard.kill()
            self._guard.wait()
            self._guard = None


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Mount]:
    shared = Path("/dev/shm")  # the image is in memory: no other file system has to wait for it
    if os.geteuid() != 0 or not shared.is_dir():
        pytest.skip("mounting needs root")
    for program in ("mkfs.ext4", "fsfreeze"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")
    path = tmp_path / "mount"
    path.mkdir()
    with tempfile.NamedTemporaryFile(dir=shared) as image:
        image.truncate(64 << 20)
        subprocess.run(["mkfs.ext4", "-q", image.name], check=True)
        mounted = subprocess.run(
            ["mount", "-o", "loop", image.name, path], check=False, capture_output=True
        )
        if mounted.returncode:
            pytest.skip(f"no loop mounts here: {mounted.stderr.decode()}")
        mount = Mount(path)
        try:
            yield mount
        finally:
            mount.thaw()
            subprocess.run(["umount", path], check=True)


def state_of(pid: int) -> str:
    """One letter per thread; D is uninterruptible sleep."""
    states = ""
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread that ended meanwhile
            states += (task / "stat").read_text().rsplit(")", 1)[1].split()[0]
    return states


def test_its_slots_are_kept_until_it_wakes_and_ends(mount: Mount):
    clock, slots = Clock(), SlotsOfRegion(64)
    stage = Stage.__new__(Stage)  # for its polls alone
    stage.clock = clock
    prepare(mount.path, FsSettings(root_dir=str(mount.path), layout="files"))
    launch = Launch("x", "fs", {"root_dir": str(mount.path), "layout": "files"})
    driver = ProcessDriver(launch, slots.region, lambda _: {}, hang_s=0.01, clock=clock)
    taken = slots.take(2)
    for i in range(2):
        taken.fill(i, block_of(key_of(i)))
    driver.submit_store(drive.job(1, [key_of(0)], taken, readonly=True))
    assert stage.done(driver, 1).ok == {key_of(0)}
    hung = driver.pid
    assert hung is not None

    mount.freeze()
    driver.submit_store(drive.job(2, [key_of(1)], taken, readonly=True))
    stage.poll(driver, lambda _: "D" in state_of(hung))
    assert stage.poll(driver, lambda _: driver.pid is None, 0.001) == []
    assert driver.counters().process_kills == 1
    for _ in range(100):
        assert driver.get_finished() == [], "its slots may still be read"
    assert "D" in state_of(hung), "killed, and still there"

    stage.poll(driver, lambda _: driver.pid is not None, POLL_GAP_S)
    assert driver.pid != hung
    assert driver.get_finished() == []
    mount.thaw()
    assert stage.done(driver, 2) == Done(2, frozenset(), Fault.UNREACHABLE)
    driver.submit_load(drive.job(3, [key_of(0)], taken))
    assert stage.done(driver, 3).ok == {key_of(0)}, "by the next one"
    assert driver.close()
    slots.region.close()
