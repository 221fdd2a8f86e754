"""Reads a root into an `Inventory`, a directory at a time.

1. Nothing is followed: no symbolic link, no other mount. Directories are opened relative to each
   other, so that a path that is swapped meanwhile leads nowhere.
2. A directory whose mtime did not change since it was listed is not listed again. What was
   listed within `RACY_NS` of its mtime is: the clock of a file system ticks coarsely.
3. A file that is known keeps its time and size: a block is written once, and whoever deletes one
   looks at its time again. A full scan looks at all.
4. Sizes are `st_size`, in pages. That is what was taken before the file was written; `st_blocks` is
   late where space is allocated late, and less where the file system compresses.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import stat
from typing import TYPE_CHECKING

from kvtier.tiers.fs.abilities import is_probe
from kvtier.tiers.fs.accounts import rounded
from kvtier.tiers.fs.inventory import NEVER, Inventory, Place, Shelf, Store
from kvtier.tiers.fs.locks import try_lock
from kvtier.tiers.fs.marker import MARKER_FILE
from kvtier.tiers.fs.members import CONTROL_DIRECTORY, NAMESPACE
from kvtier.tiers.fs.namespace_directory import FAN_OUT_NAME, NAMESPACE_FILE
from kvtier.tiers.fs.temporary import is_stale_temp, is_temp

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

logger = logging.getLogger(__name__)

RACY_NS = 2_000_000_000
FOREIGN_REMEMBERED_MAX = 1000
FOREIGN_NAMED_MAX = 3
STORES_DIRECTORY = "stores"
STORE_LOCK = "lock"
STORE_LOG = "index.log"
SEGMENT = re.compile(r"\d+\.segment")

_STORE = re.compile(r"[0-9a-f]{16}")
_KEY = re.compile(r"(?:[0-9a-f]{2}){2,128}")
_ROOT_NAMES = (CONTROL_DIRECTORY, MARKER_FILE, "lost+found")
_STORE_UNPROBED_NS = 5_000_000_000  # whoever used it just now is alive, or about to be replaced


def open_directory(name: str, parent: int, device: int) -> int | None:
    """Open a directory below another one.

    Args:
        name: within the parent.
        parent: descriptor.
        device: of the mount that must not be left.

    Returns:
        A descriptor; None if there is no such directory, it is a link, or another mount.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        descriptor = os.open(name, flags, dir_fd=parent)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        if os.path.islink(f"/proc/self/fd/{parent}/{name}"):
            return None
        raise error from None
    if os.fstat(descriptor).st_dev != device:
        os.close(descriptor)
        return None
    return descriptor


@contextlib.contextmanager
def opened(name: str, parent: int, device: int) -> Iterator[int | None]:
    """`open_directory`, closed at the end."""
    descriptor = open_directory(name, parent, device)
    try:
        yield descriptor
    finally:
        if descriptor is not None:
            os.close(descriptor)


