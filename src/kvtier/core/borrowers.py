"""Tiers that ask for blocks which other tiers may have to be read for.

A borrower asks as a request does, under the same budgets and with a deadline, and is answered when
it waits for nothing any more: once, with what is readable then. The tier that asks is never asked
itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice

from kvtier.core.ledger import Ledger
from kvtier.core.requests import Request
from kvtier.core.types import BlockKey, Lookup, TierId, Wanted


class Borrowers:
    """See the module.

    Args:
        tiers: all tiers.
        ledger: the books.
        lending_max: slots that may be lent; no more borrowers wait, and none is read more for.
        lookup: asks for a key on behalf of a request.
        settle: ends the wait of a request, and gives back what it holds.
    """

    def __init__(
        self,
        tiers: Sequence[TierId],
        ledger: Ledger,
        lending_max: int,
        lookup: Callable[[Request, BlockKey], Lookup],
        settle: Callable[[Request], None],
    ) -> None:
        self._tiers = tiers
        self._ledger = ledger
        self._lending_max = lending_max
        self._lookup = lookup
        self._settle = settle
        self._waiting: dict[Request, Wanted] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._waiting)

    def ask(self, wanted: Wanted, arrival: int) -> None:
        """Answer a question at once, or take its turn among the requests for it."""
        if not wanted.promote or len(self._waiting) >= self._lending_max:
            self._ledger.lend(wanted)
            return
        others = tuple(tier for tier in self._tiers if tier != wanted.tier)
        name = f"ticket {wanted.ticket} of tier {wanted.tier}"
        # what is promoted for somebody else is raised nowhere
        borrower = Request(name, arrival, others, frozenset(), by_block=True)
        self._waiting[borrower] = wanted

    def serve(self) -> None:
        """Look up what is wanted, and answer those who wait for nothing any more."""
        for borrower, wanted in tuple(self._waiting.items()):
            if not self._waits(borrower, wanted):
                self._answer(borrower)

    def dismiss(self) -> None:
        """A new epoch began: nothing of what was wanted can be had under it."""
        for borrower in tuple(self._waiting):
            self._answer(borrower)

    def _waits(self, borrower: Request, wanted: Wanted) -> bool:
        waits = False
        for key in islice(dict.fromkeys(wanted.keys), self._lending_max):
            answer = self._lookup(borrower, key)
            waits |= answer is Lookup.PENDING or answer is Lookup.RETRY
            if borrower.short:
                break
        return waits

    def _answer(self, borrower: Request) -> None:
        self._ledger.lend(self._waiting.pop(borrower))
        self._settle(borrower)
