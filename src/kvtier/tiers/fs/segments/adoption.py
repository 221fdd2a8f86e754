"""What a store holds that was taken over: its log compared with its files."""

from __future__ import annotations

import errno
import logging
from typing import TYPE_CHECKING

from kvtier.tiers.fs.segments.places import OwnedSegment

if TYPE_CHECKING:
    from kvtier.tiers.fs.segments.segment import SegmentFile
    from kvtier.tiers.fs.segments.store import Store
    from kvtier.tiers.fs.segments.table import Table

logger = logging.getLogger(__name__)

_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


def open_segments(store: Store, table: Table) -> tuple[list[OwnedSegment], list[int], int]:
    """Open the segments that have blocks, and take out of the table what is not there any more.

    Returns:
        The segments, the numbers of those in which nothing lies, and how many blocks are lost.

    Raises:
        OSError: the medium failed, or this process can open no more files; none stays open.
    """
    numbers = set(store.segment_numbers())
    files: list[SegmentFile] = []
    segments: list[OwnedSegment] = []
    lost = 0
    try:
        for segment_table in list(table.segments.values()):
            file = None
            if segment_table.live and segment_table.number in numbers:
                file = _open(store, segment_table.number)
            if file is None:
                lost += len(table.remove(segment_table))
                continue
            files.append(file)
            num_slots = max(0, file.nbytes()) // segment_table.slot_bytes
            for slot in range(num_slots, len(segment_table.keys)):
                lost += table.clear(segment_table, slot) is not None
            segment_table.resize(num_slots)
            segments.append(OwnedSegment(segment_table, file, store))
            numbers.remove(segment_table.number)
    except BaseException:
        for file in files:
            file.retire()
        raise
    return segments, sorted(numbers), lost


def _open(store: Store, number: int) -> SegmentFile | None:
    try:
        return store.open_segment(number)
    except OSError as error:
        if error.errno in _EXHAUSTED:
            raise  # nothing is wrong with the segment
        logger.warning("A segment of %s is lost: %s", store.directory, error)
        return None
