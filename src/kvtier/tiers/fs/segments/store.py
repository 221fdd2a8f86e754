"""The directory of a store, as the process that owns it sees it.

A store is made under another name, with its lock taken, and renamed: nobody ever sees one that is
half made, or one of a living process that is not locked. It is owned by whoever holds its lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
from typing import TYPE_CHECKING

from kvtier.tiers.fs.io import sync_directory
from kvtier.tiers.fs.namespace_directory import make_directory
from kvtier.tiers.fs.segments.log import (
    LOG_NAME,
    Log,
    create_log,
    open_log,
    read_records,
    write_records,
)
from kvtier.tiers.fs.segments.paths import TEMP_SUFFIX, create_file, open_file, temp_name
from kvtier.tiers.fs.segments.records import Header, Record
from kvtier.tiers.fs.segments.segment import (
    SegmentFile,
    create_segment,
    open_segment,
    segment_number,
    segment_path,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvtier.tiers.fs.segments.table import Table

STORES_NAME = "stores"
LOCK_NAME = "lock"
REQUESTS_NAME = "requests"
REQUEST_SUFFIX = ".request"

ABANDONED_S = 60.0
"""A store or a request takes less to make."""

_ID_DIGITS = 16


class Store:
    """A store whose lock this process holds.

    Args:
        directory: of the store.
        lock: descriptor that holds the lock.
        log: opened by this process.
        next_segment: a number that no segment of the store has had.
        direct: try direct I/O.
        durable: sync names of new files.
    """

    def __init__(
        self, directory: str, lock: int, log: Log, next_segment: int, direct: bool, durable: bool
    ) -> None:
        self.directory = directory
        self.log = log
        self.next_segment = next_segment
        self._lock = lock
        self._direct = direct
        self._durable = durable

    @property
    def name(self) -> str:
        """The store's id, 16 hex digits."""
        return os.path.basename(self.directory)

    def is_whole(self) -> bool:
        """Whether lock, log and directory still are what this process made or found."""
        return os.fstat(self._lock).st_nlink > 0 and self.log.is_whole()

    def create_segment(self, nbytes: int) -> tuple[int, SegmentFile]:
        """A new segment of `nbytes`, and its number. One caller at a time.

        Raises:
            OSError: the disk is full, or the store was wiped.
        """
        number = self.next_segment
        file = create_segment(self.directory, number, nbytes, self._direct)
        self.next_segment = number + 1
        if self._durable:
            sync_directory(self.directory)
        return number, file

    def open_segment(self, number: int) -> SegmentFile:
        """A segment that an earlier owner made.

        Raises:
            OSError: it is not there.
        """
        return open_segment(self.directory, number, self._direct, writable=True)

    def segment_numbers(self) -> list[int]:
        """Numbers of the segments that are there."""
        numbers = map(segment_number, os.listdir(self.directory))
        return sorted(number for number in numbers if number is not None)

    def remove_segment(self, number: int) -> int:
        """Remove the file of a segment; its length, or 0 if it was not there.

        Raises:
            OSError: the medium failed.
        """
        return _remove(segment_path(self.directory, number))

    def take_requests(self, now_s: float) -> list[Record]:
        """What others ask of the owner, each once. What they were killed over goes too.

        Args:
            now_s: seconds since the epoch, by the clock that the files' times come from.

        Raises:
            OSError: the medium failed.
        """
        directory = os.path.join(self.directory, REQUESTS_NAME)
        records: list[Record] = []
        for name in sorted(os.listdir(directory)):
            path = os.path.join(directory, name)
            if name.endswith(REQUEST_SUFFIX):
                with contextlib.suppress(OSError):  # no file of ours: it goes, or stays for good
                    try:
                        records += read_records(path, int(self.name, 16))
                    finally:
                        os.unlink(path)
            elif name.endswith(TEMP_SUFFIX):
                with contextlib.suppress(FileNotFoundError):
                    if now_s - os.lstat(path).st_mtime > ABANDONED_S:
                        os.unlink(path)
        return records

    def sweep(self) -> None:
        """Remove the temporary files of an earlier owner."""
        for name in os.listdir(self.directory):
            if name.endswith(TEMP_SUFFIX):
                _remove(os.path.join(self.directory, name))

    def close(self) -> None:
        """Let go of the store; whoever locks it next owns it."""
        self.log.close()
        os.close(self._lock)

    def destroy(self) -> int:
        """Remove the store, and let go of it; the bytes of the segments that were removed."""
        freed = 0
        try:
            with contextlib.suppress(FileNotFoundError):
                freed = remove_store_files(self.directory)
        finally:
            self.close()
        return freed


