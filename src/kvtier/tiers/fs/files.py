"""One file per block: the layout for directories that engines and hosts share.

    <root>/<namespace>/namespace.json              what the namespace stands for, for humans
    <root>/<namespace>/<2 hex>/<2 hex>/<key hex>   a block

The directory is the index; nothing else is kept. Rules:

1. A block is published by a rename within its directory, so readers see all of it or nothing, also
   when its writer is killed.
2. The two levels come from the first bytes of the key: those are a hash, the last are the group.
3. Paths are absolute. A descriptor of the namespace directory would save 0.2 us per call and go
   stale when somebody wipes the namespace or mounts the root again.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import secrets
import stat
import threading
from typing import TYPE_CHECKING

from kvtier.errors import ConfigError, MissingBlockError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from kvtier.core.types import BlockKey
    from kvtier.tiers.base import Buffers

NAMESPACE_FILE = "namespace.json"

TEMP_SUFFIX = ".tmp"

DEFAULT_SWEEP_AGE_S = 3600.0
"""No write of a block takes an hour; a file that old has lost its writer."""

_FILE_MODE = 0o600
_DIRECTORY_MODE = 0o700
_READ_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
_WRITE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
_OPEN_ATTEMPTS = 3  # a directory that vanishes between two calls is being wiped


class FilesTier:
    """Keeps blocks as files below `<root>/<namespace>`; any number of processes may share it.

    Args:
        root: an existing directory, see `check_root`.
        namespace: hex digest under which the blocks are shared.
        description: written to `namespace.json` unless that exists; must hold no secret.

    Raises:
        OSError: the namespace directory or its description cannot be written.
    """

    def __init__(
        self, root: Path, namespace: str, description: Mapping[str, object] | None = None
    ) -> None:
        self._directory = os.path.join(os.path.abspath(root), namespace)
        self._closing = threading.Event()
        # unique over hosts that share the directory: pids alone are not
        self._token = secrets.token_hex(8)
        self._temp_numbers = itertools.count()
        _make_directory(self._directory)
        path = os.path.join(self._directory, NAMESPACE_FILE)
        if not os.path.lexists(path):
            text = json.dumps(dict(description or {}), indent=2, sort_keys=True) + "\n"
            self._publish(path, (memoryview(text.encode()),))

    def exists(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Whether there is a file that is not empty, per key: one `stat` each.

        Raises:
            OSError: the medium failed; that is not the same as absent.
        """
        return [self._size(self._path(key)) > 0 for key in keys]

    def read(self, key: BlockKey, into: Buffers) -> None:
        """Read the file straight into `into`. A file of another length is removed.

        Raises:
            MissingBlockError: there is no such file, or it is not exactly as long as `into`.
            OSError: the medium failed.
        """
        path = self._path(key)
        try:
            descriptor = os.open(path, _READ_FLAGS)
        except FileNotFoundError:
            raise MissingBlockError(f"no file {path}") from None
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            raise MissingBlockError(f"{path} is a symbolic link, not a block") from None
        try:
            wanted = sum(view.nbytes for view in into)
            # one byte more than the block shows a file that is too long, without a stat
            got = _read_all(descriptor, [*into, memoryview(bytearray(1))])
        finally:
            os.close(descriptor)
        if got != wanted:
            self.delete(key)
            raise MissingBlockError(f"{path} is not a block of {wanted} bytes and was removed")

    def write(self, key: BlockKey, data: Buffers) -> None:
        """Write a file beside the others and rename it; nothing if the block is there already.

        Raises:
            OSError: disk full, quota, permissions; no temporary file is left behind.
        """
        path = self._path(key)
        if self._size(path) != sum(view.nbytes for view in data):
            self._publish(path, data)

    def delete(self, key: BlockKey) -> None:
        """Remove the block's file; absent is fine."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path(key))

    def sweep(self, older_than_s: float = DEFAULT_SWEEP_AGE_S, *, now: float) -> int:
        """Remove the temporary files that killed writers left in this namespace.

        Walks every directory: call it from a thread that nobody waits for. Ends early on `close`.

        Args:
            older_than_s: age of the last write below which a file may have a living writer.
            now: seconds since the epoch, by the clock that the files' times come from.

        Returns:
            How many were removed.
        """
        removed = 0
        pending = [self._directory]
        while pending and not self._closing.is_set():
            try:
                entries = os.scandir(pending.pop())
            except (FileNotFoundError, NotADirectoryError):
                continue  # wiped meanwhile
            with entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        pending.append(entry.path)
                    elif entry.name.endswith(TEMP_SUFFIX):
                        with contextlib.suppress(FileNotFoundError):
                            if now - entry.stat(follow_symlinks=False).st_mtime > older_than_s:
                                os.unlink(entry.path)
                                removed += 1
        return removed

    def close(self) -> None:
        """End a running sweep; blocks stay where they are."""
        self._closing.set()

    def _path(self, key: BlockKey) -> str:
        name = key.hex()
        return f"{self._directory}/{name[:2]}/{name[2:4]}/{name}"

    @staticmethod
    def _size(path: str) -> int:
        """Length of a block's file in bytes; -1 if there is none."""
        try:
            found = os.stat(path, follow_symlinks=False)
        except (FileNotFoundError, NotADirectoryError):
            return -1
        return found.st_size if stat.S_ISREG(found.st_mode) else -1

    def _publish(self, path: str, data: Buffers) -> None:
        directory = os.path.dirname(path)
        temp = f"{directory}/{os.getpid()}-{self._token}-{next(self._temp_numbers)}{TEMP_SUFFIX}"
        descriptor = self._create(temp, directory)
        try:
            try:
                # a umask can only take bits away; this one took the owner's
                if stat.S_IMODE(os.fstat(descriptor).st_mode) != _FILE_MODE:
                    os.fchmod(descriptor, _FILE_MODE)
                _write_all(descriptor, data)
            finally:
                os.close(descriptor)  # before the rename: some file systems report a full disk here
            os.rename(temp, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temp)
            raise

    def _create(self, temp: str, directory: str) -> int:
        for _ in range(_OPEN_ATTEMPTS - 1):
            try:
                return os.open(temp, _WRITE_FLAGS, _FILE_MODE)
            except FileNotFoundError:
                self._make_directories(directory)
        return os.open(temp, _WRITE_FLAGS, _FILE_MODE)

    def _make_directories(self, directory: str) -> None:
        """Make `directory` and what lies between it and the root, but never the root itself: a root
        that vanished is a mount that is gone, and must not be replaced by the disk below.
        """
        levels = os.path.relpath(directory, self._directory).split(os.sep)
        path = self._directory
        _make_directory(path)
        for level in levels:
            path = os.path.normpath(os.path.join(path, level))
            _make_directory(path)


