"""Locks on files: how members of a root see each other.

`flock`, not `fcntl` record locks: it belongs to the open file, so that threads and objects of one
process exclude each other, and closing some other descriptor of the file does not drop it. The
kernel releases it when its holder dies. NFS clients turn it into a lock at the server (since Linux
2.6.12), so it excludes other hosts too; a host that vanishes loses it when its lease ends. Always
non-blocking: a lock that somebody keeps costs a bounded number of attempts, never a stuck thread.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import random
import time
from collections.abc import Callable

_FIRST_PAUSE_S = 0.0002
_LAST_PAUSE_S = 0.01


def try_lock(descriptor: int, *, shared: bool = False) -> bool:
    """Lock an open file now, or not at all.

    Args:
        descriptor: open for writing, unless shared (NFS wants that).
        shared: with others that share it.

    Raises:
        OSError: the file system has no locks, or lost its server.
    """
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES, errno.EINTR):
            return False
        raise
    return True


def lock_within(
    descriptor: int,
    timeout_s: float,
    *,
    shared: bool = False,
    clock: Callable[[], float] = time.monotonic,
) -> bool:
    """Try to lock again and again, up to `timeout_s` seconds.

    Raises:
        OSError: as `try_lock`.
    """
    deadline = clock() + timeout_s
    pause = _FIRST_PAUSE_S
    while not try_lock(descriptor, shared=shared):
        if clock() >= deadline:
            return False
        time.sleep(pause * random.uniform(0.5, 1.5))  # noqa: S311 - spreads attempts, no secret
        pause = min(2 * pause, _LAST_PAUSE_S)
    return True


def unlock(descriptor: int) -> None:
    """Release a lock early; closing the file does too."""
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)


def names_it(path: str, descriptor: int) -> bool:
    """Whether `path` is still the open file, and not removed or replaced.

    Raises:
        OSError: the file system failed.
    """
    try:
        found = os.stat(path, follow_symlinks=False)
    except (FileNotFoundError, NotADirectoryError):
        return False
    mine = os.fstat(descriptor)
    return (found.st_dev, found.st_ino) == (mine.st_dev, mine.st_ino)
