"""The files of slots: making them, and moving many blocks with few calls.

Each file has two descriptors. Direct I/O is tried first; what the kernel refuses for its alignment
goes through the page cache, which the kernel keeps coherent with it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from typing import TYPE_CHECKING, NamedTuple

from kvtier.errors import MissingBlockError
from kvtier.tiers.fs.segments.paths import allocate, create_file, open_file
from kvtier.tiers.fs.segments.sync import GroupSync

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvtier.tiers.base import Buffers

SEGMENT_SUFFIX = ".segment"

IOV_MAX = 1024
"""Buffers that Linux takes in one call."""


class SegmentFile:
    """An open segment. It stays open while somebody is within `enter` and `leave`.

    Args:
        path: of the file.
        descriptor: open for reading, and for writing if it is this process's; taken over.
        direct: try direct I/O.
    """

    def __init__(self, path: str, descriptor: int, direct: bool) -> None:
        self.path = path
        self._buffered = descriptor
        self._direct = self._open_direct() if direct else -1
        self._lock = threading.Lock()
        self._users = 0
        self._retired = False
        self._sync = GroupSync(self._sync_once)

    def enter(self) -> bool:
        """Keep the file open until `leave`; False if it was retired."""
        with self._lock:
            if self._retired:
                return False
            self._users += 1
            return True

    def leave(self) -> None:
        """Undo one `enter`."""
        with self._lock:
            self._users -= 1
            if self._retired and self._users == 0:
                self._close()

    def retire(self) -> None:
        """Close the file once nobody uses it. Nobody can enter any more."""
        with self._lock:
            if not self._retired:
                self._retired = True
                if self._users == 0:
                    self._close()

    def nbytes(self) -> int:
        """Length of the file; -1 once it has no name any more."""
        found = os.fstat(self._buffered)
        return found.st_size if found.st_nlink else -1

    def read(self, offset: int, into: Sequence[memoryview]) -> int:
        """Fill `into` from `offset` on; one call unless it comes up short.

        Returns:
            The number of bytes read: less than `into` holds if the file ends before.

        Raises:
            OSError: the medium failed.
        """
        return self._move(os.preadv, offset, into)

    def write(self, offset: int, data: Sequence[memoryview]) -> None:
        """Write all of `data` from `offset` on; one call unless it comes up short.

        Raises:
            OSError: the medium failed, or is full.
        """
        if self._move(os.pwritev, offset, data) != sum(view.nbytes for view in data):
            raise OSError(errno.EIO, f"{self.path} takes no more bytes")

    def sync(self) -> None:
        """Have what was written before survive a loss of power; threads share a sync.

        Raises:
            OSError: the medium failed.
        """
        self._sync.sync()

    def _sync_once(self) -> None:
        os.fdatasync(self._buffered)

    def _move(
        self,
        call: Callable[[int, Sequence[memoryview], int], int],
        offset: int,
        views: Sequence[memoryview],
    ) -> int:
        descriptor = self._direct if self._direct >= 0 else self._buffered
        left = [view for view in views if view.nbytes]
        moved = 0
        while left:
            try:
                count = call(descriptor, left[:IOV_MAX], offset + moved)
            except OSError as error:
                if error.errno != errno.EINVAL or descriptor == self._buffered:
                    raise
                descriptor = self._buffered
                continue
            if count == 0:
                break
            moved += count
            left = _behind(left, count)
        return moved

    def _open_direct(self) -> int:
        """Another descriptor of the same file, or -1."""
        flags = fcntl.fcntl(self._buffered, fcntl.F_GETFL) & os.O_ACCMODE
        try:
            descriptor = open_file(self.path, flags | os.O_DIRECT)
        except OSError:
            return -1  # a file system without it
        if os.path.samestat(os.fstat(descriptor), os.fstat(self._buffered)):
            return descriptor
        os.close(descriptor)
        return -1

    def _close(self) -> None:
        os.close(self._buffered)
        if self._direct >= 0:
            os.close(self._direct)


def segment_path(directory: str, number: int) -> str:
    """Where segment `number` of a store lies."""
    return f"{directory}/{number}{SEGMENT_SUFFIX}"


def segment_number(name: str) -> int | None:
    """The number in the name of a segment's file; None for other names."""
    stem, dot, suffix = name.partition(".")
    if dot + suffix == SEGMENT_SUFFIX and stem.isdecimal() and str(int(stem)) == stem:
        return int(stem)
    return None


def create_segment(directory: str, number: int, nbytes: int, direct: bool) -> SegmentFile:
    """A new segment that has its room already, where the file system can promise that.

    Raises:
        OSError: ENOSPC, EDQUOT, ...; no file is left behind.
    """
    path = segment_path(directory, number)
    descriptor = create_file(path)
    try:
        allocate(descriptor, nbytes)
        return SegmentFile(path, descriptor, direct)
    except BaseException:
        os.close(descriptor)
        os.unlink(path)
        raise


def open_segment(directory: str, number: int, direct: bool, *, writable: bool) -> SegmentFile:
    """A segment that is there.

    Raises:
        OSError: it is not, or is something else.
    """
    path = segment_path(directory, number)
    return SegmentFile(path, open_file(path, os.O_RDWR if writable else os.O_RDONLY), direct)


class Piece(NamedTuple):
    """One block to be moved.

    Attributes:
        position: the caller's own number for it.
        file: segment that holds it.
        slot: in that segment.
        slot_bytes: size of its slots.
        views: the block's buffers.
        length: sum of their lengths.
    """

    position: int
    file: SegmentFile
    slot: int
    slot_bytes: int
    views: Buffers
    length: int


def move(pieces: Sequence[Piece], *, write: bool) -> dict[int, Exception]:
    """Read or write blocks: one call for each run of adjacent slots.

    A run that fails is moved again block by block, so that one bad block costs itself alone.

    Returns:
        What went wrong, by `position`: `MissingBlockError` if a file ends before the block does,
        `OSError` if the medium failed.
    """
    failures: dict[int, Exception] = {}
    for run in _runs(pieces):
        error = _move_run(run, write)
        if error is None:
            continue
        if len(run) == 1:
            failures[run[0].position] = error
            continue
        for piece in run:
            error = _move_run([piece], write)
            if error is not None:
                failures[piece.position] = error
    return failures


def _runs(pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    """Pieces that lie one behind the other without a gap."""
    run: list[Piece] = []
    for piece in sorted(pieces, key=lambda piece: (id(piece.file), piece.slot)):
        if run and not (
            piece.file is run[-1].file
            and piece.slot == run[-1].slot + 1
            and run[-1].length == run[-1].slot_bytes
        ):
            yield run
            run = []
        run.append(piece)
    if run:
        yield run


def _move_run(run: Sequence[Piece], write: bool) -> Exception | None:
    first = run[0]
    views = [view for piece in run for view in piece.views]
    offset = first.slot * first.slot_bytes
    try:
        if write:
            first.file.write(offset, views)
        elif first.file.read(offset, views) != sum(piece.length for piece in run):
            return MissingBlockError(f"{first.file.path} ends before the block does")
    except OSError as error:
        return error
    return None


def _behind(views: list[memoryview], count: int) -> list[memoryview]:
    """What is left of `views` behind their first `count` bytes."""
    for i, view in enumerate(views):
        if count < view.nbytes:
            return [view.cast("B")[count:], *views[i + 1 :]]
        count -= view.nbytes
    return []
