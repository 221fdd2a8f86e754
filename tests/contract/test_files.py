"""The files layout: the contracts, and a block as a file on the disk."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from descriptors import opened_below
from files_world import file_of, files_under, get, put

import kvtier
from kvtier.errors import MissingBlockError
from kvtier.testing.blocks import BLOCK_BYTES, NAMESPACE, block_of, key_of
from kvtier.testing.contract import TierContract
from kvtier.tiers.base import SupportsBatch, SupportsDelete, SupportsFigures, Tier
from kvtier.tiers.fs.files import Durability, FilesTier
from kvtier.tiers.fs.namespace_directory import NamespaceDirectory

if TYPE_CHECKING:
    from collections.abc import Iterator


class FilesContract(TierContract):
    direct = False
    durability: Durability = "none"

    @pytest.fixture(autouse=True)
    def place(self, tmp_path: Path) -> None:
        self.root = tmp_path

    def make(self) -> Tier:
        return FilesTier(self.root, NAMESPACE, durability=self.durability, direct=self.direct)

    def reopen(self) -> Tier:
        return self.make()


class TestFilesTier(FilesContract):
    pass


class TestDirectFilesTier(FilesContract):
    direct = True


class TestDurableFilesTier(FilesContract):
    durability = "data"


class TestDurableDirectFilesTier(FilesContract):
    durability = "data"
    direct = True


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[FilesTier]:
    tier = FilesTier(tmp_path, NAMESPACE)
    yield tier
    tier.close()


def is_held(root: Path) -> bool:
    """Whether somebody has the namespace open, told as a sweeper would."""
    with (root / NAMESPACE / "namespace.json").open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


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


def test_an_empty_file_is_there_until_it_is_read(tmp_path: Path, tier: FilesTier) -> None:
    """Existence is asked for thousands of keys: the length is not looked at."""
    put(tier, key_of(1))
    os.truncate(file_of(tmp_path, 1), 0)
    assert tier.exists([key_of(1)]) == [True]
    with pytest.raises(MissingBlockError):
        get(tier, key_of(1))
    assert tier.exists([key_of(1)]) == [False]


def test_a_symbolic_link_is_not_followed(tmp_path: Path, tier: FilesTier) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(block_of(key_of(1)))
    path = file_of(tmp_path, 1)
    path.parent.mkdir(parents=True)
    path.symlink_to(elsewhere)
    with pytest.raises(MissingBlockError):
        get(tier, key_of(1))
    tier.delete(key_of(1))
    assert path.is_symlink(), "foreign"
    put(tier, key_of(1), block_of(key_of(1)))
    assert not path.is_symlink(), "the link was replaced by a block"
    assert elsewhere.read_bytes() == block_of(key_of(1)), "and what it pointed to left alone"


@pytest.mark.parametrize("kind", ["directory", "pipe", "socket"])
@pytest.mark.parametrize("direct", [False, True])
def test_what_is_no_file_is_missing_and_left_alone(tmp_path: Path, kind: str, direct: bool) -> None:
    tier = FilesTier(tmp_path, NAMESPACE, direct=direct)
    path = file_of(tmp_path, 1)
    path.parent.mkdir(parents=True)
    if kind == "directory":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)  # opening one waits for a writer
    else:
        os.mknod(path, stat.S_IFSOCK | 0o600)
    for buffers in (get, lambda tier, key: tier.read(key, ())):
        with pytest.raises(MissingBlockError):
            buffers(tier, key_of(1))
    tier.delete(key_of(1))
    assert path.exists()


def test_keys_spread_over_the_directories(tmp_path: Path, tier: FilesTier) -> None:
    for i in range(500):
        tier.write(key_of(i), (memoryview(b"block"),))
    first = [path for path in (tmp_path / NAMESPACE).iterdir() if path.is_dir()]
    assert len(first) > 200  # of 256; 220 are expected
    assert max(len(list(path.iterdir())) for path in first) < 12


def test_a_wiped_namespace_is_made_again(tmp_path: Path) -> None:
    tier = FilesTier(tmp_path, NAMESPACE, {"model": "tiny"})
    put(tier, key_of(1))
    (tmp_path / NAMESPACE).rename(tmp_path / "wiped")
    assert tier.exists([key_of(1)]) == [False]
    with pytest.raises(MissingBlockError):
        get(tier, key_of(1))
    put(tier, key_of(1))
    assert get(tier, key_of(1)) == block_of(key_of(1))
    assert tier.exists([key_of(1), key_of(2)]) == [True, False]
    assert json.loads((tmp_path / NAMESPACE / "namespace.json").read_text()) == {"model": "tiny"}
    assert is_held(tmp_path)


def test_a_namespace_that_others_made_anew_is_used_and_held(tmp_path: Path) -> None:
    tier = FilesTier(tmp_path, NAMESPACE)
    (tmp_path / NAMESPACE).rename(tmp_path / "wiped")
    other = FilesTier(tmp_path, NAMESPACE)
    put(other, key_of(1))
    other.close()
    assert not is_held(tmp_path)
    assert tier.exists([key_of(1), key_of(2)]) == [True, False]
    assert get(tier, key_of(1)) == block_of(key_of(1))
    assert is_held(tmp_path)


def test_a_root_that_vanished_is_not_made_again(tmp_path: Path) -> None:
    """It was a mount: below it is another disk."""
    root = tmp_path / "mount"
    root.mkdir()
    tier = FilesTier(root, NAMESPACE)
    put(tier, key_of(2))
    root.rename(tmp_path / "unmounted")
    for fails in (
        lambda: put(tier, key_of(1)),
        lambda: get(tier, key_of(2)),
        lambda: tier.exists([key_of(2)]),
        lambda: FilesTier(root, NAMESPACE),
    ):
        with pytest.raises(FileNotFoundError):
            fails()
    assert not root.exists()
    (tmp_path / "unmounted").rename(root)
    assert get(tier, key_of(2)) == block_of(key_of(2)), "and it may come back"


def mount_tmpfs(path: Path, options: str = "size=8m") -> None:
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", path], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("a tmpfs cannot be mounted")


def test_a_mount_that_was_lost_is_not_replaced_by_the_disk_below(tmp_path: Path) -> None:
    """The directory is still there, but empty, and another disk's."""
    mount_tmpfs(tmp_path)
    try:
        tier = FilesTier(tmp_path, NAMESPACE)
        put(tier, key_of(1))
    finally:
        subprocess.run(["umount", "-l", tmp_path], check=True)
    for fails in (
        lambda: put(tier, key_of(1)),
        lambda: get(tier, key_of(1)),
        lambda: tier.exists([key_of(1)]),
    ):
        with pytest.raises(OSError, match="another file system") as caught:
            fails()
        assert caught.value.errno == errno.ESTALE
    assert list(tmp_path.iterdir()) == []
    mount_tmpfs(tmp_path)
    try:
        (tmp_path / "kvtier.json").touch()  # the mark of a root: this mount is meant
        put(tier, key_of(1))
        assert get(tier, key_of(1)) == block_of(key_of(1))
    finally:
        tier.close()
        subprocess.run(["umount", "-l", tmp_path], check=True)


