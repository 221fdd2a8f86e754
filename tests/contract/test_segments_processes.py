"""Several processes on one namespace, and processes that are killed."""

from __future__ import annotations

import fcntl
import os
import random
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
from segments_world import (
    SMALL,
    Capacity,
    buffers,
    get,
    held,
    open_tier,
    put,
    python,
    segments_of,
    stores_of,
    vanish,
)

from kvtier.errors import MissingBlockError
from kvtier.testing.blocks import NAMESPACE, block_of, key_of
from kvtier.tiers.fs.segments import SegmentsTier, follower, inspection, store, upkeep
from kvtier.tiers.fs.segments.records import RECORD_BYTES

if TYPE_CHECKING:
    from pathlib import Path

KILLED_ANYWHERE = """
import os, random, signal, sys
from pathlib import Path
from segments_world import SMALL, Capacity, held, open_tier, put
from kvtier.testing.blocks import key_of
from kvtier.tiers.fs.segments import upkeep
upkeep.LOG_SLACK_RECORDS = 0
durability = sys.argv[2]
CALLS = ("pwritev", "pwrite", "rename", "unlink", "mkdir", "ftruncate", "open",
         "fdatasync", "rmdir")

def die_at(wanted):
    count = 0
    def dying(name, whole):
        def call(*arguments, **options):
            nonlocal count
            count += 1
            if count == wanted:
                part = random.Random(wanted).random()
                try:
                    if name == "pwrite":
                        fd, data, at = arguments
                        whole(fd, data[: int(len(data) * part)], at)
                    elif name == "pwritev":
                        fd, views, at = arguments
                        whole(fd, [views[0][: int(len(views[0]) * part)]], at)
                finally:
                    os.kill(os.getpid(), signal.SIGKILL)
            return whole(*arguments, **options)
        return call
    for name in CALLS:
        setattr(os, name, dying(name, getattr(os, name)))

def life(root, report, wanted):
    "Writes 60 blocks into 20 slots, and does all else that changes a store."
    die_at(wanted)
    tier = open_tier(root, Capacity(20 * SMALL), durability=durability)
    def tell():
        for key in tier.take_dropped():
            os.write(report, b"-" + key)
    for i in range(0, 60, 3):
        put(tier, i, i + 1, i + 2)
        tell()
        for j in range(i, i + 3):
            os.write(report, b"+" + key_of(j))
        if i % 12 == 0:
            tier.delete(key_of(i))
            os.write(report, b"-" + key_of(i))
        if i % 9 == 0:
            tier.maintain()
            tell()
    tier.close()

def check(root, told, wanted):
    capacity = Capacity(20 * SMALL)
    capacity.used = sum(p.stat().st_size for p in root.rglob("*.segment"))
    tier = open_tier(root, capacity)
    tier.maintain()
    assert tier.figures()["upkeep_failures"] == 0
    found = {key_of(i) for i in held(tier, range(60))}  # looks at every byte
    kept = {}
    for at in range(0, len(told), 37):
        kept[told[at + 1 : at + 37]] = told[at : at + 1] == b"+"
    missing = {key for key, there in kept.items() if there} - found
    # those that went to make room a moment ago had no time to be told of
    assert len(missing) <= 3, (wanted, len(missing))
    for i in range(100, 140):  # it works on
        put(tier, i)
        assert held(tier, [i]) == {i}
    tier._owned.slots.check()
    (slots, free), = tier._owned.slots.counts().values()
    assert slots - free == tier.figures()["blocks"]
    disk = sum(p.stat().st_size for p in root.rglob("*.segment"))
    assert disk == tier.figures()["used_bytes"] == capacity.used <= capacity.nbytes
    left = [p for p in root.rglob("*.tmp") if p.parent.name != "stores" and p.parent.parent != root]
    assert not any(".tmp/" not in str(p) for p in left), left
    tier.close()
    return len(found)

wanted, lives, most = 0, 0, 0
while True:
    wanted += int(sys.argv[3])
    root = Path(sys.argv[1]) / str(wanted)
    root.mkdir()
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(ours)
        life(root, theirs, wanted)
        os._exit(0)
    os.close(theirs)
    told = b""
    while chunk := os.read(ours, 65536):
        told += chunk
    os.close(ours)
    _, status = os.waitpid(child, 0)
    most = max(most, check(root, told, wanted))
    for path in sorted(root.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    if status == 0:
        break
    assert os.WTERMSIG(status) == signal.SIGKILL
print(wanted, most)
"""


