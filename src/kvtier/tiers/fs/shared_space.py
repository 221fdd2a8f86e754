"""The `Space` of one process in a root that many use: spends grants, and asks for more.

    take() --> enough spare? --yes--> spend it (no file is touched)
                 | no
                 +--> refused a moment ago? --yes--> False
                 | no
                 +--> ledger, under its lock: report, ask for a chunk --> spend, or wait and False

1. Spare is good for `LEASE_S` after the last exchange with the ledger: a process that was stopped
   for a minute, or whose ledger was replaced, asks before it writes on. What was given back and not
   told within that time is not told any more: an inventory may have noticed it by then.
2. What is given back goes to the ledger and is never spent here again (rule 2 of `accounts`).
3. Waiting for the ledger is bounded; then the answer is False.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
import time
from typing import TYPE_CHECKING

from kvtier.errors import TierError
from kvtier.tiers.fs import accounts as books
from kvtier.tiers.fs.accounts import UNBOUNDED, Accounts, Entry, Report, rounded
from kvtier.tiers.fs.ledger import LEDGER_FILE, LedgerBusyError, LedgerFile
from kvtier.tiers.fs.members import CONTROL_DIRECTORY, NAMESPACE, Member, make_control_directory
from kvtier.tiers.fs.namespace_directory import check_same_root
from kvtier.tiers.fs.sizes import free_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

logger = logging.getLogger(__name__)

LOCK_WAIT_S = 0.5
"""How long a writer may wait for the ledger. It is held for some 50 microseconds at a time."""

LEASE_S = 10.0
"""Ten times the interval at which members report."""

RECENT_S = 15.0
"""A write that takes longer than this may be missed by one inventory."""

REFUSED_S = 0.1
"""How long a refusal is remembered, so that a full tier does not hammer the lock."""

IDLE_S = 10.0
"""Whoever has not written for so long gives its spare back."""

_UNWRITABLE = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EROFS))

CHUNK_BYTES_MAX = 64 * 1024 * 1024
_CHUNKS_PER_CAPACITY = 256
_BLOCKS_PER_CHUNK = 4


class SharedSpace:
    """A share in the capacity of `root`. Thread safe.

    Somebody has to call `report` about once a second: `Sweeper` does.

    Args:
        root: an existing directory.
        capacity_bytes: bound of what all members together store; None for none. Members that were
            given different ones go by the smallest.
        min_free_bytes: of the mount; of different ones the largest counts.
        owning: whether only this process can delete what it takes (`segments`). Then it takes much
            at a time, and what it holds should be told with `measure_owned`.
        clock: seconds, monotonic.

    Attributes:
        measure_owned: bytes on disk that only this process can delete, adopted stores included;
            called with every report. To be set by whoever opens the tier.
        on_refused: called after a refusal.

    On a mount that is full or read-only it begins all the same, so that what lies there can be
    read; until it is a member, `take` raises what keeps it from becoming one.

    Raises:
        OSError: the control directory cannot be written, or has no locks.
        TierError: somebody keeps the ledger locked.
    """

    def __init__(
        self,
        root: Path,
        capacity_bytes: int | None,
        min_free_bytes: int,
        *,
        owning: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.root = os.path.abspath(root)
        self._settings = (UNBOUNDED if capacity_bytes is None else capacity_bytes, min_free_bytes)
        self._owning = owning
        self._clock = clock
        self._exchanging = threading.Lock()  # one thread at a time asks the ledger
        self._lock = threading.Lock()  # guards all below; never held over I/O
        self._spare = 0
        self._returned = 0
        self._taken = [0, 0]  # in this and in the previous span of `RECENT_S`
        self._span_end = clock() + RECENT_S
        self._owned = 0
        self._owed = 0
        self._largest = 0
        self._good_until = 0.0
        self._refused_until = 0.0
        self._last_take = clock()
        self._refusals = 0
        self._accounts = Accounts()
        self._free = 0
        self._told_differing = False
        self._joined = False
        self.measure_owned: Callable[[], int] = _nothing
        self.on_refused: Callable[[], object] = _nothing
        self._why_not_joined: OSError | None = None
        self._device = os.stat(self.root).st_dev
        try:
            self._join()
        except OSError as error:
            if error.errno not in _UNWRITABLE:
                raise
            logger.warning("%s cannot be written now: %s", self.root, error)

    @property
    def member_id(self) -> str:
        """This member's id; changes if the control directory was removed."""
        return self._member.id

    @property
    def control(self) -> str:
        """Path of the control directory."""
        return os.path.join(self.root, CONTROL_DIRECTORY)

    def take(self, nbytes: int) -> bool:
        """Reserve bytes, rounded up to pages. Waits at most about `LOCK_WAIT_S`.

        Raises:
            OSError: the ledger cannot be read or written.
        """
        need = rounded(nbytes)
        now = self._clock()
        with self._lock:
            self._largest = max(self._largest, need)
            if self._spend(need, now):
                return True
            if now < self._refused_until:
                self._refusals += 1
                return False
        if self._exchanging.acquire(timeout=LOCK_WAIT_S):
            try:
                if self._take_from_ledger(need):
                    return True
            finally:
                self._exchanging.release()
        with self._lock:
            self._refusals += 1
            self._refused_until = self._clock() + REFUSED_S
        self.on_refused()
        return False

    def give_back(self, nbytes: int) -> None:
        """Return bytes that were taken. They reach the others at the next exchange."""
        nbytes = rounded(nbytes)
        with self._lock:
            self._returned += nbytes
            self._owed = max(0, self._owed - nbytes)

    def owed(self) -> int:
        """Bytes that this process should delete, as of the last exchange."""
        with self._lock:
            return self._owed

    def note_room(self) -> None:
        """Forget a refusal: some was made just now."""
        with self._lock:
            self._refused_until = 0.0

    def report(self) -> None:
        """Tell the ledger how things are, and learn from it; about once a second.

        Raises:
            OSError: the ledger cannot be read or written.
        """
        with self._exchanging:
            if not (self._joined and self.ledger.is_current() and self._member.is_current()):
                if self._joined:
                    logger.warning("%s was removed or replaced: joining anew", self.control)
                self._leave()
                self._join()
                return
            owned = self.measure_owned()
            with self._lock:
                self._owned = owned
                idle = self._clock() - self._last_take > IDLE_S
                if idle:
                    self._returned += self._spare
                    self._spare = 0
            try:
                self._exchange(0)
            except LedgerBusyError as error:
                logger.debug("Not reported: %s", error)

    def close(self) -> None:
        """Give all spare back and leave. No other call may be running."""
        with self._exchanging:
            if not self._joined:
                return
            with self._lock:
                self._returned += self._spare
                self._spare = 0
                told = self._report(self._clock())
            try:
                with self.ledger.change(LOCK_WAIT_S) as accounts:
                    if self.member_id in accounts.members:
                        books.report(accounts, self.member_id, told)
                        del accounts.members[self.member_id]
            except (OSError, LedgerBusyError) as error:
                logger.warning("Leaving %s without a word: %s", self.control, error)
            self._leave()

    def figures(self) -> Mapping[str, float]:
        """Levels as of the last exchange, and totals.

        `capacity_bytes` is the limit that holds now, `used_bytes` what lies on disk or is on its
        way, `granted_bytes` that and what members may still write, `free_bytes` of the whole mount.
        """
        with self._lock:
            accounts = self._accounts
            spare = sum(entry.spare for entry in accounts.members.values())
            return {
                "capacity_bytes": accounts.limit,
                "granted_bytes": accounts.granted,
                "free_bytes": self._free,
                "used_bytes": max(0, accounts.granted - spare),
                "members": len(accounts.members),
                "owed_bytes": self._owed,
                "refused_takes": self._refusals,
            }

    def _join(self) -> None:
        try:
            self._become_member()
        except OSError as error:
            self._why_not_joined = error
            raise
        self._why_not_joined = None

    def _become_member(self) -> None:
        self._device = check_same_root(self.root, self._device)
        control = make_control_directory(self.root)
        self.ledger = LedgerFile(os.path.join(control, LEDGER_FILE), self._clock)
        try:
            self._member = Member(control, "segments" if self._owning else "files")
        except BaseException:
            self.ledger.close()
            raise
        with self._lock:
            self._spare = self._returned = 0
        self._joined = True
        try:
            self._exchange(0)
        except BaseException as error:
            self._leave()
            if isinstance(error, LedgerBusyError):
                raise TierError(
                    f"{self.ledger.path} has been locked for {LOCK_WAIT_S} s: a process that uses "
                    f"{self.root} is stopped or hangs; see which with `fuser`, and end it"
                ) from error
            raise

    def _leave(self) -> None:
        if self._joined:
            self._joined = False
            self._member.close()
            self.ledger.close()

    def _spend(self, need: int, now: float) -> bool:
        """Take from the spare. Called under the lock."""
        if now >= self._good_until or need > self._spare:
            return False
        self._spare -= need
        self._count(need, now)
        return True

    def _count(self, need: int, now: float) -> None:
        """Note what was taken just now. Called under the lock."""
        self._turn(now)
        self._taken[0] += need
        self._last_take = now

    def _turn(self, now: float) -> None:
        """Begin a new span of recent takes when it is time. Called under the lock."""
        if now >= self._span_end:
            recent = now < self._span_end + RECENT_S
            self._taken = [0, self._taken[0] if recent else 0]
            self._span_end = now + RECENT_S

    def _report(self, now: float) -> Report:
        """What to tell; what was given back is told once. Called under the lock."""
        self._turn(now)
        returned = self._returned if now < self._good_until else 0
        told = Report(self._spare, sum(self._taken), returned, self._owned)
        self._returned = 0
        return told

    def _take_from_ledger(self, need: int) -> bool:
        """Ask for more, or find that another thread just did."""
        now = self._clock()
        with self._lock:
            if self._spend(need, now):
                return True
            if now < self._refused_until:
                return False
        try:
            return self._exchange(need)
        except LedgerBusyError as error:
            logger.debug("Refused: %s", error)
            return False

    def _exchange(self, need: int) -> bool:
        """Report, and ask for `need` bytes if that is not 0. Called by one thread at a time.

        Returns:
            Whether they were granted, and spent.
        """
        if not self._joined:
            why = self._why_not_joined
            number = errno.ENOENT if why is None or why.errno is None else why.errno
            raise OSError(number, os.strerror(number), self.control)
        now = self._clock()
        with self._lock:
            told = self._report(now)
            aside = told.spare if need else 0  # or other threads spend what this one builds on
            self._spare -= aside
        granted = 0
        try:
            with self.ledger.change(LOCK_WAIT_S) as accounts:
                self._register(accounts, told)
                books.report(accounts, self.member_id, told)
                free = free_bytes(self.root)
                books.set_limit(accounts, free)
                if need > told.spare:
                    chunk = self._chunk(accounts)
                    granted = books.grant(accounts, self.member_id, need - told.spare, chunk)
                owed = books.debts(accounts).get(self.member_id, 0)
        except BaseException:
            with self._lock:
                self._returned += told.returned
                self._spare += aside
            raise
        with self._lock:
            self._accounts = accounts
            self._free = free
            self._owed = owed
            self._good_until = now + LEASE_S
            self._spare += aside + granted
            return need > 0 and self._spend(need, now)

    def _register(self, accounts: Accounts, told: Report) -> None:
        """Be in the accounts: at first, and again if they were lost."""
        if self.member_id in accounts.members:
            return
        if not (accounts.known or accounts.members or self._holds_anything()):
            accounts.known = True  # a new root
        for entry in accounts.members.values():
            if (entry.capacity, entry.min_free) != self._settings and not self._told_differing:
                self._told_differing = True
                logger.warning(
                    "%s is used with different capacities or min_free: %s here, %s elsewhere; the "
                    "smallest capacity and the largest min_free count",
                    self.root,
                    self._settings,
                    (entry.capacity, entry.min_free),
                )
        accounts.members[self.member_id] = Entry(*self._settings)
        accounts.granted += told.spare + told.returned
        accounts.handed_out += told.spare + told.returned

    def _holds_anything(self) -> bool:
        """Whether the root may hold blocks: a namespace has more than its description."""
        with os.scandir(self.root) as entries:
            namespaces = [entry.path for entry in entries if NAMESPACE.fullmatch(entry.name)]
        for path in namespaces:
            with contextlib.suppress(NotADirectoryError), os.scandir(path) as entries:
                if any(entry.is_dir(follow_symlinks=False) for entry in entries):
                    return True
        return False

    def _chunk(self, accounts: Accounts) -> int:
        """What to ask for: few locks for a large root, little tied up in a small one."""
        if self._owning:
            return 0  # a segment at a time
        share = min(accounts.limit // _CHUNKS_PER_CAPACITY, CHUNK_BYTES_MAX)
        return rounded(max(share, _BLOCKS_PER_CHUNK * self._largest))


def _nothing() -> int:
    """What is owned where nothing is."""
    return 0
