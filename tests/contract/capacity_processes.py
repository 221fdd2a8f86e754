"""Processes that share a root, and a look at it from outside."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import kvtier
from kvtier.tiers.fs.accounts import Accounts, rounded
from kvtier.tiers.fs.ledger import LedgerFile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PATIENCE_S = 60.0
_OTHERS = ("namespace.json", "lock", "index.log")
_SOURCE = str(Path(kvtier.__file__).parents[1])


class UserProcess:
    """A running `capacity_process.py`."""

    def __init__(self, root: Path, capacity: int, min_free: int = 0) -> None:
        script = Path(__file__).with_name("capacity_process.py")
        self.process = subprocess.Popen(
            [sys.executable, str(script), str(root), str(capacity), str(min_free)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": _SOURCE},
        )
        assert self.answer() == "ready"

    def tell(self, line: str) -> None:
        assert self.process.stdin
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def answer(self) -> str:
        assert self.process.stdout
        return self.process.stdout.readline().strip()

    def ask(self, line: str) -> str:
        self.tell(line)
        return self.answer()

    def figures(self) -> dict[str, float]:
        found: dict[str, float] = json.loads(self.ask("figures"))
        return found

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def end(self) -> int:
        if self.process.poll() is None:
            with contextlib.suppress(OSError):
                self.tell("exit")
            try:
                self.process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                self.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe:
                with contextlib.suppress(OSError):
                    pipe.close()
        return self.process.returncode


@contextlib.contextmanager
def users(root: Path, count: int, capacity: int) -> Iterator[list[UserProcess]]:
    started: list[UserProcess] = []
    try:
        started += (UserProcess(root, capacity) for _ in range(count))
        yield started
    finally:
        for user in started:
            user.signal(signal.SIGCONT)
            user.end()


@contextlib.contextmanager
def frozen(processes: list[UserProcess]) -> Iterator[None]:
    """Stop processes, so that what they do can be looked at in one instant."""
    living = [user.process.pid for user in processes if user.process.poll() is None]
    for pid in living:
        os.kill(pid, signal.SIGSTOP)
    try:
        until(lambda: all(_is_stopped(pid) for pid in living))
        yield
    finally:
        for pid in living:
            os.kill(pid, signal.SIGCONT)


def _is_stopped(pid: int) -> bool:
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            state = (task / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:  # a thread that ended
            continue
        if state not in "TtZX":
            return False
    return True


def until(condition: Callable[[], object]) -> None:
    """Wait for something that happens, however long that takes on a busy machine."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.005)


def files_in(root: Path) -> list[Path]:
    """Block files, segments and temporary files."""
    found = []
    for directory, _, names in os.walk(root):
        if ".kvtier" not in directory:
            found += [Path(directory, name) for name in names if name not in _OTHERS]
    return found


def usage(root: Path) -> int:
    """Bytes of them, in pages."""
    total = 0
    for path in files_in(root):
        with contextlib.suppress(FileNotFoundError):
            total += rounded(path.lstat().st_size)
    return total


def books_of(root: Path) -> Accounts:
    """The accounts as they are on disk."""
    ledger = LedgerFile(str(root / ".kvtier" / "ledger"))
    try:
        with ledger.change(PATIENCE_S) as accounts:
            return accounts
    finally:
        ledger.close()
