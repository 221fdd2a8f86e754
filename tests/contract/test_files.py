from __future__ import annotations

import errno
import json
import os
import random
import signal
import stat
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import kvtier
from kvtier.errors import ConfigError, MissingBlockError
from kvtier.testing.blocks import BLOCK_BYTES, NAMESPACE, block_of, key_of
from kvtier.testing.contract import TierContract
from kvtier.tiers.base import SupportsDelete, Tier
from kvtier.tiers.fs.files import FilesTier, check_root

if TYPE_CHECKING:
    from collections.abc import Iterator

NOBODY = 65534

put = TierContract.put
get = TierContract.get


class TestFilesTier(TierContract):
    @pytest.fixture(autouse=True)
    def place(self, tmp_path: Path) -> None:
        self.root = tmp_path

    def make(self) -> Tier:
        return FilesTier(self.root, NAMESPACE)

    def reopen(self) -> Tier:
        return FilesTier(self.root, NAMESPACE)


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[FilesTier]:
    tier = FilesTier(tmp_path, NAMESPACE)
    yield tier
    tier.close()


def file_of(root: Path, i: int) -> Path:
    """Where the layout puts a block: written down here a second time, as a reader of it would."""
    name = key_of(i).hex()
    return root / NAMESPACE / name[:3] / name


def files_under(root: Path) -> list[Path]:
    return [path for path in root.rglob("*") if not path.is_dir() and path.name != "namespace.json"]


def python(code: str, *arguments: object) -> subprocess.Popen[str]:
    """A child that runs `code`, with kvtier to import and its output to read."""
    source = str(Path(kvtier.__file__).parents[1])
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": source},
        stdout=subprocess.PIPE,
        text=True,
    )


# --- the back door: the file itself


def test_a_block_is_one_file_of_its_bytes(tmp_path: Path, tier: FilesTier) -> None:
    put(tier, key_of(1))
    assert files_under(tmp_path) == [file_of(tmp_path, 1)]
    assert file_of(tmp_path, 1).read_bytes() == block_of(key_of(1))


def test_a_file_put_there_by_hand_is_a_block(tmp_path: Path, tier: FilesTier) -> None:
    path = file_of(tmp_path, 1)
    path.parent.mkdir(parents=True)
    path.write_bytes(block_of(key_of(1)))
    assert tier.exists([key_of(1)]) == [True]
    assert get(tier, key_of(1)) == block_of(key_of(1))


def test_a_write_of_a_present_block_does_not_write(tmp_path: Path, tier: FilesTier) -> None:
    put(tier, key_of(1))
    before = file_of(tmp_path, 1).stat()
    put(tier, key_of(1))
    assert file_of(tmp_path, 1).stat().st_ino == before.st_ino
    assert file_of(tmp_path, 1).stat().st_mtime_ns == before.st_mtime_ns


@pytest.mark.parametrize("length", [0, 1, BLOCK_BYTES - 1, BLOCK_BYTES + 1, 3 * BLOCK_BYTES])
def test_a_file_of_another_length_is_missing_and_goes(
    tmp_path: Path, tier: FilesTier, length: int
) -> None:
    put(tier, key_of(1))
    os.truncate(file_of(tmp_path, 1), length)
    with pytest.raises(MissingBlockError):
        get(tier, key_of(1))
    assert not file_of(tmp_path, 1).exists()


@pytest.mark.parametrize("length", [0, 1, BLOCK_BYTES + 1])
def test_a_write_replaces_a_file_of_another_length(
    tmp_path: Path, tier: FilesTier, length: int
) -> None:
    put(tier, key_of(1))
    os.truncate(file_of(tmp_path, 1), length)
    put(tier, key_of(1))
    assert get(tier, key_of(1)) == block_of(key_of(1))


def test_an_empty_file_does_not_exist(tmp_path: Path, tier: FilesTier) -> None:
    put(tier, key_of(1))
    os.truncate(file_of(tmp_path, 1), 0)
    assert tier.exists([key_of(1)]) == [False]