def is_held(directory: int, name: str) -> bool:
    """Whether somebody has locked a file; False if there is none."""
    try:
        descriptor = os.open(name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
    except FileNotFoundError:
        return False
    try:
        return not try_lock(descriptor)
    finally:
        os.close(descriptor)


class Scanner:
    """Keeps an inventory up to date. One thread.

    Args:
        root: path.
        inventory: to fill.
    """

    def __init__(self, root: str, inventory: Inventory) -> None:
        self._root = root
        self._inventory = inventory
        self._told_foreign: set[str] = set()
        self._new_foreign: list[str] = []
        self._device = 0
        self._full = True
        self._now = 0
        self.stale_temps_removed = 0

    def scan(self, full: bool, now: Callable[[], int]) -> Iterator[bool]:
        """Bring the inventory up to date.

        Args:
            full: list every directory, and look at every file.
            now: ns, by the clock of the file system; may be a second late.

        Yields:
            After each directory: whether it was listed.

        Raises:
            OSError: the medium failed. The inventory is still good, the scan has to begin anew.
        """
        inventory = self._inventory
        self._full = full
        inventory.foreign.clear()
        inventory.num_foreign = 0
        self._new_foreign.clear()
        root = os.open(self._root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self._device = os.fstat(root).st_dev
            seen = set()
            for name in sorted(os.listdir(root)):
                self._now = now()
                if NAMESPACE.fullmatch(name):
                    with opened(name, root, self._device) as directory:
                        if directory is not None:
                            seen.add(name)
                            place = inventory.places.setdefault(name, Place())
                            yield from self._scan_place(name, directory, place, now)
                            continue
                ours = name in _ROOT_NAMES or is_probe(name)
                if not ours and self._temp_bytes(root, name) is None:
                    self._note_foreign(name)
            for name in inventory.places.keys() - seen:
                del inventory.places[name]
        finally:
            os.close(root)
        self._tell_foreign()

    def _scan_place(
        self, name: str, directory: int, place: Place, now: Callable[[], int]
    ) -> Iterator[bool]:
        place.described = 0
        shelves, found_stores = set(), False
        for entry in sorted(os.listdir(directory)):
            self._now = now()
            if entry == NAMESPACE_FILE:
                with contextlib.suppress(FileNotFoundError):
                    place.described = os.stat(entry, dir_fd=directory).st_mtime_ns
            elif FAN_OUT_NAME.fullmatch(entry):
                with opened(entry, directory, self._device) as shelf:
                    if shelf is not None:
                        shelves.add(entry)
                        yield self._scan_shelf(f"{name}/{entry}", entry, shelf, place)
                        continue
                self._note_foreign(f"{name}/{entry}")
            elif entry == STORES_DIRECTORY:
                with opened(entry, directory, self._device) as stores:
                    if stores is not None:
                        found_stores = True
                        yield from self._scan_stores(f"{name}/{entry}", stores, place)
                        continue
                self._note_foreign(f"{name}/{entry}")
            elif self._temp_bytes(directory, entry) is None:
                self._note_foreign(f"{name}/{entry}")
        for gone in place.shelves.keys() - shelves:
            del place.shelves[gone]
        if not found_stores:
            place.stores.clear()
        if is_held(directory, NAMESPACE_FILE):
            place.last_held = self._now

    def _scan_shelf(self, path: str, name: str, directory: int, place: Place) -> bool:
        """List one directory of blocks, unless it is as it was."""
        before = os.fstat(directory).st_mtime_ns
        old = place.shelves.get(name)
        if old is not None and not self._full and old.seen == before != NEVER:
            return False
        known = {} if old is None or self._full else old.known()
        files = []
        other_bytes = 0
        with os.scandir(directory) as entries:
            for entry in entries:
                file = entry.name
                if _KEY.fullmatch(file) and file.startswith(name):
                    key = bytes.fromhex(file)
                    if key in known:
                        files.append((key, *known[key]))
                        continue
                    with contextlib.suppress(FileNotFoundError):
                        status = entry.stat(follow_symlinks=False)
                        if stat.S_ISREG(status.st_mode):
                            files.append((key, status.st_mtime_ns, status.st_size))
                            continue
                elif (temp_bytes := self._temp_bytes(directory, file)) is not None:
                    other_bytes += temp_bytes
                    continue
                self._note_foreign(f"{path}/{file}")
        racy = self._now - before < RACY_NS or other_bytes > 0
        place.shelves[name] = Shelf(files, NEVER if racy else before, other_bytes)
        return True

    def _scan_stores(self, path: str, stores: int, place: Place) -> Iterator[bool]:
        seen = set()
        for name in sorted(os.listdir(stores)):
            if is_temp(name):
                continue  # a store in the making; whoever uses the namespace tidies up
            if _STORE.fullmatch(name):
                with opened(name, stores, self._device) as directory:
                    if directory is not None:
                        seen.add(name)
                        place.stores[name] = self._store(directory)
                        yield True
                        continue
            self._note_foreign(f"{path}/{name}")
        for gone in place.stores.keys() - seen:
            del place.stores[gone]

    def _store(self, directory: int) -> Store:
        nbytes, last_use = 0, os.fstat(directory).st_mtime_ns
        for name in os.listdir(directory):
            with contextlib.suppress(FileNotFoundError):
                status = os.stat(name, dir_fd=directory, follow_symlinks=False)
                if stat.S_ISREG(status.st_mode):
                    if SEGMENT.fullmatch(name):
                        nbytes += rounded(status.st_size)
                    elif name == STORE_LOG:
                        last_use = max(last_use, status.st_mtime_ns)
        # looking takes the lock for an instant, which an owner that comes back must not meet
        probed = self._now - last_use > _STORE_UNPROBED_NS
        return Store(nbytes, last_use, probed and not is_held(directory, STORE_LOCK))

    def _temp_bytes(self, directory: int, name: str) -> int | None:
        """Bytes of a temporary file, 0 if it is gone or was removed; None if it is none."""
        if not is_temp(name):
            return None
        try:
            status = os.stat(name, dir_fd=directory, follow_symlinks=False)
            if not stat.S_ISREG(status.st_mode):
                return None
            if not is_stale_temp(name, status, self._now / 1e9):
                return rounded(status.st_size)
            os.unlink(name, dir_fd=directory)
        except FileNotFoundError:
            return 0
        self.stale_temps_removed += 1
        return 0

    def _note_foreign(self, path: str) -> None:
        if not os.path.lexists(os.path.join(self._root, path)):
            return  # it was ours, and was removed since it was listed
        inventory = self._inventory
        inventory.num_foreign += 1
        if len(inventory.foreign) < FOREIGN_REMEMBERED_MAX:
            inventory.foreign.append(path)
        if len(self._told_foreign) < FOREIGN_REMEMBERED_MAX and path not in self._told_foreign:
            self._told_foreign.add(path)
            self._new_foreign.append(path)

    def _tell_foreign(self) -> None:
        """One line for all that was not told before."""
        new = self._new_foreign
        if new:
            logger.warning(
                "%s holds %d files and directories that are not kvtier's and are left alone; new "
                "ones are %s%s",
                self._root,
                self._inventory.num_foreign,
                ", ".join(new[:FOREIGN_NAMED_MAX]),
                f" and {len(new) - FOREIGN_NAMED_MAX} more" if len(new) > FOREIGN_NAMED_MAX else "",
            )
