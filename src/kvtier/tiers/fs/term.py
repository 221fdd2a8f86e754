"""What the sweeper of a root knows and does, from its election on.

    scan --> settle --> reconcile --> rest --> scan ...        evict whenever there is need

A scan that finds what to evict may come while another one settles; it corrects nothing.

1. Nothing is evicted before a first complete scan: half an inventory does not know the oldest.
2. Bytes leave the books after their file is gone, never before.
3. A scan is compared with the books only when every member has reported after its end. Until then a
   file may be missing from both, and be given back a second time later.
4. A file that turns out to be missing stops evicting until a scan has told what else is.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtier.tiers.fs import accounts as books
from kvtier.tiers.fs.accounts import Accounts, Mark
from kvtier.tiers.fs.eviction import Remover
from kvtier.tiers.fs.inventory import (
    Inventory,
    Victims,
    VictimStore,
    choose_victims,
    unused_namespaces,
)
from kvtier.tiers.fs.ledger import LedgerBusyError
from kvtier.tiers.fs.members import living_members, remove_dead
from kvtier.tiers.fs.scan import Scanner
from kvtier.tiers.fs.shared_space import LEASE_S, LOCK_WAIT_S
from kvtier.tiers.fs.sizes import free_bytes

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from concurrent.futures import Executor

    from kvtier.core.types import BlockKey
    from kvtier.tiers.fs.shared_space import SharedSpace

logger = logging.getLogger(__name__)

REMOVERS = 4
"""Threads that delete, which is waiting for the medium: 2 ms a file where the mount discards."""

_REST = 20  # times the duration of a scan: at most 5 % of a core, whatever the size
_FIRST_SLICE_S = 0.2
_SLICE_S = 0.05  # of a later scan, between two looks at the books
_ROLL_CALL_S = 2.0
_STALE = 0.5  # share of what was granted; a scan that knows less is made anew
_BUSY = 0.2  # share of the interval after which it looks again while there is something to evict
_BATCH = 256  # directories between two entries in the books


@dataclass(frozen=True, slots=True)
class SweepSettings:
    """When the sweeper does what.

    Attributes:
        interval_s: between looks at the books.
        scan_s: least rest between scans, unless something calls for one.
        full_scan_s: between scans that list every directory and look at every file.
        takeover_s: see `Election`.
        dead_age_s: a namespace that nobody held or used for so long goes first.
        orphan_grace_s: how long a store waits for its owner to be restarted before its space may
            go to others.
        high: share of the limit at which eviction begins.
        low: share of the limit at which it ends.
    """

    interval_s: float = 0.25
    scan_s: float = 10.0
    full_scan_s: float = 3600.0
    takeover_s: float = 30.0
    dead_age_s: float = 3600.0
    orphan_grace_s: float = 600.0
    high: float = 0.95
    low: float = 0.90

    def __post_init__(self) -> None:
        assert 0 < self.low < self.high <= 1, "watermarks are shares, the low one below the high"


@dataclass(slots=True)
class _Comparison:
    """A scan that is to be compared with the books.

    Attributes:
        mark: the books before it began.
        removed_until_mark: bytes that this term had deleted by then.
        awaited: number of reports of each member at its end; None before.
        found: bytes that it found.
        removed_until_end: bytes that this term had deleted at its end.
        ended: when.
    """

    mark: Mark
    removed_until_mark: int
    awaited: dict[str, int] | None = None
    found: int = 0
    removed_until_end: int = 0
    ended: float = 0.0


class Term:
    """One process as the sweeper. One thread, but for `levels` and `totals`.

    Args:
        space: of this process.
        settings: see `SweepSettings`.
        pool: deletes files in parallel.
        closing: set when deleting must end.
        may_go_on: whether this process is still the sweeper and is not closing.
        tell: called with namespace and keys that were evicted.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        space: SharedSpace,
        settings: SweepSettings,
        pool: Executor,
        closing: threading.Event,
        may_go_on: Callable[[], bool],
        tell: Callable[[str, Sequence[BlockKey]], None],
        clock: Callable[[], float],
    ) -> None:
        self._space = space
        self._settings = settings
        self._pool = pool
        self._closing = closing
        self._may_go_on = may_go_on
        self._tell = tell
        self._clock = clock
        self._inventory = Inventory()
        self._scanner = Scanner(space.root, self._inventory)
        self._scan: Iterator[bool] | None = None
        self._scan_due = self._full_scan_due = self._roll_call_due = 0.0
        self._scan_seconds = self._scan_ended = 0.0
        self._scanning_full = False
        self._complete = False  # a scan has ended
        self._removed = 0  # bytes deleted in this term
        self._unbooked = 0  # of them not off the books yet
        self._removed_at_scan = 0
        self._short = False  # there was less to evict than was needed
        self._comparison: _Comparison | None = None
        self._unknown_since: float | None = None
        self._now_ns = 0
        self._levels: dict[str, float] = {}
        self._totals = dict.fromkeys(
            ("evicted_blocks", "evicted_bytes", "evicted_stores", "stale_temps_removed"), 0
        )

    def levels(self) -> Mapping[str, float]:
        """Of the last scan: blocks, bytes, foreign files, seconds."""
        return self._levels

    def totals(self) -> Mapping[str, float]:
        """Since the beginning of the term."""
        return {**self._totals, "stale_temps_removed": self._scanner.stale_temps_removed}

    def step(self, file_clock: Callable[[], int]) -> float:
        """Do a little of everything that is due.

        Args:
            file_clock: now, ns, by the clock of the file system; may be a second late.

        Returns:
            Seconds until the next step.

        Raises:
            OSError: the medium failed. Come again later.
        """
        self._now_ns = file_clock()
        now = self._clock()
        if now >= self._roll_call_due:
            self._roll_call_due = now + _ROLL_CALL_S
            self._bury_the_dead()
        accounts = self._look()
        if accounts is None:
            return self._settings.interval_s
        if self._comparison is not None and self._comparison.awaited is not None:
            self._settle(self._comparison, accounts)
        if self._scan is not None or self._is_scan_due(accounts):
            self._go_on_scanning(accounts, file_clock)
        evicts = self._evict(accounts)
        if self._scan is not None and (self._short or not self._complete):
            return 0.0
        return self._settings.interval_s * (_BUSY if evicts else 1.0)

    def _bury_the_dead(self) -> None:
        """Take members that are gone out of the books; a scan tells what they had not spent."""
        control = self._space.control
        dead = remove_dead(control, self._now_ns / 1e9)
        try:
            with self._space.ledger.change(LOCK_WAIT_S) as accounts:
                living = living_members(control)
                gone = accounts.members.keys() - living
                for member in gone:
                    del accounts.members[member]
        except LedgerBusyError:
            return
        if dead or gone:
            logger.info("%d processes that used %s died", len(gone), self._space.root)
            self._scan_due = 0.0

    def _look(self) -> Accounts | None:
        """The books, with a fresh limit and what was deleted taken off; None if they are locked."""
        try:
            with self._space.ledger.change(LOCK_WAIT_S) as accounts:
                self._book(accounts)
                books.set_limit(accounts, free_bytes(self._space.root))
        except LedgerBusyError as error:
            logger.debug("Not swept: %s", error)
            return None
        if self._unbooked:
            self._unbooked = 0
            self._space.note_room()
        return accounts

    def _book(self, accounts: Accounts) -> None:
        if self._unbooked:
            books.give_back(accounts, self._unbooked)

    def _is_scan_due(self, accounts: Accounts) -> bool:
        now = self._clock()
        if accounts.known:
            self._unknown_since = None
            return now >= self._scan_due
        if self._unknown_since is None:
            self._unknown_since = now
        # a member that is not in the new books may still write, but not beyond its lease
        strangers = living_members(self._space.control) - accounts.members.keys()
        return not strangers or now >= self._unknown_since + LEASE_S

    def _go_on_scanning(self, accounts: Accounts, file_clock: Callable[[], int]) -> None:
        """Begin a scan, or go on with it for a slice of time."""
        now = self._clock()
        if self._scan is None:
            if self._comparison is None or self._comparison.awaited is None:
                self._comparison = _Comparison(books.mark(accounts), self._removed)
            self._scanning_full = now >= self._full_scan_due
            self._scan_seconds = 0.0
            self._scan = self._scanner.scan(self._scanning_full, file_clock)
        end = now + (_SLICE_S if self._complete else _FIRST_SLICE_S)
        try:
            for _ in self._scan:
                if self._clock() >= end or not self._may_go_on():
                    self._scan_seconds += self._clock() - now
                    return
        except BaseException:
            self._scan = None
            raise
        self._scan = None
        self._short = False
        self._complete = True
        self._scan_ended = self._clock()
        self._scan_seconds += self._scan_ended - now
        self._removed_at_scan = self._removed
        self._levels = {
            "inventory_blocks": self._inventory.num_files,
            "inventory_bytes": self._inventory.nbytes,
            "inventory_seconds": self._scan_seconds,
            "foreign_files": self._inventory.num_foreign,
        }
        self._scan_due = self._scan_ended + max(self._settings.scan_s, _REST * self._scan_seconds)
        if self._scanning_full:
            self._full_scan_due = self._scan_ended + self._settings.full_scan_s
        comparison = self._comparison
        if comparison is not None and comparison.awaited is None:
            comparison.awaited = books.reports_of(accounts)
            comparison.found = self._inventory.nbytes
            comparison.removed_until_end = self._removed
            comparison.ended = self._scan_ended
            self._space.report()

    def _settle(self, comparison: _Comparison, accounts: Accounts) -> None:
        """Wait until everybody has reported since the scan, then correct the books by it."""
        assert comparison.awaited is not None, "the scan has ended"
        unheard = books.unheard(accounts, comparison.awaited)
        # one that is stopped drops what it has not told within its lease
        if unheard and self._clock() < comparison.ended + LEASE_S + LOCK_WAIT_S:
            return
        found = comparison.found - (self._removed - comparison.removed_until_end)
        removed = self._removed - comparison.removed_until_mark
        try:
            with self._space.ledger.change(LOCK_WAIT_S) as accounts:
                self._book(accounts)
                known = accounts.known
                change = books.reconcile(accounts, comparison.mark, found, removed)
        except LedgerBusyError:
            return
        self._unbooked = 0
        self._comparison = None
        if known and abs(change) > max(books.PAGE_BYTES, found // 100):
            logger.info(
                "%s: %d bytes %s than the books said",
                self._space.root,
                abs(change),
                "more lie there" if change > 0 else "less lie there",
            )
        self._remove_empty_namespaces()

    def _remove_empty_namespaces(self) -> None:
        inventory = self._inventory
        unused = unused_namespaces(inventory, self._now_ns, int(self._settings.dead_age_s * 1e9))
        empty = [name for name in unused if not inventory.places[name].nbytes]
        if empty:
            with self._remover() as remover:
                for name in empty:
                    if remover.remove_namespace(name):
                        del inventory.places[name]

    @contextlib.contextmanager
    def _remover(self) -> Iterator[Remover]:
        root = os.open(self._space.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            yield Remover(root, self._closing.is_set)
        finally:
            os.close(root)

    def _evict(self, accounts: Accounts) -> bool:
        """Delete down to the low watermark, if there is need; whether there was."""
        need = books.bytes_to_free(accounts, self._settings.high, self._settings.low)
        if need == 0 or not self._complete:
            return False
        inventory, now = self._inventory, self._now_ns
        with self._remover() as remover:
            unused = unused_namespaces(inventory, now, int(self._settings.dead_age_s * 1e9))
            dead = {name for name in unused if not remover.is_held(name)}
            grace = int(self._settings.orphan_grace_s * 1e9)
            victims = choose_victims(inventory, dead, need, now, grace)
            self._short = not victims
            left = self._levels["inventory_bytes"] - (self._removed - self._removed_at_scan)
            if self._short or left < _STALE * accounts.granted:
                # most of what is there is newer than the last scan
                rest = self._scan_ended + self._scan_seconds
                self._scan_due = min(self._scan_due, rest)
            for start in range(0, len(victims), _BATCH):
                missing = self._remove(remover, victims[start : start + _BATCH])
                if missing:
                    self._scan_due = 0.0
                if missing or not self._may_go_on() or self._look() is None:
                    break
        return True

    def _remove(self, remover: Remover, victims: Sequence[Victims | VictimStore]) -> int:
        """Delete a batch; how many files others had deleted."""
        missing = 0
        failure: OSError | None = None
        parts = [victims[i::REMOVERS] for i in range(REMOVERS)]
        remove = functools.partial(remover.remove, self._inventory)
        for outcome in itertools.chain.from_iterable(self._pool.map(remove, parts)):
            missing += outcome.missing
            failure = failure or outcome.failure
            self._removed += outcome.nbytes
            self._unbooked += outcome.nbytes
            self._totals["evicted_blocks"] += len(outcome.keys)
            self._totals["evicted_bytes"] += outcome.nbytes
            self._totals["evicted_stores"] += outcome.stores
            if outcome.keys:
                self._tell(outcome.namespace, outcome.keys)
        if failure is not None:
            raise failure
        return missing