def test_a_symbolic_link_is_not_followed(tmp_path: Path, tier: FilesTier) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(block_of(key_of(1)))
    path = file_of(tmp_path, 1)
    path.parent.mkdir(parents=True)
    path.symlink_to(elsewhere)
    assert tier.exists([key_of(1)]) == [False]
    with pytest.raises(MissingBlockError):
        get(tier, key_of(1))
    put(tier, key_of(1), block_of(key_of(1)))
    assert not path.is_symlink(), "the link was replaced by a block"
    assert elsewhere.read_bytes() == block_of(key_of(1)), "and what it pointed to left alone"


def test_keys_spread_over_the_directories(tmp_path: Path, tier: FilesTier) -> None:
    for i in range(500):
        tier.write(key_of(i), (memoryview(b"block"),))
    first = [path for path in (tmp_path / NAMESPACE).iterdir() if path.is_dir()]
    assert len(first) > 180  # of 256; 219 are expected
    assert max(len(list(path.iterdir())) for path in first) < 12


def test_a_wiped_namespace_is_made_again(tmp_path: Path, tier: FilesTier) -> None:
    put(tier, key_of(1))
    (tmp_path / NAMESPACE).rename(tmp_path / "wiped")
    assert tier.exists([key_of(1)]) == [False]
    put(tier, key_of(1))
    assert get(tier, key_of(1)) == block_of(key_of(1))


def test_a_root_that_vanished_is_not_made_again(tmp_path: Path) -> None:
    """It was a mount: below it is another disk."""
    root = tmp_path / "mount"
    root.mkdir()
    tier = FilesTier(root, NAMESPACE)
    root.rename(tmp_path / "unmounted")
    with pytest.raises(FileNotFoundError):
        put(tier, key_of(1))
    with pytest.raises(FileNotFoundError):
        FilesTier(root, NAMESPACE)
    assert not root.exists()


def test_a_broken_medium_is_not_an_absent_block(tmp_path: Path) -> None:
    """A loop of links stands for it: an error of stat that is not absence, even for root."""
    tier = FilesTier(tmp_path, NAMESPACE)
    directory = file_of(tmp_path, 1).parent
    directory.parent.mkdir()
    directory.symlink_to(directory)
    with pytest.raises(OSError, match="symbolic links"):
        tier.exists([key_of(1)])


def test_it_can_delete(tier: FilesTier) -> None:
    assert isinstance(tier, SupportsDelete)


# --- what the namespace stands for


def test_the_namespace_is_described_once(tmp_path: Path) -> None:
    FilesTier(tmp_path, NAMESPACE, {"model": "tiny", "block_bytes": 7}).close()
    FilesTier(tmp_path, NAMESPACE, {"model": "other"}).close()
    path = tmp_path / NAMESPACE / "namespace.json"
    assert json.loads(path.read_text()) == {"model": "tiny", "block_bytes": 7}
    assert path.read_text().endswith("\n")
    assert files_under(tmp_path) == []


# --- permissions


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077, 0o777])
def test_only_the_owner_may_read(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        tier = FilesTier(tmp_path, NAMESPACE)
        put(tier, key_of(1))
    finally:
        os.umask(before)
    paths = list(tmp_path.rglob("*"))
    assert len(paths) == 5
    for path in paths:
        expected = 0o700 if path.is_dir() else 0o600
        assert stat.S_IMODE(path.stat().st_mode) == expected, path


@pytest.fixture
def as_nobody() -> Iterator[Path]:
    """A directory of an ordinary user, and that user's rights while the test runs."""
    with tempfile.TemporaryDirectory() as directory:
        if os.geteuid() != 0:
            yield Path(directory)
            return
        os.chown(directory, NOBODY, NOBODY)
        os.seteuid(NOBODY)
        try:
            yield Path(directory)
        finally:
            os.seteuid(0)


def test_a_directory_that_became_read_only_fails_writes_alone(as_nobody: Path) -> None:
    tier = FilesTier(as_nobody, NAMESPACE)
    put(tier, key_of(1))
    assert key_of(1)[0] != key_of(3)[0], "they would share a directory"
    (as_nobody / NAMESPACE).chmod(0o500)
    try:
        with pytest.raises(PermissionError):
            put(tier, key_of(3))
        assert get(tier, key_of(1)) == block_of(key_of(1))
        assert tier.exists([key_of(1), key_of(3)]) == [True, False]
    finally:
        (as_nobody / NAMESPACE).chmod(0o700)
    put(tier, key_of(3))


@pytest.mark.parametrize("mode", [0o000, 0o300, 0o500, 0o600])
def test_check_root_refuses_what_cannot_be_used(as_nobody: Path, mode: int) -> None:
    root = as_nobody / "root"
    root.mkdir()
    check_root(root, "secondary_tiers[0].root_dir")
    root.chmod(mode)
    try:
        with pytest.raises(ConfigError, match=r"secondary_tiers\[0\]\.root_dir is .*root.*chmod"):
            check_root(root, "secondary_tiers[0].root_dir")
    finally:
        root.chmod(0o700)
    assert list(root.iterdir()) == []


def test_check_root_below_a_closed_directory(as_nobody: Path) -> None:
    root = as_nobody / "closed" / "root"
    root.mkdir(parents=True)
    root.parent.chmod(0o000)
    try:
        with pytest.raises(ConfigError, match="root_dir is"):
            check_root(root, "root_dir")
    finally:
        root.parent.chmod(0o700)


def test_check_root_of_the_superuser() -> None:
    """access(2) says that root may write /proc; a file cannot be made there all the same."""
    with pytest.raises(ConfigError, match="x is '/proc', where user"):
        check_root(Path("/proc"), "x")


def test_check_root_refuses_what_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"x is .*absent.*mkdir -p"):
        check_root(tmp_path / "absent", "x")
    with pytest.raises(ConfigError, match=r"x is .*file.*not a directory"):
        check_root(tmp_path / "file", "x")
    with pytest.raises(ConfigError, match=r"x is .*file/below"):
        check_root(tmp_path / "file" / "below", "x")


