"""Several processes on one namespace, and processes that are killed."""

from __future__ import annotations

import random
import signal
import threading
from typing import TYPE_CHECKING

import pytest
from segments_world import held, open_tier, python, vanish

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
