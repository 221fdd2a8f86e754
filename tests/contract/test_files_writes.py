"""Writes of the files layout: killed, refused, cut short; what they take and give back."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import kvtier
from kvtier.envelope import HEADER_BYTES
from kvtier.errors import MissingBlockError, TierFullError
from kvtier.testing.blocks import BLOCK_BYTES, NAMESPACE, block_of, key_of
from kvtier.testing.contract import TierContract
from kvtier.tiers.fs.files import Durability, FilesTier
from kvtier.tiers.fs.temporary import is_stale_temp

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvtier.core.types import BlockKey

put = TierContract.put
get = TierContract.get

DURABILITIES: tuple[Durability, ...] = ("none", "data")


class Counted:
    """Room for so many bytes, and what is taken of it."""

    def __init__(self, room: int = 1 << 40) -> None:
        self.room = room
        self.taken = 0
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> bool:
        with self._lock:
            if self.taken + nbytes > self.room:
                return False
            self.taken += nbytes
            return True

    def give_back(self, nbytes: int) -> None:
        with self._lock:
            self.taken -= nbytes

    def owed(self) -> int:
        return 0


def file_of(root: Path, i: int) -> Path:
    name = key_of(i).hex()
    return root / NAMESPACE / name[:3] / name


def files_under(root: Path) -> list[Path]:
    return [path for path in root.rglob("*") if not path.is_dir() and path.name != "namespace.json"]


def bytes_under(root: Path) -> int:
    return sum(path.stat().st_size for path in files_under(root))


def sweep(root: Path, now: float) -> int:
    """Remove what a sweeper may; how many files."""
    stale = [path for path in files_under(root) if is_stale_temp(path.name, path.stat(), now)]
    for path in stale:
        path.unlink()
    return len(stale)


def cut(key: BlockKey, nbytes: int = BLOCK_BYTES) -> tuple[memoryview, memoryview]:
    content = memoryview(block_of(key, nbytes))
    return content[:HEADER_BYTES], content[HEADER_BYTES:]


def write_many(tier: FilesTier, numbers: Sequence[int]) -> list[BaseException | None]:
    keys = [key_of(i) for i in numbers]
    return tier.write_batch(keys, [cut(key) for key in keys])


def python(code: str, *arguments: object) -> subprocess.Popen[str]:
    """A child that runs `code`, with kvtier to import and its output to read."""
    source = str(Path(kvtier.__file__).parents[1])
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": source},
        stdout=subprocess.PIPE,
        text=True,
    )


# --- batches


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("durability", DURABILITIES)
def test_a_batch_is_like_its_blocks(tmp_path: Path, durability: Durability, direct: bool) -> None:
    """More of them than are synced together, and one that is there."""
    space = Counted()
    tier = FilesTier(tmp_path, NAMESPACE, space=space, durability=durability, direct=direct)
    put(tier, key_of(7))
    assert write_many(tier, range(40)) == [None] * 40
    assert sorted(files_under(tmp_path)) == sorted(file_of(tmp_path, i) for i in range(40))
    assert space.taken == 40 * BLOCK_BYTES == bytes_under(tmp_path)
    keys = [key_of(i) for i in range(41)]
    into = [bytearray(BLOCK_BYTES) for _ in keys]
    outcomes = tier.read_batch(keys, [(memoryview(b)[:4096], memoryview(b)[4096:]) for b in into])
    assert outcomes[:40] == [None] * 40
    assert isinstance(outcomes[40], MissingBlockError)
    assert [bytes(b) for b in into[:40]] == [block_of(key) for key in keys[:40]]


@pytest.mark.parametrize("durability", DURABILITIES)
def test_one_block_of_a_batch_may_fail_alone(tmp_path: Path, durability: Durability) -> None:
    tier = FilesTier(tmp_path, NAMESPACE, space=Counted(), durability=durability)
    file_of(tmp_path, 3).parent.touch()  # a file where a directory should be
    outcomes = write_many(tier, range(6))
    assert [type(outcome) for outcome in outcomes] == [
        *[type(None)] * 3,
        NotADirectoryError,
        *[type(None)] * 2,
    ]
    assert tier.exists([key_of(i) for i in range(6)]) == [True, True, True, False, True, True]


def test_all_of_a_batch_is_synced_before_the_first_is_renamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And each directory once afterwards, with the one that new directories are in."""
    tier = FilesTier(tmp_path, NAMESPACE, durability="data")
    calls: list[str] = []

    def note(name: str) -> None:
        inner: Callable[..., Any] = getattr(os, name)

        def call(*arguments: Any) -> Any:
            calls.append(name)
            return inner(*arguments)

        monkeypatch.setattr(os, name, call)

    for name in ("pwritev", "fdatasync", "rename", "fsync"):
        note(name)
    assert write_many(tier, range(10)) == [None] * 10
    directories = {file_of(tmp_path, i).parent for i in range(10)}
    expected = [*["pwritev"] * 10, *["fdatasync"] * 10, *["rename"] * 10]
    assert calls == [*expected, *["fsync"] * (len(directories) + 1)]
    calls.clear()
    os.unlink(file_of(tmp_path, 1))
    put(tier, key_of(1))
    assert calls == ["pwritev", "fdatasync", "rename", "fsync"], "its directory is synced already"