# --- killed writers and full disks

WRITER = """
import sys, itertools
from pathlib import Path
from kvtier.testing.blocks import NAMESPACE, block_of, key_of
from kvtier.tiers.fs.files import FilesTier
tier = FilesTier(Path(sys.argv[1]), NAMESPACE)
for i in itertools.count(int(sys.argv[2])):
    content = memoryview(block_of(key_of(i), int(sys.argv[3])))
    print(i, flush=True)
    tier.write(key_of(i), (content[:4096], content[4096:]))
"""


def test_a_killed_writer_leaves_whole_blocks_or_nothing(tmp_path: Path) -> None:
    block_bytes = 4 << 20  # a write that takes a while
    chance = random.Random(1)
    numbers = {}
    blocks: set[Path] = set()
    temps: set[Path] = set()
    for attempt in range(60):
        if attempt >= 8 and temps:
            break  # one kill at least was in the middle of a write
        first = 100 * attempt
        numbers |= {key_of(i).hex(): i for i in range(first, first + 100)}
        writer = python(WRITER, tmp_path, first, block_bytes)
        assert writer.stdout is not None
        with writer:
            for _ in range(chance.randint(1, 12)):
                assert writer.stdout.readline()
            # into the write that was announced, at no particular place of it
            threading.Event().wait(chance.random() * 0.004)
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
    tier = FilesTier(tmp_path, NAMESPACE)
    now = max(path.stat().st_mtime for path in files_under(tmp_path))
    assert tier.sweep(now=now) == 0, "they are young"
    assert tier.sweep(60, now=now + 61) == len(temps)
    assert set(files_under(tmp_path)) == blocks


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


def test_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", tmp_path],
        capture_output=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip("a tmpfs cannot be mounted")
    try:
        tier = FilesTier(tmp_path, NAMESPACE)
        kept, refused = [], []
        for i in range(10):
            try:
                put(tier, key_of(i))
                kept.append(i)
            except OSError as error:
                refused.append(error.errno)
        assert 1 <= len(kept) < 8
        assert refused == [errno.ENOSPC] * (10 - len(kept))
        assert sorted(files_under(tmp_path)) == sorted(file_of(tmp_path, i) for i in kept)
        tier.delete(key_of(0))
        put(tier, key_of(30))
        assert get(tier, key_of(30)) == block_of(key_of(30))
    finally:
        subprocess.run(["umount", "-l", tmp_path], check=True)


