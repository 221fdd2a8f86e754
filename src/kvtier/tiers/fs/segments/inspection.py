"""What the command line does with stores, beside running engines: listing, reading, evicting.

Nothing here owns a store for longer than a call.
"""

from __future__ import annotations

import fcntl
import os
import threading
from typing import TYPE_CHECKING, NamedTuple, Self

from kvtier.core.types import BlockKey
from kvtier.errors import MissingBlockError
from kvtier.tiers.fs.segments.log import LogReader
from kvtier.tiers.fs.segments.paths import open_file
from kvtier.tiers.fs.segments.records import EVICT, EVICT_ALL, Record
from kvtier.tiers.fs.segments.segment import open_segment, segment_number
from kvtier.tiers.fs.segments.store import (
    LOCK_NAME,
    STORES_NAME,
    adopt_store,
    lock_store,
    remove_store_files,
    request,
    store_directories,
)
from kvtier.tiers.fs.segments.table import slot_bytes_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path
    from types import TracebackType

_NO_KEY = BlockKey(b"")


class StoreListing(NamedTuple):
    """A store as its directory shows it.

    Attributes:
        directory: of the store.
        alive: a process owns it.
        segments: number of its segments.
        used_bytes: what they take of the disk.
    """

    directory: str
    alive: bool
    segments: int
    used_bytes: int


class StoredBlock(NamedTuple):
    """A block as the log has it. Times are nanoseconds since the epoch; `length` is in bytes,
    header and row together.
    """

    key: BlockKey
    segment: int
    slot: int
    length: int
    created_ns: int
    used_ns: int


class Eviction(NamedTuple):
    """What became of a request to evict.

    Attributes:
        requested: the owner lives, and was asked: it obeys within about a second.
        blocks: that were evicted here and now, of a store without an owner.
        freed_bytes: of the segments that were removed here and now.
    """

    requested: bool
    blocks: int = 0
    freed_bytes: int = 0


def list_stores(namespace: Path) -> list[StoreListing]:
    """The stores below the directory of a namespace.

    Raises:
        OSError: the medium failed.
    """
    listings = []
    for directory in store_directories(os.path.join(namespace, STORES_NAME)):
        try:
            names = os.listdir(directory)
            sizes = [
                os.lstat(os.path.join(directory, name)).st_size
                for name in names
                if segment_number(name) is not None
            ]
        except FileNotFoundError:
            continue  # given up meanwhile
        listings.append(StoreListing(directory, is_alive(directory), len(sizes), sum(sizes)))
    return listings


def is_alive(directory: str) -> bool:
    """Whether a process owns a store.

    Raises:
        OSError: the medium failed.
    """
    try:
        lock = open_file(os.path.join(directory, LOCK_NAME), os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False


class StoreReader:
    """A store as it was when it was opened, to list and to read; use it in a `with`. Thread safe.

    Args:
        directory: of the store.

    Raises:
        DamagedHeaderError, OtherVersionError: its log cannot be understood.
        OSError: it is not there, or the medium failed.
    """

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._lock = threading.Lock()  # guards the reader and its table
        self._reader = LogReader(directory)
        self._reader.follow()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the log."""
        self._reader.close()

    def __len__(self) -> int:
        return len(self._reader.table)

    def blocks(self) -> Iterator[StoredBlock]:
        """All blocks, as they lie on the disk."""
        with self._lock:
            segments = [segment.copy() for segment in self._reader.table.segments.values()]
        for segment in segments:
            for record in segment.records():
                yield StoredBlock(*record[1:])

    def find(self, key: BlockKey) -> StoredBlock | None:
        """Where a block lies now; None if the store does not hold it.

        Raises:
            OSError: the medium failed.
        """
        with self._lock:
            self._follow()
            found = self._reader.table.find(key)
            if found is None:
                return None
            segment, slot = found
            return StoredBlock(
                key,
                segment.number,
                slot,
                segment.lengths[slot],
                segment.created[slot],
                segment.used[slot],
            )

    def read(self, block: StoredBlock, into: memoryview) -> None:
        """Read the first bytes of a block, its header and then its row.

        Args:
            block: as it was listed or found.
            into: at most as long as the block; page aligned for direct I/O.

        Raises:
            MissingBlockError: it was evicted meanwhile, or its segment is gone.
            OSError: the medium failed.
        """
        try:
            file = open_segment(self._directory, block.segment, direct=True, writable=False)
        except FileNotFoundError:
            raise MissingBlockError(f"segment {block.segment} is gone") from None
        try:
            got = file.read(block.slot * slot_bytes_of(block.length), [into])
        finally:
            file.retire()
        now = self.find(block.key)
        if got < into.nbytes or now is None or now[:5] != block[:5]:
            raise MissingBlockError("it was evicted or moved while it was being read")

    def _follow(self) -> None:
        """Learn what the log says now. Called under the lock."""
        if self._reader.pending() is None:  # rewritten meanwhile
            reader, self._reader = self._reader, LogReader(self._directory)
            reader.close()
        self._reader.follow()


def evict(directory: str, keys: Sequence[BlockKey] | None) -> Eviction:
    """Evict blocks of a store, or all of them, by its owner if it has one, else here and now.

    The caller gives `freed_bytes` back to the capacity of the root.

    Raises:
        DamagedHeaderError, OtherVersionError: it has no owner, and its log cannot be understood.
        OSError: the medium failed, or there is no such store.
    """
    lock = lock_store(directory)
    if lock is None:
        records = [Record(EVICT_ALL, _NO_KEY)] if keys is None else [Record(EVICT, k) for k in keys]
        request(directory, records)
        return Eviction(requested=True)
    try:
        store, table = adopt_store(directory, lock, direct=False, durable=True)
    except BaseException:
        os.close(lock)
        raise
    try:
        if keys is None:
            return Eviction(False, len(table), remove_store_files(directory))
        records = []
        for key in keys:
            found = table.find(key)
            if found is not None:
                records.append(Record(EVICT, key, found[0].number, found[1]))
                table.clear(*found)
        with store.log.lock:
            store.log.append(records)
        store.log.sync()
        empty = set(store.segment_numbers())
        empty -= {segment.number for segment in table.segments.values() if segment.live}
        return Eviction(False, len(records), sum(map(store.remove_segment, sorted(empty))))
    finally:
        store.close()
