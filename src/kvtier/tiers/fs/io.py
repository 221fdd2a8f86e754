"""Vectored transfers of whole blocks between memory and a file, past the page cache where it works.

`O_DIRECT` wants offsets and lengths that are multiples of the device's sector, and on some file
systems aligned memory too. A transfer that is refused (EINVAL) goes on through the page cache: the
flag is taken off that descriptor, at the byte where the refusal came.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtier.tiers.base import Buffers

ALIGNMENT = 4096
"""Suits every device's sector size; a header and a row are multiples of it."""

_BUFFERS_MAX = 1024  # IOV_MAX of Linux


def aligned(buffers: Buffers) -> bool:
    """Whether the lengths of all buffers suit `O_DIRECT`. Their addresses are left to the kernel
    to judge: few file systems mind.
    """
    return all(view.nbytes % ALIGNMENT == 0 for view in buffers)


def scratch(nbytes: int) -> memoryview:
    """Page-aligned memory of this process, zeroed; freed when nothing refers to it any more."""
    return memoryview(mmap.mmap(-1, max(nbytes, 1)))[:nbytes]


def open_file(path: str, flags: int, direct: bool, mode: int = 0o600) -> int:
    """Open a file with `O_DIRECT`, or without it where that is refused.

    Raises:
        OSError: as `os.open`.
    """
    if direct:
        try:
            return os.open(path, flags | os.O_DIRECT, mode)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
        if flags & os.O_EXCL:
            # the file is made before the flag is refused
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
    return os.open(path, flags, mode)


def read_all(descriptor: int, into: Buffers, offset: int = 0) -> int:
    """Fill `into` from a file; one call of the kernel unless it comes up short.

    Returns:
        The number of bytes read: less than `into` holds if the file ends before.

    Raises:
        OSError: the medium failed.
    """
    got = 0
    left = _filled(into)
    while left:
        try:
            count = os.preadv(descriptor, left[:_BUFFERS_MAX], offset + got)
        except OSError as error:
            _go_buffered(descriptor, error)
            continue
        if count == 0:
            break
        got += count
        left = _behind(left, count)
    return got


def write_all(descriptor: int, data: Buffers, offset: int = 0) -> None:
    """Write all of `data` to a file; one call of the kernel unless it comes up short.

    Raises:
        OSError: the medium failed, or is full.
    """
    written = 0
    left = _filled(data)
    while left:
        try:
            count = os.pwritev(descriptor, left[:_BUFFERS_MAX], offset + written)
        except OSError as error:
            _go_buffered(descriptor, error)
            continue
        if count == 0:
            raise OSError(errno.EIO, "the file takes no more bytes")
        written += count
        left = _behind(left, count)


def sync_directory(path: str) -> None:
    """Make renames in a directory survive a loss of power.

    Raises:
        OSError: the medium failed.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # what cannot sync a directory (CIFS, some FUSE) keeps its order by itself
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def _go_buffered(descriptor: int, error: OSError) -> None:
    """Take `O_DIRECT` off a descriptor whose transfer was refused for it; else raise the error."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    if error.errno != errno.EINVAL or not flags & os.O_DIRECT:
        raise error
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)


def _filled(buffers: Buffers) -> list[memoryview]:
    return [view for view in buffers if view.nbytes]


def _behind(buffers: Sequence[memoryview], count: int) -> list[memoryview]:
    """What is left of `buffers` behind their first `count` bytes."""
    for i, view in enumerate(buffers):
        if count < view.nbytes:
            return [view.cast("B")[count:], *buffers[i + 1 :]]
        count -= view.nbytes
    return []
