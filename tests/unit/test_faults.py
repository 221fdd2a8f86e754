"""What an exception of a tier means: to its circuit, and to people."""

from __future__ import annotations

import errno
import ssl

import pytest

from kvtier.core.health import REPEATING
from kvtier.core.types import Fault
from kvtier.drivers.faults import Cause, cause_of, fault_of, worse
from kvtier.errors import (
    EnvelopeError,
    TierDeniedError,
    TierError,
    TierFullError,
    TierThrottledError,
    TierTimeoutError,
    TierUnreachableError,
)

STATES = [
    (OSError(errno.ENOSPC, ""), "enospc", Fault.FULL),
    (OSError(errno.EDQUOT, ""), "edquot", Fault.FULL),
    (OSError(errno.EIO, ""), "eio", Fault.ERROR),
    (OSError(errno.EUCLEAN, ""), "eio", Fault.ERROR),
    (OSError(errno.EMFILE, ""), "emfile", Fault.THROTTLED),
    (OSError(errno.ENFILE, ""), "enfile", Fault.THROTTLED),
    (OSError(errno.EROFS, ""), "erofs", Fault.FULL),
    (OSError(errno.ESTALE, ""), "estale", Fault.UNREACHABLE),
    (FileNotFoundError(errno.ENOENT, ""), "vanished", Fault.UNREACHABLE),
    (OSError(errno.ENOTDIR, ""), "vanished", Fault.UNREACHABLE),
    (OSError(errno.ENXIO, ""), "vanished", Fault.UNREACHABLE),
    (PermissionError(errno.EACCES, ""), "denied", Fault.DENIED),
    (OSError(errno.EPERM, ""), "denied", Fault.DENIED),
    (OSError(errno.ENOTCONN, ""), "unreachable", Fault.UNREACHABLE),
    (ConnectionRefusedError(errno.ECONNREFUSED, ""), "unreachable", Fault.UNREACHABLE),
    (ConnectionError("no errno"), "unreachable", Fault.UNREACHABLE),
    (OSError(errno.ETIMEDOUT, ""), "timeout", Fault.UNREACHABLE),
    (TimeoutError("no errno"), "timeout", Fault.UNREACHABLE),
    (BlockingIOError(errno.EAGAIN, ""), "throttled", Fault.THROTTLED),
    (OSError(errno.EFBIG, ""), "full", Fault.FULL),
    (TierFullError(""), "full", Fault.FULL),
    (TierThrottledError(""), "throttled", Fault.THROTTLED),
    (TierUnreachableError(""), "unreachable", Fault.UNREACHABLE),
    (TierTimeoutError(""), "timeout", Fault.UNREACHABLE),
    (TierDeniedError(""), "denied", Fault.DENIED),
    (EnvelopeError(""), "corrupt", Fault.ERROR),
    (OSError(errno.EINVAL, ""), "other", Fault.ERROR),
    (OSError("no errno"), "other", Fault.ERROR),
    (TierError(""), "other", Fault.ERROR),
    (ValueError(""), "other", Fault.ERROR),
    (KeyboardInterrupt(), "other", Fault.ERROR),
]


@pytest.mark.parametrize(("error", "cause", "fault"), STATES, ids=repr)
def test_each_state_has_its_cause_and_its_fault(
    error: BaseException, cause: str, fault: Fault
) -> None:
    assert cause_of(error) == cause
    assert fault_of(error) is fault


def test_every_cause_that_an_exception_can_tell_is_in_the_table() -> None:
    assert {cause for _, cause, _ in STATES} == set(Cause) - {Cause.STALLED}


def test_what_the_next_job_would_meet_as_well_opens_the_circuit_at_once() -> None:
    at_once = {cause for _, cause, fault in STATES if fault in REPEATING}
    assert at_once == set(Cause) - {Cause.EIO, Cause.CORRUPT, Cause.OTHER, Cause.STALLED}


def test_a_tier_error_has_the_cause_that_it_was_raised_from() -> None:
    gone = TierUnreachableError("the root is gone")
    gone.__cause__ = FileNotFoundError(errno.ENOENT, "")
    assert (cause_of(gone), fault_of(gone)) == (Cause.VANISHED, Fault.UNREACHABLE)
    unknown = TierFullError("no room")
    unknown.__cause__ = ValueError("not of the system")
    assert (cause_of(unknown), fault_of(unknown)) == (Cause.FULL, Fault.FULL)


@pytest.mark.parametrize("number", [1, 2, 6])
def test_the_number_of_an_error_of_tls_is_no_errno(number: int) -> None:
    broken = TierUnreachableError("the handshake failed")
    broken.__cause__ = ssl.SSLError(number, "")
    assert (cause_of(broken), fault_of(broken)) == (Cause.UNREACHABLE, Fault.UNREACHABLE)


def test_an_error_of_the_system_keeps_its_own_cause() -> None:
    """While handling one error another came: only a deliberate `raise from` of ours counts."""
    full = OSError(errno.ENOSPC, "")
    full.__cause__ = OSError(errno.EIO, "")
    assert cause_of(full) is Cause.ENOSPC


def test_a_known_fault_says_more_than_an_unknown_one() -> None:
    assert worse(None, None) is None
    assert worse(None, Fault.FULL) is Fault.FULL
    assert worse(Fault.ERROR, Fault.FULL) is Fault.FULL
    assert worse(Fault.FULL, Fault.ERROR) is Fault.FULL
    assert worse(Fault.ERROR, None) is Fault.ERROR