def create_store(stores: str, namespace: str, *, direct: bool, durable: bool) -> Store:
    """A new, empty store of this process.

    Args:
        stores: the directory that the stores of the namespace lie in.
        namespace: its hex digest.
        direct: try direct I/O.
        durable: sync what makes it survive a loss of power.

    Raises:
        OSError: it cannot be made.
    """
    make_directory(stores)
    identity = secrets.token_hex(_ID_DIGITS // 2)
    temp = os.path.join(stores, temp_name())
    make_directory(temp)
    lock = -1
    try:
        make_directory(os.path.join(temp, REQUESTS_NAME))
        lock = create_file(os.path.join(temp, LOCK_NAME))
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        create_log(temp, Header(int(identity, 16), namespace, 0), durable).close()
        if durable:
            sync_directory(temp)
        directory = os.path.join(stores, identity)
        os.rename(temp, directory)
    except BaseException:
        if lock >= 0:
            os.close(lock)
        with contextlib.suppress(OSError):
            remove_store_files(temp)
        raise
    if durable:
        sync_directory(stores)
        sync_directory(os.path.dirname(stores))
    log, table = open_log(directory, durable)
    return Store(directory, lock, log, table.next_segment, direct, durable)


def lock_store(directory: str) -> int | None:
    """Take the lock of a store whose owner is gone.

    Returns:
        The descriptor that holds it; None if the owner lives, or there is no such store.

    Raises:
        OSError: the medium failed, or permissions.
    """
    path = os.path.join(directory, LOCK_NAME)
    try:
        descriptor = open_file(path, os.O_RDWR)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(descriptor), os.stat(path)):  # not removed before we had it
            return descriptor
    except (BlockingIOError, FileNotFoundError):
        pass
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


def adopt_store(directory: str, lock: int, *, direct: bool, durable: bool) -> tuple[Store, Table]:
    """Own a store that this process has locked, and read its log: some seconds for 10^6 records.

    Returns:
        The store and its blocks.

    Raises:
        DamagedHeaderError, OtherVersionError: see `decode_header`.
        OSError: the medium failed, or the log is not there.
    """
    log, table = open_log(directory, durable)
    store = Store(directory, lock, log, table.next_segment, direct, durable)
    store.next_segment = max([store.next_segment, *(n + 1 for n in store.segment_numbers())])
    return store, table


def sweep_unborn(stores: str, now_s: float) -> None:
    """Remove what processes that were killed while they made a store left behind.

    Args:
        stores: the directory that the stores of the namespace lie in.
        now_s: seconds since the epoch, by the clock that the files' times come from.

    Raises:
        OSError: the medium failed.
    """
    for name in os.listdir(stores):
        path = os.path.join(stores, name)
        if not name.endswith(TEMP_SUFFIX) or now_s - os.lstat(path).st_mtime < ABANDONED_S:
            continue
        if os.path.lexists(os.path.join(path, LOCK_NAME)):
            lock = lock_store(path)
            if lock is None:
                continue
            os.close(lock)
        remove_store_files(path)


def store_directories(stores: str) -> list[str]:
    """The stores of a namespace.

    Raises:
        OSError: the medium failed.
    """
    try:
        names = os.listdir(stores)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [os.path.join(stores, name) for name in sorted(names) if _is_store_name(name)]


def remove_store_files(directory: str) -> int:
    """Remove a store that nobody owns or that the caller does; what is not ours stays.

    Returns:
        The bytes of its segments.
    """
    freed = 0
    requests = os.path.join(directory, REQUESTS_NAME)
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir(requests):
            if name.endswith((REQUEST_SUFFIX, TEMP_SUFFIX)):
                _remove(os.path.join(requests, name))
    for name in os.listdir(directory):
        if segment_number(name) is not None:
            freed += _remove(os.path.join(directory, name))
        elif name == LOG_NAME or name.endswith(TEMP_SUFFIX):
            _remove(os.path.join(directory, name))
    with contextlib.suppress(OSError):  # a foreign file keeps its directory
        os.rmdir(requests)
    _remove(os.path.join(directory, LOCK_NAME))
    with contextlib.suppress(OSError):
        os.rmdir(directory)
    return freed


def request(directory: str, records: Iterable[Record]) -> None:
    """Ask the owner of a store for something; it obeys within about a second.

    Raises:
        OSError: it cannot be written, or the store is gone.
    """
    name = temp_name().removesuffix(TEMP_SUFFIX) + REQUEST_SUFFIX
    store = int(os.path.basename(directory), 16)
    write_records(os.path.join(directory, REQUESTS_NAME), name, records, store)


def _is_store_name(name: str) -> bool:
    return len(name) == _ID_DIGITS and all(digit in "0123456789abcdef" for digit in name)


def _remove(path: str) -> int:
    """Remove a file; its length, or 0 if there was none."""
    try:
        nbytes = os.lstat(path).st_size
        os.unlink(path)
    except FileNotFoundError:
        return 0
    return nbytes
