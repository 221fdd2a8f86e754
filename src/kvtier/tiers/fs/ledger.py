"""The file that holds the accounts of a root; changed only under its lock.

    offset 0        copy A     each: magic, sequence, length, checksum, then msgpack
    offset 64 KiB   copy B

1. A change goes over the older copy. A writer that is killed in the middle leaves the newer one.
2. Both copies damaged (a power cut, a file system that lost it): the accounts start anew, unknown,
   and an inventory fills them. Nothing is granted until then.
3. No fsync: after a power cut an old copy may be read, and the next inventory corrects it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import struct
import threading
import time
from typing import TYPE_CHECKING

import msgspec
import xxhash

from kvtier.errors import KVTierError
from kvtier.tiers.fs.accounts import Accounts
from kvtier.tiers.fs.locks import lock_within, names_it, unlock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

logger = logging.getLogger(__name__)

LEDGER_FILE = "ledger"

COPY_BYTES = 64 * 1024
"""Room for one copy: some 1,000 members."""

_MAGIC = b"KVLEDGER"
_HEADER = struct.Struct("<8sQQQ")  # magic, sequence, length, checksum
_OPEN_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
_FILE_MODE = 0o600

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Accounts).decode


class LedgerBusyError(KVTierError):
    """Somebody kept the ledger locked all the time that there was. Never leaves the tier."""


class LedgerFile:
    """The accounts of a root on disk. Thread safe.

    Args:
        path: of the file, made if it is not there; its directory exists.
        clock: seconds, monotonic.

    Raises:
        OSError: it cannot be made, opened or written.
    """

    def __init__(self, path: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.path = path
        self._clock = clock
        self._mutex = threading.Lock()  # a file lock does not keep threads of one owner apart
        self._descriptor = os.open(path, _OPEN_FLAGS, _FILE_MODE)
        self._told_damage = False

    @contextlib.contextmanager
    def change(self, timeout_s: float) -> Iterator[Accounts]:
        """The accounts under the lock; what the body changes is written unless it raises.

        Args:
            timeout_s: how long to try for the lock.

        Raises:
            LedgerBusyError: somebody kept it.
            OSError: the medium failed, or the accounts do not fit. They are as before then.
        """
        deadline = self._clock() + timeout_s
        if not self._mutex.acquire(timeout=timeout_s):
            raise LedgerBusyError(f"{self.path} is in use in this process")
        try:
            left = max(0.0, deadline - self._clock())
            if not lock_within(self._descriptor, left, clock=self._clock):
                raise LedgerBusyError(f"{self.path} is locked by another process")
            try:
                sequence, accounts = self._read()
                before = _encode(accounts)
                yield accounts
                after = _encode(accounts)
                if after != before or sequence == 0:
                    self._write(sequence + 1, after)
            finally:
                unlock(self._descriptor)
        finally:
            self._mutex.release()

    def is_current(self) -> bool:
        """Whether the file still lies where it was opened.

        Raises:
            OSError: the medium failed.
        """
        return names_it(self.path, self._descriptor)

    def close(self) -> None:
        """Close the file; calls that follow raise OSError."""
        with self._mutex:
            descriptor, self._descriptor = self._descriptor, -1
            if descriptor >= 0:
                os.close(descriptor)

    def _read(self) -> tuple[int, Accounts]:
        """The newest readable copy and its sequence; 0 and new accounts if there is none."""
        content = os.pread(self._descriptor, 2 * COPY_BYTES, 0)
        best: tuple[int, bytes] = (0, b"")
        for start in (0, COPY_BYTES):
            found = _opened(content[start : start + COPY_BYTES])
            if found is not None and found[0] > best[0]:
                best = found
        if best[0]:
            with contextlib.suppress(msgspec.DecodeError):
                return best[0], _decode(best[1])
        if content and not self._told_damage:
            self._told_damage = True
            logger.warning(
                "%s is damaged: the tier reads blocks as before, and writes again once it has "
                "counted what lies on disk",
                self.path,
            )
        return 0, Accounts()

    def _write(self, sequence: int, payload: bytes) -> None:
        if _HEADER.size + len(payload) > COPY_BYTES:
            raise OSError(f"{self.path} has no room for so many members")
        header = _HEADER.pack(_MAGIC, sequence, len(payload), _checksum(sequence, payload))
        # the whole copy, so that its space is there when the disk is full
        copy = (header + payload).ljust(COPY_BYTES if sequence <= 2 else 0, b"\0")
        written = os.pwrite(self._descriptor, copy, sequence % 2 * COPY_BYTES)
        if written != len(copy):
            raise OSError(f"{self.path}: {written} of {len(copy)} bytes were written")


def _checksum(sequence: int, payload: bytes) -> int:
    return xxhash.xxh3_64_intdigest(payload, seed=sequence)


def _opened(copy: bytes) -> tuple[int, bytes] | None:
    """Sequence and payload of one copy; None if it is damaged."""
    if len(copy) < _HEADER.size:
        return None
    magic, sequence, length, checksum = _HEADER.unpack_from(copy)
    payload = copy[_HEADER.size : _HEADER.size + length]
    if magic != _MAGIC or len(payload) != length or checksum != _checksum(sequence, payload):
        return None
    return sequence, payload