@pytest.mark.parametrize(("durability", "step"), [("none", 1), ("data", 7)])
def test_a_process_that_is_killed_in_any_call(tmp_path: Path, durability: str, step: int) -> None:
    """Before each call that changes the disk, and in the middle of each that writes; syncs take
    time, so that only some calls are tried with them."""
    with python(KILLED_ANYWHERE, tmp_path, durability, step) as child:
        assert child.stdout is not None
        output = child.stdout.read().split()
        assert child.wait(240) == 0
    calls, most = map(int, output)
    assert calls > 100, "it made fewer calls than it should"
    assert most >= 16


WRITER = """
import sys, itertools
from pathlib import Path
from segments_world import buffers
from kvtier.testing.blocks import NAMESPACE, block_of, key_of
from kvtier.tiers.fs.segments import SegmentsTier
tier = SegmentsTier(Path(sys.argv[1]), NAMESPACE)
first, length = int(sys.argv[2]), int(sys.argv[3])
contents = [block_of(key_of(first + i), length) for i in range(12)]
for i, content in enumerate(contents):
    print(first + i, flush=True)
    tier.write(key_of(first + i), buffers(content))
sys.stdin.read()
"""


def test_a_writer_that_is_killed_at_any_moment(tmp_path: Path) -> None:
    length = 1 << 20  # a write that takes a while
    chance = random.Random(1)
    known: set[int] = set()
    for attempt in range(8):
        first = 100 * attempt
        with python(WRITER, tmp_path, first, length) as child:
            assert child.stdout is not None
            begun = chance.randint(1, 10)
            for _ in range(begun):
                assert child.stdout.readline()
            threading.Event().wait(chance.random() * 0.004)  # into the write, at no certain place
            child.kill()
        assert child.returncode == -signal.SIGKILL
        known |= set(range(first, first + begun - 1))
        tier = open_tier(tmp_path)
        found = held(tier, range(first + 12), length)
        assert found >= known
        known = found
        assert tier.figures()["stores"] == 1, "each took over what was there"
        vanish(tier)
    for path in tmp_path.rglob("*.segment"):
        path.unlink()


SHARER = """
import random, sys
from pathlib import Path
from segments_world import SMALL, Capacity
from kvtier.envelope import seal, verify
from kvtier.errors import MissingBlockError, TierFullError
from kvtier.testing.blocks import NAMESPACE, block_of, key_of
from kvtier.tiers.fs.segments import SegmentsTier, upkeep
upkeep.LOG_SLACK_RECORDS = 50
chance = random.Random(int(sys.argv[2]))
tier = SegmentsTier(Path(sys.argv[1]), NAMESPACE, space=Capacity(18 * SMALL), upkeep_s=0.02)
print("open", flush=True)
good = bad = 0
for _ in range(int(sys.argv[3])):
    keys = [key_of(chance.randrange(60)) for _ in range(4)]
    rows = [memoryview(block_of(key, 4096)) for key in keys]
    data = [(memoryview(seal(NAMESPACE, k, r, 1)), r) for k, r in zip(keys, rows)]
    for error in tier.write_batch(keys, data):
        assert error is None or isinstance(error, TierFullError), error
    keys = [key_of(i) for i in chance.sample(range(60), 8)]
    into = [(memoryview(bytearray(4096)), memoryview(bytearray(4096))) for _ in keys]
    for key, (header, row), error in zip(keys, into, tier.read_batch(keys, into)):
        if error is None:
            verify(header, NAMESPACE, key, row)  # raises if it is another block, or half of one
            assert bytes(row) == block_of(key, 4096)
            good += 1
        else:
            assert isinstance(error, MissingBlockError), error
            bad += 1
figures = tier.figures()
assert figures["upkeep_failures"] == 0
print(good, bad, int(figures["compactions"]), flush=True)
tier.close()
"""


