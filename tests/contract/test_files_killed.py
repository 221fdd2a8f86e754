"""Writers of the files layout that are killed."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from files_world import DURABILITIES, file_of, files_under, get, put, python, sweep

import kvtier
from kvtier.testing.blocks import NAMESPACE, block_of, key_of
from kvtier.tiers.fs.files import Durability, FilesTier
from kvtier.tiers.fs.native import probe_native

WRITER = """
import sys, itertools
from pathlib import Path
from kvtier.testing.blocks import NAMESPACE, block_of, key_of
from kvtier.tiers.fs.files import FilesTier
from kvtier.tiers.fs.native import probe_native
tier = FilesTier(
    Path(sys.argv[1]), NAMESPACE, durability=sys.argv[4], direct=sys.argv[5] == "True",
    native=probe_native().files if sys.argv[6] == "True" else None,
)
for i in itertools.count(int(sys.argv[2]), 2):
    blocks = [memoryview(block_of(key_of(n), int(sys.argv[3]))) for n in (i, i + 1)]
    print(i, flush=True)
    tier.write_batch([key_of(i), key_of(i + 1)], [(b[:4096], b[4096:]) for b in blocks])
"""


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize(
    ("durability", "native"), [*((each, False) for each in DURABILITIES), ("none", True)]
)
def test_a_killed_writer_leaves_whole_blocks_or_nothing(
    tmp_path: Path, durability: Durability, native: bool, direct: bool
) -> None:
    if native and probe_native().files is None:
        pytest.skip(probe_native().reason)
    block_bytes = 4 << 20  # a write that takes a while
    chance = random.Random(1)
    numbers = {}
    blocks: set[Path] = set()
    temps: set[Path] = set()
    for attempt in range(60):
        if attempt >= 5 and temps:
            break  # one kill at least was in the middle of a write
        first = 100 * attempt
        numbers |= {key_of(i).hex(): i for i in range(first, first + 100)}
        writer = python(WRITER, tmp_path, first, block_bytes, durability, direct, native)
        assert writer.stdout is not None
        with writer:
            for _ in range(chance.randint(1, 6)):
                assert writer.stdout.readline()
            # into the write that was announced, at no particular place of it
            threading.Event().wait(chance.random() * 0.008)
            writer.kill()
        assert writer.returncode == -signal.SIGKILL
        found = set(files_under(tmp_path))
        temps = {path for path in found if path.name.endswith(".tmp")}
        for path in found - temps - blocks:
            content = block_of(key_of(numbers[path.name]), block_bytes)
            assert path.read_bytes() == content, "a torn block"
        blocks = found - temps
    assert blocks, "no block was finished"
    assert temps, "no kill hit a write"
    assert sweep(tmp_path, now=0) == len(temps), "young, but their writers are dead"
    assert set(files_under(tmp_path)) == blocks


STOPPED = """
import os, sys
from pathlib import Path
from kvtier.testing.blocks import NAMESPACE, block_of, key_of
from kvtier.tiers.fs.files import FilesTier
tier = FilesTier(Path(sys.argv[1]), NAMESPACE, durability="data")
tier.write(key_of(0), (memoryview(block_of(key_of(0))),))
name, when, inner = sys.argv[2], sys.argv[3], getattr(os, sys.argv[2])
def stop(*arguments, **named):
    if when == "after":
        inner(*arguments, **named)
    os.write(1, b"now\\n")
    os.read(0, 1)
setattr(os, name, stop)
tier.write(key_of(1), (memoryview(block_of(key_of(1))),))
"""


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("call", ["open", "pwritev", "fdatasync", "close", "rename", "fsync"])
def test_a_writer_killed_at_each_step(tmp_path: Path, call: str, when: str) -> None:
    """While it lives its file is not swept; once it is dead it is, and the key can be written."""
    source = str(Path(kvtier.__file__).parents[1])
    with subprocess.Popen(
        [sys.executable, "-c", STOPPED, tmp_path, call, when],
        env={**os.environ, "PYTHONPATH": source},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"now\n"
        during = sorted(files_under(tmp_path))
        assert sweep(tmp_path, now=1e12) == 0, "a living writer's"
        writer.kill()
    tier = FilesTier(tmp_path, NAMESPACE)
    published = call == "fsync" or (call, when) == ("rename", "after")
    opened = (call, when) != ("open", "before")
    assert len(during) == 1 + opened
    assert tier.exists([key_of(0), key_of(1)]) == [True, published]
    assert sweep(tmp_path, now=0) == (opened and not published)
    put(tier, key_of(1))
    assert get(tier, key_of(1)) == block_of(key_of(1))
    assert sorted(files_under(tmp_path)) == sorted(file_of(tmp_path, i) for i in (0, 1))
