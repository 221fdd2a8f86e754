"""`capacity` and `min_free` in bytes, from what an operator writes: 5000, "500GiB", "80%"."""

from __future__ import annotations

import os
import re
from fractions import Fraction
from typing import TYPE_CHECKING

from kvtier.config import parse_size
from kvtier.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

DEFAULT_MIN_FREE = "10%"
"""A mount that fills to the brim stops everything else on it, and most file systems slow down."""

_SHARE = re.compile(r"(\d+(?:\.\d+)?)\s*%")


def mount_bytes(root: Path) -> int:
    """Size of the mount that holds `root`.

    Raises:
        OSError: the mount does not answer.
    """
    found = os.statvfs(root)
    return found.f_blocks * found.f_frsize


def free_bytes(root: Path | str) -> int:
    """What an unprivileged process may still write on the mount of a directory.

    Raises:
        OSError: the mount does not answer.
    """
    found = os.statvfs(root)
    return found.f_bavail * found.f_frsize


def parse_capacity(value: object, setting: str, total_bytes: int) -> int | None:
    """The bytes that blocks in a root may take.

    Args:
        value: None for no bound but `min_free`; bytes, text with a unit, or a share like "80%".
        setting: its path, for the message.
        total_bytes: size of the mount.

    Raises:
        ConfigError: not a size or a share, or more than the mount has.
    """
    if value is None:
        return None
    size = _share_of(value, setting, total_bytes)
    if size is None:
        size = parse_size(value, setting)
    if size < 1:
        raise ConfigError(
            f"{setting} = {value!r} leaves no room for any block: give a share above 0%, a size "
            f'such as "500GiB", or leave {setting} out to be bounded by min_free alone'
        )
    if size > total_bytes:
        raise ConfigError(
            f"{setting} = {value!r} is {size} bytes, more than the {total_bytes} bytes of the "
            f'mount: give less, or a share such as "80%", or mount a larger disk'
        )
    return size


def parse_min_free(value: object, setting: str, total_bytes: int) -> int:
    """The bytes of a mount that stay free, whoever fills it.

    Args:
        value: bytes (0 for none), text with a unit, or a share like "10%".
        setting: its path, for the message.
        total_bytes: size of the mount.

    Raises:
        ConfigError: not a size or a share, or all of the mount.
    """
    size = 0 if value == 0 and not isinstance(value, bool) else None
    if size is None:
        size = _share_of(value, setting, total_bytes)
    if size is None:
        size = parse_size(value, setting)
    if size >= total_bytes:
        raise ConfigError(
            f"{setting} = {value!r} is {size} bytes, and the mount has {total_bytes}: nothing "
            f'could ever be stored. Give less, or a share such as "{DEFAULT_MIN_FREE}"'
        )
    return size


def _share_of(value: object, setting: str, total_bytes: int) -> int | None:
    """Bytes of a share such as "80%"; None if it is no share."""
    match = _SHARE.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        return None
    percent = Fraction(match[1])
    if percent > 100:
        raise ConfigError(f"{setting} = {value!r} is not allowed: a share is at most 100%")
    return int(total_bytes * percent / 100)