@pytest.mark.parametrize("processes", [2, 3])
def test_processes_share_a_namespace(tmp_path: Path, processes: int) -> None:
    """Each evicts all the time under the eyes of the others, and nobody reads a wrong byte. One is
    killed in the middle of it."""
    rounds = 700
    children = [python(SHARER, tmp_path, seed, rounds) for seed in range(processes)]
    victim = python(SHARER, tmp_path, 99, 10**6)
    for child in [*children, victim]:
        assert child.stdout is not None
        assert child.stdout.readline() == "open\n"
    threading.Event().wait(0.3)
    victim.kill()
    victim.wait()
    for child in children:
        assert child.stdout is not None
        good, missing, compactions = map(int, child.stdout.read().split())
        assert child.wait(120) == 0
        assert good > rounds, "hardly anything was read"
        assert missing > 0, "nothing was evicted"
        assert compactions > 0
    for child in [*children, victim]:
        for pipe in (child.stdin, child.stdout):
            assert pipe is not None
            pipe.close()
    tier = open_tier(tmp_path)
    assert tier.figures()["blocks"] > 0
    left = [path for path in tmp_path.rglob("*.tmp") if path.parent.name != "requests"]
    assert left == []
    tier.close()


# --- taking over


def test_a_restart_has_its_blocks_at_once_and_in_order(tmp_path: Path) -> None:
    capacity = Capacity(16 * SMALL)
    tier = open_tier(tmp_path, capacity)
    put(tier, *range(16))
    order = list(range(16))
    random.Random(3).shuffle(order)
    for i in order:
        get(tier, i)
    tier.close()
    tier = open_tier(tmp_path, capacity)
    assert tier.exists([key_of(i) for i in range(16)]) == [True] * 16
    for i, expected in enumerate(order):
        put(tier, 100 + i)
        assert tier.take_dropped() == [key_of(expected)]
    tier.close()


def test_a_killed_process_forgets_the_last_uses_alone(tmp_path: Path) -> None:
    tier = open_tier(tmp_path, Capacity(16 * SMALL))
    put(tier, *range(16))
    get(tier, 0)
    tier.maintain()
    get(tier, 1)
    vanish(tier)
    tier = open_tier(tmp_path, Capacity(0))
    put(tier, 100)
    assert tier.take_dropped() == [key_of(1)]
    tier.close()


def test_a_living_process_takes_over_from_one_that_died(tmp_path: Path) -> None:
    survivor, victim = open_tier(tmp_path), open_tier(tmp_path)
    put(survivor, 1)
    put(victim, 2)
    survivor.maintain()
    assert survivor.figures()["stores"] == 1
    vanish(victim)
    survivor.maintain()
    assert survivor.figures()["stores"] == 2
    assert survivor.figures()["followed_stores"] == 0
    assert held(survivor, [1, 2]) == {1, 2}
    survivor.delete(key_of(2))
    survivor.maintain()
    survivor._owned.evict(survivor._owned.stores()[1], None)
    survivor.maintain()
    assert len(stores_of(tmp_path)) == 1, "an empty store was taken over and goes"
    survivor.close()


def test_a_store_that_is_removed_while_it_is_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its owner removes it between our opening the lock and our taking it: nothing was taken."""
    owner = open_tier(tmp_path)
    put(owner, 1)
    owner.delete(key_of(1))
    (directory,) = stores_of(tmp_path)
    whole = fcntl.flock

    def meanwhile(fd: int, operation: int) -> None:
        monkeypatch.undo()
        owner.close()
        whole(fd, operation)

    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(fcntl, "flock", meanwhile)
    assert store.lock_store(str(directory)) is None
    assert not directory.exists()
    assert len(os.listdir("/proc/self/fd")) < before


def test_a_store_is_locked_before_it_can_be_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process looks for orphans at the moment at which a store appears."""
    owner, other = open_tier(tmp_path), open_tier(tmp_path)
    whole = os.rename

    def meanwhile(source: str, target: str) -> None:
        other.maintain()
        whole(source, target)
        other.maintain()

    monkeypatch.setattr(os, "rename", meanwhile)
    put(owner, 1)
    monkeypatch.undo()
    assert other.figures()["stores"] == 0
    assert held(other, [1]) == {1}
    owner.close()
    other.close()