def check_root(root: Path, setting: str) -> None:
    """Whether blocks can be kept below `root`, by creating and removing a file there.

    Args:
        root: the directory.
        setting: path of the setting that names it, for the message.

    Raises:
        ConfigError: it is missing, not a directory, or this process may not search or write it.
    """
    try:
        is_directory = stat.S_ISDIR(os.stat(root).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(
            f"{setting} is {str(root)!r}, which does not exist: create it (mkdir -p {root}), or "
            f"mount it, or set {setting} to an existing directory"
        ) from None
    except OSError as error:
        raise _unusable(root, setting, error) from error
    if not is_directory:
        raise ConfigError(
            f"{setting} is {str(root)!r}, which is not a directory: set it to a directory that "
            f"this user may write"
        )
    # access(2) alone says yes to the superuser, also on a read-only mount
    probe = root / f"{os.getpid()}-{secrets.token_hex(8)}{TEMP_SUFFIX}"
    try:
        os.listdir(root)  # the sweep and the listing need it
        os.close(os.open(probe, _WRITE_FLAGS, _FILE_MODE))
        os.unlink(probe)
    except OSError as error:
        raise _unusable(root, setting, error) from error


def _unusable(root: Path, setting: str, error: OSError) -> ConfigError:
    return ConfigError(
        f"{setting} is {str(root)!r}, where user {os.geteuid()} cannot create a file "
        f"({error.strerror}): make it readable, writable and searchable for this user (chown, "
        f"chmod, remount), or set {setting} to another directory"
    )


def _make_directory(path: str) -> None:
    """Make one directory; one that another process made is fine."""
    try:
        os.mkdir(path, _DIRECTORY_MODE)
    except FileExistsError:
        return
    if stat.S_IMODE(os.stat(path).st_mode) & _DIRECTORY_MODE != _DIRECTORY_MODE:
        os.chmod(path, _DIRECTORY_MODE)


def _read_all(descriptor: int, into: list[memoryview]) -> int:
    """Fill `into` from the start of a file; one call unless it comes up short.

    Returns:
        The number of bytes read: less than `into` holds if the file is shorter.
    """
    got = 0
    while into:
        count = os.preadv(descriptor, into, got)
        if count == 0:
            break
        got += count
        into = _behind(into, count)
    return got


def _write_all(descriptor: int, data: Buffers) -> None:
    """Write all of `data` from the start of a file; one call unless it comes up short."""
    written = 0
    left = list(data)
    while left:
        count = os.pwritev(descriptor, left, written)
        if count == 0 and any(view.nbytes > 0 for view in left):
            raise OSError(errno.EIO, "the file takes no more bytes")
        written += count
        left = _behind(left, count)


def _behind(buffers: list[memoryview], count: int) -> list[memoryview]:
    """What is left of `buffers` behind their first `count` bytes."""
    for i, view in enumerate(buffers):
        if count < view.nbytes:
            return [view.cast("B")[count:], *buffers[i + 1 :]]
        count -= view.nbytes
    return []
