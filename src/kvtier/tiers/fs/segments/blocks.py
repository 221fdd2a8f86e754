"""Writing, reading and deleting the blocks that this process keeps. See `owned` for the order."""

from __future__ import annotations

import contextlib
import errno
import threading
from typing import TYPE_CHECKING, NamedTuple

from kvtier.errors import MissingBlockError, TierFullError
from kvtier.tiers.fs.segments.owned import FULL
from kvtier.tiers.fs.segments.records import MAX_KEY_BYTES, PUT, Record
from kvtier.tiers.fs.segments.segment import Piece, move
from kvtier.tiers.fs.segments.table import slot_bytes_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtier.core.types import BlockKey
    from kvtier.tiers.base import Buffers
    from kvtier.tiers.fs.segments.owned import OwnedStores
    from kvtier.tiers.fs.segments.places import Block, Place
    from kvtier.tiers.fs.segments.store import Store


class _Item(NamedTuple):
    """One block to be written."""

    position: int
    key: BlockKey
    views: Buffers
    length: int


class OwnedBlocks:
    """Moves blocks in and out of the stores of this process. Thread safe.

    Args:
        owned: the stores.
        durable: sync before a write returns.
    """

    def __init__(self, owned: OwnedStores, durable: bool) -> None:
        self._owned = owned
        self._slots = owned.slots
        self._durable = durable
        self._writing: set[BlockKey] = set()
        self._written = threading.Condition()  # guards `_writing`

    def read(
        self, keys: Sequence[BlockKey], into: Sequence[Buffers], indices: Sequence[int]
    ) -> dict[int, Exception | None]:
        """Read those of the blocks that are here.

        Returns:
            By index: None if the block was read, what went wrong otherwise; nothing for blocks
            that are not here.
        """
        pinned = self._slots.pin(keys[i] for i in indices)
        outcome: dict[int, Exception | None] = {}
        pieces = []
        try:
            for i in indices:
                block = pinned.get(keys[i])
                if block is None:
                    continue
                length = sum(view.nbytes for view in into[i])
                if block.length != length:
                    outcome[i] = MissingBlockError(
                        f"the block has {block.length} bytes, not {length}"
                    )
                    continue
                outcome[i] = None
                segment, slot = block.place
                pieces.append(
                    Piece(i, segment.file, slot, segment.table.slot_bytes, into[i], length)
                )
            failures = move(pieces, write=False)
        finally:
            self._slots.unpin(pinned.values())
        with contextlib.suppress(OSError):  # a log that cannot be written: they are found again
            for i, error in outcome.items():
                if error is not None:
                    self.delete(keys[i])
            for i, failure in failures.items():
                if isinstance(failure, MissingBlockError) and self.delete(keys[i]):
                    self._owned.give_up([pinned[keys[i]]], "lost_blocks")
        return {**outcome, **failures}

    def write(
        self, keys: Sequence[BlockKey], data: Sequence[Buffers], indices: Sequence[int]
    ) -> dict[int, Exception]:
        """Keep blocks. One that is here is only used; one that another thread is writing is waited
        for.

        Returns:
            What went wrong, by index.
        """
        failures: dict[int, Exception] = {}
        left = [_Item(i, keys[i], data[i], sum(v.nbytes for v in data[i])) for i in indices]
        for item in left:
            if not 1 <= len(item.key) <= MAX_KEY_BYTES:
                failures[item.position] = ValueError(
                    f"a key has 1 to {MAX_KEY_BYTES} bytes, this one {len(item.key)}"
                )
        left = [item for item in left if item.position not in failures]
        while left:
            mine, others = [], []
            with self._written:
                for item in left:
                    if self._slots.touch(item.key, item.length):
                        continue
                    if item.key in self._writing:
                        others.append(item)
                    else:
                        self._writing.add(item.key)
                        mine.append(item)
            try:
                self._write_mine(mine, failures)
            finally:
                with self._written:
                    self._writing.difference_update(item.key for item in mine)
                    self._written.notify_all()
            with self._written:
                for item in others:
                    while item.key in self._writing:
                        self._written.wait()
            left = others
        return failures

    def delete(self, key: BlockKey) -> bool:
        """Forget a block; False if it is not here."""
        block = self._slots.forget(key)
        if block is None:
            return False
        self._owned.release([block])
        return True

    def _write_mine(self, items: Sequence[_Item], failures: dict[int, Exception]) -> None:
        by_size: dict[int, list[_Item]] = {}
        for item in items:
            by_size.setdefault(slot_bytes_of(item.length), []).append(item)
        for slot_bytes, group in by_size.items():
            try:
                for item in group:
                    self.delete(item.key)  # it has another length
                places = self._owned.room(slot_bytes, len(group))
            except OSError as error:
                failures.update((item.position, error) for item in group)
                continue
            for item in group[len(places) :]:
                self._owned.totals["full_blocks"] += 1
                failures[item.position] = TierFullError(
                    "no space for another segment, and no block that could make room"
                )
            self._write_to(list(zip(group, places, strict=False)), failures)

    def _write_to(
        self, targets: Sequence[tuple[_Item, Place]], failures: dict[int, Exception]
    ) -> None:
        """Write blocks into reserved slots, then say so in the logs, then in the index."""
        unused = {place.location: place for _, place in targets}
        try:
            pieces = [
                Piece(
                    item.position,
                    place.segment.file,
                    place.slot,
                    place.segment.table.slot_bytes,
                    item.views,
                    item.length,
                )
                for item, place in targets
            ]
            failed = move(pieces, write=True)
            if self._durable:
                for file in {piece.file for piece in pieces if piece.position not in failed}:
                    try:
                        file.sync()
                    except OSError as error:
                        failed.update((p.position, error) for p in pieces if p.file is file)
            failures.update(failed)
            good: dict[Store, list[tuple[_Item, Place]]] = {}
            for item, place in targets:
                if item.position not in failed:
                    good.setdefault(place.segment.store, []).append((item, place))
            for store, group in good.items():
                try:
                    self._publish(store, group, unused, failures)
                except OSError as error:
                    failures.update((item.position, error) for item, _ in group)
        finally:
            self._slots.abandon(unused.values())

    def _publish(
        self,
        store: Store,
        group: Sequence[tuple[_Item, Place]],
        unused: dict[int, Place],
        failures: dict[int, Exception],
    ) -> None:
        records = []
        for item, place in group:
            now = self._slots.stamp()
            number = place.segment.table.number
            records.append(Record(PUT, item.key, number, place.slot, item.length, now, now))
        leaving: list[Block] = []
        with store.log.lock:
            try:
                count = store.log.append(records)
            except OSError as error:
                if error.errno not in FULL:
                    raise
                count = 0
            for (item, place), record in zip(group[:count], records, strict=False):
                del unused[place.location]
                leaving += self._slots.publish(item.key, place, item.length, record.created_ns)
        if count < len(group):
            self._owned.shrink()  # the next write finds room for its record
        for item, _ in group[count:]:
            failures[item.position] = OSError(errno.ENOSPC, "no space left for the log")
        self._owned.release(leaving)
        store.log.sync()
