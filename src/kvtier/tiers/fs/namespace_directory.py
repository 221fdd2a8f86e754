"""The directory of one namespace below a root: made, described, and held while it is in use.

    <root>/<namespace>/namespace.json     what the namespace stands for; flock'ed shared by whoever
                                          has it open, so that a sweeper can tell which are live

A root is never made: one that vanished is a mount that is gone, and must not be replaced by the
disk below. For the same reason a namespace is not made anew on another file system than before,
unless that carries the mark of a root.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import re
import stat
import threading
import time
from typing import TYPE_CHECKING

from kvtier.tiers.fs.io import sync_directory, write_all
from kvtier.tiers.fs.marker import MARKER_FILE
from kvtier.tiers.fs.temporary import TempNames

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from kvtier.core.types import BlockKey

logger = logging.getLogger(__name__)

FAN_OUT_DIGITS = 2
"""Of a key, in hex: the directory that its file lies in."""

FAN_OUT_NAME = re.compile(rf"[0-9a-f]{{{FAN_OUT_DIGITS}}}")
"""Matches the name of such a directory as a whole."""

NAMESPACE_FILE = "namespace.json"

FILE_MODE = 0o600
DIRECTORY_MODE = 0o700
WRITE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW

_HOLD_AGAIN_S = 1.0
_NEVER = float("inf")
_NO_LOCKS = frozenset((errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EINVAL))


def block_path(key: BlockKey) -> str:
    """Where a block's file lies below its namespace."""
    name = key.hex()
    return f"{name[:FAN_OUT_DIGITS]}/{name}"


class NamespaceDirectory:
    """Makes, describes and holds `<root>/<namespace>`. Thread safe.

    Args:
        root: an existing directory.
        namespace: hex digest.
        description: written to `namespace.json` unless that exists; must hold no secret.
        durable: sync what is made here.
        clock: seconds, monotonic.

    Raises:
        OSError: the root is gone, or the directory or its description cannot be written.
    """

    def __init__(
        self,
        root: Path | str,
        namespace: str,
        description: Mapping[str, object] | None = None,
        durable: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.root = os.path.abspath(root)
        self.path = os.path.join(self.root, namespace)
        self.temp_names = TempNames()
        self._file = os.path.join(self.path, NAMESPACE_FILE)
        self._text = json.dumps(dict(description or {}), indent=2, sort_keys=True) + "\n"
        self._durable = durable
        self._clock = clock
        self._device = os.stat(self.root).st_dev
        self._lock = threading.Lock()  # guards what follows
        self._closed = False
        self._held: int | None = None  # descriptor with the shared flock
        self._held_inode: tuple[int, int] | None = None
        self._hold_at = 0.0  # when to try; never while it is held
        self.make()

    def make(self) -> None:
        """Make the directory and its description, where they are missing, and hold it.

        Raises:
            OSError: the root is gone, or is another file system now; or it cannot be written.
        """
        self.check_root()
        make_directory(self.path)
        if not os.path.lexists(self._file):
            self._describe()
            if self._durable:
                sync_directory(self.path)
                sync_directory(self.root)
        self.hold_again(os.stat(self.path))

    def check_root(self) -> None:
        """Whether the root is still there, and what it was.

        Raises:
            FileNotFoundError: it is gone.
            OSError: it cannot be asked; or (ESTALE) another file system without our mark is in its
                place.
        """
        self._device = check_same_root(self.root, self._device)

    def hold(self) -> None:
        """Show that the namespace is in use, unless that is done. Quick when it is.

        A file system without locks cannot show it, and while a sweeper has the file for itself it
        is tried again later: neither is an error.
        """
        if self._clock() < self._hold_at:
            return
        with self._lock:
            if self._clock() < self._hold_at or self._closed:
                return
            self._hold_at = self._clock() + _HOLD_AGAIN_S
            try:
                descriptor = self._open_description()
            except OSError:
                return  # wiped meanwhile
            try:
                fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
                there = os.path.samestat(os.fstat(descriptor), os.stat(self._file))
                directory = os.stat(self.path)
            except OSError as error:
                os.close(descriptor)
                if error.errno in _NO_LOCKS:
                    self._hold_at = _NEVER
                    logger.info("%s cannot be locked: %s", self._file, error.strerror)
                return
            if not there:
                os.close(descriptor)  # removed between the two calls, as that of a dead namespace
                return
            self._hold_at = _NEVER
            self._held = descriptor
            self._held_inode = (directory.st_dev, directory.st_ino)

    def hold_again(self, found: os.stat_result) -> None:
        """Hold the directory that is there now, if it is not the one that is held.

        Args:
            found: `stat` of the directory, as it is now.
        """
        if (found.st_dev, found.st_ino) == self._held_inode:
            return
        with self._lock:
            self._let_go()
        self.hold()

    def close(self) -> None:
        """Let go of the namespace."""
        with self._lock:
            self._closed = True
            self._let_go()

    def _let_go(self) -> None:
        if self._held is not None:
            os.close(self._held)
            self._held = None
            self._held_inode = None
            self._hold_at = 0.0

    def _open_description(self) -> int:
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            return os.open(self._file, flags)
        except FileNotFoundError:
            # removed as that of a dead namespace, while somebody wrote the first block again
            self._describe()
            return os.open(self._file, flags)

    def _describe(self) -> None:
        temp = os.path.join(self.path, self.temp_names.new())
        descriptor = os.open(temp, WRITE_FLAGS, FILE_MODE)
        try:
            try:
                own_mode(descriptor)
                write_all(descriptor, (memoryview(self._text.encode()),))
                if self._durable:
                    os.fdatasync(descriptor)
            finally:
                os.close(descriptor)
            os.rename(temp, self._file)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temp)
            raise


def check_same_root(root: str, device: int) -> int:
    """Whether a root is still there, and what it was.

    Args:
        root: path of the directory.
        device: of the file system that it was on.

    Returns:
        The device now.

    Raises:
        FileNotFoundError: it is gone.
        OSError: it cannot be asked; or (ESTALE) another file system without our mark is in its
            place.
    """
    now = os.stat(root).st_dev
    if now != device and not os.path.lexists(os.path.join(root, MARKER_FILE)):
        raise OSError(
            errno.ESTALE,
            f"another file system than before, without {MARKER_FILE}: was it unmounted?",
            root,
        )
    return now


def make_directory(path: str) -> None:
    """Make one directory, with mode 0700; one that is there is fine.

    Raises:
        OSError: it cannot be made.
    """
    try:
        os.mkdir(path, DIRECTORY_MODE)
    except FileExistsError:
        return
    # a umask can only take bits away; this one took the owner's
    if stat.S_IMODE(os.stat(path).st_mode) & DIRECTORY_MODE != DIRECTORY_MODE:
        os.chmod(path, DIRECTORY_MODE)


def own_mode(descriptor: int) -> None:
    """Give a new file the mode 0600, also where the umask took bits of the owner's."""
    if stat.S_IMODE(os.fstat(descriptor).st_mode) != FILE_MODE:
        os.fchmod(descriptor, FILE_MODE)
