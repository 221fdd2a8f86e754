"""The table of mounts, as this process sees it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePosixPath

_TABLE = "/proc/self/mountinfo"
_ESCAPED = re.compile(r"\\([0-7]{3})")  # how blanks and the like are written there


@dataclass(frozen=True, slots=True)
class Mount:
    """One line of the table of mounts.

    Attributes:
        device: `major:minor` of the file system.
        inside: which directory of the file system is shown, e.g. `/` or `/x`.
        point: where it is shown.
        kind: type of the file system, e.g. `ext4`.
        source: what is mounted: a device, `server:/export`.
    """

    device: str
    inside: PurePosixPath
    point: PurePosixPath
    kind: str
    source: str


def mounts() -> list[Mount]:
    """The mounts, oldest first: of two at one point the later hides the earlier.

    Raises:
        FileNotFoundError: the system has no such table.
    """
    with open(_TABLE, encoding="utf-8", errors="surrogateescape") as table:
        return [_decoded(line) for line in table]


def _decoded(line: str) -> Mount:
    fields = line.split(" ")
    dash = fields.index("-", 6)  # optional fields end with it
    inside, point, source = map(_plain, (fields[3], fields[4], fields[dash + 2]))
    kind = fields[dash + 1]
    return Mount(fields[2], PurePosixPath(inside), PurePosixPath(point), kind, source)


def _plain(field: str) -> str:
    return _ESCAPED.sub(lambda match: chr(int(match[1], 8)), field)
