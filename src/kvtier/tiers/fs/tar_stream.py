"""Tar archives as streams, in bounded memory and without anything but plain files.

`tarfile` keeps every member it met and reads extended headers of any length into memory, and both
grow with what a stranger sent. Here a member is its 512-byte header and its content; long names
come in GNU's form; whatever else an archive may have ends the reading.
"""

from __future__ import annotations

import tarfile
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO

from kvtier.errors import ArchiveError

if TYPE_CHECKING:
    from collections.abc import Sequence

_RECORD_BYTES = tarfile.BLOCKSIZE
_NAME_BYTES_MAX = 1024
_PLAIN_TYPES = (tarfile.REGTYPE, tarfile.AREGTYPE)
_SKIP_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Member:
    """A member's header.

    Attributes:
        name: as the archive has it; may be anything.
        nbytes: length of the content.
        is_file: a plain file; no link, directory or device.
    """

    name: str
    nbytes: int
    is_file: bool


class TarWriter:
    """Writes members one after the other. `out` needs no position."""

    def __init__(self, out: BinaryIO) -> None:
        self._out = out

    def add(self, name: str, content: Sequence[memoryview | bytes], modified_s: float) -> None:
        """Append a plain file, readable and writable by its owner only."""
        info = tarfile.TarInfo(name)
        info.size = sum(memoryview(piece).nbytes for piece in content)
        info.mode = 0o600
        info.mtime = int(modified_s)
        self._out.write(info.tobuf(tarfile.GNU_FORMAT, "ascii", "strict"))
        for piece in content:
            self._out.write(piece)
        self._out.write(bytes(-info.size % _RECORD_BYTES))

    def finish(self) -> None:
        """Append the end of the archive."""
        self._out.write(bytes(2 * _RECORD_BYTES))
        self._out.flush()


class TarReader:
    """Reads members one after the other: `next_member`, then its content by `read` or `skip`.

    Args:
        source: the archive; may be a pipe.
    """

    def __init__(self, source: BinaryIO) -> None:
        self._source = source
        self._left = 0  # content of the member that was not taken yet
        self._padding = 0

    def next_member(self) -> Member | None:
        """The next member's header; None at the end of the archive.

        Raises:
            ArchiveError: not a tar archive, damaged, or cut off.
        """
        self.skip()
        info = self._header()
        if info is None:
            return None
        if info.type == tarfile.GNUTYPE_LONGNAME:
            if info.size > _NAME_BYTES_MAX:
                raise ArchiveError(f"a member's name has {info.size} bytes")
            name = self._exactly(info.size)
            self._exactly(-info.size % _RECORD_BYTES)
            info = self._header()
            if info is None:
                raise ArchiveError("the archive ends behind a member's name")
            info.name = name.rstrip(b"\0").decode("utf-8", "backslashreplace")
        is_file = info.type in _PLAIN_TYPES
        # links and directories have no content, whatever their header says
        nbytes = info.size if is_file or info.type not in tarfile.SUPPORTED_TYPES else 0
        if nbytes < 0:
            raise ArchiveError(f"the member {info.name!r} has {nbytes} bytes")
        self._left = nbytes
        self._padding = -nbytes % _RECORD_BYTES
        return Member(info.name, nbytes, is_file)

    def read(self, into: memoryview) -> None:
        """Fill `into` with the member's content; it must be as long as that.

        Raises:
            ArchiveError: cut off.
        """
        assert into.nbytes == self._left, "a member is read whole"
        got = 0
        while got < into.nbytes:
            count = self._readinto(into[got:])
            if count == 0:
                raise ArchiveError("the archive ends within a member")
            got += count
        self._left = 0

    def skip(self) -> None:
        """Pass over what is left of the member.

        Raises:
            ArchiveError: cut off.
        """
        left = self._left + self._padding
        while left:
            left -= len(self._exactly(min(left, _SKIP_BYTES)))
        self._left = self._padding = 0

    def _header(self) -> tarfile.TarInfo | None:
        record = self._exactly(_RECORD_BYTES)
        if not any(record):
            if any(self._exactly(_RECORD_BYTES)):
                raise ArchiveError("the archive has a hole")
            return None
        try:
            return tarfile.TarInfo.frombuf(record, "utf-8", "backslashreplace")
        except tarfile.HeaderError as error:
            raise ArchiveError(f"not a tar archive, or damaged: {error}") from None

    def _exactly(self, nbytes: int) -> bytes:
        got = bytearray()
        while len(got) < nbytes:
            piece = self._source.read(nbytes - len(got))
            if not piece:
                raise ArchiveError("the archive is cut off")
            got += piece
        return bytes(got)

    def _readinto(self, into: memoryview) -> int:
        readinto = getattr(self._source, "readinto", None)
        if readinto is not None:
            return int(readinto(into) or 0)
        piece = self._source.read(into.nbytes)
        into[: len(piece)] = piece
        return len(piece)