def test_nothing_is_synced_without_durability(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int) -> None:
        raise AssertionError("a sync")

    monkeypatch.setattr(os, "fsync", refuse)
    monkeypatch.setattr(os, "fdatasync", refuse)
    tier = FilesTier(tmp_path, NAMESPACE)
    assert write_many(tier, range(3)) == [None] * 3


# --- refusals of the medium

ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EMFILE, errno.EROFS, errno.ESTALE)


@pytest.mark.parametrize("number", ERRNOS)
@pytest.mark.parametrize("call", ["open", "pwritev", "fdatasync", "close", "rename"])
@pytest.mark.parametrize("direct", [False, True])
def test_a_refused_write_raises_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, call: str, direct: bool
) -> None:
    """The kernel refuses one call of a write; then it does no more, and the next write works."""
    space = Counted()
    tier = FilesTier(tmp_path, NAMESPACE, space=space, durability="data", direct=direct)
    put(tier, key_of(2))
    before = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patched:
        inner: Callable[..., Any] = getattr(os, call)

        def refuse(*arguments: Any) -> Any:
            if call == "close":
                inner(*arguments)
            raise OSError(number, os.strerror(number))

        patched.setattr(os, call, refuse)
        with pytest.raises(OSError, match=r".") as caught:
            put(tier, key_of(1))
        assert caught.value.errno == number
    assert files_under(tmp_path) == [file_of(tmp_path, 2)]
    assert space.taken == BLOCK_BYTES
    assert len(os.listdir("/proc/self/fd")) == before
    put(tier, key_of(1))
    assert get(tier, key_of(1)) == block_of(key_of(1))


