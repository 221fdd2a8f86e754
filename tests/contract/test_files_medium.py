"""What the fs tier knows of its medium: kinds of mounts, direct I/O, temporary files, threads."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

import kvtier
from kvtier.tiers.fs import probe
from kvtier.tiers.fs.io import aligned, open_file, read_all, scratch, write_all
from kvtier.tiers.fs.medium import Medium, is_shared, probe_direct
from kvtier.tiers.fs.temporary import TempNames, is_stale_temp, is_temp

# --- the medium


def test_what_a_directory_is_on(tmp_path: Path) -> None:
    below = tmp_path / "with a blank"
    below.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "source name", below],
        capture_output=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip("a tmpfs cannot be mounted")
    try:
        (below / "deep").mkdir()
        (tmp_path / "link").symlink_to(below / "deep")
        (below / "file").write_bytes(bytes(1 << 20))
        found = Medium.of(tmp_path / "link")
        assert (found.mount_point, found.file_system) == (str(below), "tmpfs")
        assert (found.shared, found.read_only) == (False, False)
        assert found.total_bytes == 8 << 20
        assert 6 << 20 < found.free_bytes <= 7 << 20
        assert found.identity == Medium.of(below).identity == "tmpfs source name 8388608"
        assert Medium.of(tmp_path).mount_point != str(below)
        subprocess.run(["mount", "-o", "remount,ro", below], check=True)
        assert Medium.of(below).read_only
        subprocess.run(["mount", "-t", "tmpfs", "above", below], check=True)
        try:
            assert Medium.of(below).source == "above", "it hides the other"
        finally:
            subprocess.run(["umount", "-l", below], check=True)
    finally:
        subprocess.run(["umount", "-l", below], check=True)
    assert Medium.of(below).device == Medium.of(tmp_path).device


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Medium.of(tmp_path / "absent")


NETWORK = ["nfs", "nfs4", "cifs", "smb3", "lustre", "gpfs", "ceph", "beegfs", "9p", "virtiofs"]
FUSE = ["fuse", "fuse.sshfs", "fuse.glusterfs"]
LOCAL = ["ext4", "xfs", "btrfs", "zfs", "tmpfs", "overlay", "fuseblk"]


def test_which_file_systems_other_hosts_see() -> None:
    assert [name for name in [*NETWORK, *FUSE, *LOCAL] if not is_shared(name)] == LOCAL


# --- direct I/O


def refuse_direct(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Have the kernel refuse one kind of call that is made past the page cache."""
    inner = getattr(os, name)

    def call(*arguments: Any, **named: Any) -> Any:
        if name == "open":
            direct = arguments[1] & os.O_DIRECT
            if direct and arguments[1] & os.O_CREAT:
                os.close(inner(arguments[0], arguments[1] & ~os.O_DIRECT, *arguments[2:]))
        else:
            direct = fcntl.fcntl(arguments[0], fcntl.F_GETFL) & os.O_DIRECT
        if direct:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return inner(*arguments, **named)

    monkeypatch.setattr(os, name, call)


