"""Who uses a root: one locked file each, so that everybody sees who is alive.

    <root>/.kvtier/members/<id>     held under an exclusive lock while its process lives

The file is locked under another name and then renamed, so no living member is ever seen without
its lock.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import socket
import time

import msgspec

from kvtier.errors import TierError
from kvtier.tiers.fs.locks import names_it, try_lock

CONTROL_DIRECTORY = ".kvtier"
MEMBERS_DIRECTORY = "members"

NAMESPACE = re.compile(r"[0-9a-f]{64}")
"""Name of a directory that is a namespace."""

_ID = re.compile(r"[0-9a-f]{16}")
_NEW_SUFFIX = ".new"
_NEW_AGE_S = 60.0  # renaming takes no minute
_DIRECTORY_MODE = 0o700
_FILE_MODE = 0o600
_FLAGS = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW


class MemberRecord(msgspec.Struct, frozen=True):
    """What a member file says.

    Attributes:
        host: name of its host.
        pid: on that host.
        layout: `files` or `segments`.
        started: seconds since the epoch, by its host's clock.
    """

    host: str
    pid: int
    layout: str
    started: float


def make_control_directory(root: str) -> str:
    """`<root>/.kvtier` with what belongs in it; the path.

    Raises:
        OSError: it cannot be made.
    """
    control = os.path.join(root, CONTROL_DIRECTORY)
    for directory in (control, os.path.join(control, MEMBERS_DIRECTORY)):
        with contextlib.suppress(FileExistsError):
            os.mkdir(directory, _DIRECTORY_MODE)
    return control


class Member:
    """This process as a member of a root, from construction to `close`.

    Args:
        control: the control directory.
        layout: for the record.

    Raises:
        OSError: the file cannot be made or locked.
    """

    def __init__(self, control: str, layout: str) -> None:
        self.id = secrets.token_hex(8)
        self._path = os.path.join(control, MEMBERS_DIRECTORY, self.id)
        new = self._path + _NEW_SUFFIX
        self._descriptor = os.open(new, _FLAGS | os.O_CREAT | os.O_EXCL, _FILE_MODE)
        try:
            if not try_lock(self._descriptor):
                raise TierError(f"{new}: another process locked a file that was just made")
            record = MemberRecord(socket.gethostname(), os.getpid(), layout, time.time())
            os.write(self._descriptor, msgspec.json.encode(record))
            os.rename(new, self._path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(new)
            os.close(self._descriptor)
            raise

    def is_current(self) -> bool:
        """Whether others still see this member.

        Raises:
            OSError: the medium failed.
        """
        return names_it(self._path, self._descriptor)

    def close(self) -> None:
        """Leave."""
        with contextlib.suppress(OSError):
            if self.is_current():
                os.unlink(self._path)
        os.close(self._descriptor)


def living_members(control: str) -> set[str]:
    """Ids of the members whose files are there; the dead are, until `remove_dead`.

    Raises:
        OSError: the medium failed.
    """
    return set(filter(_ID.fullmatch, os.listdir(os.path.join(control, MEMBERS_DIRECTORY))))


def remove_dead(control: str, now: float) -> list[str]:
    """Remove the files of members that died.

    Args:
        control: the control directory.
        now: seconds since the epoch, by the clock of the file system.

    Returns:
        Ids of the members whose files are gone. Their entries in the ledger come next.

    Raises:
        OSError: the medium failed.
    """
    directory = os.path.join(control, MEMBERS_DIRECTORY)
    dead = []
    for name in os.listdir(directory):
        path = os.path.join(directory, name)
        if _ID.fullmatch(name):
            if _remove_unlocked(path):
                dead.append(name)
        elif name.endswith(_NEW_SUFFIX):
            with contextlib.suppress(FileNotFoundError):
                if now - os.stat(path, follow_symlinks=False).st_mtime > _NEW_AGE_S:
                    _remove_unlocked(path)
    return dead


def read_members(control: str) -> dict[str, MemberRecord]:
    """The living members by id, for display.

    Raises:
        OSError: the medium failed.
    """
    directory = os.path.join(control, MEMBERS_DIRECTORY)
    found = {}
    for name in sorted(filter(_ID.fullmatch, os.listdir(directory))):
        path = os.path.join(directory, name)
        with contextlib.suppress(FileNotFoundError, msgspec.DecodeError):
            with open(path, "rb") as file:
                record = msgspec.json.decode(file.read(), type=MemberRecord)
            if _is_locked(path):
                found[name] = record
    return found


def _is_locked(path: str) -> bool:
    """Whether somebody holds a file.

    Raises:
        FileNotFoundError: it is gone.
    """
    descriptor = os.open(path, _FLAGS)
    try:
        return not try_lock(descriptor)
    finally:
        os.close(descriptor)


def _remove_unlocked(path: str) -> bool:
    """Remove a file that nobody holds; False if somebody does, or it is gone already."""
    try:
        descriptor = os.open(path, _FLAGS)
    except FileNotFoundError:
        return False
    try:
        if not (try_lock(descriptor) and names_it(path, descriptor)):
            return False
        os.unlink(path)
        return True
    finally:
        os.close(descriptor)