def test_what_cannot_be_removed_is_left_to_the_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = Counted()
    tier = FilesTier(tmp_path, NAMESPACE, space=space)

    def refuse(*arguments: Any, **_: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with monkeypatch.context() as patched:
        patched.setattr(os, "rename", refuse)
        patched.setattr(os, "unlink", refuse)
        with pytest.raises(OSError, match="Read-only"):
            put(tier, key_of(1))
    (temp,) = files_under(tmp_path)
    assert temp.name.endswith(".tmp")
    assert space.taken == 0
    assert sweep(tmp_path, now=1e12) == 0, "this process lives and might be writing it"


def test_a_directory_that_cannot_be_synced_fails_its_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = Counted()
    tier = FilesTier(tmp_path, NAMESPACE, space=space, durability="data")
    put(tier, key_of(1))
    put(tier, key_of(2))
    os.unlink(file_of(tmp_path, 1))
    bad = os.stat(file_of(tmp_path, 1).parent).st_ino
    inner = os.fsync

    def refuse(descriptor: int) -> None:
        if os.fstat(descriptor).st_ino == bad:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        inner(descriptor)

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", refuse)
        outcomes = write_many(tier, (1, 3))
    assert isinstance(outcomes[0], OSError)
    assert outcomes[1] is None
    assert get(tier, key_of(1)) == block_of(key_of(1)), "it is there all the same"


LIMITED = """
import errno, resource, sys
from pathlib import Path
from kvtier.testing.blocks import NAMESPACE, block_of, key_of
from kvtier.tiers.fs.files import FilesTier
tier = FilesTier(Path(sys.argv[1]), NAMESPACE)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
content = memoryview(block_of(key_of(1), 300_000))
try:
    tier.write(key_of(1), (content[:4096], content[4096:]))
except OSError as error:
    print(errno.errorcode[error.errno])
tier.write(key_of(2), (memoryview(block_of(key_of(2), 100_000)),))
print(*tier.exists([key_of(1), key_of(2)]))
"""


def test_a_write_that_is_cut_short_leaves_nothing(tmp_path: Path) -> None:
    """The limit lets a first write through in part, so that the rest has to be written too."""
    with python(LIMITED, tmp_path) as child:
        assert child.stdout is not None
        assert child.stdout.read().split() == ["EFBIG", "False", "True"]
    assert files_under(tmp_path) == [file_of(tmp_path, 2)]


DESCRIPTORS = """
import errno, os, resource, sys
from pathlib import Path
from kvtier.testing.blocks import NAMESPACE, block_of, key_of
from kvtier.tiers.fs.files import FilesTier
tier = FilesTier(Path(sys.argv[1]), NAMESPACE, durability="data")
blocks = [memoryview(block_of(key_of(i))) for i in range(30)]
tier.write(key_of(0), (blocks[0],))
held = len(os.listdir("/proc/self/fd")) - 1
resource.setrlimit(resource.RLIMIT_NOFILE, (held + int(sys.argv[2]), 4096))
for move in (
    lambda: tier.read(key_of(0), (memoryview(bytearray(65536)),)),
    lambda: tier.exists([key_of(0), key_of(1)]),
    lambda: tier.write(key_of(1), (blocks[1],)),
):
    try:
        move()
        print("ok")
    except OSError as error:
        print(errno.errorcode[error.errno])
outcomes = tier.write_batch([key_of(i) for i in range(2, 30)], [(b,) for b in blocks[2:]])
print(sum(o is not None for o in outcomes))
resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 4096))
outcomes = tier.write_batch([key_of(i) for i in range(30)], [(b,) for b in blocks])
print(sum(o is not None for o in outcomes))
"""


@pytest.mark.parametrize(("spare", "expected"), [(0, "EMFILE EMFILE EMFILE 28 0"), (1, "ok ok ok")])
def test_a_lack_of_descriptors_passes(tmp_path: Path, spare: int, expected: str) -> None:
    with python(DESCRIPTORS, tmp_path, spare) as child:
        assert child.stdout is not None
        words = child.stdout.read().split()
    assert " ".join(words).startswith(expected)
    assert words[-1] == "0", "all is well once there are some"
    assert sorted(files_under(tmp_path)) == sorted(file_of(tmp_path, i) for i in range(30))


@pytest.mark.parametrize("durability", DURABILITIES)
def test_a_full_disk_leaves_nothing(tmp_path: Path, durability: Durability) -> None:
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", tmp_path],
        capture_output=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip("a tmpfs cannot be mounted")
    try:
        space = Counted()
        tier = FilesTier(tmp_path, NAMESPACE, space=space, durability=durability)
        outcomes = write_many(tier, range(10))
        kept = [i for i in range(10) if outcomes[i] is None]
        refused = [o.errno for o in outcomes if isinstance(o, OSError)]
        assert 1 <= len(kept) < 8
        assert refused == [errno.ENOSPC] * (10 - len(kept))
        assert sorted(files_under(tmp_path)) == sorted(file_of(tmp_path, i) for i in kept)
        assert space.taken == bytes_under(tmp_path)
        tier.delete(key_of(kept[0]))
        put(tier, key_of(30))
        assert get(tier, key_of(30)) == block_of(key_of(30))
        tier.close()
    finally:
        subprocess.run(["umount", "-l", tmp_path], check=True)


@pytest.mark.parametrize("direct", [False, True])
def test_short_reads_and_writes_are_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direct: bool
) -> None:
    """The kernel may move less than asked for; here it never moves more than 5,000 bytes, which
    direct I/O then refuses in the middle of a block.
    """
    tier = FilesTier(tmp_path, NAMESPACE, direct=direct)
    whole_read, whole_write = os.preadv, os.pwritev

    def part(buffers: list[memoryview]) -> list[memoryview]:
        return [next(view for view in buffers if view.nbytes)[:5000]]

    monkeypatch.setattr(os, "preadv", lambda fd, views, at: whole_read(fd, part(views), at))
    monkeypatch.setattr(os, "pwritev", lambda fd, views, at: whole_write(fd, part(views), at))
    put(tier, key_of(1))
    assert file_of(tmp_path, 1).read_bytes() == block_of(key_of(1))
    assert get(tier, key_of(1)) == block_of(key_of(1))


# --- room