def test_a_broken_medium_is_not_an_absent_block(tmp_path: Path) -> None:
    """A loop of links stands for it: an error of stat that is not absence, even for root."""
    tier = FilesTier(tmp_path, NAMESPACE)
    put(tier, key_of(2))
    directory = file_of(tmp_path, 3).parent
    directory.symlink_to(directory)
    with pytest.raises(OSError, match="symbolic links"):
        tier.exists([key_of(2), key_of(3)])


def test_it_can_delete(tier: FilesTier) -> None:
    assert isinstance(tier, SupportsDelete)


def test_it_moves_batches_and_has_figures(tier: FilesTier) -> None:
    assert isinstance(tier, SupportsBatch)
    assert isinstance(tier, SupportsFigures)


# --- what the namespace stands for


def test_the_namespace_is_described_once(tmp_path: Path) -> None:
    FilesTier(tmp_path, NAMESPACE, {"model": "tiny", "block_bytes": 7}).close()
    FilesTier(tmp_path, NAMESPACE, {"model": "other"}).close()
    path = tmp_path / NAMESPACE / "namespace.json"
    assert json.loads(path.read_text()) == {"model": "tiny", "block_bytes": 7}
    assert path.read_text().endswith("\n")
    assert files_under(tmp_path) == []


def test_a_namespace_is_held_while_it_is_open(tmp_path: Path) -> None:
    first, second = FilesTier(tmp_path, NAMESPACE), FilesTier(tmp_path, NAMESPACE)
    assert is_held(tmp_path)
    first.close()
    assert is_held(tmp_path)
    second.close()
    assert not is_held(tmp_path)


def test_a_namespace_that_a_sweeper_has_for_itself_is_held_later(tmp_path: Path) -> None:
    now = 100.0
    FilesTier(tmp_path, NAMESPACE).close()
    with (tmp_path / NAMESPACE / "namespace.json").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        directory = NamespaceDirectory(tmp_path, NAMESPACE, clock=lambda: now)
    directory.hold()
    assert not is_held(tmp_path), "not tried again at once"
    now += 1.0
    directory.hold()
    assert is_held(tmp_path)
    directory.close()


def test_a_description_that_was_removed_is_written_again(tmp_path: Path) -> None:
    """A sweeper removed it as that of a dead namespace, but not the directory: a block came."""
    FilesTier(tmp_path, NAMESPACE).close()
    path = tmp_path / NAMESPACE / "namespace.json"
    now = 100.0
    with path.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        directory = NamespaceDirectory(tmp_path, NAMESPACE, {"a": 1}, clock=lambda: now)
        path.unlink()
    now += 1.0
    directory.hold()
    assert is_held(tmp_path)
    assert json.loads(path.read_text()) == {"a": 1}
    directory.close()


def test_a_description_that_goes_while_it_is_locked_is_not_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    path = tmp_path / NAMESPACE / "namespace.json"
    FilesTier(tmp_path, NAMESPACE).close()
    flock = fcntl.flock

    def lock_late(descriptor: int, how: int) -> None:
        path.rename(tmp_path / "removed")
        path.touch()
        flock(descriptor, how)

    with monkeypatch.context() as patched:
        patched.setattr(fcntl, "flock", lock_late)
        directory = NamespaceDirectory(tmp_path, NAMESPACE, clock=lambda: now)
    assert not is_held(tmp_path)
    now += 1.0
    directory.hold()
    assert is_held(tmp_path)
    directory.close()


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
    assert len(paths) == 4
    for path in paths:
        expected = 0o700 if path.is_dir() else 0o600
        assert stat.S_IMODE(path.stat().st_mode) == expected, path


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


# --- many writers


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
    before = opened_below(tmp_path)
    for i in range(20):
        put(tier, key_of(i))
        get(tier, key_of(i))
        os.truncate(file_of(tmp_path, i), 3)
        with pytest.raises(MissingBlockError):
            get(tier, key_of(i))
    assert opened_below(tmp_path) == before
