"""However an engine ends, its I/O processes end as well, also when their tier hangs."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from remote_tier import Remote

from kvtier.drivers.process.serve import LAST_S
from kvtier.testing.faults import FaultyTier, Hang
from kvtier.tiers.memory import MemoryTier

BOUND_S = 4 * LAST_S + 10.0
PROGRAM = Path(__file__).with_name("engine_life.py")


class Hung:
    """A tier that hangs in its first write."""

    def __init__(self, address: str, script: FaultyTier) -> None:
        self.address = address
        self.script = script


@pytest.fixture(params=["idle", "hung"])
def hung(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Hung | None]:
    if request.param == "idle":
        yield None
        return
    released = threading.Event()
    script = FaultyTier(MemoryTier())
    script.script("write", Hang(released))
    address = str(tmp_path / "remote")
    server = Remote(address, script)
    yield Hung(address, script)
    released.set()
    server.close()


def start(how: str, hung: Hung | None) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(PROGRAM), how, *([hung.address] if hung else [])],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for_end(pidfd: int) -> bool:
    waiting = select.poll()
    waiting.register(pidfd, select.POLLIN)
    return bool(waiting.poll(BOUND_S * 1e3))


def settled(pid: int, hung: Hung | None) -> None:
    """The I/O process is past its imports, and in the write that hangs if one does."""
    deadline = time.monotonic() + 30
    while not Path(f"/proc/{pid}/comm").read_text().startswith("kvtier-x"):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    while hung and not hung.script.calls["write"]:
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize("how", ["killed", "terminated", "exit", "exception", "_exit", "close"])
def test_no_orphan(how: str, hung: Hung | None):
    with start(how, hung) as engine:
        assert engine.stdout is not None
        pid = int(engine.stdout.readline())
        pidfd = os.pidfd_open(pid)
        settled(pid, hung)
        if how in ("killed", "terminated"):
            engine.send_signal(signal.SIGKILL if how == "killed" else signal.SIGTERM)
        else:
            assert engine.stdin is not None
            engine.stdin.close()
        assert wait_for_end(pidfd), "an orphan"
        os.close(pidfd)


def test_killed_before_the_process_has_begun(hung: Hung | None):
    with start("wait", hung) as engine:
        assert engine.stdout is not None
        pid = int(engine.stdout.readline())
        pidfd = os.pidfd_open(pid)
        engine.kill()
        assert wait_for_end(pidfd)
        os.close(pidfd)


def test_a_daemonic_engine(hung: Hung | None):
    with start("daemonic", hung) as parent:
        assert parent.stdout is not None
        assert parent.stdin is not None
        pid = int(parent.stdout.readline())
        pidfd = os.pidfd_open(pid)
        settled(pid, hung)
        parent.stdin.close()
        assert wait_for_end(pidfd)
        os.close(pidfd)


def test_a_fork_of_the_engine_keeps_the_socket_but_not_the_process(hung: Hung | None):
    with start("forked", hung) as engine:
        assert engine.stdout is not None
        holder = int(engine.stdout.readline())
        pid = int(engine.stdout.readline())
        pidfd = os.pidfd_open(pid)
        settled(pid, hung)
        engine.kill()
        try:
            assert wait_for_end(pidfd)
            os.kill(holder, 0)  # still holds it
        finally:
            os.kill(holder, signal.SIGKILL)
        os.close(pidfd)


def test_the_name_of_the_tier_is_seen_in_ps(hung: Hung | None):
    with start("wait", hung) as engine:
        assert engine.stdout is not None
        pid = int(engine.stdout.readline())
        settled(pid, hung)
        line = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        assert line[2:4] == [b"-m", b"kvtier.drivers.process.serve"]
        assert line[4] == b"x"
        engine.kill()
