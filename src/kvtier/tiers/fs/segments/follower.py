"""Reading the stores of other processes on this host, by following their logs.

An owner says in its log that a block is gone before it writes to the slot again. So whoever reads
the slot, then looks at the log, and finds the block still there, has read that block.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from typing import TYPE_CHECKING, NamedTuple

from kvtier.errors import MissingBlockError, TierError
from kvtier.tiers.fs.segments.log import LogReader
from kvtier.tiers.fs.segments.records import EVICT, TOUCH, Record
from kvtier.tiers.fs.segments.segment import Piece, SegmentFile, move, open_segment
from kvtier.tiers.fs.segments.store import request, store_directories

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from kvtier.core.types import BlockKey
    from kvtier.tiers.base import Buffers

logger = logging.getLogger(__name__)

INLINE_BYTES = 16 << 20
"""So much of a log is read while a lookup waits (about 0.15 s); more is left to the upkeep."""

_SETTLED_NS = 100_000_000  # a directory changed later than that may change again unnoticed


class _Found(NamedTuple):
    """A block of another process's store, as its log has it."""

    number: int
    slot_bytes: int
    slot: int
    length: int
    created_ns: int


class Follower:
    """One store of another process. Thread safe.

    Args:
        directory: of the store.
        direct: try direct I/O.

    Attributes:
        keys: of the blocks, to look up without a lock.
    """

    def __init__(self, directory: str, direct: bool) -> None:
        self.directory = directory
        self.keys: Collection[BlockKey] = ()
        self._direct = direct
        self._lock = threading.Lock()  # guards all below
        self._reader: LogReader | None = None
        self._files: dict[int, SegmentFile] = {}  # by number
        self._touched: dict[BlockKey, None] = {}
        self._gone: list[BlockKey] = []
        self._closed = False

    def glance(self) -> None:
        """Read what is new in the log, unless that is much, or another thread is at it.

        Raises:
            FileNotFoundError: the store is gone.
            TierError: its log cannot be understood.
            OSError: the medium failed.
        """
        if self._lock.acquire(blocking=False):
            try:
                self._look(INLINE_BYTES)
            finally:
                self._lock.release()

    def read(
        self, keys: Sequence[BlockKey], into: Sequence[Buffers], indices: Sequence[int]
    ) -> dict[int, Exception | None]:
        """Read those of the blocks that are here; as `OwnedStores.read`.

        Raises:
            OSError: as `glance`.
        """
        outcome: dict[int, Exception | None] = {}
        found: dict[int, _Found] = {}
        pieces = []
        with self._lock:
            for i in indices:
                block = self._find(keys[i])
                if block is None:
                    continue
                length = sum(view.nbytes for view in into[i])
                file = self._enter(block.number) if block.length == length else None
                if file is None:
                    outcome[i] = MissingBlockError("its segment is gone, or it has another length")
                    continue
                found[i] = block
                pieces.append(Piece(i, file, block.slot, block.slot_bytes, into[i], length))
        try:
            failures = move(pieces, write=False)
        finally:
            for piece in pieces:
                piece.file.leave()
        if found:
            with self._lock:
                current = self._look(INLINE_BYTES)
                for i, block in found.items():
                    if not current or self._find(keys[i]) != block:
                        outcome[i] = MissingBlockError("it was evicted while it was being read")
                    else:
                        outcome[i] = failures.get(i)
                        self._touched[keys[i]] = None
        return outcome

    def touch(self, key: BlockKey, length: int) -> bool:
        """Count a use of a block, to be told to the owner; False if it is not here, or has another
        length.
        """
        with self._lock:
            block = self._find(key)
            if block is None or block.length != length:
                return False
            self._touched[key] = None
            return True

    def delete(self, key: BlockKey) -> None:
        """Forget a block here and now, and ask its owner to.

        Raises:
            OSError: the owner cannot be asked.
        """
        with self._lock:
            found = None if self._reader is None else self._reader.table.find(key)
            if found is not None and self._reader is not None:
                self._reader.table.clear(*found)
        if found is not None:
            request(self.directory, [Record(EVICT, key)])

    def tend(self) -> list[BlockKey]:
        """Catch up with the log however long it is, tell the owner what was used, and close the
        files of segments that are gone.

        Returns:
            Keys of blocks that left since the last call.

        Raises:
            OSError, TierError: as `glance`.
        """
        self._read_anew()
        with self._lock:
            if not self._look(float("inf")) or self._reader is None:
                return []  # closed meanwhile
            gone, self._gone = self._gone, []
            touched, self._touched = self._touched, {}
            table = self._reader.table
            records = [Record(TOUCH, key) for key in touched if key in table.places]
            live = {segment.number for segment in table.segments.values() if segment.live}
            for number in self._files.keys() - live:
                self._files.pop(number).retire()
        if records:
            request(self.directory, records)
        return gone

    def close(self) -> list[BlockKey]:
        """Let go of everything; keys that were to be had here."""
        with self._lock:
            if self._closed:
                return []
            self._closed = True
            keys = [*self._gone, *self.keys]
            self.keys = ()
            for file in self._files.values():
                file.retire()
            if self._reader is not None:
                self._reader.close()
                self._reader = None
            return keys

    def _look(self, limit: float) -> bool:
        if self._closed:
            return False
        pending = None if self._reader is None else self._reader.pending()
        if pending is None:
            if not self._reopen(limit):
                return False
        elif pending > limit:
            return False
        assert self._reader is not None, "it was opened a moment ago"
        if pending is None or pending > 0:
            self._reader.follow(self._gone)
        return True

    def _reopen(self, limit: float) -> bool:
        """Begin anew with a log that was not seen yet, or that replaced the one that was."""
        reader = LogReader(self.directory)
        if (reader.pending() or 0) > limit:
            reader.close()
            return False
        reader.follow()
        self._replace(reader)
        return True

    def _replace(self, reader: LogReader) -> None:
        if self._closed:
            reader.close()
            return
        former = self._reader
        if former is not None:
            self._gone += former.table.places.keys() - reader.table.places.keys()
            former.close()
        self._reader = reader
        self.keys = reader.table.places

    def _read_anew(self) -> None:
        """Read a log that replaced the one that was seen, without keeping anybody waiting."""
        with self._lock:
            if self._closed or (self._reader is not None and self._reader.pending() is not None):
                return
        reader = LogReader(self.directory)
        reader.follow()
        with self._lock:
            self._replace(reader)

    def _find(self, key: BlockKey) -> _Found | None:
        found = None if self._reader is None else self._reader.table.find(key)
        if found is None:
            return None
        segment, slot = found
        length, created_ns = segment.lengths[slot], segment.created[slot]
        return _Found(segment.number, segment.slot_bytes, slot, length, created_ns)

    def _enter(self, number: int) -> SegmentFile | None:
        """The file of a segment, kept open until `leave`; None if it is gone."""
        file = self._files.get(number)
        if file is None:
            try:
                file = open_segment(self.directory, number, self._direct, writable=False)
            except OSError:
                return None
            self._files[number] = file
        return file if file.enter() else None


