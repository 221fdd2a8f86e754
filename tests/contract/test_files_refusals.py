"""Writes of the files layout that the medium refuses or cuts short."""

from __future__ import annotations

import errno
import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from descriptors import opened_below
from files_world import (
    DURABILITIES,
    Counted,
    bytes_under,
    file_of,
    files_under,
    get,
    put,
    python,
    sweep,
    write_many,
)

from kvtier.testing.blocks import BLOCK_BYTES, NAMESPACE, block_of, key_of
from kvtier.tiers.fs.files import Durability, FilesTier

if TYPE_CHECKING:
    from collections.abc import Callable

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
    before = opened_below(tmp_path)
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
    assert opened_below(tmp_path) == before
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
