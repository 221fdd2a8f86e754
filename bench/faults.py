"""What a broken medium costs the engine: step times without and with each fault, and the recovery.

An engine that stores and loads over the fs tier, in its I/O process, on a small loop-mounted file
system. Each fault comes, stays for a while and goes. A step is timed as the scheduler's thread has
it: polls, answers and commands; not the pause between steps. What needs the superuser or a C
compiler is left out without them, and said on stderr. `remote_faults.py` does the same for servers.
For each fault:

    <fault>_step_p50, _p99, _max   with the fault, beside the same run before it
    <fault>_left_alone             1 if the tier was left alone where it fails, for that cause
    <fault>_still_read             1 if reads went on, where they can
    <fault>_recovery               seconds until blocks move both ways again, without a restart
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import errno
import logging
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from _report import Row, main
from _step_rig import (
    BACKOFF_MAX_S,
    DENIED,
    ERROR,
    FULL,
    HUNG,
    LOST,
    THROTTLED,
    Engine,
    Trouble,
    left_alone,
    step_rows,
    suffer,
)

from kvtier.testing.broken_medium import (
    HANG,
    BrokenCalls,
    Group,
    LoopMount,
    UnavailableError,
)

MOUNT_BYTES = 192 << 20
KILLED_S = 8.0
"""By then a process that hangs is killed, and so is the one after it."""


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


def rows_of(name: str, trouble: Trouble, root: Path, layout: str, seconds: float) -> list[Row]:
    """One fault, on a fresh root."""
    not_judged = dict.fromkeys(GO_ON.get((layout, name), ()))
    trouble = dataclasses.replace(trouble, **not_judged)
    tier = {"type": "fs", "name": "disk", "root_dir": str(root), "layout": layout, "threads": 4}
    engine = Engine(tier)
    try:
        engine.warm_up()
        suffered = suffer(engine, name, trouble, seconds)
    finally:
        engine.close()
    counted = ", ".join(f"{count} {cause}" for cause, count in suffered.counted.items())
    print(
        f"{name}: left alone {suffered.opened}; counted {counted}; "
        f"{suffered.went.process_kills} processes killed",
        file=sys.stderr,
    )
    alone = left_alone(trouble, suffered.opened)
    rows = step_rows(name, suffered)
    rows.append(Row(f"{name}_left_alone", alone, "yes/no", 1, "should be", "higher"))
    if not trouble.reads:
        served = suffered.went.read_blocks > suffered.came.read_blocks
        rows.append(Row(f"{name}_still_read", served, "yes/no", 1, "should be", "higher"))
    seconds_each = (suffered.recovery_s, "s", BACKOFF_MAX_S)
    rows.append(Row(f"{name}_recovery", *seconds_each, "longest backoff", "lower"))
    return rows


def on_mount(name: str, scratch: Path, layout: str, seconds: float) -> list[Row]:
    """A fault of a real file system."""
    with LoopMount(scratch, MOUNT_BYTES) as mount:
        root = mount.point
        return rows_of(name, OF_MOUNT[name](mount), root, layout, seconds)


def on_calls(name: str, scratch: Path, layout: str, seconds: float) -> list[Row]:
    """A fault of single calls."""
    root = scratch / "root"
    root.mkdir(mode=0o700)
    calls = BrokenCalls(root, scratch, BrokenCalls.build(scratch))
    with environment_of(calls.environment):
        return rows_of(name, OF_CALLS[name](calls), root, layout, seconds)


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
