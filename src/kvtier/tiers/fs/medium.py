"""What a directory lies on: which file system, whether other hosts see it, how full it is, and
whether it takes direct I/O.

Everything here asks the mount and so hangs with it: callers bound the time.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtier.tiers.fs.io import ALIGNMENT, scratch
from kvtier.tiers.fs.temporary import TempNames

if TYPE_CHECKING:
    from pathlib import Path

_SHARED = frozenset(
    [
        "9p",
        "acfs",
        "afs",
        "beegfs",
        "ceph",
        "cifs",
        "fuse",
        "gfs",
        "gfs2",
        "glusterfs",
        "gpfs",
        "lustre",
        "nfs",
        "nfs4",
        "ocfs2",
        "orangefs",
        "panfs",
        "prl_fs",
        "pvfs2",
        "smb3",
        "smbfs",
        "vboxsf",
        "virtiofs",
        "wekafs",
    ]
)
_OCTAL = re.compile(r"\\([0-7]{3})")  # how mountinfo writes blanks and the like


@dataclass(frozen=True, slots=True)
class Medium:
    """What a directory is on.

    Attributes:
        mount_point: where its file system is mounted.
        file_system: type as the kernel names it, e.g. `ext4`, `nfs4`, `fuse.sshfs`.
        source: what is mounted: a device, `server:/export`.
        device: number of the mount as `major:minor`. Differs between mounts, also of one export.
        shared: other hosts may see the same files: a network or cluster file system, or one that
            cannot be told from it (FUSE, and what virtual machines share with their host).
        total_bytes: size of the file system.
        free_bytes: what an ordinary user may still write.
        block_bytes: its preferred transfer size.
        read_only: mounted so.
    """

    mount_point: str
    file_system: str
    source: str
    device: str
    shared: bool
    total_bytes: int
    free_bytes: int
    block_bytes: int
    read_only: bool

    @staticmethod
    def of(path: Path | str) -> Medium:
        """What `path` is on.

        Raises:
            OSError: it does not exist or cannot be asked.
        """
        real = os.path.realpath(path, strict=True)
        mount_point, device, file_system, source = _mount_of(real)
        found = os.statvfs(real)
        return Medium(
            mount_point=mount_point,
            file_system=file_system,
            source=source,
            device=device,
            shared=is_shared(file_system),
            total_bytes=found.f_blocks * found.f_frsize,
            free_bytes=found.f_bavail * found.f_frsize,
            block_bytes=found.f_bsize,
            read_only=bool(found.f_flag & os.ST_RDONLY),
        )

    @property
    def identity(self) -> str:
        """The same text for the same medium, also after a restart of the host."""
        return f"{self.file_system} {self.source} {self.total_bytes}"


@dataclass(frozen=True, slots=True)
class DirectProbe:
    """Whether `O_DIRECT` works.

    Attributes:
        works: a page was written and read back past the page cache.
        reason: why not, or what was done; for the log.
    """

    works: bool
    reason: str


def is_shared(file_system: str) -> bool:
    """Whether other hosts may see the files of a file system of this type."""
    return file_system in _SHARED or file_system.startswith("fuse.")


def probe_direct(directory: Path | str) -> DirectProbe:
    """Try direct I/O with a file of one page in `directory`, which is removed. Raises nothing."""
    path = os.path.join(directory, TempNames().new())
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_DIRECT
    page, back = scratch(ALIGNMENT), scratch(ALIGNMENT)
    page[:] = secrets.token_bytes(ALIGNMENT)
    step = "open"
    try:
        descriptor = os.open(path, flags, 0o600)
        try:
            step = "write"
            written = os.pwritev(descriptor, [page], 0)
            step = "read"
            got = os.preadv(descriptor, [back], 0)
        finally:
            os.close(descriptor)
    except OSError as error:
        return DirectProbe(False, f"O_DIRECT is refused at {step}: {error.strerror}")
    finally:
        # made even where opening was refused
        with contextlib.suppress(OSError):
            os.unlink(path)
    if written != ALIGNMENT or got != ALIGNMENT or page != back:
        return DirectProbe(False, "a page written with O_DIRECT did not come back whole")
    return DirectProbe(True, "a page was written and read back with O_DIRECT")


def _mount_of(real: str) -> tuple[str, str, str, str]:
    """Mount point, device, type and source of the file system that a real path is on."""
    best = ("", "", "unknown", "")
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as lines:
        for line in lines:
            mount, _, kind = line.partition(" - ")
            _, _, device, _, point, *_ = mount.split()
            file_system, source, *_ = kind.split()
            point = _plain(point)
            # of two at one point the later hides the earlier
            if len(point) >= len(best[0]) and _lies_in(real, point):
                best = (point, device, file_system, _plain(source))
    return best


def _lies_in(path: str, directory: str) -> bool:
    return path == directory or path.startswith(directory.rstrip("/") + "/")


def _plain(text: str) -> str:
    return _OCTAL.sub(lambda match: chr(int(match[1], 8)), text)
