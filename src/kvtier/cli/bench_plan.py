"""What a benchmark of a remote tier is asked to do, from its command line."""

from __future__ import annotations

from typing import Annotated

import typer

from kvtier.cli.bench_remote import Plan
from kvtier.config import parse_size
from kvtier.errors import ConfigError

SIZES = "64KiB,512KiB,2MiB,8MiB"
IN_FLIGHT = "1,8,64"
QUICK_SIZES = "64KiB,2MiB"
QUICK_IN_FLIGHT = "1,16"

Sizes = Annotated[str | None, typer.Option(metavar="LIST", show_default=SIZES, help="Block sizes.")]
InFlight = Annotated[
    str | None, typer.Option(metavar="LIST", show_default=IN_FLIGHT, help="Blocks at once.")
]
Seconds = Annotated[float, typer.Option(metavar="S", min=1, help="For all of it, roughly.")]
Quick = Annotated[
    bool, typer.Option("--quick", help=f"Only {QUICK_SIZES}, {QUICK_IN_FLIGHT} at once.")
]

_SIZE_MAX = 256 << 20
_IN_FLIGHT_MAX = 1024


def plan_of(
    kind: str,
    options: dict[str, object],
    sizes: str | None,
    in_flight: str | None,
    seconds: float,
    *,
    quick: bool,
) -> Plan:
    """The plan; lists that were not given are those of a quick or a full run.

    Raises:
        ConfigError: a list has something else than numbers, or numbers that are not allowed.
    """
    return Plan(
        kind,
        options,
        _numbers(sizes or (QUICK_SIZES if quick else SIZES), "--sizes", _SIZE_MAX),
        _numbers(
            in_flight or (QUICK_IN_FLIGHT if quick else IN_FLIGHT), "--in-flight", _IN_FLIGHT_MAX
        ),
        seconds,
    )


def _numbers(text: str, option: str, most: int) -> list[int]:
    try:
        numbers = sorted({parse_size(_size(part), option) for part in text.split(",")})
    except ConfigError:
        numbers = [0]
    if not 1 <= numbers[0] <= numbers[-1] <= most:
        raise ConfigError(f"{option} = {text!r} must be numbers from 1 to {most}, such as {SIZES}")
    return numbers


def _size(part: str) -> int | str:
    return int(part) if part.strip().isdecimal() else part
