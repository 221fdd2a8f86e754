"""Making directories and files that only this user can read, whatever the umask."""

from __future__ import annotations

import itertools
import os
import secrets
import stat

TEMP_SUFFIX = ".tmp"

_FILE_MODE = 0o600
_DIRECTORY_MODE = 0o700
_CREATE_FLAGS = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW

_token = secrets.token_hex(8)
_numbers = itertools.count()


def temp_name() -> str:
    """A name that no other process and no other call uses."""
    return f"{os.getpid()}-{_token}-{next(_numbers)}{TEMP_SUFFIX}"


def make_directory(path: str) -> None:
    """Make one directory, not those above it; one that is there is fine.

    Raises:
        OSError: it cannot be made.
    """
    try:
        os.mkdir(path, _DIRECTORY_MODE)
    except FileExistsError:
        return
    if stat.S_IMODE(os.stat(path).st_mode) & _DIRECTORY_MODE != _DIRECTORY_MODE:
        os.chmod(path, _DIRECTORY_MODE)


def create_file(path: str) -> int:
    """A descriptor, for reading and writing, of a file that was not there.

    Raises:
        OSError: it cannot be made, or is there.
    """
    descriptor = os.open(path, _CREATE_FLAGS, _FILE_MODE)
    try:
        if stat.S_IMODE(os.fstat(descriptor).st_mode) != _FILE_MODE:
            os.fchmod(descriptor, _FILE_MODE)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def open_file(path: str, flags: int) -> int:
    """A descriptor of an ordinary file that is there; links are not followed.

    Raises:
        OSError: it is not there, or something else.
    """
    descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path} is not an ordinary file")
    return descriptor


def sync_directory(path: str) -> None:
    """Have the names in a directory survive a loss of power.

    Raises:
        OSError: the medium failed.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
