"""The blocks of the `files` layout as a tool sees them: one file each, named by its key.

    <namespace>/<2 hex>/<key hex>

A block is published by a rename and never changed, so a file that is open is one whole block, and
removing a block is removing its file, whoever reads it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import stat
from typing import TYPE_CHECKING

from kvtier.core.types import BlockKey
from kvtier.envelope import BLOCK_BYTES_MAX, MAX_KEY_BYTES
from kvtier.errors import EnvelopeError, MissingBlockError
from kvtier.tiers.fs.accounts import rounded
from kvtier.tiers.fs.catalog_capacity import give_back
from kvtier.tiers.fs.catalog_findings import BlockEntry, Deleted, Findings
from kvtier.tiers.fs.namespace_directory import FAN_OUT_NAME, NAMESPACE_FILE, block_path
from kvtier.tiers.fs.segments.store import STORES_NAME
from kvtier.tiers.fs.temporary import is_temp

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvtier.tiers.fs.page_buffer import PageBuffer

_NAME = re.compile(rf"(?:[0-9a-f]{{2}}){{2,{MAX_KEY_BYTES}}}")
_OURS_IN_NAMESPACE = frozenset({NAMESPACE_FILE, STORES_NAME})
_READ_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW


class FileBlocks:
    """See the module.

    Args:
        path: of the namespace's directory.
    """

    layout = "files"

    def __init__(self, path: str) -> None:
        self._path = path

    def path_of(self, key: BlockKey) -> str:
        """Where the block's file is, if there is one."""
        return f"{self._path}/{block_path(key)}"

    def disk_bytes(self) -> None:
        """Nothing but the blocks."""

    def blocks(self, findings: Findings) -> Iterator[BlockEntry]:
        """Every block, one directory after the other."""
        for entry in _scan(self._path, findings):
            if FAN_OUT_NAME.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
                yield from self._blocks_in(entry, findings)
            elif is_temp(entry.name):
                findings.temporary(entry)
            elif entry.name not in _OURS_IN_NAMESPACE:
                findings.foreign(entry.path)

    def read(
        self, entry: BlockEntry, buffer: PageBuffer, nbytes: int = BLOCK_BYTES_MAX
    ) -> memoryview:
        """Header and row, from the medium and not from the page cache where that is possible."""
        path = self.path_of(entry.key)
        descriptor = _open(path)
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise MissingBlockError(f"{path} is no file")
            if found.st_size > BLOCK_BYTES_MAX:
                raise EnvelopeError(f"length: {path} has {found.st_size} bytes, no block has")
            return _read_all(descriptor, buffer.view(min(found.st_size, nbytes)))
        finally:
            os.close(descriptor)

    def delete(self, entries: Sequence[BlockEntry], unless_used: bool = False) -> Deleted:
        """Unlink the files."""
        deleted = Deleted()
        room = 0
        for entry in entries:
            path = self.path_of(entry.key)
            try:
                if unless_used and os.stat(path, follow_symlinks=False).st_mtime > entry.last_use_s:
                    deleted.kept += 1
                    continue
                os.unlink(path)
            except FileNotFoundError:
                deleted.kept += 1
            except OSError as error:
                deleted.failures.append((entry, error.strerror or str(error)))
            else:
                deleted.blocks += 1
                deleted.nbytes += entry.nbytes
                room += rounded(entry.nbytes)
        give_back(os.path.dirname(self._path), room)
        return deleted

    def is_used(self) -> bool:
        """Files belong to nobody."""
        return False

    def clear(self, findings: Findings) -> None:
        """Remove the directories of blocks and the files of writers that are no more."""
        for entry in _scan(self._path, findings):
            if is_temp(entry.name):
                _unlink(entry.path)
            elif FAN_OUT_NAME.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
                for inner in _scan(entry.path, findings):
                    if is_temp(inner.name):
                        _unlink(inner.path)
                with contextlib.suppress(OSError):
                    os.rmdir(entry.path)

    def _blocks_in(self, directory: os.DirEntry[str], findings: Findings) -> Iterator[BlockEntry]:
        for entry in _scan(directory.path, findings):
            if is_temp(entry.name):
                findings.temporary(entry)
                continue
            if not (_NAME.fullmatch(entry.name) and entry.name.startswith(directory.name)):
                findings.foreign(entry.path)
                continue
            try:
                found = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue  # evicted meanwhile
            except OSError as error:
                findings.unreadable(entry.path, error)
                continue
            if not stat.S_ISREG(found.st_mode):
                findings.foreign(entry.path)
                continue
            yield BlockEntry(BlockKey(bytes.fromhex(entry.name)), found.st_size, found.st_mtime)


def _scan(path: str, findings: Findings) -> Iterator[os.DirEntry[str]]:
    """Entries of a directory; of one that vanished, none."""
    try:
        with os.scandir(path) as entries:
            yield from entries
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        findings.unreadable(path, error)


def _open(path: str) -> int:
    """A descriptor that bypasses the page cache where the file system can."""
    try:
        try:
            return os.open(path, _READ_FLAGS | os.O_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return os.open(path, _READ_FLAGS)
    except FileNotFoundError:
        raise MissingBlockError(f"no file {path}") from None
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise MissingBlockError(f"{path} is a symbolic link, not a block") from None
        raise


def _read_all(descriptor: int, into: memoryview) -> memoryview:
    """Fill `into` from the start of the file; what the file has less is left off."""
    got = 0
    while got < into.nbytes:
        try:
            count = os.preadv(descriptor, [into[got:]], got)
        except OSError as error:
            # a read that ends within a page, or a file system that took the flag and refuses it
            flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
            if error.errno != errno.EINVAL or not flags & os.O_DIRECT:
                raise
            fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
            continue
        if count == 0:
            break
        got += count
    return into[:got]


def _unlink(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
