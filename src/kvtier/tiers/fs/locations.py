"""Where a directory really lies: which file system, and which path inside it.

Two paths may lead to one place by symbolic links and by bind mounts. The table of mounts tells the
second: `/data` and `/srv/cache` are one directory if both show `/x` of the same file system.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

MOUNTS = "/proc/self/mountinfo"

_ESCAPED = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True, slots=True)
class Mount:
    """One line of the table of mounts.

    Attributes:
        device: `major:minor` of the file system.
        inside: which directory of the file system is shown, e.g. `/` or `/x`.
        point: where it is shown.
        kind: type of the file system, e.g. `ext4`.
    """

    device: str
    inside: PurePosixPath
    point: PurePosixPath
    kind: str


@dataclass(frozen=True, slots=True)
class Location:
    """A directory of a file system, however it was reached.

    Attributes:
        device: of the file system.
        path: from its top.
        shown: the path that leads there from the top of everything, without links.
        kind: type of the file system; empty if not known.
    """

    device: str
    path: PurePosixPath
    shown: PurePosixPath
    kind: str

    def is_at(self, other: Location) -> bool:
        """Whether both are one directory."""
        return (self.device, self.path) == (other.device, other.path)

    def holds(self, other: Location) -> bool:
        """Whether `other` is this directory or lies below it, in the file system or by a mount."""
        inside = self.device == other.device and other.path.is_relative_to(self.path)
        return inside or other.shown.is_relative_to(self.shown)


def location_of(directory: Path) -> Location:
    """The place of an existing directory.

    Raises:
        OSError: it cannot be looked at.
    """
    path = PurePosixPath(os.path.realpath(directory, strict=True))
    number = os.stat(directory).st_dev
    device = f"{os.major(number)}:{os.minor(number)}"
    around = [mount for mount in mounts() if path.is_relative_to(mount.point)]
    # a mount that was covered by a later one further up shows another device; where the table has
    # other devices than files do (btrfs), the deepest mount is the best guess
    same = [mount for mount in around if mount.device == device] or around
    if not same:
        return Location(device, path, path, "")
    deepest = max(len(mount.point.parts) for mount in same)
    mount = [each for each in same if len(each.point.parts) == deepest][-1]
    inside = mount.inside / path.relative_to(mount.point)
    return Location(mount.device, inside, path, mount.kind)


def mounts() -> list[Mount]:
    """The mounts that this process sees, oldest first; none where the system has no such table."""
    try:
        with open(MOUNTS, encoding="utf-8", errors="surrogateescape") as table:
            return [_decoded(line) for line in table]
    except FileNotFoundError:
        return []


def _decoded(line: str) -> Mount:
    fields = line.split(" ")
    kind = fields[fields.index("-", 6) + 1]  # optional fields end with a dash
    return Mount(fields[2], _path(fields[3]), _path(fields[4]), kind)


def _path(field: str) -> PurePosixPath:
    return PurePosixPath(_ESCAPED.sub(lambda match: chr(int(match[1], 8)), field))
