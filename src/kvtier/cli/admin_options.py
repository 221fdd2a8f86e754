"""What people write on the command line for ages, sizes and samples, and how figures are shown."""

from __future__ import annotations

import re
from typing import Final

from kvtier.config import parse_size
from kvtier.errors import ConfigError

_AGE: Final = re.compile(r"(\d{1,9}(?:\.\d{1,6})?)\s*([smhdw])", re.ASCII)
_SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_SHARE: Final = re.compile(r"(\d{1,3}(?:\.\d{1,6})?)%", re.ASCII)


def parse_age(text: str, option: str) -> float:
    """Seconds from text such as `90s`, `30m`, `12h`, `7d`, `2w`.

    Raises:
        ConfigError: it is no such text.
    """
    match = _AGE.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"{option} = {text!r} must be a figure and a unit: 90s, 30m, 12h, 7d, 2w")
    return float(match[1]) * _SECONDS[match[2]]


def eviction_bounds(older_than: str | None, to_size: str | None) -> tuple[float | None, int | None]:
    """Seconds of `--older-than`, and bytes of `--to-size`.

    Raises:
        ConfigError: neither is given, or one is malformed.
    """
    if older_than is None and to_size is None:
        raise ConfigError(
            "nothing says what to evict: give --older-than, --to-size or both; `kvtier wipe` "
            "removes everything"
        )
    age_s = None if older_than is None else parse_age(older_than, "--older-than")
    to_bytes = None
    if to_size is not None:
        text = to_size.strip()
        given = int(text) if text.isdigit() else to_size
        to_bytes = 0 if text == "0" else parse_size(given, "--to-size")
    return age_s, to_bytes


def sample_size(text: str, population: int, option: str) -> int:
    """How many of `population` a sample such as `500` or `5%` has, at least 1.

    Raises:
        ConfigError: it is no such text, or more than 100 %.
    """
    text = text.strip()
    share = _SHARE.fullmatch(text)
    if share is not None and 0 < float(share[1]) <= 100:
        return min(population, max(1, round(population * float(share[1]) / 100)))
    if re.fullmatch(r"[0-9]{1,12}", text) and int(text) > 0:
        return min(population, int(text))
    raise ConfigError(f"{option} = {text!r} must be a number of blocks above 0, or a share: 5%")


def count_text(count: int, noun: str, nouns: str | None = None) -> str:
    """So many of something: `1 block`, `2,000 blocks`."""
    return f"{count:,} {noun if count == 1 else nouns or noun + 's'}"


def size_text(nbytes: float) -> str:
    """Bytes for people, in powers of 1024."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


def age_text(seconds: float | None) -> str:
    """A time span for people, in the largest unit of which there are two or more."""
    if seconds is None:
        return "-"
    seconds = max(seconds, 0.0)
    for unit in ("w", "d", "h", "m"):
        if seconds >= 2 * _SECONDS[unit]:
            return f"{seconds / _SECONDS[unit]:.0f} {unit}"
    return f"{seconds:.0f} s"
