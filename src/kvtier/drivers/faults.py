"""Why a tier failed, told from what it raised."""

from __future__ import annotations

import errno

from kvtier.core.types import Fault
from kvtier.errors import (
    TierDeniedError,
    TierFullError,
    TierThrottledError,
    TierUnreachableError,
)

_BY_ERRNO = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG), Fault.FULL),
    **dict.fromkeys((errno.EACCES, errno.EPERM), Fault.DENIED),
    **dict.fromkeys(
        (errno.ESTALE, errno.ENODEV, errno.ENXIO, errno.ENOTCONN, errno.EHOSTUNREACH),
        Fault.UNREACHABLE,
    ),
    **dict.fromkeys((errno.ENETUNREACH, errno.EHOSTDOWN, errno.ETIMEDOUT), Fault.UNREACHABLE),
    **dict.fromkeys((errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOBUFS), Fault.THROTTLED),
}

_BY_TYPE: tuple[tuple[type[BaseException], Fault], ...] = (
    (TierFullError, Fault.FULL),
    (TierThrottledError, Fault.THROTTLED),
    (TierUnreachableError, Fault.UNREACHABLE),
    (TierDeniedError, Fault.DENIED),
    (ConnectionError, Fault.UNREACHABLE),
    (TimeoutError, Fault.UNREACHABLE),
)

_CAUSES = {
    errno.ENOSPC: "enospc",
    errno.EDQUOT: "edquot",
    errno.EIO: "eio",
    errno.EMFILE: "emfile",
    errno.ENFILE: "emfile",
    errno.EROFS: "erofs",
    errno.ESTALE: "estale",
    errno.ENOENT: "vanished",
}


def fault_of(error: BaseException) -> Fault:
    """The fault that an exception of a tier stands for."""
    for kind, fault in _BY_TYPE:
        if isinstance(error, kind):
            return fault
    if isinstance(error, OSError) and error.errno is not None:
        return _BY_ERRNO.get(error.errno, Fault.ERROR)
    return Fault.ERROR


def cause_of(error: BaseException) -> str:
    """A short name of what happened, for counters: of few values, so that it may be a label."""
    if isinstance(error, OSError) and error.errno in _CAUSES:
        return _CAUSES[error.errno]
    fault = fault_of(error)
    return "other" if fault is Fault.ERROR else fault.value


def worse(first: Fault | None, second: Fault | None) -> Fault | None:
    """Of two faults the one that says more: any cause is better known than `ERROR`."""
    if first is None or first is Fault.ERROR:
        return second or first
    return first