def test_a_block_in_two_stores_is_kept_once(tmp_path: Path) -> None:
    one, two = open_tier(tmp_path), open_tier(tmp_path)
    # neither knows of the other's store when it writes: as if at the same moment
    put(one, 5)
    two._followers._followers = {}
    two._blocks.write([key_of(5)], [buffers(block_of(key_of(5), SMALL))], [0])
    vanish(one)
    vanish(two)
    tier = open_tier(tmp_path)
    assert tier.figures()["blocks"] == 1
    assert tier.figures()["stores"] == 2
    tier._owned.slots.check()
    counts = tier._owned.slots.counts()[SMALL]
    assert counts == (32, 31), "the slot of the other copy is free"
    tier.delete(key_of(5))
    vanish(tier)
    tier = open_tier(tmp_path)
    assert held(tier, [5]) == set(), "the other copy came back"
    tier.close()


def test_a_block_that_is_taken_over_while_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    orphan, tier = open_tier(tmp_path), open_tier(tmp_path, direct=False)
    put(orphan, 5)
    tier._followers._followers = {}
    whole = os.pwritev

    def meanwhile(fd: int, views: list[memoryview], at: int) -> int:
        monkeypatch.undo()
        vanish(orphan)
        tier.maintain()
        assert tier.figures()["blocks"] == 1
        return whole(fd, views, at)

    monkeypatch.setattr(os, "pwritev", meanwhile)
    tier._blocks.write([key_of(5)], [buffers(block_of(key_of(5), SMALL))], [0])
    assert tier.figures()["stores"] == 2
    assert tier._owned.slots.counts()[SMALL] == (32, 31), "a slot leaked"
    tier._owned.slots.check()
    assert held(tier, [5]) == {5}
    tier.delete(key_of(5))
    vanish(tier)
    tier = open_tier(tmp_path)
    assert held(tier, [5]) == set(), "the other copy came back"
    tier.close()


def test_a_log_that_is_truncated_is_read_anew(tmp_path: Path) -> None:
    owner, reader = open_tier(tmp_path), open_tier(tmp_path)
    put(owner, 1, 2)
    assert held(reader, [1, 2]) == {1, 2}
    os.truncate(stores_of(tmp_path)[0] / "index.log", 2 * RECORD_BYTES)
    assert held(reader, [1, 2]) == {1}
    owner.close()
    reader.close()


