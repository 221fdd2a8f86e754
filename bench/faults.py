"""What a broken medium costs the engine: step times without and with each fault, and the recovery.

An engine that stores and loads over the fs tier, in its I/O process, on a small loop-mounted file
system. Each fault comes, stays for a while and goes. A step is timed as the scheduler's thread has
it: polls, answers and commands; not the pause between steps. What needs the superuser or a C
compiler is left out without them, and said on stderr. For each fault:

    <fault>_step_p50, _p99, _max   with the fault, beside the same run before it
    <fault>_left_alone             1 if the tier was left alone where it fails, for that cause
    <fault>_still_read             1 if reads went on, where they can
    <fault>_recovery               seconds until blocks move both ways again, without a restart
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import logging
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from _report import Row, main

from kvtier.config import Settings
from kvtier.core.health import Circuit, State
from kvtier.core.requests import Request
from kvtier.core.types import Fault
from kvtier.drivers.base import TierCounters
from kvtier.namespace import Namespace
from kvtier.offloader import Offloader, configure_tiers
from kvtier.region import Geometry, Region
from kvtier.testing.broken_medium import (
    HANG,
    BrokenCalls,
    Group,
    LoopMount,
    UnavailableError,
)
from kvtier.testing.engine import Groups, key_of, scan

ROW_BYTES = 16 * 1024
NUM_SLOTS = 256
PROMPT_BLOCKS = 8
MOUNT_BYTES = 192 << 20
PAUSE_S = 0.002  # the model's part of a step, here
REQUESTS_MAX = 8
RECOVERY_MAX_S = 30.0
WARM_UP_MAX_S = 20.0
WARM_UP_BLOCKS = 300
BACKOFF_MAX_S = 1.0
DEADLINE_S = 1.0
KILLED_S = 8.0
"""By then a process that hangs is killed, and so is the one after it."""

SETTINGS = {
    "cpu_bytes_to_use": NUM_SLOTS * ROW_BYTES,
    "max_wait_ms": 2_000,
    "hold_ms": 1_000,
    "job_deadline_ms": int(DEADLINE_S * 1e3),
    "tier_stall_ms": 500,
    "tier_backoff_ms": 100,
    "tier_backoff_max_ms": int(BACKOFF_MAX_S * 1e3),
    "absent_ttl_ms": 100,
    "prefill_tokens_per_s": "unknown",
}


class Engine:
    """Stores a prompt now and then, and asks for older ones that have left the pool."""

    def __init__(self, root: Path, layout: str) -> None:
        tier = {"type": "fs", "name": "disk", "root_dir": str(root), "layout": layout, "threads": 4}
        settings = Settings.decode({**SETTINGS, "secondary_tiers": [tier]})
        self.region = Region.create(Geometry(NUM_SLOTS, ROW_BYTES, 1))
        self.offloader = Offloader(
            settings,
            configure_tiers(settings.secondary_tiers),
            self.region,
            Namespace.of({"weights": "of the benchmark"}),
        )
        self.step_s: list[float] = []
        self.wrong_reads = 0
        self._random = random.Random(1)
        self._steps = 0
        self._prompts = 0
        self._asking: dict[str, tuple[Request, list[int]]] = {}

    @property
    def counters(self) -> TierCounters:
        return self.offloader.drivers[0].counters()

    @property
    def reads(self) -> Circuit:
        return self.offloader.core.ledger.reads[0]

    @property
    def writes(self) -> Circuit:
        return self.offloader.core.ledger.writes[0]

    def run(self, seconds: float, until: Callable[[], bool] = lambda: False) -> float:
        """Step until something is so, or for so long. Returns the seconds it took."""
        began = time.monotonic()
        while time.monotonic() - began < seconds and not until():
            self._steps += 1
            started = time.perf_counter()
            self._step()
            self.step_s.append(time.perf_counter() - started)
            time.sleep(PAUSE_S)
        return time.monotonic() - began

    def take_step_s(self) -> list[float]:
        """Times of the steps since the last call."""
        taken, self.step_s = self.step_s, []
        return taken

    def _step(self) -> None:
        core = self.offloader.core
        self.offloader.begin()
        if self._steps % 16 == 0:
            prompt = self._prompt(self._prompts)
            self._prompts += 1
            slots = core.prepare_store("store", [key_of(block) for block in prompt])
            for key, slot in slots.items():
                self.region.slot(slot)[: len(key)] = key
            core.complete_store(slots)
        if self._steps % 4 == 0 and len(self._asking) < REQUESTS_MAX and self._prompts > 64:
            name = f"request {self._steps}"
            number = self._random.randrange(max(0, self._prompts - 512), self._prompts - 40)
            self._asking[name] = (core.open_request(name), self._prompt(number))
        for name, (request, prompt) in list(self._asking.items()):
            hit = scan(lambda key, of=request: core.lookup(of, key), prompt, Groups())
            if hit is None:
                continue
            keys = [key_of(block) for block in prompt[:hit]]
            for key, slot in zip(keys, core.prepare_load(name, keys), strict=True):
                self.wrong_reads += slot is None or self.region.slot(slot)[: len(key)] != key
            core.complete_load(name)
            core.finish_request(name)
            del self._asking[name]
        self.offloader.end()

    @staticmethod
    def _prompt(number: int) -> list[int]:
        return list(range(number * PROMPT_BLOCKS, (number + 1) * PROMPT_BLOCKS))

    def close(self) -> None:
        self.offloader.close()


@dataclass(frozen=True)
class Trouble:
    """One fault: how it comes and goes, and what the tier should make of it.

    Attributes:
        come: break the medium.
        go: mend it.
        reads: faults that may open the reads; empty if they must go on.
        writes: faults that may open the writes; empty if they must go on.
        least_s: seconds that it stays at least.
    """

    come: Callable[[], object]
    go: Callable[[], object]
    reads: frozenset[Fault] = frozenset()
    writes: frozenset[Fault] = frozenset()
    least_s: float = 0.0


LOST = frozenset({Fault.UNREACHABLE})
HUNG = frozenset({Fault.STALLED, Fault.UNREACHABLE})
FULL = frozenset({Fault.FULL})
DENIED = frozenset({Fault.DENIED})
THROTTLED = frozenset({Fault.THROTTLED})
ERROR = frozenset({Fault.ERROR})


def failing(calls: BrokenCalls, number: int, *groups: Group) -> Callable[[], object]:
    """Have calls fail with an errno."""
    return lambda: calls.answer(dict.fromkeys(groups, number))


def hanging(calls: BrokenCalls, *groups: Group) -> Callable[[], object]:
    """Have calls hang."""
    return lambda: calls.answer(dict.fromkeys(groups, HANG))


# `segments` evicts for itself when the disk is full, and goes on in files that are open
GO_ON = {
    ("segments", "enospc"): ("writes",),
    ("segments", "vanished_mount"): ("reads", "writes"),
}

BOTH: tuple[Group, ...] = ("create", "write", "open", "read")

OF_MOUNT: dict[str, Callable[[LoopMount], Trouble]] = {
    "enospc": lambda m: Trouble(m.fill, m.make_room, writes=FULL),
    "vanished_mount": lambda m: Trouble(m.take_away, m.bring_back, reads=LOST, writes=LOST),
}

OF_CALLS: dict[str, Callable[[BrokenCalls], Trouble]] = {
    "read_only": lambda c: Trouble(failing(c, errno.EROFS, "create", "write"), c.heal, writes=FULL),
    "edquot": lambda c: Trouble(failing(c, errno.EDQUOT, "write"), c.heal, writes=FULL),
    "eio": lambda c: Trouble(failing(c, errno.EIO, *BOTH), c.heal, reads=ERROR, writes=ERROR),
    "estale": lambda c: Trouble(failing(c, errno.ESTALE, *BOTH), c.heal, reads=LOST, writes=LOST),
    "emfile": lambda c: Trouble(
        failing(c, errno.EMFILE, *BOTH), c.heal, reads=THROTTLED, writes=THROTTLED
    ),
    "permission_loss": lambda c: Trouble(
        failing(c, errno.EACCES, *BOTH), c.heal, reads=DENIED, writes=DENIED
    ),
    "hung_reads": lambda c: Trouble(
        hanging(c, "read"), c.heal, reads=HUNG, writes=HUNG, least_s=KILLED_S
    ),
    "hung_writes": lambda c: Trouble(
        hanging(c, "write"), c.heal, reads=HUNG, writes=HUNG, least_s=KILLED_S
    ),
    "hung_mount": lambda c: Trouble(
        hanging(c, "all"), c.heal, reads=HUNG, writes=HUNG, least_s=KILLED_S
    ),
}


@contextlib.contextmanager
def environment_of(values: Mapping[str, str]) -> Iterator[None]:
    """Variables that I/O processes inherit."""
    os.environ.update(values)
    try:
        yield
    finally:
        for name in values:
            del os.environ[name]


def suffer(name: str, trouble: Trouble, root: Path, layout: str, seconds: float) -> list[Row]:
    """One fault, on a fresh root."""
    engine = Engine(root, layout)
    opened: dict[str, Fault | None] = {}

    def look() -> bool:
        for word, circuit in (("reads", engine.reads), ("writes", engine.writes)):
            if circuit.state is not State.CLOSED:
                opened[word] = circuit.fault
        return False

    try:
        engine.run(WARM_UP_MAX_S, lambda: engine.counters.read_blocks > WARM_UP_BLOCKS)
        engine.take_step_s()
        engine.run(seconds)
        before, broken_at = engine.take_step_s(), engine.counters
        trouble.come()
        engine.run(max(2 * seconds, trouble.least_s), look)
        during, mended_at = engine.take_step_s(), engine.counters
        trouble.go()

        def moves_again() -> bool:
            now = engine.counters
            closed = engine.reads.state is State.CLOSED and engine.writes.state is State.CLOSED
            read, written = now.read_blocks, now.write_blocks
            return closed and read > mended_at.read_blocks and written > mended_at.write_blocks

        recovery_s = engine.run(RECOVERY_MAX_S, moves_again)
        assert moves_again(), f"{name}: no recovery within {RECOVERY_MAX_S:g} s"
        assert engine.wrong_reads == 0, f"{name}: wrong blocks were served"
    finally:
        engine.close()
    wanted = {"reads": trouble.reads, "writes": trouble.writes}
    for word in GO_ON.get((layout, name), ()):
        del wanted[word]
    left_alone = all(opened.get(word) in faults for word, faults in wanted.items() if faults)
    counted = ", ".join(f"{count} {cause}" for cause, count in mended_at.faults.items())
    print(
        f"{name}: left alone {opened}; counted {counted}; "
        f"{mended_at.process_kills} processes killed",
        file=sys.stderr,
    )
    rows = step_rows(name, before, during)
    rows.append(Row(f"{name}_left_alone", left_alone, "yes/no", 1, "should be", "higher"))
    if not wanted.get("reads"):
        served = mended_at.read_blocks > broken_at.read_blocks
        rows.append(Row(f"{name}_still_read", served, "yes/no", 1, "should be", "higher"))
    rows.append(Row(f"{name}_recovery", recovery_s, "s", BACKOFF_MAX_S, "longest backoff", "lower"))
    return rows


def step_rows(name: str, before: list[float], during: list[float]) -> list[Row]:
    """Median, tail and worst of the steps, in microseconds."""
    rows = []
    for word, place in (("p50", 0.5), ("p99", 0.99), ("max", 1.0)):
        broken, whole = (
            sorted(each)[min(int(place * len(each)), len(each) - 1)] * 1e6
            for each in (during, before)
        )
        rows.append(Row(f"{name}_step_{word}", broken, "us", whole, "before the fault", "lower"))
    return rows


def on_mount(name: str, scratch: Path, layout: str, seconds: float) -> list[Row]:
    """A fault of a real file system."""
    with LoopMount(scratch, MOUNT_BYTES) as mount:
        root = mount.point
        return suffer(name, OF_MOUNT[name](mount), root, layout, seconds)


def on_calls(name: str, scratch: Path, layout: str, seconds: float) -> list[Row]:
    """A fault of single calls."""
    root = scratch / "root"
    root.mkdir(mode=0o700)
    calls = BrokenCalls(root, scratch, BrokenCalls.build(scratch))
    with environment_of(calls.environment):
        return suffer(name, OF_CALLS[name](calls), root, layout, seconds)


def measure(seconds: float, layout: str, only: list[str]) -> list[Row]:
    """Every fault that can be made here."""
    logging.disable(logging.WARNING)
    rows: list[Row] = []
    for name in only or (*OF_MOUNT, *OF_CALLS):
        with tempfile.TemporaryDirectory(prefix="kvtier-faults-") as scratch:
            run = on_mount if name in OF_MOUNT else on_calls
            try:
                rows += run(name, Path(scratch), layout, seconds)
            except UnavailableError as error:
                print(f"{name} is left out: {error}", file=sys.stderr)
    return rows


if __name__ == "__main__":
    options = argparse.ArgumentParser(add_help=False)
    options.add_argument(
        "--seconds", type=float, default=2.0, help="before each fault; twice in it"
    )
    options.add_argument(
        "--layout", default="files", choices=["files", "segments"], help="of the fs tier"
    )
    options.add_argument(
        "--only", nargs="*", default=[], choices=[*OF_MOUNT, *OF_CALLS], help="some of the faults"
    )
    given = options.parse_known_args()[0]
    main(__doc__, lambda: measure(given.seconds, given.layout, given.only), options)
