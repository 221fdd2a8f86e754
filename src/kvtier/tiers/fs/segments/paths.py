"""Files that only this user can read, whatever the umask, and room for them."""

from __future__ import annotations

import ctypes
import errno
import itertools
import os
import secrets
import stat

from kvtier.tiers.fs.namespace_directory import FILE_MODE, own_mode

TEMP_SUFFIX = ".tmp"

_CREATE_FLAGS = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW

_KEEP_SIZE = 1  # FALLOC_FL_KEEP_SIZE
_NOT_SUPPORTED = (errno.EOPNOTSUPP, errno.ENOSYS)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)

_token = secrets.token_hex(8)
_numbers = itertools.count()


def temp_name() -> str:
    """A name that no other process and no other call uses."""
    return f"{os.getpid()}-{_token}-{next(_numbers)}{TEMP_SUFFIX}"


def create_file(path: str) -> int:
    """A descriptor, for reading and writing, of a file that was not there.

    Raises:
        OSError: it cannot be made, or is there.
    """
    descriptor = os.open(path, _CREATE_FLAGS, FILE_MODE)
    try:
        own_mode(descriptor)
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


def allocate(descriptor: int, nbytes: int) -> None:
    """Make a file `nbytes` long, and have the disk keep the room. The C library's posix_fallocate
    would write to every page where a file system cannot do that; the file is sparse there instead,
    and a write may find the disk full.

    Raises:
        OSError: ENOSPC, EDQUOT, EFBIG, ...
    """
    try:
        _fallocate(descriptor, 0, 0, nbytes)
    except OSError as error:
        if error.errno not in _NOT_SUPPORTED:
            raise
        os.ftruncate(descriptor, nbytes)


def reserve(descriptor: int, offset: int, nbytes: int) -> None:
    """Have the disk keep room behind the end of a file, whose length does not change.

    Raises:
        OSError: there is none, or the file system cannot.
    """
    _fallocate(descriptor, _KEEP_SIZE, offset, nbytes)


def _fallocate(descriptor: int, mode: int, offset: int, nbytes: int) -> None:
    while _libc.fallocate(descriptor, mode, offset, nbytes) != 0:
        number = ctypes.get_errno()
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number))
