"""What the books of a root say about its capacity, for tools that are no member of it.

Without a ledger, or while it is busy, nothing is known and nothing is told: the members' next
inventory notices what a tool did all the same.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtier.tiers.fs import accounts as books
from kvtier.tiers.fs.ledger import LEDGER_FILE, LedgerBusyError, LedgerFile
from kvtier.tiers.fs.members import CONTROL_DIRECTORY, read_members

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from kvtier.tiers.fs.accounts import Accounts
    from kvtier.tiers.fs.members import MemberRecord

_LOCK_WAIT_S = 1.0


@dataclass(frozen=True, slots=True)
class Capacity:
    """The books of a root at one moment.

    Attributes:
        limit_bytes: that all members together may store, as of their last look at the mount.
        granted_bytes: on disk, or allowed to be written.
        members: processes that use the root now, by id.
    """

    limit_bytes: int
    granted_bytes: int
    members: Mapping[str, MemberRecord]


def capacity_of(root: str) -> Capacity | None:
    """What is known of a root's capacity; None if nothing is."""
    with _ledger(root) as ledger, contextlib.suppress(LedgerBusyError, OSError):
        if ledger is not None:
            with ledger.change(_LOCK_WAIT_S) as accounts:
                found = (accounts.known, accounts.limit, accounts.granted)
            if found[0]:
                members = read_members(os.path.join(root, CONTROL_DIRECTORY))
                return Capacity(found[1], found[2], members)
    return None


def give_back(root: str, nbytes: int) -> None:
    """Tell the members of a root that so many bytes of blocks were deleted."""
    if nbytes:
        with _ledger(root) as ledger, contextlib.suppress(LedgerBusyError, OSError):
            if ledger is not None:
                with ledger.change(_LOCK_WAIT_S) as accounts:
                    _give_back(accounts, nbytes)


def _give_back(accounts: Accounts, nbytes: int) -> None:
    if accounts.known:
        books.give_back(accounts, nbytes)


@contextlib.contextmanager
def _ledger(root: str) -> Iterator[LedgerFile | None]:
    """The ledger of a root, if there is one; never made here."""
    path = os.path.join(root, CONTROL_DIRECTORY, LEDGER_FILE)
    if not os.path.isfile(path):
        yield None
        return
    try:
        ledger = LedgerFile(path)
    except OSError:
        yield None
        return
    try:
        yield ledger
    finally:
        ledger.close()
