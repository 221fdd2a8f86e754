"""Who may write how much: the arithmetic of a root's capacity, without a file or a clock.

    granted  =  bytes that lie on disk  +  bytes that members may still write
    limit    =  the least of: every member's capacity, what every member's min_free leaves

1. Bytes are granted before they are written, and `granted` never passes `limit` by a grant. So what
   lies on disk never does.
2. Deleted bytes become writable again only through a grant, so `handed_out` counts all that was
   ever allowed to be written. That makes a slow inventory comparable with a running system: see
   `reconcile`.
3. A figure that another process cannot know exactly is bounded from above.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping

UNBOUNDED = 2**62
"""Stands for "no capacity" in sums that must not overflow 64 bits."""

PAGE_BYTES = 4096
"""Space is counted in pages, as file systems hand it out."""


def rounded(nbytes: int) -> int:
    """What so many bytes take on disk."""
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


class Entry(msgspec.Struct, array_like=True):
    """What a member has said of itself. Bytes.

    Attributes:
        capacity: that it was configured with; `UNBOUNDED` for none.
        min_free: likewise.
        spare: at most what it may write without asking again.
        recent: what it has taken lately, so that it may not have arrived on disk yet.
        owned: what lies on disk and only this member can delete (stores of `segments`).
        asked: what it was refused; 0 if it waits for nothing.
        reports: how often it has told.
    """

    capacity: int = UNBOUNDED
    min_free: int = 0
    spare: int = 0
    recent: int = 0
    owned: int = 0
    asked: int = 0
    reports: int = 0


class Accounts(msgspec.Struct, array_like=True):
    """The books of one root.

    Attributes:
        known: False until an inventory has told what lies on disk; nothing is granted before.
        granted: see above.
        limit: as of the last `set_limit`.
        handed_out: sum of all grants ever.
        returned: sum of all bytes ever taken off `granted` because they were given back or evicted.
        members: by id.
    """

    known: bool = False
    granted: int = 0
    limit: int = 0
    handed_out: int = 0
    returned: int = 0
    members: dict[str, Entry] = {}

    def check(self) -> None:
        """Assert what must hold between any two changes."""
        assert self.granted >= 0, "bytes were given back that nobody had"
        for entry in self.members.values():
            assert min(msgspec.structs.astuple(entry)) >= 0, "a member's figure is below zero"


class Report(msgspec.Struct, frozen=True):
    """What a member tells with every change of the books. Bytes.

    Attributes:
        spare: it may still write.
        recent: it took lately.
        returned: it gave back since its last report.
        owned: see `Entry`.
    """

    spare: int
    recent: int
    returned: int
    owned: int


class Mark(msgspec.Struct, frozen=True):
    """The books at the start of an inventory.

    Attributes:
        unseen: bytes that may arrive on disk without a further grant.
        handed_out: see `Accounts`.
        returned: see `Accounts`.
    """

    unseen: int
    handed_out: int
    returned: int


def set_limit(accounts: Accounts, free: int) -> None:
    """Compute the limit anew.

    Args:
        accounts: changed in place.
        free: bytes that are free on the mount now.
    """
    capacity = min((entry.capacity for entry in accounts.members.values()), default=UNBOUNDED)
    min_free = max((entry.min_free for entry in accounts.members.values()), default=0)
    spare = sum(entry.spare for entry in accounts.members.values())
    on_disk = max(0, accounts.granted - spare)
    accounts.limit = max(0, min(capacity, on_disk + free - min_free))


def report(accounts: Accounts, member: str, told: Report) -> None:
    """Enter what a registered member tells."""
    entry = accounts.members[member]
    entry.spare, entry.recent, entry.owned = told.spare, told.recent, told.owned
    entry.reports += 1
    give_back(accounts, told.returned)


def give_back(accounts: Accounts, nbytes: int) -> None:
    """Take bytes off the books: they are not on disk (any more)."""
    accounts.granted = max(0, accounts.granted - nbytes)
    accounts.returned += nbytes


def grant(accounts: Accounts, member: str, need: int, chunk: int) -> int:
    """Allow a member to write.

    Args:
        accounts: with a fresh limit and report; changed in place.
        member: who asks.
        need: the least that helps it.
        chunk: what it would rather have, so that it need not ask so often.

    Returns:
        Bytes granted; 0 if refused, and then the member counts as waiting.
    """
    entry = accounts.members[member]
    room = accounts.limit - accounts.granted
    amount = max(need, chunk) if room >= max(need, chunk) else need
    if not accounts.known or amount > room or _must_leave_it(accounts, member, need):
        entry.asked = need
        return 0
    entry.asked = 0
    entry.spare += amount
    accounts.granted += amount
    accounts.handed_out += amount
    return amount


def _must_leave_it(accounts: Accounts, member: str, need: int) -> bool:
    """Whether the room is for others, who wait and own less than their share."""
    others = any(entry.asked for name, entry in accounts.members.items() if name != member)
    owned = accounts.members[member].owned
    return others and owned > 0 and owned + need > _shares(accounts, {member: need})[member]


def debts(accounts: Accounts) -> dict[str, int]:
    """Bytes that each member should delete, by id: what it owns beyond its share while others wait
    or the limit is passed. Members that owe nothing are left out.
    """
    shares = _shares(accounts, {})
    return {
        name: entry.owned - shares[name]
        for name, entry in accounts.members.items()
        if entry.owned > shares[name]
    }


def _shares(accounts: Accounts, wanted: Mapping[str, int]) -> dict[str, int]:
    """Max-min fair shares of what members own or wait for: nobody gets more than it has and wants,
    and what some do not use the others share equally.
    """
    demands = {
        name: entry.owned + max(entry.asked, wanted.get(name, 0))
        for name, entry in accounts.members.items()
    }
    others = accounts.granted - sum(entry.owned for entry in accounts.members.values())
    return fair_shares(demands, max(0, accounts.limit - max(0, others)))


def fair_shares(demands: Mapping[str, int], total: int) -> dict[str, int]:
    """Divide `total`: the smallest share below its demand is as large as possible."""
    shares: dict[str, int] = {}
    left = total
    for i, name in enumerate(sorted(demands, key=lambda name: (demands[name], name))):
        shares[name] = min(demands[name], left // (len(demands) - i))
        left -= shares[name]
    return shares


def bytes_to_free(accounts: Accounts, high: float, low: float) -> int:
    """How much the sweeper should delete now: down to the low watermark, once the high one is
    passed or somebody waits in vain; 0 otherwise.

    Args:
        accounts: with a fresh limit.
        high: share of the limit, e.g. 0.95.
        low: share of the limit, below `high`.
    """
    asked = sum(entry.asked for entry in accounts.members.values())
    short = accounts.granted + asked - accounts.limit if asked else 0
    if accounts.granted <= int(accounts.limit * high) and short <= 0:
        return 0
    return max(0, short, accounts.granted - int(accounts.limit * low))


def mark(accounts: Accounts) -> Mark:
    """Remember the books before an inventory begins."""
    unseen = sum(entry.spare + entry.recent for entry in accounts.members.values())
    return Mark(unseen, accounts.handed_out, accounts.returned)


def reports_of(accounts: Accounts) -> dict[str, int]:
    """How often each member has told."""
    return {name: entry.reports for name, entry in accounts.members.items()}


def unheard(accounts: Accounts, since: Mapping[str, int]) -> set[str]:
    """Members that have told nothing since `reports_of` said so. What one of them gave back may be
    missing from an inventory made before, and is still on the books.
    """
    return {
        name
        for name, entry in accounts.members.items()
        if name in since and entry.reports == since[name]
    }


def reconcile(accounts: Accounts, before: Mark, found: int, removed: int = 0) -> int:
    """Correct `granted` by an inventory that was made while others went on writing and deleting.

    Every byte on disk that the inventory missed was written after `before`: from what members
    could write then, or from a grant since. That bounds `granted` from above. What was found and
    not given back since is still there: that bounds it from below. To be called when nobody is
    `unheard` since the end of the inventory.

    Args:
        accounts: changed in place.
        before: from the moment before the inventory read anything.
        found: bytes that it found, less what its maker has evicted itself.
        removed: what its maker has evicted and given back since `before`.

    Returns:
        The correction in bytes: negative if less lies on disk than the books said.
    """
    spare = sum(entry.spare for entry in accounts.members.values())
    given_back = accounts.returned - before.returned - removed
    upper = found + before.unseen + accounts.handed_out - before.handed_out
    lower = max(0, found - max(0, given_back)) + spare
    corrected = max(min(accounts.granted, upper), min(lower, upper))
    if not accounts.known:
        corrected = upper
    change = corrected - accounts.granted
    accounts.granted = corrected
    accounts.known = True
    return change
