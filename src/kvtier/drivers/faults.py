"""Why a tier failed, told from what it raised: a `Fault` for its circuit, a `Cause` for people.

A fault says what to do next (leave the tier alone at once, or after a few more); a cause says what
an operator has to mend, so each has a counter of its own.
"""

from __future__ import annotations

import errno
import sys
from enum import StrEnum

from kvtier.core.types import Fault
from kvtier.errors import (
    EnvelopeError,
    TierDeniedError,
    TierError,
    TierFullError,
    TierThrottledError,
    TierTimeoutError,
    TierUnreachableError,
)


class Cause(StrEnum):
    """What went wrong with a tier; the labels of its failure counters."""

    ENOSPC = "enospc"  # the mount is full
    EDQUOT = "edquot"  # the user's or project's quota is used up
    FULL = "full"  # the tier's own capacity is used up, or a file may not get that large
    EROFS = "erofs"  # mounted read-only, often after an error of the medium
    EIO = "eio"  # the medium or the file system's structure is damaged
    EMFILE = "emfile"  # this process has no file descriptor left
    ENFILE = "enfile"  # this machine has no file descriptor left
    ESTALE = "estale"  # a network mount serves another directory than it did
    VANISHED = "vanished"  # the directory, its mount or its device is gone
    DENIED = "denied"  # permissions or credentials
    UNREACHABLE = "unreachable"  # the server does not answer the connection
    TIMEOUT = "timeout"  # the server answers too late
    THROTTLED = "throttled"  # asked to slow down
    CORRUPT = "corrupt"  # a block is not what its key says
    STALLED = "stalled"  # nothing came back: told by drivers that give up, never by an exception
    OTHER = "other"


_UNREACHABLE = (
    *(errno.ENOTCONN, errno.EHOSTUNREACH, errno.EHOSTDOWN, errno.ENETUNREACH, errno.ENETDOWN),
    *(errno.ECONNREFUSED, errno.ECONNRESET, errno.ECONNABORTED, errno.EPIPE, errno.ESHUTDOWN),
)

_BY_ERRNO: dict[int, tuple[Cause, Fault]] = {
    errno.ENOSPC: (Cause.ENOSPC, Fault.FULL),
    errno.EDQUOT: (Cause.EDQUOT, Fault.FULL),
    errno.EFBIG: (Cause.FULL, Fault.FULL),
    errno.EROFS: (Cause.EROFS, Fault.FULL),  # like a full one, it still serves what it holds
    # one bad sector is no reason to leave all others alone
    **dict.fromkeys(
        (errno.EIO, errno.EREMOTEIO, errno.EUCLEAN, errno.EBADMSG), (Cause.EIO, Fault.ERROR)
    ),
    errno.EMFILE: (Cause.EMFILE, Fault.THROTTLED),
    errno.ENFILE: (Cause.ENFILE, Fault.THROTTLED),
    errno.ESTALE: (Cause.ESTALE, Fault.UNREACHABLE),
    # tiers tell a missing block with an error of its own, so this is a root or a mount
    **dict.fromkeys(
        (errno.ENOENT, errno.ENOTDIR, errno.ENODEV, errno.ENXIO),
        (Cause.VANISHED, Fault.UNREACHABLE),
    ),
    **dict.fromkeys((errno.EACCES, errno.EPERM), (Cause.DENIED, Fault.DENIED)),
    **dict.fromkeys(_UNREACHABLE, (Cause.UNREACHABLE, Fault.UNREACHABLE)),
    errno.ETIMEDOUT: (Cause.TIMEOUT, Fault.UNREACHABLE),
    **dict.fromkeys((errno.EAGAIN, errno.ENOBUFS), (Cause.THROTTLED, Fault.THROTTLED)),
}

_BY_TYPE: tuple[tuple[type[BaseException], tuple[Cause, Fault]], ...] = (
    (TierFullError, (Cause.FULL, Fault.FULL)),
    (TierThrottledError, (Cause.THROTTLED, Fault.THROTTLED)),
    (TierTimeoutError, (Cause.TIMEOUT, Fault.UNREACHABLE)),
    (TierUnreachableError, (Cause.UNREACHABLE, Fault.UNREACHABLE)),
    (TierDeniedError, (Cause.DENIED, Fault.DENIED)),
    (EnvelopeError, (Cause.CORRUPT, Fault.ERROR)),
    (TimeoutError, (Cause.TIMEOUT, Fault.UNREACHABLE)),
    (ConnectionError, (Cause.UNREACHABLE, Fault.UNREACHABLE)),
)


def fault_of(error: BaseException) -> Fault:
    """The fault that an exception of a tier stands for."""
    found = _by_type(error) or _by_errno(error)
    return found[1] if found else Fault.ERROR


def cause_of(error: BaseException) -> Cause:
    """What an exception of a tier tells about the medium. A `TierError` that was raised from an
    error of the operating system has the cause of that one.
    """
    behind = error.__cause__ if isinstance(error, TierError) else None
    found = _by_errno(behind) or _by_errno(error) or _by_type(error)
    return found[0] if found else Cause.OTHER


def worse(first: Fault | None, second: Fault | None) -> Fault | None:
    """Of two faults the one that says more: any cause is better known than `ERROR`."""
    if first is None or first is Fault.ERROR:
        return second or first
    return first


def _by_errno(error: BaseException | None) -> tuple[Cause, Fault] | None:
    if isinstance(error, OSError) and not _is_of_tls(error) and error.errno:
        return _BY_ERRNO.get(error.errno)
    return None


def _is_of_tls(error: OSError) -> bool:
    """Whether its number is one of TLS, which is no errno."""
    ssl = sys.modules.get("ssl")  # where nobody has imported it, nobody can have raised one
    return ssl is not None and isinstance(error, ssl.SSLError)


def _by_type(error: BaseException) -> tuple[Cause, Fault] | None:
    return next((found for kind, found in _BY_TYPE if isinstance(error, kind)), None)
