"""Deletes what was chosen, if it still is what was chosen.

Never follows a link or leaves the mount. A block that is being read has an open descriptor and
survives for its reader.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvtier.tiers.fs.accounts import rounded
from kvtier.tiers.fs.inventory import Victims, VictimStore
from kvtier.tiers.fs.locks import names_it, try_lock
from kvtier.tiers.fs.namespace_directory import NAMESPACE_FILE
from kvtier.tiers.fs.scan import (
    SEGMENT,
    STORE_LOCK,
    STORE_LOG,
    STORES_DIRECTORY,
    is_held,
    opened,
)
from kvtier.tiers.fs.temporary import is_temp

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvtier.core.types import BlockKey
    from kvtier.tiers.fs.inventory import Inventory, Shelf

_REQUESTS_DIRECTORY = "requests"
_LOCK_FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(slots=True)
class Outcome:
    """What came of deleting.

    Attributes:
        namespace: of the keys.
        keys: of the block files that were deleted.
        nbytes: bytes that lie there no more.
        missing: files that somebody else had deleted.
        kept: files that were used since they were seen.
        stores: whole stores that were deleted.
        failure: why the rest was not deleted.
    """

    namespace: str
    keys: list[BlockKey] = field(default_factory=list)
    nbytes: int = 0
    missing: int = 0
    kept: int = 0
    stores: int = 0
    failure: OSError | None = None


class Remover:
    """Deletes below one root.

    Args:
        root: descriptor of the root; stays the caller's.
        stopped: asked before each file, from any thread; True ends the work early.
    """

    def __init__(self, root: int, stopped: Callable[[], bool]) -> None:
        self._root = root
        self._device = os.fstat(root).st_dev
        self._stopped = stopped

    def remove(
        self, inventory: Inventory, victims: Sequence[Victims | VictimStore]
    ) -> list[Outcome]:
        """Delete what was chosen, up to the first failure, and forget it in the inventory.

        May run on several threads, with different directories.
        """
        outcomes: list[Outcome] = []
        for victim in victims:
            place = inventory.places[victim.namespace]
            outcome = Outcome(victim.namespace)
            outcomes.append(outcome)
            try:
                if isinstance(victim, Victims):
                    self._remove_files(victim, place.shelves[victim.shelf], outcome)
                else:
                    self._remove_store(victim, outcome)
                    if not outcome.kept:
                        place.stores.pop(victim.store, None)
            except OSError as error:
                outcome.failure = error
                break
        return outcomes

    def _remove_files(self, victims: Victims, shelf: Shelf, outcome: Outcome) -> None:
        gone: list[int] = []
        with (
            opened(victims.namespace, self._root, self._device) as place,
            contextlib.ExitStack() as stack,
        ):
            stack.callback(shelf.remove, gone)
            directory = None
            if place is not None:
                directory = stack.enter_context(opened(victims.shelf, place, self._device))
            if directory is None:
                outcome.missing = len(victims.indices)
                gone += victims.indices
            else:
                for i in victims.indices:
                    if self._stopped():
                        break
                    if self._remove_file(directory, shelf, i, outcome):
                        gone.append(i)

    @staticmethod
    def _remove_file(directory: int, shelf: Shelf, i: int, outcome: Outcome) -> bool:
        """Delete one file; whether it is to be forgotten."""
        key = shelf.key(i)
        name = key.hex()
        try:
            status = os.stat(name, dir_fd=directory, follow_symlinks=False)
            if not stat.S_ISREG(status.st_mode):
                return True
            if status.st_mtime_ns != shelf.mtimes[i]:
                shelf.mtimes[i] = status.st_mtime_ns
                outcome.kept += 1
                return False
            os.unlink(name, dir_fd=directory)
        except FileNotFoundError:
            outcome.missing += 1
            return True
        outcome.keys.append(key)
        outcome.nbytes += rounded(status.st_size)
        return True

    def _remove_store(self, victim: VictimStore, outcome: Outcome) -> None:
        """Delete a store, unless somebody owns it again."""
        with contextlib.ExitStack() as stack:
            directory: int | None = self._root
            parents = []
            for name in (victim.namespace, STORES_DIRECTORY, victim.store):
                assert directory is not None, "the loop ends where a level is missing"
                parents.append(directory)
                directory = stack.enter_context(opened(name, directory, self._device))
                if directory is None:
                    outcome.missing = 1
                    return
            assert directory is not None, "as above"
            try:
                lock = os.open(STORE_LOCK, _LOCK_FLAGS | os.O_CREAT, 0o600, dir_fd=directory)
            except OSError as error:
                if error.errno in (errno.ELOOP, errno.ENOENT, errno.EISDIR):
                    return
                raise
            stack.callback(os.close, lock)
            if not try_lock(lock):
                outcome.kept = 1
                return
            self._empty_store(directory, outcome)
            try:
                os.rmdir(victim.store, dir_fd=parents[-1])
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
                    raise
            outcome.stores = 1

    def _empty_store(self, directory: int, outcome: Outcome) -> None:
        """Delete what a store is made of: first its log, so that nobody opens it any more."""
        with opened(_REQUESTS_DIRECTORY, directory, self._device) as requests:
            if requests is not None:
                for name in os.listdir(requests):
                    _unlink(requests, name)
                with contextlib.suppress(OSError):
                    os.rmdir(_REQUESTS_DIRECTORY, dir_fd=directory)
        names = os.listdir(directory)
        for name in [STORE_LOG, *filter(is_temp, names)]:
            _unlink(directory, name)
        for name in filter(SEGMENT.fullmatch, names):
            outcome.nbytes += _unlink(directory, name)
        _unlink(directory, STORE_LOCK)

    def is_held(self, namespace: str) -> bool:
        """Whether somebody uses a namespace."""
        with opened(namespace, self._root, self._device) as place:
            return place is not None and is_held(place, NAMESPACE_FILE)

    def remove_namespace(self, namespace: str) -> bool:
        """Delete a namespace that nobody holds and that is empty; whether it is gone.

        Raises:
            OSError: the medium failed.
        """
        with opened(namespace, self._root, self._device) as place:
            if place is None:
                return True
            try:
                description = os.open(NAMESPACE_FILE, _LOCK_FLAGS, dir_fd=place)
            except FileNotFoundError:
                return self._remove_empty(namespace, place)
            try:
                path = f"/proc/self/fd/{place}/{NAMESPACE_FILE}"
                if not (try_lock(description) and names_it(path, description)):
                    return False
                return self._remove_empty(namespace, place)
            finally:
                os.close(description)

    def _remove_empty(self, namespace: str, place: int) -> bool:
        try:
            for name in os.listdir(place):
                if name != NAMESPACE_FILE:
                    os.rmdir(name, dir_fd=place)
            _unlink(place, NAMESPACE_FILE)
            os.rmdir(namespace, dir_fd=self._root)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR, errno.ENOENT):
                return False
            raise
        return True


def _unlink(directory: int, name: str) -> int:
    """Delete a file; the bytes that it took, 0 if it was gone."""
    try:
        status = os.stat(name, dir_fd=directory, follow_symlinks=False)
        os.unlink(name, dir_fd=directory)
    except (FileNotFoundError, IsADirectoryError):
        return 0
    return rounded(status.st_size) if stat.S_ISREG(status.st_mode) else 0
