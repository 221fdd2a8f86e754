"""What a file system must be able to do for the fs tier, found out by doing it in a directory.

Needed: names of `NAME_LENGTH` characters kept as they are, renames that replace a file, bytes that
come back, syncs, and locks. Upper and lower case need not differ: names of ours are lower case.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import time

NAME_LENGTH = 72
"""Hex digits of a key: a hash of 32 bytes and the group."""

_PROBE = re.compile(r"[0-9]+-[0-9a-f]{16}\.probe\.tmp")
_ABANDONED_S = 3600.0
_CONTENT = b"written by kvtier to see whether this file system keeps it"
_WRITE_FLAGS = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW


class MissingAbilityError(Exception):
    """The file system cannot do something that the tier needs; the text says what."""


def probe_directory(root: str) -> int:
    """Try everything in a directory of its own below `root`, and remove it.

    Returns:
        The user id that the file system gives to files of this process.

    Raises:
        MissingAbilityError: see there.
        OSError: nothing can be made in `root`, or the medium failed.
    """
    directory = os.path.join(root, f"{os.getpid()}-{secrets.token_hex(8)}.probe.tmp")
    try:
        os.mkdir(directory, 0o700)
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        raise MissingAbilityError(_short_names(error)) from error
    try:
        os.chmod(directory, 0o700)  # the umask may have taken the owner's bits
        return _try(directory)
    finally:
        _remove(directory)


def remove_abandoned(root: str) -> None:
    """Remove what killed processes left of `probe_directory`, once it is old."""
    with os.scandir(root) as entries:
        for entry in entries:
            if is_probe(entry.name):
                with contextlib.suppress(OSError):
                    if time.time() - entry.stat(follow_symlinks=False).st_mtime > _ABANDONED_S:
                        _remove(entry.path)


def is_probe(name: str) -> bool:
    """Whether `probe_directory` makes directories of this name."""
    return _PROBE.fullmatch(name) is not None


def _try(directory: str) -> int:
    first, second = (os.path.join(directory, f"{i}.tmp") for i in range(2))
    final = os.path.join(directory, "f" * NAME_LENGTH)
    _write(first, b"")
    owner = _write(second, _CONTENT)
    try:
        os.rename(first, final)
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise MissingAbilityError(_short_names(error)) from error
        raise MissingAbilityError(f"cannot rename files ({error.strerror})") from error
    try:
        os.rename(second, final)
    except OSError as error:
        raise MissingAbilityError(
            f"cannot replace a file by renaming another ({error.strerror})"
        ) from error
    found = os.listdir(directory)
    if found != [os.path.basename(final)]:
        raise MissingAbilityError(_short_names(found))
    # open for writing: an exclusive lock on NFS needs that
    with open(final, "r+b", buffering=0) as file:
        if file.read(2 * len(_CONTENT)) != _CONTENT:
            raise MissingAbilityError("does not give back what was written to a file")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise MissingAbilityError(f"has no file locks ({error.strerror})") from error
    return owner


def _short_names(seen: object) -> str:
    return f"does not keep names of {NAME_LENGTH} characters as they are ({seen})"


def _write(path: str, content: bytes) -> int:
    """Make a file and sync it. Returns who owns it."""
    descriptor = os.open(path, _WRITE_FLAGS, 0o600)
    try:
        os.write(descriptor, content)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
                raise
            raise MissingAbilityError(f"cannot sync files ({error.strerror})") from error
        return os.fstat(descriptor).st_uid
    finally:
        os.close(descriptor)


def _remove(directory: str) -> None:
    with contextlib.suppress(OSError):
        for name in os.listdir(directory):
            os.unlink(os.path.join(directory, name))
        os.rmdir(directory)
