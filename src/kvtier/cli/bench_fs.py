"""`kvtier bench fs`: what an fs tier reaches in a directory, beside fio with the same shapes."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import typer

from kvtier.cli.admin_options import size_text
from kvtier.cli.admin_output import Json, exit_codes, messages_console, say
from kvtier.cli.bench_fio import FioBest, find_fio, measure_fio, total_bytes
from kvtier.cli.bench_fs_jobs import BenchTier, JobTimes, filled_region
from kvtier.cli.bench_report import Row, print_rows
from kvtier.config import parse_size
from kvtier.errors import ConfigError
from kvtier.interrupts import interrupts_held, termination_as_interrupt
from kvtier.region.memory import available_memory
from kvtier.tiers.fs.medium import probe_direct

KIB, MIB = 1 << 10, 1 << 20
SIZES = "64KiB,256KiB,1MiB,4MiB,16MiB"
JOBS = "1,16,64,256"
QUICK_SIZES = "256KiB,4MiB"
QUICK_JOBS = "1,64"

_REPEAT_BYTES = 256 * MIB
_REPETITIONS_MAX = 5
_PAGE = 4096

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured.

    Attributes:
        sizes: bytes per block, ascending.
        jobs: blocks per job, ascending.
        layout: of the tier.
        threads: of the tier; None for its own choice.
        seconds: that all of it may take; shapes that would take longer are left out.
    """

    sizes: Sequence[int]
    jobs: Sequence[int]
    layout: str
    threads: int | None
    seconds: float

    @property
    def disk_bytes(self) -> int:
        """Most that lies on the disk at a time."""
        return max(
            sum(repetitions(size, job) * job * (size + _PAGE) for job in self.jobs)
            + total_bytes(size)
            for size in self.sizes
        )


@dataclass(slots=True)
class Measured:
    """Figures by block size and blocks per job."""

    times: dict[tuple[int, int], JobTimes] = field(default_factory=dict)
    fio: dict[tuple[int, int], FioBest] = field(default_factory=dict)

    def rows(self) -> list[Row]:
        """One row per shape and operation."""
        rows = []
        for (size, job), times in self.times.items():
            best = self.fio.get((size, job), FioBest())
            shape = f"{shape_text(size)} x {job}"
            for name, seconds, baseline, baseline_name in (
                ("store", times.store, best.write, best.write_name),
                ("load", times.load, best.read, best.read_name),
            ):
                speed = size * job / seconds / 1e9
                rows.append(
                    Row(f"fs {name} {shape}", speed, "GB/s", baseline, baseline_name, "higher")
                )
            for name, seconds in (("present", times.present), ("absent", times.absent)):
                rows.append(
                    Row(f"fs lookup {name} {shape}", seconds / job * 1e6, "us/key", 0, "", "lower")
                )
        return rows


def repetitions(size: int, job: int) -> int:
    """How often a shape is measured: small ones more often."""
    return max(1, min(_REPETITIONS_MAX, _REPEAT_BYTES // (size * job)))


def shape_text(size: int) -> str:
    """A block size for names of rows."""
    return f"{size // MIB}MiB" if size % MIB == 0 else f"{size // KIB}KiB"


def bench_fs(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="Where to measure; engines may use it.")
    ],
    sizes: Annotated[
        str | None, typer.Option(metavar="LIST", show_default=SIZES, help="Block sizes.")
    ] = None,
    jobs: Annotated[
        str | None, typer.Option(metavar="LIST", show_default=JOBS, help="Blocks per job.")
    ] = None,
    layout: Annotated[
        Literal["auto", "files", "segments"], typer.Option(help="Of the tier.")
    ] = "auto",
    threads: Annotated[
        int | None, typer.Option(metavar="N", min=2, max=1024, help="Of the tier.")
    ] = None,
    seconds: Annotated[
        float, typer.Option(metavar="S", min=1, help="Leave out what would take longer in all.")
    ] = 100.0,
    quick: Annotated[
        bool, typer.Option("--quick", help=f"Only {QUICK_SIZES} in jobs of {QUICK_JOBS}.")
    ] = False,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Draw it; needs matplotlib.")
    ] = None,
    json: Json = False,
) -> None:
    """Store, load and look up blocks in a directory, beside fio where that is installed.

    Everything happens in a directory of its own below DIR, which is removed at the end.
    """
    messages = messages_console()
    with exit_codes(messages):
        draw = None if plot is None else _plotter(plot)
        plan = Plan(
            sizes=_sizes((QUICK_SIZES if quick else SIZES) if sizes is None else sizes),
            jobs=_jobs((QUICK_JOBS if quick else JOBS) if jobs is None else jobs),
            layout=layout,
            threads=threads,
            seconds=seconds,
        )
        check_free(directory, plan.disk_bytes)
        with (
            termination_as_interrupt(),
            scratch(directory) as place,
            messages.status("bench") as status,
        ):
            measured = measure(plan, place, status.update, lambda text: say(messages, text))
        if draw is not None:
            draw(measured)
    rows = measured.rows()
    print_rows(rows, f"fs tier in {directory}", json=json)