def test_direct_works_or_says_why_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = probe_direct(tmp_path)
    try:
        descriptor = os.open(tmp_path / "f", os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    except OSError:
        assert not found.works
    else:
        os.close(descriptor)
        assert found.works, found.reason
    for name, step in (("open", "open"), ("pwritev", "write"), ("preadv", "read")):
        with monkeypatch.context() as patched:
            refuse_direct(patched, name)
            found = probe_direct(tmp_path)
        assert not found.works
        assert found.reason == f"O_DIRECT is refused at {step}: Invalid argument"
    assert not probe_direct(tmp_path / "absent").works
    with monkeypatch.context() as patched:
        patched.setattr(os, "preadv", lambda *_: 4096)
        assert not probe_direct(tmp_path).works, "what came back is not what was written"
    assert {path.name for path in tmp_path.iterdir()} <= {"f"}


@pytest.mark.parametrize("name", ["open", "pwritev", "preadv"])
def test_what_is_refused_goes_on_through_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    refuse_direct(monkeypatch, name)
    content = os.urandom(3 * 4096)
    page = scratch(len(content))
    page[:] = content
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
    descriptor = open_file(str(tmp_path / "f"), flags, direct=True)
    write_all(descriptor, (page[:4096], page[4096:]))
    back = scratch(len(content))
    assert read_all(descriptor, (back[:8192], back[8192:])) == len(content)
    os.close(descriptor)
    assert bytes(back) == content == (tmp_path / "f").read_bytes()


@pytest.mark.parametrize("direct", [False, True])
def test_any_length_at_any_offset_and_address(tmp_path: Path, direct: bool) -> None:
    content = os.urandom(10_001)
    odd = memoryview(bytearray(1) + content)[1:]
    descriptor = open_file(str(tmp_path / "f"), os.O_RDWR | os.O_CREAT, direct)
    write_all(descriptor, (odd[:5000], odd[5000:5000], odd[5000:]), 4097)
    back = memoryview(bytearray(10_005))
    assert read_all(descriptor, (back[:1], back[1:]), 4097) == 10_001
    os.close(descriptor)
    assert back[:10_001] == content
    assert (tmp_path / "f").stat().st_size == 4097 + 10_001


def test_more_buffers_than_one_call_takes(tmp_path: Path) -> None:
    content = os.urandom(3000)
    views = [memoryview(content)[i : i + 1] for i in range(3000)]
    descriptor = open_file(str(tmp_path / "f"), os.O_RDWR | os.O_CREAT, direct=False)
    write_all(descriptor, views)
    back = memoryview(bytearray(3000))
    assert read_all(descriptor, [back[i : i + 1] for i in range(3000)]) == 3000
    os.close(descriptor)
    assert back == content


def test_other_refusals_are_raised(tmp_path: Path) -> None:
    """EINVAL without O_DIRECT, and what is no EINVAL: trying again would never end."""
    (tmp_path / "f").write_bytes(b"x")
    descriptor = open_file(str(tmp_path / "f"), os.O_RDWR, direct=True)
    with pytest.raises(OSError, match="Invalid"):
        read_all(descriptor, (scratch(4096),), -4096)
    os.close(descriptor)
    reader = open_file(str(tmp_path / "f"), os.O_RDONLY, direct=True)
    with pytest.raises(OSError, match="Bad file"):
        write_all(reader, (scratch(4096),))
    os.close(reader)


def test_which_lengths_suit_direct_transfers() -> None:
    page = scratch(8192)
    assert aligned((page[:4096], page[4096:], page[:0]))
    assert not aligned((page[:4095], page[4095:]))
    assert page.nbytes == 8192
    assert scratch(0).nbytes == 0


# --- temporary files


def name_in_child(lives: bool) -> tuple[str, subprocess.Popen[str]]:
    code = "from kvtier.tiers.fs.temporary import TempNames as T; print(T().new(), flush=True);"
    child = subprocess.Popen(
        [sys.executable, "-c", code + "input()" * lives],
        env={**os.environ, "PYTHONPATH": str(Path(kvtier.__file__).parents[1])},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    return child.stdout.readline().strip(), child


def test_which_temporary_files_are_stale(tmp_path: Path) -> None:
    (tmp_path / "f").touch()
    os.utime(tmp_path / "f", (1000.0, 1000.0))
    found = (tmp_path / "f").stat()

    def stale(name: str, now: float = 1e9) -> bool:
        assert is_temp(name)
        return is_stale_temp(name, found, now)

    name, child = name_in_child(lives=True)
    assert not stale(name), "its writer lives"
    assert not stale(TempNames().new())
    pid, token, number = name.split("-")
    later = token[:16] + f"{int(token[16:32], 16) + 1:016x}" + token[32:]
    assert stale(f"{pid}-{later}-{number}", now=0), "the pid is another process's now"
    unknown = token[:16] + 16 * "0" + token[32:]
    assert not stale(f"{pid}-{unknown}-{number}"), "its start is not known, its pid lives"
    child.communicate("\n")
    assert stale(name, now=0), "dead, at whatever age"
    elsewhere = f"{pid}-{'0' * 16}{token[16:]}-{number}"
    assert not stale(elsewhere, now=1000 + 3600)
    assert stale(elsewhere, now=1000 + 3601)
    assert stale("1-a-0.tmp")
    for foreign in ("x.tmp", "1-a-0.tmp.gz", "1-a-0", "-a-0.tmp", "a-1-0.tmp", "ab" * 36):
        assert not is_temp(foreign)
        assert not is_stale_temp(foreign, found, 1e9)


def test_names_are_new(tmp_path: Path) -> None:
    first, second = TempNames(), TempNames()
    names = [source.new() for source in (first, second) for _ in range(100)]
    assert len(set(names)) == 200


# --- threads


def test_the_smallest_number_that_is_good_enough() -> None:
    assert probe.smallest_good({1: 10.0, 2: 19.0, 4: 20.0, 8: 18.0}) == 2
    assert probe.smallest_good({1: 10.0, 2: 18.9, 4: 19.9, 8: 21.0}) == 8
    assert probe.smallest_good({16: 5.0}) == 16


@pytest.mark.parametrize(
    ("writes", "reads", "threads"),
    [
        ({1: 10.0, 8: 10.0}, {1: 10.0, 8: 10.0}, 8),
        ({2: 10.0, 8: 20.0}, {2: 10.0, 8: 10.0}, 16),
        ({2: 10.0, 8: 10.0}, {2: 10.0, 8: 20.0}, 16),
        ({4: 10.0, 16: 20.0}, {4: 10.0}, 16),
    ],
)
def test_half_of_the_threads_keep_the_medium_busy(writes, reads, threads: int) -> None:
    assert probe.threads_for(writes, reads) == threads


def test_threads_are_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    number = probe.threads_of(tmp_path, direct=True)
    assert number in probe.COUNTS[1:]
    kept = tmp_path / ".kvtier" / "probe.json"
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [kept]
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    assert stat.S_IMODE(kept.parent.stat().st_mode) == 0o700
    measured: list[bool] = []

    def measure(root: Path, direct: bool, medium: str) -> probe.ThreadProbe:
        measured.append(direct)
        return probe.ThreadProbe(threads=4, medium=medium, direct=direct, write={}, read={})

    monkeypatch.setattr(probe, "measure", measure)
    assert probe.threads_of(tmp_path, direct=True) == number
    assert measured == []
    assert probe.threads_of(tmp_path, direct=False) == 4
    assert measured == [False], "another way of writing"
    other = probe.ThreadProbe(threads=16, medium="another", direct=False, write={}, read={})
    probe.remember(tmp_path, other)
    assert probe.threads_of(tmp_path, direct=False) == 4
    assert measured == [False, False], "another medium"
    for spoilt in (b"", b"{", msgspec.json.encode({"threads": 4}), b'{"threads":"x"}'):
        kept.write_bytes(spoilt)
        assert probe.threads_of(tmp_path, direct=False) == 4
    kept.write_bytes(msgspec.json.encode(msgspec.structs.replace(other, threads=10**6)))
    assert probe.recall(tmp_path) is None


def test_what_cannot_be_measured_has_a_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert probe.threads_of(tmp_path / "absent", direct=False) == 8

    def refuse(*_: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "pwritev", refuse)
    assert probe.threads_of(tmp_path, direct=False) == 8
    monkeypatch.setattr("kvtier.tiers.fs.medium.is_shared", lambda _: True)
    assert probe.threads_of(tmp_path, direct=False) == 16
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [], "nothing is left"


def test_a_slow_medium_is_measured_with_many_threads_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each look at the clock finds a second gone."""
    now = [0.0]
    lock = threading.Lock()

    def clock() -> float:
        with lock:
            now[0] += 1.0
            return now[0]

    found = probe.measure(tmp_path, False, "m", clock)
    assert set(found.write) == set(found.read) == {16}
    assert found.threads == 16