def test_long_logs_are_read_in_the_background(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = open_tier(tmp_path)
    put(tier, *range(40))
    put(tier, 41)
    vanish(tier)
    monkeypatch.setattr(upkeep, "INLINE_BYTES", 10 * RECORD_BYTES)
    monkeypatch.setattr(follower, "INLINE_BYTES", 10 * RECORD_BYTES)
    tier = open_tier(tmp_path)
    assert tier.figures()["inventory_complete"] == 0
    assert tier.exists([key_of(0)]) == [False]
    monkeypatch.undo()
    tier.maintain()
    assert tier.figures()["inventory_complete"] == 1
    assert held(tier, range(40)) == set(range(40))
    tier.close()


def test_a_store_that_was_never_finished_is_swept(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    put(tier, 1)
    stores = tmp_path / NAMESPACE / "stores"
    unborn = stores / "1-abc-0.tmp"
    for path in (unborn, stores / "2-abc-0.tmp", stores / "foreign"):
        path.mkdir()
    (unborn / "lock").touch()
    (unborn / "index.log").touch()
    for path in (unborn, stores / "foreign"):
        os.utime(path, (0, 0))
    tier.maintain()
    assert not unborn.exists()
    assert (stores / "2-abc-0.tmp").exists(), "its maker may live"
    assert (stores / "foreign").exists()
    assert tier.figures()["upkeep_failures"] == 0
    tier.close()


# --- following


def test_a_block_evicted_under_a_reader_in_another_process_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slot is written again between the look at the log and the read."""
    owner = open_tier(tmp_path, Capacity(SMALL), direct=False)
    reader = open_tier(tmp_path, direct=False)
    put(owner, 1)
    assert held(reader, [1]) == {1}
    whole = os.preadv

    def meanwhile(fd: int, views: list[memoryview], at: int) -> int:
        monkeypatch.undo()
        put(owner, 2)
        count = whole(fd, views, at)
        assert bytes(views[1]) == block_of(key_of(2), SMALL)[4096:], "it was too late"
        return count

    monkeypatch.setattr(os, "preadv", meanwhile)
    with pytest.raises(MissingBlockError):
        get(reader, 1)
    assert held(reader, [1, 2]) == {2}
    owner.close()
    reader.close()


def test_a_block_that_came_back_to_its_slot_is_another_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Evicted, overwritten, and written again: what was read in between is not it, though the clock
    stands still."""
    owner = open_tier(tmp_path, Capacity(SMALL), direct=False, wall_clock_ns=lambda: 10**18)
    reader = open_tier(tmp_path, direct=False)
    put(owner, 1)
    assert held(reader, [1]) == {1}
    whole = os.preadv

    def meanwhile(fd: int, views: list[memoryview], at: int) -> int:
        monkeypatch.undo()
        put(owner, 2)
        count = whole(fd, views, at)
        put(owner, 1)
        return count

    monkeypatch.setattr(os, "preadv", meanwhile)
    with pytest.raises(MissingBlockError):
        get(reader, 1)
    assert held(reader, [1]) == {1}
    owner.close()
    reader.close()


def test_a_log_that_was_rewritten_under_a_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the old file does not say, the new one does."""
    owner = open_tier(tmp_path, Capacity(SMALL), direct=False)
    reader = open_tier(tmp_path, direct=False)
    put(owner, 1)
    assert held(reader, [1]) == {1}
    whole = os.preadv

    def meanwhile(fd: int, views: list[memoryview], at: int) -> int:
        monkeypatch.undo()
        (store,) = owner._owned.stores()
        store.log.rewrite(lambda: owner._owned.slots.copies(store), store.next_segment)
        put(owner, 2)
        return whole(fd, views, at)

    monkeypatch.setattr(os, "preadv", meanwhile)
    with pytest.raises(MissingBlockError):
        get(reader, 1)
    owner.close()
    reader.close()


def test_a_use_by_another_process_counts(tmp_path: Path) -> None:
    owner, reader = open_tier(tmp_path, Capacity(16 * SMALL)), open_tier(tmp_path)
    put(owner, *range(16))
    get(reader, 0)
    put(reader, 1)  # there already: a use
    assert reader.figures()["stores"] == 0
    reader.maintain()
    owner.maintain()
    put(owner, 20, 21)
    assert owner.take_dropped() == [key_of(2), key_of(3)]
    reader.maintain()
    assert reader.take_dropped() == [key_of(2), key_of(3)], "who follows tells of it too"
    owner.close()
    reader.close()


def test_a_damaged_block_of_another_process_is_forgotten_by_both(tmp_path: Path) -> None:
    owner, reader = open_tier(tmp_path), open_tier(tmp_path)
    put(owner, 1, 2)
    assert held(reader, [1, 2]) == {1, 2}
    reader.delete(key_of(1))
    assert held(reader, [1, 2]) == {2}
    owner.maintain()
    assert held(owner, [1, 2]) == {2}
    put(reader, 1)
    assert held(reader, [1, 2]) == {1, 2}
    owner.close()
    reader.close()


def test_new_stores_are_found_at_once(tmp_path: Path) -> None:
    reader = open_tier(tmp_path)
    assert reader.exists([key_of(1)]) == [False]
    owners = []
    for i in range(5):
        owners.append(open_tier(tmp_path))
        owners[-1]._followers._followers = {}
        put(owners[-1], i)
        assert held(reader, range(5)) == set(range(i + 1))
    for owner in owners:
        owner.close()
    reader.close()


def test_the_descriptors_of_segments_that_are_gone_are_closed(tmp_path: Path) -> None:
    owner, reader = open_tier(tmp_path), open_tier(tmp_path)
    put(owner, *range(16))
    assert len(held(reader, range(16))) == 16
    before = len(os.listdir("/proc/self/fd"))
    (segment,) = owner._owned.slots.segments()
    owner._owned.remove_segment(segment, "evicted_blocks")
    reader.maintain()
    assert len(os.listdir("/proc/self/fd")) <= before - 2
    owner.close()
    reader.close()


# --- what the command line needs


def test_stores_are_listed_and_read_beside_their_owner(tmp_path: Path) -> None:
    tier = open_tier(tmp_path, wall_clock_ns=iter(range(1000, 9999)).__next__)
    put(tier, 1, 2)
    get(tier, 1)
    tier.maintain()
    (listing,) = inspection.list_stores(tmp_path / NAMESPACE)
    assert listing == (str(stores_of(tmp_path)[0]), True, 1, 16 * SMALL)
    with inspection.StoreReader(listing.directory) as reader:
        blocks = {block.key: block for block in reader.blocks()}
        assert blocks.keys() == {key_of(1), key_of(2)}
        first, second = blocks[key_of(1)], blocks[key_of(2)]
        assert (first.length, first.segment, first.slot) == (SMALL, 0, 0)
        assert first.created_ns < second.created_ns == second.used_ns < first.used_ns
        assert reader.read(first) == block_of(key_of(1), SMALL)
        tier.delete(key_of(1))
        with pytest.raises(MissingBlockError):
            reader.read(first)
        (store,) = tier._owned.stores()
        store.log.rewrite(lambda: tier._owned.slots.copies(store), store.next_segment)
        assert reader.read(second) == block_of(key_of(2), SMALL)
    tier.close()
    (listing,) = inspection.list_stores(tmp_path / NAMESPACE)
    assert not listing.alive
    assert len(inspection.StoreReader(listing.directory)) == 1


def test_an_owner_evicts_what_it_is_asked_to(tmp_path: Path) -> None:
    capacity = Capacity(1 << 20)
    tier = SegmentsTier(tmp_path, NAMESPACE, space=capacity, upkeep_s=0.01)
    put(tier, *range(20))
    (directory,) = stores_of(tmp_path)
    assert inspection.evict(str(directory), [key_of(3), key_of(99)]).requested
    while tier.exists([key_of(3)]) == [True]:
        threading.Event().wait(0.01)
    assert held(tier, range(20)) == set(range(20)) - {3}
    assert inspection.evict(str(directory), None).requested
    while capacity.used:
        threading.Event().wait(0.01)
    assert held(tier, range(20)) == set()
    assert set(tier.take_dropped()) == {key_of(i) for i in range(20)}
    assert list((directory / "requests").iterdir()) == []
    tier.close()


def test_a_request_that_makes_no_sense_is_thrown_away(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    put(tier, 1)
    requests = stores_of(tmp_path)[0] / "requests"
    (requests / "a.request").write_bytes(os.urandom(1000))
    (requests / "b.request").symlink_to("/etc/passwd")
    (requests / "c.request").mkdir()
    for name in ("foreign", "new.tmp", "old.tmp"):
        (requests / name).touch()
    os.utime(requests / "old.tmp", (0, 0))
    tier.maintain()
    tier.maintain()
    assert sorted(path.name for path in requests.iterdir()) == ["c.request", "foreign", "new.tmp"]
    assert tier.figures()["upkeep_failures"] == 0
    assert held(tier, [1]) == {1}
    tier.close()


def test_a_store_without_an_owner_is_evicted_from_at_once(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    put(tier, *range(16))
    put(tier, *range(16, 20))
    tier.close()
    (store,) = stores_of(tmp_path)
    keys = [key_of(i) for i in (0, 16, 17, 18, 19, 50)]
    assert inspection.evict(str(store), keys) == (False, 5, 16 * SMALL)
    tier = open_tier(tmp_path)
    assert held(tier, range(20)) == set(range(1, 16))
    tier.close()
    assert inspection.evict(str(store), None) == (False, 15, 16 * SMALL)
    assert not store.exists()
    assert segments_of(tmp_path) == []


def test_a_long_log_that_was_rewritten_keeps_nobody_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the upkeep reads it, lookups say what they knew, and reads miss."""
    owner, reader = open_tier(tmp_path), open_tier(tmp_path)
    put(owner, *range(16))
    assert held(reader, range(16)) == set(range(16))
    (only,) = owner._owned.stores()
    only.log.rewrite(lambda: owner._owned.slots.copies(only), only.next_segment)
    monkeypatch.setattr(follower, "INLINE_BYTES", RECORD_BYTES)
    whole = follower.LogReader.follow
    entered, release = threading.Event(), threading.Event()

    def slow(self: follower.LogReader, *arguments: object) -> None:
        entered.set()
        assert release.wait(30)
        whole(self, *arguments)

    monkeypatch.setattr(follower.LogReader, "follow", slow)
    with ThreadPoolExecutor(1) as pool:
        tending = pool.submit(reader.maintain)
        assert entered.wait(30)
        assert reader.exists([key_of(3)]) == [True]
        with pytest.raises(MissingBlockError):
            get(reader, 3)
        assert not tending.done()
        release.set()
        tending.result(30)
    assert held(reader, range(16)) == set(range(16))
    owner.close()
    reader.close()
