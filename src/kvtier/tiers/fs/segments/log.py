"""Appending to a store's log, and rewriting it when it has grown.

1. A record is there once its last byte is. What a killed or refused append left behind the last
   whole record is overwritten by the next one; readers do not go past it.
2. A log is rewritten into another file and renamed over. The old file then has no link left, which
   is how readers notice.
3. Whoever holds `lock` may append, and must bring the table up to date before letting go: then a
   copy of the table, and the length of the log, taken under the lock belong together.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import threading
from typing import TYPE_CHECKING

from kvtier.tiers.fs.io import sync_directory
from kvtier.tiers.fs.segments.paths import create_file, open_file, reserve, temp_name
from kvtier.tiers.fs.segments.records import (
    HEADER_BYTES,
    RECORD_BYTES,
    Header,
    decode,
    decode_header,
    encode,
    encode_header,
)
from kvtier.tiers.fs.segments.sync import GroupSync
from kvtier.tiers.fs.segments.table import Table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from kvtier.core.types import BlockKey
    from kvtier.tiers.fs.segments.records import Record
    from kvtier.tiers.fs.segments.table import SegmentTable

LOG_NAME = "index.log"

RESERVE_BYTES = 1 << 18
"""Room that a log keeps on the disk: some 1,500 records."""

_CHUNK_RECORDS = 8192


class Log:
    """The log of a store that this process owns.

    Args:
        directory: of the store.
        descriptor: of the log, open for reading and writing; closed by `close`.
        header: as it stands in the file.
        end: offset behind the last whole record.
        durable: whether what was appended is synced by `sync`.

    Attributes:
        lock: see 3.
        cramped: an append failed since the log was rewritten last; a shorter log may help.
    """

    def __init__(
        self, directory: str, descriptor: int, header: Header, end: int, durable: bool
    ) -> None:
        self.lock = threading.RLock()
        self._directory = directory
        self._descriptor = descriptor
        self._header = header
        self._end = end
        self._durable = durable
        self._closed = False
        self._reserved = end
        self.cramped = False
        # the number of the descriptor never changes: rewriting puts another file behind it
        self._sync = GroupSync(self._sync_once)

    @property
    def num_records(self) -> int:
        """Records in the file, whole ones and damaged ones."""
        return (self._end - HEADER_BYTES) // RECORD_BYTES

    @property
    def nbytes(self) -> int:
        """Length of the log."""
        return self._end

    def is_whole(self) -> bool:
        """Whether the file is still there, and as long as this process made it."""
        with self.lock:  # not between a write and the note that it was made
            found = os.fstat(self._descriptor)
            return found.st_nlink > 0 and found.st_size >= self._end

    def append(self, records: Sequence[Record]) -> int:
        """Write records behind the others; the caller holds `lock`.

        Returns:
            How many are there now, from the first: fewer than `records` if the disk is full.

        Raises:
            OSError: none of them could be written; ESTALE if the log was closed.
        """
        self._assert_open()
        data = memoryview(b"".join(encode(record, self._header.store) for record in records))
        if self._end + len(data) > self._reserved:
            self._reserve(len(data))
        written = 0
        error: OSError | None = None
        while written < len(data) and error is None:
            try:
                written += os.pwrite(self._descriptor, data[written:], self._end + written)
            except OSError as failure:
                error = failure
        count = written // RECORD_BYTES
        self._end += count * RECORD_BYTES
        if error is not None:
            self.cramped = True
            with contextlib.suppress(OSError):  # a reader must not see it turn into something else
                os.ftruncate(self._descriptor, self._end)
            if count == 0:
                raise error
        return count

    def sync(self) -> None:
        """Have everything appended so far survive a loss of power, if that is wanted.

        Raises:
            OSError: the medium failed.
        """
        if self._durable:
            self._sync.sync()

    def rewrite(self, copy: Callable[[], Sequence[SegmentTable]], next_segment: int) -> None:
        """Write a shorter log that says the same, and put it in place of this one.

        Args:
            copy: copies of the tables of all segments; called under `lock`.
            next_segment: a number that no segment has had.

        Raises:
            OSError: the disk is full, say; the old log is still in use.
        """
        with self.lock:
            self._assert_open()
            position = self._end
            tables = copy()
        temp = os.path.join(self._directory, temp_name())
        descriptor = create_file(temp)
        try:
            header = self._header._replace(next_segment=next_segment)
            end = _write_at(descriptor, encode_header(header), 0)
            records = itertools.chain.from_iterable(table.records() for table in tables)
            while chunk := list(itertools.islice(records, _CHUNK_RECORDS)):
                data = b"".join(encode(record, self._header.store) for record in chunk)
                end = _write_at(descriptor, data, end)
            with self.lock:
                self._assert_open()
                while position < self._end:  # what was appended meanwhile
                    size = min(_CHUNK_RECORDS * RECORD_BYTES, self._end - position)
                    data = os.pread(self._descriptor, size, position)
                    if not data:
                        raise OSError("the log was truncated while it was being rewritten")
                    end = _write_at(descriptor, data, end)
                    position += len(data)
                if self._durable:
                    os.fdatasync(descriptor)
                os.rename(temp, os.path.join(self._directory, LOG_NAME))
                os.dup2(descriptor, self._descriptor, inheritable=False)
                self._header = header
                self._end = self._reserved = end
                self.cramped = False
            if self._durable:
                sync_directory(self._directory)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temp)
            raise
        finally:
            os.close(descriptor)

    def close(self) -> None:
        """Let go of the file: nothing is written any more, whoever still tries."""
        with self.lock:
            self._closed = True
            os.close(self._descriptor)

    def _sync_once(self) -> None:
        self._assert_open()
        os.fdatasync(self._descriptor)

    def _assert_open(self) -> None:
        if self._closed:  # the number may be another file's by now
            raise OSError(errno.ESTALE, f"the log of {self._directory} was closed")

    def _reserve(self, nbytes: int) -> None:
        """Have the disk keep room for this and later records, so that eviction works when it is
        full. It stands behind the end of the file.
        """
        self._reserved = self._end + nbytes + RESERVE_BYTES
        with contextlib.suppress(OSError):
            reserve(self._descriptor, self._end, nbytes + RESERVE_BYTES)


def create_log(directory: str, header: Header, durable: bool) -> Log:
    """A log without records, in a directory that nobody else uses yet.

    Raises:
        OSError: it cannot be written.
    """
    descriptor = create_file(os.path.join(directory, LOG_NAME))
    try:
        end = _write_at(descriptor, encode_header(header), 0)
        if durable:
            os.fdatasync(descriptor)
    except BaseException:
        os.close(descriptor)
        raise
    return Log(directory, descriptor, header, end, durable)


def open_log(directory: str, durable: bool) -> tuple[Log, Table]:
    """The log of a store that this process has locked, and what it says. What lies behind the last
    whole record is cut off.

    Raises:
        DamagedHeaderError, OtherVersionError: see `decode_header`.
        OSError: it cannot be read, or is not there.
    """
    reader = LogReader(directory, writable=True)
    try:
        reader.follow()
        os.ftruncate(reader.descriptor, reader.position)
    except BaseException:
        reader.close()
        raise
    log = Log(directory, reader.descriptor, reader.header, reader.position, durable)
    return log, reader.table


class LogReader:
    """Reads a log that may grow meanwhile.

    Args:
        directory: of the store.
        writable: open the file for its owner.

    Attributes:
        header: of the log.
        table: what was read so far.
        position: offset behind the last whole record that was read.

    Raises:
        DamagedHeaderError, OtherVersionError: see `decode_header`.
        OSError: it cannot be read, or is not there.
    """

    def __init__(self, directory: str, *, writable: bool = False) -> None:
        path = os.path.join(directory, LOG_NAME)
        self.descriptor = open_file(path, os.O_RDWR if writable else os.O_RDONLY)
        try:
            self.header = decode_header(os.pread(self.descriptor, HEADER_BYTES, 0))
        except BaseException:
            os.close(self.descriptor)
            raise
        self.table = Table(self.header.next_segment)
        self.position = HEADER_BYTES

    def pending(self) -> int | None:
        """Bytes not read yet; None if this is no longer the log: it was replaced, truncated or
        removed.
        """
        found = os.fstat(self.descriptor)
        if found.st_nlink == 0 or found.st_size < self.position:
            return None
        return found.st_size - self.position

    def follow(self, gone: list[BlockKey] | None = None) -> None:
        """Read to the end, or to the first record of which only damaged ones come after.

        Args:
            gone: keys of blocks that left are added here.
        """
        at = self.position
        while len(data := os.pread(self.descriptor, _CHUNK_RECORDS * RECORD_BYTES, at)) > 0:
            for end, record in decode(data, self.header.store):
                key = self.table.apply(record)
                self.position = at + end
                if key is not None and gone is not None:
                    gone.append(key)
            if len(data) < RECORD_BYTES:
                break
            at += len(data) - len(data) % RECORD_BYTES

    def close(self) -> None:
        """Let go of the file."""
        os.close(self.descriptor)


def read_records(path: str, store: int) -> list[Record]:
    """The whole records of a file of requests.

    Raises:
        OSError: it cannot be read.
    """
    descriptor = open_file(path, os.O_RDONLY)
    try:
        chunks = []
        while chunk := os.read(descriptor, 1 << 20):
            chunks.append(chunk)
    finally:
        os.close(descriptor)
    return [record for _, record in decode(b"".join(chunks), store)]


def write_records(directory: str, name: str, records: Iterable[Record], store: int) -> None:
    """Put a file of requests into a directory, whole at once.

    Raises:
        OSError: it cannot be written.
    """
    temp = os.path.join(directory, temp_name())
    descriptor = create_file(temp)
    try:
        try:
            _write_at(descriptor, b"".join(encode(record, store) for record in records), 0)
        finally:
            os.close(descriptor)
        os.rename(temp, os.path.join(directory, name))
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temp)
        raise


def _write_at(descriptor: int, data: bytes, offset: int) -> int:
    """Write all of `data`; the offset behind it."""
    left = memoryview(data)
    while left:
        count = os.pwrite(descriptor, left, offset)
        left = left[count:]
        offset += count
    return offset