def measure(plan: Plan, place: Path, doing: Say, note: Say) -> Measured:
    """Measure every shape; what does not fit into memory or time is left out and told.

    Raises:
        TierError: the tier or fio failed.
    """
    measured = Measured()
    until = time.monotonic() + plan.seconds
    direct = probe_direct(place)
    if not direct.works:
        note(f"figures are those of the page cache: {direct.reason}")
    fio = find_fio()
    if fio is None:
        note("fio is not installed: there is no baseline")
    memory = available_memory() // 2
    for size in plan.sizes:
        jobs = [job for job in plan.jobs if job * size <= memory]
        if len(jobs) < len(plan.jobs):
            note(f"{shape_text(size)}: jobs of more than {size_text(memory)} are left out")
        if jobs and time.monotonic() < until:
            _measure_size(plan, place, size, jobs, until, (fio, direct.works), measured, doing)
    missing = len(plan.sizes) * len(plan.jobs) - len(measured.times)
    if missing:
        note(f"{missing} shapes were left out; --seconds gives more time")
    return measured


def _measure_size(
    plan: Plan,
    place: Path,
    size: int,
    jobs: Sequence[int],
    until: float,
    fio: tuple[str | None, bool],
    measured: Measured,
    doing: Say,
) -> None:
    root = place / f"tier-{size}"
    root.mkdir(mode=0o700)
    options: dict[str, object] = {"layout": plan.layout}
    if plan.threads is not None:
        options["threads"] = plan.threads
    try:
        with (
            contextlib.closing(filled_region(size, max(jobs))) as region,
            BenchTier(root, options, region) as tier,
        ):
            depths = {min(job, tier.num_threads) for job in jobs}
            # before and after, since the speed of a shared disk changes
            best = _best(fio, place, size, depths, {}, doing)
            expected_s = 0.0
            for job in jobs:
                blocks = job * repetitions(size, job)
                if time.monotonic() + expected_s * blocks > until:
                    break
                doing(f"{shape_text(size)} x {job}")
                times = measured.times[size, job] = tier.times(job, repetitions(size, job))
                expected_s = (times.store + times.load) / job
            best = _best(fio, place, size, depths, best, doing)
            for job in jobs:
                if best and (size, job) in measured.times:
                    measured.fio[size, job] = best[min(job, tier.num_threads)]
    finally:
        shutil.rmtree(root, ignore_errors=True)


def _best(
    fio: tuple[str | None, bool],
    place: Path,
    size: int,
    depths: set[int],
    best: dict[int, FioBest],
    doing: Say,
) -> dict[int, FioBest]:
    program, direct = fio
    if program is None:
        return {}
    found = {}
    for depth in sorted(depths):
        doing(f"{shape_text(size)}: fio, depth {depth}")
        now = measure_fio(program, place, size, depth, direct)
        found[depth] = now.better(best.get(depth, FioBest()))
    return found


@contextlib.contextmanager
def scratch(directory: Path) -> Iterator[Path]:
    """A directory of our own below another one, removed at the end whatever happens.

    Raises:
        ConfigError: it cannot be made.
    """
    place: str | None = None
    try:
        with interrupts_held():
            place = tempfile.mkdtemp(prefix="kvtier-bench-", dir=directory)
        yield Path(place).absolute()
    except OSError as error:
        if place is not None:
            raise
        raise ConfigError(
            f"DIR = {str(directory)!r} cannot be written ({error.strerror}): name an existing "
            f"directory that this user may write"
        ) from None
    finally:
        if place is not None:
            shutil.rmtree(place, ignore_errors=True)


def check_free(directory: Path, needed: int) -> None:
    """Whether so many bytes, and a tenth of the mount, are free.

    Raises:
        ConfigError: they are not, or the directory does not exist.
    """
    try:
        usage = shutil.disk_usage(directory)
    except OSError as error:
        raise ConfigError(
            f"DIR = {str(directory)!r} cannot be used ({error.strerror}): name one that exists"
        ) from None
    spare = usage.free - usage.total // 10
    if needed > spare:
        raise ConfigError(
            f"DIR = {str(directory)!r} has {size_text(max(0, spare))} to spare and this needs "
            f"{size_text(needed)}: give fewer --sizes or --jobs, or --quick, or another directory"
        )


def _sizes(text: str) -> list[int]:
    sizes = sorted({parse_size(_number(part), "--sizes") for part in text.split(",")})
    for size in sizes:
        if size % _PAGE or size > 1 << 30:
            raise ConfigError(
                f"--sizes = {text!r}: block sizes are multiples of 4KiB up to 1GiB, such as {SIZES}"
            )
    return sizes


def _number(part: str) -> int | str:
    return int(part) if part.strip().isdecimal() else part


def _jobs(text: str) -> list[int]:
    try:
        jobs = sorted({int(part) for part in text.split(",")})
    except ValueError:
        jobs = [0]
    if not 1 <= jobs[0] <= jobs[-1] <= 65_536:
        raise ConfigError(f"--jobs = {text!r} must be numbers of blocks above 0, such as {JOBS}")
    return jobs


def _plotter(file: Path) -> Callable[[Measured], None]:
    """Draws into `file`. Imports what that needs now, so that it is not missed at the end.

    Raises:
        ConfigError: matplotlib is missing.
    """
    try:
        from kvtier.cli.bench_fs_plot import draw
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"--plot needs {error.name}, which is not installed: pip install 'kvtier[plot]'"
        ) from None
    return lambda measured: draw(measured, file)
