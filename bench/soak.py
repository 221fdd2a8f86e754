"""Three processes store, load and evict in one directory at four times its capacity, for long.

One of them is killed every 20 seconds and started again. Usage is measured while all of them are
stopped (SIGSTOP), so that a sample is one instant: it must never pass the capacity. Every block
that is loaded is compared with what its key says. In the end nothing may be left but blocks. Exits
with 1 if anything of that does not hold.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

from _report import Row, main

from kvtier.tiers.fs.abilities import is_probe
from kvtier.tiers.fs.accounts import rounded
from kvtier.tiers.fs.capacity import Capacity
from kvtier.tiers.fs.ledger import LedgerFile
from kvtier.tiers.fs.namespace_directory import FAN_OUT_DIGITS
from kvtier.tiers.fs.temporary import is_temp
from kvtier.tiers.fs.term import SweepSettings

PROCESSES = 3
KILL_S = 20.0
SAMPLE_S = 1.0
PATIENCE_S = 60.0
_TOTALS = (
    "stored_blocks",
    "refused_blocks",
    "loaded_blocks",
    "missed_blocks",
    "wrong_blocks",
    "corrupt_blocks",
    "stuck_jobs",
    "evicted_blocks",
)


class Worker:
    """A running `_soak_worker.py`."""

    def __init__(self, options: argparse.Namespace, root: Path, seed: int) -> None:
        script = str(Path(__file__).with_name("_soak_worker.py"))
        arguments = {
            "root": root,
            "layout": options.layout,
            "capacity": options.capacity,
            "row-bytes": options.row_bytes,
            "seed": seed,
        }
        self.process = subprocess.Popen(
            [sys.executable, script, *(f"--{name}={value}" for name, value in arguments.items())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.last: dict[str, float] = {}
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            with contextlib.suppress(ValueError):  # the last line of one that was killed
                self.last = json.loads(line)

    def end(self) -> int:
        """Ask it to end; its exit status."""
        assert self.process.stdin
        self.process.stdin.close()
        try:
            self.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._reader.join()
        return self.process.returncode


def is_stopped(pid: int) -> bool:
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            if (task / "stat").read_text().rpartition(")")[2].split()[0] not in "TtZX":
                return False
    return True


def usage(root: Path) -> tuple[int, int]:
    """Bytes of blocks, also of those that are being written, and of segments; and of everything, as
    `du` counts. Logs and requests of stores are no blocks.
    """
    taken = everything = 0
    for directory, _, names in os.walk(root):
        everything += os.lstat(directory).st_blocks * 512
        for name in names:
            found = os.lstat(os.path.join(directory, name))
            everything += found.st_blocks * 512
            folder = os.path.basename(directory)
            block = len(folder) == FAN_OUT_DIGITS and (name.startswith(folder) or is_temp(name))
            if name.endswith(".segment") or block:
                taken += rounded(found.st_size)
    return taken, everything


class Soak:
    """The run, and what went wrong in it."""

    def __init__(self, options: argparse.Namespace, root: Path) -> None:
        self.options = options
        self.root = root
        self.violations: list[str] = []
        self.past: Counter[str] = Counter()
        self.largest = self.largest_du = 0
        self.samples = self.kills = 0
        self.seeds = iter(range(10**6))
        self.workers = [Worker(options, root, next(self.seeds)) for _ in range(PROCESSES)]

    def blame(self, text: str) -> None:
        self.violations.append(text)
        print(f"VIOLATION: {text}", file=sys.stderr, flush=True)

    def sample(self) -> None:
        """Measure usage in one instant."""
        pids = [worker.process.pid for worker in self.workers]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            deadline = time.monotonic() + PATIENCE_S
            while not all(map(is_stopped, pids)):
                if time.monotonic() > deadline:
                    self.blame("a process does not stop")
                    return
                time.sleep(0.001)
            taken, everything = usage(self.root)
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
        self.samples += 1
        self.largest = max(self.largest, taken)
        self.largest_du = max(self.largest_du, everything)
        if taken > self.options.capacity:
            self.blame(f"sample {self.samples}: {taken} bytes of {self.options.capacity}")

    def collect(self, worker: Worker) -> None:
        self.past.update({name: int(worker.last.get(name, 0)) for name in _TOTALS})

    def run(self) -> None:
        choice = random.Random(1)
        end = time.monotonic() + self.options.seconds
        kill_at = time.monotonic() + self.options.kill_s
        while time.monotonic() < end:
            time.sleep(SAMPLE_S * choice.uniform(0.5, 1.5))
            for worker in self.workers:
                if worker.process.poll() is not None:
                    self.blame(f"a process ended by itself with {worker.process.returncode}")
                    return
            self.sample()
            if time.monotonic() > kill_at:
                kill_at += self.options.kill_s
                self.kill(choice.randrange(PROCESSES))
        for worker in self.workers:
            if worker.end() != 0:
                self.blame(f"a process ended with {worker.process.returncode}")
            self.collect(worker)

    def kill(self, index: int) -> None:
        worker = self.workers[index]
        worker.process.kill()
        worker.process.wait()
        worker.end()
        self.collect(worker)
        self.kills += 1
        self.workers[index] = Worker(self.options, self.root, next(self.seeds))

    def look_for_leftovers(self) -> None:
        """Let one more process clean up, then see what is left but blocks."""
        quick = SweepSettings(interval_s=0.05, scan_s=0.5)
        capacity = Capacity(self.root, self.options.capacity, 0, settings=quick)
        deadline = time.monotonic() + PATIENCE_S
        while self.leftovers() and time.monotonic() < deadline:
            time.sleep(0.1)
        for leftover in self.leftovers():
            self.blame(f"left over: {leftover}")
        capacity.close()
        members = self.root / ".kvtier" / "members"
        for name in os.listdir(members):
            self.blame(f"left over: member {name}")
        for path in [*self.root.rglob("*lock"), self.root / ".kvtier" / "ledger"]:
            with open(path, "r+b") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError:
                    self.blame(f"still locked: {path}")

    def leftovers(self) -> list[str]:
        """What should not be there: temporary files, members that are gone, bytes on the books."""
        # what is left of a probe goes with a later start, once it is old
        temps = (path for path in self.root.rglob("*.tmp") if not is_probe(path.name))
        found = [str(path) for path in temps if not is_probe(path.parent.name)]
        ledger = LedgerFile(str(self.root / ".kvtier" / "ledger"))
        with ledger.change(PATIENCE_S) as accounts:
            spare = sum(entry.spare for entry in accounts.members.values())
            found += [f"member {name}" for name in list(accounts.members)[1:]]
        ledger.close()
        taken, _ = usage(self.root)
        if accounts.granted != taken + spare:
            found.append(f"the books say {accounts.granted - spare} bytes, there are {taken}")
        return found

    def rows(self) -> list[Row]:
        totals, capacity = self.past, self.options.capacity
        for name in ("wrong_blocks", "stuck_jobs"):
            if totals[name]:
                self.blame(f"{totals[name]} {name}")
        asked = totals["stored_blocks"] + totals["refused_blocks"]
        looked = totals["loaded_blocks"] + totals["missed_blocks"]
        layout, blocks = self.options.layout, "blocks"
        figures = [
            ("largest_usage", self.largest, "B", capacity, "capacity", "lower"),
            ("largest_du", self.largest_du, "B", capacity, "capacity", "lower"),
            ("stored", totals["stored_blocks"], blocks, asked, "asked for", "higher"),
            ("loaded_and_right", totals["loaded_blocks"], blocks, looked, "looked for", "higher"),
            ("wrong", totals["wrong_blocks"], blocks, 0, "bound", "lower"),
            ("corrupt", totals["corrupt_blocks"], blocks, 0, "none expected", "lower"),
            ("stuck_jobs", totals["stuck_jobs"], "jobs", 0, "bound", "lower"),
            ("evicted_by_sweepers", totals["evicted_blocks"], blocks, 0, "-", "higher"),
            ("samples", self.samples, "samples", 0, "-", "higher"),
            ("kills", self.kills, "kills", 0, "-", "higher"),
            ("violations", len(self.violations), "", 0, "bound", "lower"),
        ]
        return [
            Row(f"soak_{layout}_{name}", float(value), unit, float(baseline), of, better)
            for name, value, unit, baseline, of, better in figures
        ]


def soak(options: argparse.Namespace) -> tuple[list[Row], list[str]]:
    root = Path(tempfile.mkdtemp(prefix="kvtier-soak-", dir=options.dir))
    try:
        run = Soak(options, root)
        try:
            run.run()
        finally:
            for worker in run.workers:
                worker.process.kill()
        run.look_for_leftovers()
        return run.rows(), run.violations
    finally:
        shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(add_help=False)
    arguments.add_argument("--seconds", type=float, default=1800.0)
    arguments.add_argument("--layout", choices=("files", "segments"), default="files")
    arguments.add_argument("--dir", help="where to make the directory")
    arguments.add_argument("--capacity", type=int, default=256 << 20, help="bytes")
    arguments.add_argument("--row-bytes", type=int, default=252 << 10)
    arguments.add_argument("--kill-s", type=float, default=KILL_S)
    found: list[str] = []

    def measure() -> list[Row]:
        rows, violations = soak(arguments.parse_known_args()[0])
        found.extend(violations)
        return rows

    main(__doc__ or "", measure, arguments)
    sys.exit(bool(found))
