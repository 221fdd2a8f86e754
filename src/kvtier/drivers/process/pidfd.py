"""Descriptors of processes: the one way to wait for, or to kill, exactly the process that is meant.

Called by their numbers, which are the same on every architecture: Python builds that are made to
run on old systems, those that uv installs for instance, come without these calls.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal

_PIDFD_SEND_SIGNAL, _PIDFD_OPEN = 424, 434
_libc = ctypes.CDLL(None, use_errno=True)


def open_pidfd(pid: int) -> int:
    """A descriptor of the process that has this pid now.

    Raises:
        ProcessLookupError: none has.
        OSError: none to be had; Linux before 5.3 for instance.
    """
    return _call(_PIDFD_OPEN, pid, 0)


def kill(pidfd: int) -> None:
    """Send SIGKILL. Nothing happens if the process has ended."""
    try:
        _call(_PIDFD_SEND_SIGNAL, pidfd, signal.SIGKILL, None, 0)
    except ProcessLookupError:
        return


def ended(pidfd: int, wait_s: float | None = 0.0) -> bool:
    """Whether every thread of the process has ended, within so many seconds; None waits for it."""
    waiting = select.poll()
    waiting.register(pidfd, select.POLLIN)
    return bool(waiting.poll(None if wait_s is None else wait_s * 1e3))


def _call(number: int, *arguments: int | None) -> int:
    result = _libc.syscall(ctypes.c_long(number), *arguments)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return int(result)
