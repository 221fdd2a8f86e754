"""What a server's refusals and a client's failures mean for the tier."""

from __future__ import annotations

import re

from kvtier.errors import (
    KVTierError,
    TierDeniedError,
    TierError,
    TierFullError,
    TierThrottledError,
    TierTimeoutError,
    TierUnreachableError,
)

# The client library names some of the server's codes its own way.
_CODES: dict[str, type[TierError]] = {
    # no room, or no writes at present: what is there is served
    **dict.fromkeys(("OOM", "MISCONF", "READONLY", "ReadOnly", "NOREPLICAS"), TierFullError),
    **dict.fromkeys(
        ("LOADING", "BusyLoadingError", "BUSY", "TRYAGAIN", "TryAgain"), TierThrottledError
    ),
    **dict.fromkeys(
        ("NOAUTH", "WRONGPASS", "NOPERM", "PermissionDenied", "AuthenticationFailed"),
        TierDeniedError,
    ),
    **dict.fromkeys(
        ("CLUSTERDOWN", "ClusterDown", "MASTERDOWN", "MasterDown", "UNBLOCKED"),
        TierUnreachableError,
    ),
}
_CODE = re.compile(r"\b(?:" + "|".join(_CODES) + r")\b")
_SIGNALLED = re.compile(r"An error was signalled by the server: -? ?")
_LATE = re.compile(r"timed? ?out", re.IGNORECASE)
_TEXT_MAX = 300


def refusal(text: str) -> TierError:
    """What an error reply of the server means."""
    shown = _SIGNALLED.sub("", text).strip()[:_TEXT_MAX]
    # a code stands in front of its sentence, or in front of that of the client library
    code = _CODE.search(shown[:120])
    kind = _CODES[code[0]] if code is not None else TierError
    return kind(f"the server refuses: {shown}")


def failure(error: BaseException) -> KVTierError:
    """What an exception of the client library means. Its classes are told by their names, since
    they are called like those of the language, and the library is not imported for this.
    """
    if isinstance(error, KVTierError):
        return error
    text = str(error)
    name = type(error).__name__
    if name == "TimeoutError":
        return TierTimeoutError("the server does not answer in time")
    if _CODE.search(text[:200]):
        return refusal(text)
    if _LATE.search(text):
        return TierTimeoutError(f"the server does not answer in time: {text.strip()[:_TEXT_MAX]}")
    if name in {"ConnectionError", "ClosingError", "CircuitBreakerError"}:
        return TierUnreachableError(f"the server cannot be reached: {text.strip()[:_TEXT_MAX]}")
    return refusal(text)
