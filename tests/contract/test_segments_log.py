"""The log of a store: torn, truncated, damaged, rewritten, followed."""

from __future__ import annotations

import errno
import os
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
from segments_world import (
    SMALL,
    Capacity,
    content_of,
    get,
    held,
    open_tier,
    put,
    rewrite_log,
    segments_of,
    stores_of,
    vanish,
)

from kvtier.core.types import BlockKey
from kvtier.errors import MissingBlockError
from kvtier.testing.blocks import NAMESPACE, key_of
from kvtier.tiers.fs.segments import records, upkeep
from kvtier.tiers.fs.segments.log import LogReader, create_log, open_log
from kvtier.tiers.fs.segments.records import (
    EVICT,
    HEADER_BYTES,
    PUT,
    RECORD_BYTES,
    TOUCH,
    DamagedHeaderError,
    Header,
    OtherVersionError,
    Record,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

HEADER = Header(0x1234, NAMESPACE, 3)


A_STORY = [
    Record(PUT, key_of(1), 3, 0, SMALL, 10, 10),
    Record(PUT, key_of(2), 3, 1, SMALL, 11, 11),
    Record(TOUCH, key_of(1), 3, 0, used_ns=12),
    Record(EVICT, key_of(2), 3, 1),
    Record(PUT, key_of(3), 3, 1, SMALL, 13, 13),
    Record(PUT, BlockKey(b"k" * 128), 4, 70, 100, 14, 14),
    Record(PUT, key_of(1), 5, 2, SMALL, 15, 15),
    Record(EVICT, key_of(3), 3, 1),
]


def told(directory: Path) -> list[Record]:
    """What the log in a directory says now."""
    reader = LogReader(str(directory))
    try:
        reader.follow()
        return said_by(reader)
    finally:
        reader.close()


def said_by(reader: LogReader) -> list[Record]:
    tables = reader.table.segments.values()
    said = sorted(record for table in tables for record in table.records())
    assert len(said) == len(reader.table)
    for record in said:
        segment, slot = reader.table.find(record.key) or (None, -1)
        assert segment is not None
        assert (segment.number, slot) == (record.segment, record.slot)
    return said


def write_log(directory: Path, story: Sequence[Record]) -> bytes:
    for path in directory.iterdir():
        path.unlink()
    log = create_log(str(directory), HEADER, durable=False)
    with log.lock:
        assert log.append(story) == len(story)
    log.close()
    return (directory / "index.log").read_bytes()


def test_what_a_story_adds_up_to(tmp_path: Path) -> None:
    content = write_log(tmp_path, A_STORY)
    assert len(content) == HEADER_BYTES + len(A_STORY) * RECORD_BYTES
    assert told(tmp_path) == sorted(
        [
            Record(PUT, BlockKey(b"k" * 128), 4, 70, 100, 14, 14),
            Record(PUT, key_of(1), 5, 2, SMALL, 15, 15),
        ]
    )


def test_a_touch_is_remembered(tmp_path: Path) -> None:
    write_log(tmp_path, A_STORY[:3])
    assert Record(PUT, key_of(1), 3, 0, SMALL, 10, 12) in told(tmp_path)


def test_what_has_left_its_slot_cannot_leave_it_again(tmp_path: Path) -> None:
    """A record about a block that lies elsewhere by now says nothing of the one that lies there."""
    here = Record(PUT, key_of(1), 3, 0, SMALL, 10, 10)
    late = [Record(EVICT, key_of(2), 3, 0), Record(TOUCH, key_of(2), 3, 0, used_ns=99)]
    write_log(tmp_path, [here, *late])
    assert told(tmp_path) == [here]


def test_a_record_is_laid_out_as_documented() -> None:
    record = Record(PUT, key_of(1), 2, 3, 4, 5, 6)
    data = records.encode(record, 7)
    assert len(data) == 176
    assert (data[8], data[9]) == (PUT, 36)
    numbers = [(12, 4, 2), (16, 4, 3), (24, 8, 4), (32, 8, 5), (40, 8, 6)]
    for offset, size, value in numbers:
        assert int.from_bytes(data[offset : offset + size], "little") == value
    assert data[48:84] == key_of(1)
    assert not any(data[84:])


def test_a_log_of_another_store_says_nothing(tmp_path: Path) -> None:
    content = write_log(tmp_path, A_STORY)
    other = records.encode_header(HEADER._replace(store=0x9999))
    (tmp_path / "index.log").write_bytes(other + content[HEADER_BYTES:])
    assert told(tmp_path) == []


def test_every_length(tmp_path: Path) -> None:
    """Cut off anywhere, a log says what its whole records say, and goes on from there."""
    content = write_log(tmp_path, A_STORY)
    expected = []
    for i in range(len(A_STORY) + 1):
        write_log(tmp_path, A_STORY[:i])
        expected.append(told(tmp_path))
    path = tmp_path / "index.log"
    last = Record(PUT, key_of(9), 9, 0, SMALL, 99, 99)
    for length in range(len(content)):
        path.write_bytes(content[:length])
        if length < HEADER_BYTES:
            with pytest.raises(DamagedHeaderError):
                told(tmp_path)
            continue
        whole = (length - HEADER_BYTES) // RECORD_BYTES
        assert told(tmp_path) == expected[whole]
        log, _ = open_log(str(tmp_path), durable=False)
        with log.lock:
            log.append([last])
        log.close()
        assert told(tmp_path) == sorted([*expected[whole], last])


def test_every_bit_of_a_record(tmp_path: Path) -> None:
    """A record of which any bit is wrong is as good as absent: of each kind, and a move."""
    content = write_log(tmp_path, A_STORY)
    path = tmp_path / "index.log"
    for i in (0, 2, 3, 6):
        write_log(tmp_path, A_STORY[:i] + A_STORY[i + 1 :])
        expected = told(tmp_path)
        for bit in range(8 * RECORD_BYTES):
            damaged = bytearray(content)
            damaged[HEADER_BYTES + i * RECORD_BYTES + bit // 8] ^= 1 << bit % 8
            path.write_bytes(damaged)
            assert told(tmp_path) == expected


def test_every_bit_of_the_header(tmp_path: Path) -> None:
    content = write_log(tmp_path, A_STORY)
    for bit in range(8 * HEADER_BYTES):
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        (tmp_path / "index.log").write_bytes(damaged)
        with pytest.raises(DamagedHeaderError):
            told(tmp_path)


def test_another_format_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = open_tier(tmp_path)
    monkeypatch.setattr(records, "FORMAT_VERSION", 2)
    put(tier, 1)
    vanish(tier)
    monkeypatch.undo()
    with pytest.raises(OtherVersionError, match="format 2"):
        told(stores_of(tmp_path)[0])
    before = {path: path.read_bytes() for path in stores_of(tmp_path)[0].glob("*.*")}
    tier = open_tier(tmp_path)
    tier.maintain()
    assert held(tier, [1]) == set()
    put(tier, 1)
    tier.close()
    assert all(path.read_bytes() == content for path, content in before.items())


# --- appending


def test_a_full_disk_cuts_an_append_at_a_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = create_log(str(tmp_path), HEADER, durable=False)
    whole = os.pwrite
    room = 3 * RECORD_BYTES + 50

    def filling(fd: int, data: memoryview, at: int) -> int:
        nonlocal room
        if room == 0:
            raise OSError(errno.ENOSPC, "full")
        count = whole(fd, data[:room], at)
        room -= count
        return count

    monkeypatch.setattr(os, "pwrite", filling)
    with log.lock:
        assert log.append(A_STORY[:5]) == 3
        with pytest.raises(OSError, match="full"):
            log.append(A_STORY[3:])
    assert log.is_whole()
    monkeypatch.undo()
    with log.lock:
        log.append(A_STORY[3:])
    log.close()
    content = (tmp_path / "index.log").read_bytes()
    assert content == write_log(tmp_path, A_STORY)


def test_a_closed_log_takes_nothing(tmp_path: Path) -> None:
    """Its descriptor may be another file's."""
    log = create_log(str(tmp_path), HEADER, durable=True)
    log.close()
    innocent = os.open(tmp_path / "innocent", os.O_RDWR | os.O_CREAT)
    try:
        for attempt in (lambda: log.append(A_STORY), log.sync, lambda: log.rewrite(list, 1)):
            with log.lock, pytest.raises(OSError, match="closed"):
                attempt()
        assert os.fstat(innocent).st_size == 0
    finally:
        os.close(innocent)


def test_a_log_is_rewritten_while_it_grows(tmp_path: Path) -> None:
    """Threads write and evict while the log is rewritten over and over; a reader follows, and a
    restart finds the same."""
    tier = open_tier(tmp_path, Capacity(32 * SMALL))
    put(tier, 0)
    (store,) = tier._owned.stores()
    other = open_tier(tmp_path)
    done = threading.Event()

    def write(seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(200):
            put(tier, *chance.sample(range(100), 3))
            tier.delete(key_of(chance.randrange(100)))

    def rewrite() -> int:
        count = 0
        while not done.is_set():
            store.log.rewrite(lambda: tier._owned.slots.copies(store), store.next_segment)
            count += 1
        return count

    def follow() -> None:
        while not done.is_set():
            for i in range(100):
                try:
                    assert get(other, i) == content_of(i)
                except MissingBlockError:
                    continue

    with ThreadPoolExecutor(5) as pool:
        rewriting, following = pool.submit(rewrite), pool.submit(follow)
        writing = [pool.submit(write, seed) for seed in range(3)]
        try:
            for future in writing:
                future.result(120)
        finally:
            done.set()
        assert rewriting.result(30) > 3
        following.result(30)
    expected = held(tier, range(100))
    assert held(other, range(100)) == expected
    tables = tier._owned.slots.copies(store)
    expected_records = sorted(record for table in tables for record in table.records())
    tier._owned.flush_uses()
    vanish(tier)
    assert [r[:6] for r in told(stores_of(tmp_path)[0])] == [r[:6] for r in expected_records]
    again = open_tier(tmp_path)
    assert held(again, range(100)) == expected
    again.close()
    other.close()


def test_a_log_that_has_grown_is_rewritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upkeep, "LOG_SLACK_RECORDS", 10)
    tier = open_tier(tmp_path, Capacity(16 * SMALL))
    other = open_tier(tmp_path)
    for i in range(50):
        put(tier, i)
    path = stores_of(tmp_path)[0] / "index.log"
    before = path.stat()
    tier.maintain()
    assert tier.figures()["compactions"] == 1
    assert path.stat().st_ino != before.st_ino
    assert path.stat().st_size == HEADER_BYTES + 16 * RECORD_BYTES < before.st_size
    put(tier, 60)
    assert held(other, range(61)) == held(tier, range(61))
    tier.maintain()
    assert tier.figures()["compactions"] == 1
    tier.close()
    other.close()


def test_a_number_is_never_used_again(tmp_path: Path) -> None:
    """Also after its segment and every word of it are gone: a reader may have it open still."""
    tier = open_tier(tmp_path)
    put(tier, *range(16))
    put(tier, *range(16, 32))
    newest = tier._owned.slots.segments()[1]
    tier._owned.remove_segment(newest, "evicted_blocks")
    rewrite_log(tier)
    vanish(tier)
    tier = open_tier(tmp_path)
    put(tier, *range(16, 32))
    assert [path.name for path in segments_of(tmp_path)] == ["0.segment", "2.segment"]
    tier.close()


def test_a_disk_that_is_full_leaves_the_old_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = open_tier(tmp_path)
    put(tier, 1)
    (store,) = tier._owned.stores()

    def full(fd: int, data: bytes, at: int) -> int:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="full"):
        store.log.rewrite(lambda: tier._owned.slots.copies(store), 1)
    monkeypatch.undo()
    assert sorted(p.name for p in stores_of(tmp_path)[0].iterdir()) == [
        "0.segment",
        "index.log",
        "lock",
        "requests",
    ]
    put(tier, 2)
    vanish(tier)
    tier = open_tier(tmp_path)
    assert held(tier, [1, 2]) == {1, 2}
    tier.close()


def test_a_log_that_is_being_written_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is looked at while an append is between the file and its own books."""
    log = create_log(str(tmp_path), HEADER, durable=False)
    whole = os.fstat
    entered, release = threading.Event(), threading.Event()

    def slow(fd: int) -> os.stat_result:
        found = whole(fd)
        entered.set()
        release.wait(0.05)  # nothing else can come in between: it has to wait
        return found

    def append() -> None:
        with log.lock:
            log.append(A_STORY)

    monkeypatch.setattr(os, "fstat", slow)
    with ThreadPoolExecutor(2) as pool:
        looking = pool.submit(log.is_whole)
        assert entered.wait(30)
        pool.submit(append).result(30)
        release.set()
        assert looking.result(30)
    log.close()
