"""What a broken server costs the engine: step times without and with each fault, and the recovery.

An engine that stores and loads over the object or the valkey tier, in its I/O process, through a
proxy to a real server on this machine. Each fault comes, stays for a while and goes; the engine is
not restarted. A step is timed as the scheduler's thread has it: polls, answers and commands; not
the pause between steps. First an idle run of the same engine, then for each fault:

    <tier>_<fault>_step_p50, _p99, _max   with the fault, beside the same run without it
    <tier>_<fault>_step_waits             steps in which the thread waited for something
    <tier>_<fault>_left_alone             1 if what fails was left alone, for the right fault, and
                                          what need not fail was not
    <tier>_<fault>_counted                1 if the failures were counted under their cause
    <tier>_<fault>_recovery               seconds until blocks move both ways again
"""

from __future__ import annotations

import argparse
import logging
import os
import sys

from _remote_faults import (
    AT_START,
    FAULTS,
    OVER_TLS,
    Make,
    not_there,
    other_authority,
    wrong_password_at_start,
)
from _remote_place import entry, place_of, set_password
from _report import Row, main
from _step_rig import (
    BACKOFF_MAX_S,
    Engine,
    Suffered,
    Trouble,
    at_place,
    counted_rightly,
    left_alone,
    step_rows,
    suffer,
    suffer_from_start,
)

from kvtier.testing.s3_servers import ACCESS_KEY, SECRET_KEY

SETTINGS = {"job_deadline_ms": 4_000, "tier_stall_ms": 2_500, "max_wait_ms": 3_000}
"""A request's timeout comes before the engine's own patience ends, as with the defaults."""

options = argparse.ArgumentParser(add_help=False)
options.add_argument("--tier", choices=["object", "valkey"], help="one of them")
options.add_argument("--seconds", type=float, default=0.5, help="before each fault; twice in it")
options.add_argument("--quick", action="store_true", help="a third of a second")
options.add_argument("--only", nargs="*", default=[], metavar="FAULT", help="some of the faults")


def rows_of(name: str, trouble: Trouble, suffered: Suffered, engine: Engine) -> list[Row]:
    counted = ", ".join(f"{count} {cause}" for cause, count in suffered.counted.items())
    print(
        f"{name}: left alone {suffered.opened}; counted {counted or 'nothing'}; "
        f"{suffered.went.process_kills} processes killed; {engine.loaded_blocks} blocks compared",
        file=sys.stderr,
    )
    alone = left_alone(trouble, suffered.opened) and not suffered.went.process_kills
    waits = (suffered.whole_waits, "without the fault")
    recovery = (suffered.recovery_s, "s", BACKOFF_MAX_S, "longest backoff")
    return [
        *step_rows(name, suffered),
        Row(f"{name}_step_waits", suffered.broken_waits, "steps", *waits, "lower"),
        Row(f"{name}_left_alone", alone, "yes/no", 1, "should be", "higher"),
        Row(
            *(f"{name}_counted", counted_rightly(trouble, suffered), "yes/no", 1, "should be"),
            "higher",
        ),
        Row(f"{name}_recovery", *recovery, "lower"),
    ]


def one_engine(tier: str, faults: dict[str, Make], seconds: float, *, tls: bool) -> list[Row]:
    """Faults one after the other, under an engine that is never restarted."""
    rows: list[Row] = []
    with place_of(tier, "good" if tls else "") as at:
        engine = Engine(entry(tier, at, tls=tls), **SETTINGS)
        try:
            engine.warm_up()
            if not tls:
                rows.append(idle_row(tier, engine, seconds))
            for fault, make in faults.items():
                name, trouble = f"{tier}_{fault}", make(at)
                rows += rows_of(name, trouble, suffer(engine, name, trouble, seconds), engine)
        finally:
            engine.close()
    return rows


def idle_row(tier: str, engine: Engine, seconds: float) -> Row:
    """Steps that ask and store nothing, beside those that do."""
    engine.run(seconds)
    busy = at_place(engine.take_step_s(), 0.99) * 1e6
    engine.idle = True
    engine.run(seconds)
    engine.idle = False
    idle = at_place(engine.take_step_s(), 0.99) * 1e6
    return Row(f"{tier}_idle_step_p99", idle, "us", busy, "storing and loading", "lower")


def started_with(tier: str, fault: str, make: Make, seconds: float) -> list[Row]:
    """A fault that is there before the engine."""
    tls = make is other_authority
    with place_of(tier, "other" if tls else "") as at:
        if make is not_there:
            at.proxy.stop_listening()
        if make is wrong_password_at_start:
            set_password(at, "another")
        trouble = make(at)
        engine = Engine(entry(tier, at, tls=tls), **SETTINGS)
        try:
            name = f"{tier}_{fault}"
            suffered = suffer_from_start(engine, name, trouble, seconds)
            return rows_of(name, trouble, suffered, engine)
        finally:
            engine.close()


def measure() -> list[Row]:
    chosen = options.parse_known_args()[0]
    seconds = 0.3 if chosen.quick else chosen.seconds
    logging.disable(logging.WARNING)
    os.environ["AWS_ACCESS_KEY_ID"], os.environ["AWS_SECRET_ACCESS_KEY"] = ACCESS_KEY, SECRET_KEY
    rows: list[Row] = []
    for tier in [chosen.tier] if chosen.tier else list(FAULTS):

        def some(faults: dict[str, Make]) -> dict[str, Make]:
            return {n: f for n, f in faults.items() if not chosen.only or n in chosen.only}

        for faults, tls in ((FAULTS[tier], False), (OVER_TLS, True)):
            if some(faults):
                rows += one_engine(tier, some(faults), seconds, tls=tls)
        for fault, make in some(AT_START[tier]).items():
            rows += started_with(tier, fault, make, seconds)
    return rows


if __name__ == "__main__":
    main(__doc__, measure, options)