class Followers:
    """All stores of a namespace but those of this process. Thread safe.

    Args:
        stores: directory that the stores lie in.
        direct: try direct I/O.
        mine: names of the stores of this process.
        gave_up: told the keys of blocks that are gone.
        wall_clock_ns: nanoseconds since the epoch, by the clock that the files' times come from.
    """

    def __init__(
        self,
        stores: str,
        direct: bool,
        mine: Callable[[], Collection[str]],
        gave_up: Callable[[Iterable[BlockKey]], None],
        wall_clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._stores = stores
        self._direct = direct
        self._mine = mine
        self._gave_up = gave_up
        self._wall_clock_ns = wall_clock_ns
        self._lock = threading.Lock()  # guards the list and what it was made from
        self._followers: dict[str, Follower] = {}  # by directory; replaced, never changed
        self._seen_ns = -1

    def all(self) -> list[Follower]:
        """Those known now."""
        return list(self._followers.values())

    def look(self) -> list[Follower]:
        """Those known now, with what is new in their logs: one call of the system for each, and one
        to see that there is no further store.
        """
        self.scan()
        for follower in self.all():
            try:
                follower.glance()
            except (OSError, TierError) as error:
                self._lose(follower, error)
        return self.all()

    def read(
        self, keys: Sequence[BlockKey], into: Sequence[Buffers], indices: Sequence[int]
    ) -> dict[int, Exception | None]:
        """Read blocks from whichever store has them; as `OwnedStores.read`."""
        outcome: dict[int, Exception | None] = {}
        left = list(indices)
        for follower in self.look() if left else ():
            try:
                outcome.update(follower.read(keys, into, left))
            except (OSError, TierError) as error:
                self._lose(follower, error)
            left = [i for i in left if i not in outcome or outcome[i] is not None]
        return outcome

    def touch(self, key: BlockKey, length: int) -> bool:
        """Count a use of a block; False if no store has it in that length."""
        return any(key in follower.keys and follower.touch(key, length) for follower in self.all())

    def delete(self, key: BlockKey) -> None:
        """Ask whoever keeps a block to forget it."""
        for follower in self.all():
            try:
                follower.delete(key)
            except OSError as error:
                self._lose(follower, error)

    def tend(self) -> None:
        """Catch up with every log, whatever it takes."""
        self.scan(force=True)
        for follower in self.all():
            try:
                self._gave_up(follower.tend())
            except (OSError, TierError) as error:
                self._lose(follower, error)

    def scan(self, *, force: bool = False) -> None:
        """See which stores there are, if their directory changed."""
        try:
            changed_ns = os.stat(self._stores).st_mtime_ns
        except FileNotFoundError:
            changed_ns = 0
        if changed_ns == self._seen_ns and not force:
            return
        with self._lock:
            now_ns = self._wall_clock_ns()
            mine = self._mine()
            found = {
                path
                for path in store_directories(self._stores)
                if os.path.basename(path) not in mine
            }
            former = self._followers
            self._followers = {
                path: former.get(path) or Follower(path, self._direct) for path in sorted(found)
            }
            for path in former.keys() - found:
                keys = former[path].close()
                if os.path.basename(path) not in mine:
                    self._gave_up(keys)
            settled = abs(now_ns - changed_ns) > _SETTLED_NS
            self._seen_ns = changed_ns if settled else -1

    def close(self) -> None:
        """Let go of everything."""
        for follower in self.all():
            follower.close()

    def _lose(self, follower: Follower, error: Exception) -> None:
        """A store cannot be followed: it is gone, or cannot be understood."""
        if not isinstance(error, FileNotFoundError):
            logger.debug("Not following %s: %s", follower.directory, error)
        with self._lock:
            if self._followers.get(follower.directory) is not follower:
                return
            left = dict(self._followers)
            del left[follower.directory]
            self._followers = left
        self._gave_up(follower.close())