def test_short_reads_and_writes_are_continued(
    tmp_path: Path, tier: FilesTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel may move less than asked for; here it never moves more than 5,000 bytes."""
    whole_read, whole_write = os.preadv, os.pwritev

    def cut(buffers: list[memoryview]) -> list[memoryview]:
        return [next(view for view in buffers if view.nbytes)[:5000]]

    monkeypatch.setattr(os, "preadv", lambda fd, views, at: whole_read(fd, cut(views), at))
    monkeypatch.setattr(os, "pwritev", lambda fd, views, at: whole_write(fd, cut(views), at))
    put(tier, key_of(1))
    assert file_of(tmp_path, 1).read_bytes() == block_of(key_of(1))
    assert get(tier, key_of(1)) == block_of(key_of(1))


# --- the sweep


def test_the_sweep_takes_old_temporary_files_alone(tmp_path: Path, tier: FilesTier) -> None:
    put(tier, key_of(1))
    directory = file_of(tmp_path, 1).parent
    old, young, top = (
        directory / "1-a-0.tmp",
        directory / "1-a-1.tmp",
        tmp_path / NAMESPACE / "t.tmp",
    )
    for path, age in ((old, 3601), (young, 3599), (top, 9999), (file_of(tmp_path, 1), 9999)):
        path.touch()
        os.utime(path, (1e6 - age, 1e6 - age))
    other = tmp_path / ("ef" * 32)
    other.mkdir()
    (other / "x.tmp").touch()
    os.utime(other / "x.tmp", (0, 0))
    assert tier.sweep(now=1e6) == 2
    assert (young.exists(), old.exists(), top.exists()) == (True, False, False)
    assert file_of(tmp_path, 1).exists()
    assert (tmp_path / NAMESPACE / "namespace.json").exists()
    assert (other / "x.tmp").exists(), "not ours"


def test_a_closed_tier_does_not_sweep(tmp_path: Path, tier: FilesTier) -> None:
    (tmp_path / NAMESPACE / "t.tmp").touch()
    tier.close()
    assert tier.sweep(-1, now=1e12) == 0


def test_processes_that_start_together_share_a_namespace(tmp_path: Path) -> None:
    """Eight make the same directories and write the same keys."""
    code = """
import sys
from pathlib import Path
from kvtier.testing.blocks import NAMESPACE, block_of, key_of
from kvtier.tiers.fs.files import FilesTier
sys.stdin.readline()
tier = FilesTier(Path(sys.argv[1]), NAMESPACE, {"model": "tiny"})
for i in range(30):
    tier.write(key_of(i), (memoryview(block_of(key_of(i))),))
"""
    source = str(Path(kvtier.__file__).parents[1])
    children = [
        subprocess.Popen(
            [sys.executable, "-c", code, tmp_path],
            env={**os.environ, "PYTHONPATH": source},
            stdin=subprocess.PIPE,
        )
        for _ in range(4)
    ]
    for child in children:
        assert child.stdin is not None
        child.stdin.write(b"go\n")
        child.stdin.flush()
    assert [child.wait(60) for child in children] == [0] * 4
    for child in children:
        child.stdin.close()
    assert sorted(files_under(tmp_path)) == sorted(file_of(tmp_path, i) for i in range(30))
    tier = FilesTier(tmp_path, NAMESPACE)
    assert all(get(tier, key_of(i)) == block_of(key_of(i)) for i in range(30))


def test_temporary_names_differ_between_tiers_of_one_process(tmp_path: Path) -> None:
    """Two writers of one key at the same moment: each has a file of its own."""
    tiers = [FilesTier(tmp_path, NAMESPACE) for _ in range(4)]
    start = threading.Barrier(4)
    failures: list[BaseException] = []

    def work(tier: FilesTier) -> None:
        try:
            for i in range(60):
                start.wait(30)
                put(tier, key_of(i))
                assert get(tier, key_of(i)) == block_of(key_of(i))
        except BaseException as error:
            failures.append(error)
            start.abort()

    threads = [threading.Thread(target=work, args=(tier,)) for tier in tiers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert len(files_under(tmp_path)) == 60


def test_nothing_is_left_open(tmp_path: Path) -> None:
    tier = FilesTier(tmp_path, NAMESPACE)
    before = len(os.listdir("/proc/self/fd"))
    for i in range(20):
        put(tier, key_of(i))
        get(tier, key_of(i))
        os.truncate(file_of(tmp_path, i), 3)
        with pytest.raises(MissingBlockError):
            get(tier, key_of(i))
    assert len(os.listdir("/proc/self/fd")) == before
