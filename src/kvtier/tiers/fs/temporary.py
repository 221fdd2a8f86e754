"""Names of temporary files: they tell whether whoever writes the file still lives.

    <pid>-<token>-<n>.tmp     token: 16 hex of the place, 16 of the start time, 8 random

The *place* is where a pid means something: one boot of one host, one namespace of pids. Within it
a process is alive or it is not; about other places only the age of the file tells something.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import os
import re
import secrets
import socket

TEMP_SUFFIX = ".tmp"

STALE_AGE_S = 3600.0
"""No write of a block takes an hour: a file that old, from another place, has lost its writer."""

_NAME = re.compile(r"(\d{1,10})-([0-9a-f]{1,64})-\d+\.tmp")
_TOKEN = re.compile(r"([0-9a-f]{16})([0-9a-f]{16})[0-9a-f]{8}")


class TempNames:
    """Names that no other writer uses, for files that this process writes."""

    def __init__(self) -> None:
        pid = os.getpid()
        self._prefix = f"{pid}-{_place()}{_start_time(pid) or 0:016x}{secrets.token_hex(4)}"
        self._numbers = itertools.count()  # its next is atomic

    def new(self) -> str:
        """A name that was not given before."""
        return f"{self._prefix}-{next(self._numbers)}{TEMP_SUFFIX}"


def is_temp(name: str) -> bool:
    """Whether a file of this name is a temporary one of ours."""
    return _NAME.fullmatch(name) is not None


def is_stale_temp(name: str, found: os.stat_result, now: float) -> bool:
    """Whether a file is a temporary one of ours whose writer is surely gone.

    Args:
        name: of the file, without its directory.
        found: its `stat`.
        now: seconds since the epoch, by the clock that the file's times come from.
    """
    parts = _NAME.fullmatch(name)
    if parts is None:
        return False
    token = _TOKEN.fullmatch(parts[2])
    if token is not None and token[1] == _place():
        return not _is_running(int(parts[1]), int(token[2], 16))
    return now - found.st_mtime > STALE_AGE_S


@functools.cache
def _place() -> str:
    """16 hex digits that differ wherever a pid means another process."""
    parts = [socket.gethostname()]
    for path in ("/etc/machine-id", "/proc/sys/kernel/random/boot_id"):
        try:
            with open(path, encoding="ascii") as file:
                parts.append(file.read().strip())
        except OSError:
            parts.append("")
    for kind in ("pid", "time"):  # a start time counts from a time namespace's own zero
        try:
            parts.append(os.readlink(f"/proc/self/ns/{kind}"))
        except OSError:
            parts.append("")
    if not parts[2]:
        parts.append(secrets.token_hex(8))  # a place that cannot be told is a place of its own
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _is_running(pid: int, start_time: int) -> bool:
    """Whether the process of this place with that pid is the one that started then."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        pass  # somebody else's: it exists
    return start_time == 0 or _start_time(pid) in (None, start_time)


def _start_time(pid: int) -> int | None:
    """When a process started, in clock ticks since the boot; None if that cannot be read."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return int(file.read().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None
