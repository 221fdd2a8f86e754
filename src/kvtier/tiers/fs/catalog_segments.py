"""The blocks of the `segments` layout as a tool sees them: stores, each with a log of its own.

Only the owner of a store changes it. A tool asks a living owner and waits for it, for a bounded
time; a store without an owner it changes itself.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvtier.envelope import BLOCK_BYTES_MAX
from kvtier.errors import MissingBlockError, TierError
from kvtier.tiers.fs.catalog_capacity import give_back
from kvtier.tiers.fs.catalog_findings import BlockEntry, Deleted, Findings
from kvtier.tiers.fs.segments.inspection import (
    StoredBlock,
    StoreReader,
    evict,
    is_alive,
    list_stores,
)
from kvtier.tiers.fs.segments.log import LOG_NAME
from kvtier.tiers.fs.segments.paths import TEMP_SUFFIX
from kvtier.tiers.fs.segments.segment import segment_number
from kvtier.tiers.fs.segments.store import (
    LOCK_NAME,
    REQUESTS_NAME,
    STORES_NAME,
    lock_store,
    remove_store_files,
    store_directories,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvtier.core.types import BlockKey
    from kvtier.tiers.fs.page_buffer import PageBuffer

OWNER_WAIT_S: Final = 10.0
"""An owner obeys within about a second, unless its process is stopped or its disk hangs."""

_PAUSE_S: Final = 0.05


class SegmentBlocks:
    """See the module.

    Args:
        path: of the namespace's directory.
        owner_wait_s: how long to wait for owners that are asked to evict.
        say: told what is waited for.
    """

    layout = "segments"

    def __init__(
        self,
        path: str,
        owner_wait_s: float = OWNER_WAIT_S,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._root = os.path.dirname(path)
        self._stores = os.path.join(path, STORES_NAME)
        self._owner_wait_s = owner_wait_s
        self._say = say
        self._lock = threading.Lock()
        self._readers: dict[str, StoreReader] = {}
        weakref.finalize(self, _close_all, self._readers)

    def disk_bytes(self) -> int:
        """What the segments take of the disk, blocks and free slots together."""
        return sum(store.used_bytes for store in list_stores(Path(self._stores).parent))

    def blocks(self, findings: Findings) -> Iterator[BlockEntry]:
        """Every block of every store. Several stores may have the same one."""
        try:
            self._note_foreign(findings)
            directories = store_directories(self._stores)
        except OSError as error:
            findings.unreadable(self._stores, error)
            return
        for directory in directories:
            store = os.path.basename(directory)
            try:
                blocks = list(self._reader(store).blocks())
            except FileNotFoundError:
                continue  # given up meanwhile
            except OSError as error:
                findings.unreadable(directory, error)
                continue
            except TierError as error:
                findings.problems.append((directory, str(error)))
                continue
            for block in blocks:
                yield BlockEntry(block.key, block.length, block.used_ns / 1e9, (store, block))

    def read(
        self, entry: BlockEntry, buffer: PageBuffer, nbytes: int = BLOCK_BYTES_MAX
    ) -> memoryview:
        """Header and row, from the medium and not from the page cache where that is possible."""
        store, block = _place(entry)
        into = buffer.view(min(block.length, nbytes))
        try:
            self._reader(store).read(block, into)
        except FileNotFoundError:
            raise MissingBlockError(f"store {store} is gone") from None
        return into

    def delete(self, entries: Sequence[BlockEntry], unless_used: bool = False) -> Deleted:
        """Evict, by the owners where there are some."""
        deleted = Deleted()
        by_store: dict[str, list[BlockEntry]] = defaultdict(list)
        for entry in entries:
            by_store[_place(entry)[0]].append(entry)
        asked: dict[str, dict[BlockKey, BlockEntry]] = {}
        for store, wanted in by_store.items():
            try:
                left = [entry for entry in wanted if self._is_there(entry, unless_used)]
                deleted.kept += len(wanted) - len(left)
                if not left:
                    continue
                done = evict(os.path.join(self._stores, store), [entry.key for entry in left])
            except FileNotFoundError:
                deleted.kept += len(wanted)
                continue
            except (OSError, TierError) as error:
                deleted.failures += [(entry, str(error)) for entry in wanted]
                continue
            if done.requested:
                asked[store] = {entry.key: entry for entry in left}
            else:
                give_back(self._root, done.freed_bytes)
                _count(deleted, left)
        if asked:
            self._say(f"waiting for the owners of {len(asked)} stores")
        self._wait(asked, deleted)
        return deleted

    def is_used(self) -> bool:
        """Whether a store has a living owner."""
        try:
            return any(map(is_alive, store_directories(self._stores)))
        except OSError:
            return False

    def clear(self, findings: Findings) -> None:
        """Remove the stores that nobody owns."""
        for directory in store_directories(self._stores):
            try:
                lock = lock_store(directory)
                if lock is not None:
                    try:
                        give_back(self._root, remove_store_files(directory))
                    finally:
                        os.close(lock)
            except OSError as error:
                findings.unreadable(directory, error)
        with contextlib.suppress(OSError):
            os.rmdir(self._stores)

    def _reader(self, store: str) -> StoreReader:
        with self._lock:
            reader = self._readers.get(store)
            if reader is None:
                reader = self._readers[store] = StoreReader(os.path.join(self._stores, store))
            return reader

    def _is_there(self, entry: BlockEntry, unless_used: bool) -> bool:
        """Whether the listed block is still in its place, and unused if that matters."""
        store, block = _place(entry)
        now = self._reader(store).find(entry.key)
        if now is None or now[:5] != block[:5]:
            return False
        return not unless_used or now.used_ns <= block.used_ns

    def _wait(self, asked: dict[str, dict[BlockKey, BlockEntry]], deleted: Deleted) -> None:
        """Wait until owners have evicted what they were asked to, or the time is over."""
        until = time.monotonic() + self._owner_wait_s
        while asked:
            for store, entries in list(asked.items()):
                gone = [entry for entry in entries.values() if not self._is_left(entry)]
                _count(deleted, gone)
                for entry in gone:
                    del entries[entry.key]
                if not entries:
                    del asked[store]
            if asked and time.monotonic() >= until:
                break
            if asked:
                time.sleep(_PAUSE_S)
        for store, entries in asked.items():
            reason = (
                f"the process that owns store {store} was asked to evict it and has not done so "
                f"in {self._owner_wait_s:g} s; it will when it runs again"
            )
            deleted.failures += [(entry, reason) for entry in entries.values()]

    def _is_left(self, entry: BlockEntry) -> bool:
        try:
            return self._is_there(entry, unless_used=False)
        except (FileNotFoundError, TierError):
            return False  # the whole store is gone

    def _note_foreign(self, findings: Findings) -> None:
        """Tell what lies among the stores and is not ours."""
        stores = store_directories(self._stores)
        ours = {os.path.basename(directory) for directory in stores}
        for entry in _entries(self._stores):
            if entry.name not in ours and not entry.name.endswith(TEMP_SUFFIX):
                findings.foreign(entry.path)
        for directory in stores:
            for entry in _entries(directory):
                known = entry.name in (LOCK_NAME, LOG_NAME, REQUESTS_NAME)
                temporary = entry.name.endswith(TEMP_SUFFIX)
                if not (known or temporary or segment_number(entry.name) is not None):
                    findings.foreign(entry.path)


def _entries(path: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(path) as found:
            return list(found)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _place(entry: BlockEntry) -> tuple[str, StoredBlock]:
    """Store and position of a block that was listed here."""
    assert isinstance(entry.place, tuple), "this layout listed the block"
    store, block = entry.place
    return store, block


def _count(deleted: Deleted, entries: Sequence[BlockEntry]) -> None:
    deleted.blocks += len(entries)
    deleted.nbytes += sum(entry.nbytes for entry in entries)


def _close_all(readers: dict[str, StoreReader]) -> None:
    for reader in readers.values():
        reader.close()