def test_what_is_taken_is_what_is_there(tmp_path: Path) -> None:
    space = Counted()
    tier = FilesTier(tmp_path, NAMESPACE, space=space)
    for i in range(4):
        put(tier, key_of(i))
        put(tier, key_of(i))  # there already
        assert space.taken == (i + 1) * BLOCK_BYTES == bytes_under(tmp_path)
    os.truncate(file_of(tmp_path, 0), 999)
    put(tier, key_of(0))  # replaces 999 bytes that were taken
    assert space.taken == 5 * BLOCK_BYTES - 999
    space.taken = bytes_under(tmp_path)
    os.truncate(file_of(tmp_path, 1), 999)
    space.taken = bytes_under(tmp_path)
    with pytest.raises(MissingBlockError):
        get(tier, key_of(1))
    assert space.taken == 3 * BLOCK_BYTES == bytes_under(tmp_path)
    tier.delete(key_of(2))
    tier.delete(key_of(2))
    tier.delete(key_of(77))
    assert space.taken == 2 * BLOCK_BYTES == bytes_under(tmp_path)
    assert tier.figures() == {"removed_blocks": 1}


@pytest.mark.parametrize("durability", DURABILITIES)
def test_without_room_nothing_is_written(tmp_path: Path, durability: Durability) -> None:
    space = Counted(3 * BLOCK_BYTES + 1)
    tier = FilesTier(tmp_path, NAMESPACE, space=space, durability=durability)
    outcomes = write_many(tier, range(5))
    assert [type(outcome) for outcome in outcomes] == [*[type(None)] * 3, *[TierFullError] * 2]
    assert bytes_under(tmp_path) == space.taken == 3 * BLOCK_BYTES
    with pytest.raises(TierFullError, match="capacity"):
        put(tier, key_of(9))
    put(tier, key_of(1))  # there already: needs none
    tier.delete(key_of(0))
    put(tier, key_of(9))


def test_threads_that_write_and_delete_keep_the_account(tmp_path: Path) -> None:
    """Each has keys of its own, deleted by two: one of them gives back."""
    space = Counted()
    tiers = [FilesTier(tmp_path, NAMESPACE, space=space) for _ in range(2)]
    start = threading.Barrier(8)
    failures: list[BaseException] = []

    def work(number: int) -> None:
        pair = number // 2
        try:
            for i in range(100 * pair, 100 * pair + 60):
                if number % 2:
                    put(tiers[0], key_of(i))
                start.wait(30)
                tiers[number % 2].delete(key_of(i))
        except BaseException as error:
            failures.append(error)
            start.abort()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert space.taken == 0 == bytes_under(tmp_path)


# --- recency


def test_the_last_use_is_the_mtime(tmp_path: Path) -> None:
    tier = FilesTier(tmp_path, NAMESPACE, touch_age_s=60)
    uses: list[Callable[[], object]] = [
        lambda: get(tier, key_of(1)),
        lambda: put(tier, key_of(1)),
    ]
    put(tier, key_of(1))
    path = file_of(tmp_path, 1)
    now = path.stat().st_mtime
    for use in uses:
        for written_down, then in ((False, now - 40), (True, now - 80), (True, now + 9999)):
            os.utime(path, (then, then))
            use()
            assert (abs(path.stat().st_mtime - then) > 1) == written_down
            assert not written_down or path.stat().st_mtime >= now
    os.utime(path, (1.0, 1.0))
    tier.exists([key_of(1)])
    assert path.stat().st_mtime == 1.0, "a lookup is no use"


def test_a_use_that_cannot_be_written_down_is_a_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = FilesTier(tmp_path, NAMESPACE)
    put(tier, key_of(1))
    os.utime(file_of(tmp_path, 1), (1.0, 1.0))

    def refuse(*_: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "utime", refuse)
    assert get(tier, key_of(1)) == block_of(key_of(1))


# --- killed writers

WRITER = """
import sys, itertools
from pathlib import Path
from kvtier.testing.blocks import NAMESPACE, block_of, key_of
from kvtier.tiers.fs.files import FilesTier
tier = FilesTier(
    Path(sys.argv[1]), NAMESPACE, durability=sys.argv[4], direct=sys.argv[5] == "True"
)
for i in itertools.count(int(sys.argv[2]), 2):
    blocks = [memoryview(block_of(key_of(n), int(sys.argv[3]))) for n in (i, i + 1)]
    print(i, flush=True)
    tier.write_batch([key_of(i), key_of(i + 1)], [(b[:4096], b[4096:]) for b in blocks])
"""


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("durability", DURABILITIES)
def test_a_killed_writer_leaves_whole_blocks_or_nothing(
    tmp_path: Path, durability: Durability, direct: bool
) -> None:
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
        writer = python(WRITER, tmp_path, first, block_bytes, durability, direct)
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
