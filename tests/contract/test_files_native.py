"""The compiled part of the files layout: it does what is ordinary, and leaves the rest as is."""

from __future__ import annotations

import errno
import os
import shutil
import sys
import sysconfig
import time
import tracemalloc
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from descriptors import opened_below
from files_world import Counted, file_of, files_under, get, put, python
from test_files import FilesContract

from kvtier.errors import ConfigError, MissingBlockError, TierFullError
from kvtier.testing.blocks import BLOCK_BYTES, NAMESPACE, block_of, key_of
from kvtier.tiers.fs.files import FilesTier
from kvtier.tiers.fs.io import scratch
from kvtier.tiers.fs.namespace_directory import FILE_MODE, WRITE_FLAGS
from kvtier.tiers.fs.native import NativeFiles, probe_native
from kvtier.tiers.fs.settings import FsSettings
from kvtier.tiers.fs.tier_type import FsTierType

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvtier.tiers.base import Tier

FIRST_KEYS = (1, 2, 3)


def test_it_was_built_where_there_is_a_compiler() -> None:
    """Else the tests below would be skipped for want of what they test."""
    header = Path(sysconfig.get_path("include"), "Python.h")
    if shutil.which("cc") is None or not header.exists():
        pytest.skip("no C compiler or no headers of Python: installed without the compiled part")
    assert probe_native().files is not None, probe_native().reason


@pytest.fixture(name="native")
def compiled() -> NativeFiles:
    found = probe_native()
    if found.files is None:
        pytest.skip(found.reason)
    return found.files


class TestNativeFilesTier(FilesContract):
    @pytest.fixture(autouse=True)
    def compiled(self, native: NativeFiles) -> None:
        self.native = native

    def make(self) -> Tier:
        return FilesTier(self.root, NAMESPACE, direct=self.direct, native=self.native)


class TestNativeDirectFilesTier(TestNativeFilesTier):
    direct = True


class Recorded:
    """The compiled part, and what it said."""

    def __init__(self, native: NativeFiles) -> None:
        self._native = native
        self.said: list[list[bool]] = []

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> list[bool]:
            self.said.append(getattr(self._native, name)(*arguments))
            return self.said[-1]

        return call


@pytest.fixture
def recorded(native: NativeFiles) -> Recorded:
    return Recorded(native)


@pytest.fixture
def space() -> Counted:
    return Counted()


@pytest.fixture(params=[False, True], ids=["buffered", "direct"])
def tier(
    tmp_path: Path, recorded: Recorded, space: Counted, request: pytest.FixtureRequest
) -> Iterator[FilesTier]:
    """With the directories of the first few blocks made, and nothing in them."""
    tier = FilesTier(tmp_path, NAMESPACE, space=space, direct=request.param, native=recorded)
    for i in FIRST_KEYS:
        file_of(tmp_path, i).parent.mkdir(exist_ok=True)
    before = opened_below(tmp_path)
    yield tier
    assert opened_below(tmp_path) == before, "a file was left open"
    tier.close()


def write_many(tier: FilesTier, numbers: Sequence[int]) -> list[BaseException | None]:
    blocks = [scratch(BLOCK_BYTES) for _ in numbers]
    for i, block in zip(numbers, blocks, strict=True):
        block[:] = block_of(key_of(i))
    pieces = [(block[:4096], block[4096:]) for block in blocks]
    return tier.write_batch([key_of(i) for i in numbers], pieces)


def read_many(tier: FilesTier, *numbers: int) -> tuple[list[BaseException | None], list[bytes]]:
    into = [scratch(BLOCK_BYTES) for _ in numbers]
    pieces = [(view[:4096], view[4096:]) for view in into]
    outcomes = tier.read_batch([key_of(i) for i in numbers], pieces)
    return outcomes, [bytes(view) for view in into]


# --- the ordinary


def test_new_blocks_are_written_in_one_call(
    tmp_path: Path, tier: FilesTier, recorded: Recorded, space: Counted
) -> None:
    assert write_many(tier, FIRST_KEYS) == [None] * 3
    assert recorded.said == [[True] * 3]
    assert {path: path.read_bytes() for path in files_under(tmp_path)} == {
        file_of(tmp_path, i): block_of(key_of(i)) for i in FIRST_KEYS
    }
    assert {path.stat().st_mode & 0o7777 for path in files_under(tmp_path)} == {0o600}
    assert space.taken == 3 * BLOCK_BYTES


def test_blocks_are_read_in_one_call(tier: FilesTier, recorded: Recorded) -> None:
    write_many(tier, FIRST_KEYS)
    outcomes, blocks = read_many(tier, *FIRST_KEYS)
    assert outcomes == [None] * 3
    assert blocks == [block_of(key_of(i)) for i in FIRST_KEYS]
    assert recorded.said[1:] == [[True] * 3]


def test_keys_are_looked_up_in_one_call(tier: FilesTier, recorded: Recorded) -> None:
    write_many(tier, (1, 3))
    assert tier.exists([key_of(i) for i in (1, 2, 3, 1000)]) == [True, False, True, False]
    assert len(recorded.said) == 2


def test_a_use_is_written_down_if_the_last_one_is_old(tmp_path: Path, tier: FilesTier) -> None:
    write_many(tier, (1, 2))
    old, recent = time.time() - 100, time.time() - 0.001
    os.utime(file_of(tmp_path, 1), (old, old))
    os.utime(file_of(tmp_path, 2), (recent, recent))
    read_many(tier, 1, 2)
    assert file_of(tmp_path, 1).stat().st_mtime > time.time() - 50
    assert file_of(tmp_path, 2).stat().st_mtime == pytest.approx(recent, abs=1e-6)


def test_a_use_in_the_future_is_put_right(tmp_path: Path, tier: FilesTier) -> None:
    write_many(tier, (1,))
    os.utime(file_of(tmp_path, 1), (2e9, 2e9))
    read_many(tier, 1)
    assert file_of(tmp_path, 1).stat().st_mtime < 2e9


def test_the_umask_takes_no_bits_of_the_owner(
    tmp_path: Path, tier: FilesTier, recorded: Recorded
) -> None:
    former = os.umask(0o777)
    try:
        write_many(tier, (1,))
    finally:
        os.umask(former)
    assert recorded.said == [[True]]
    assert file_of(tmp_path, 1).stat().st_mode & 0o7777 == 0o600


# --- what is left to be done call by call


def test_a_directory_is_made_for_a_block(
    tmp_path: Path, tier: FilesTier, recorded: Recorded, space: Counted
) -> None:
    file_of(tmp_path, 3).parent.rmdir()
    assert write_many(tier, FIRST_KEYS) == [None] * 3
    assert recorded.said == [[True, True, False]]
    assert get(tier, key_of(3)) == block_of(key_of(3))
    assert space.taken == 3 * BLOCK_BYTES


def test_a_present_block_is_not_written_again(
    tmp_path: Path, tier: FilesTier, recorded: Recorded, space: Counted
) -> None:
    write_many(tier, (1,))
    before = file_of(tmp_path, 1).stat()
    assert write_many(tier, (1, 2)) == [None] * 2
    assert recorded.said[1] == [False, True]
    assert file_of(tmp_path, 1).stat().st_ino == before.st_ino
    assert space.taken == 2 * BLOCK_BYTES


@pytest.mark.parametrize("length", [0, BLOCK_BYTES - 1, BLOCK_BYTES + 1])
def test_a_file_of_another_length_is_replaced_by_a_write(
    tmp_path: Path, tier: FilesTier, space: Counted, length: int
) -> None:
    file_of(tmp_path, 1).write_bytes(b"x" * length)
    space.take(length)
    assert write_many(tier, (1, 2)) == [None] * 2
    assert get(tier, key_of(1)) == block_of(key_of(1))
    assert space.taken == 2 * BLOCK_BYTES


@pytest.mark.parametrize("length", [0, BLOCK_BYTES - 1, BLOCK_BYTES + 1])
def test_a_file_of_another_length_is_missing_and_goes(
    tmp_path: Path, tier: FilesTier, length: int
) -> None:
    write_many(tier, (2,))
    file_of(tmp_path, 1).write_bytes(b"x" * length)
    outcomes, blocks = read_many(tier, 1, 2)
    assert isinstance(outcomes[0], MissingBlockError)
    assert outcomes[1] is None
    assert blocks[1] == block_of(key_of(2))
    assert files_under(tmp_path) == [file_of(tmp_path, 2)]


@pytest.mark.parametrize("kind", ["link", "directory", "fifo"])
def test_what_is_not_a_file_is_no_block(tmp_path: Path, tier: FilesTier, kind: str) -> None:
    write_many(tier, (2,))
    path = file_of(tmp_path, 1)
    if kind == "link":
        path.symlink_to(file_of(tmp_path, 2))
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        path.mkdir()
    outcomes, _ = read_many(tier, 1, 2)
    assert isinstance(outcomes[0], MissingBlockError | IsADirectoryError)
    assert outcomes[1] is None


def test_absent_blocks_are_missing(tier: FilesTier) -> None:
    write_many(tier, (2,))
    outcomes, _ = read_many(tier, 1, 2, 3)
    assert [type(outcome) for outcome in outcomes] == [
        MissingBlockError,
        type(None),
        MissingBlockError,
    ]


def test_what_has_room_is_written(tmp_path: Path, tier: FilesTier, space: Counted) -> None:
    space.room = 2 * BLOCK_BYTES
    outcomes = write_many(tier, FIRST_KEYS)
    assert outcomes[:2] == [None, None]
    assert isinstance(outcomes[2], TierFullError)
    assert len(files_under(tmp_path)) == 2
    assert space.taken == 2 * BLOCK_BYTES


def test_a_present_block_needs_no_room(tier: FilesTier, space: Counted) -> None:
    write_many(tier, (1,))
    space.room = space.taken
    assert write_many(tier, (1,)) == [None]


def test_a_ledger_that_fails_is_told_of_each_block(
    tier: FilesTier, space: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(nbytes: int) -> bool:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(space, "take", fail)
    outcomes = write_many(tier, (1, 2))
    assert [getattr(outcome, "errno", None) for outcome in outcomes] == [errno.EIO] * 2


def test_what_cannot_be_handed_over_takes_no_room(tier: FilesTier, space: Counted) -> None:
    memory = memoryview(bytearray(BLOCK_BYTES))
    with pytest.raises(BufferError):
        tier.write_batch([key_of(1), key_of(2)], [(memory,), (memory[::2],)])
    assert space.taken == 0


def test_a_medium_that_fails_is_not_absence(tmp_path: Path, native: NativeFiles) -> None:
    descriptor = os.open(tmp_path, os.O_PATH)
    try:
        assert native.find_files(descriptor, ["here", "here/below"]) == [False, False]
        (tmp_path / "here").touch()
        assert native.find_files(descriptor, ["here", "here/below"]) == [True, False]
        with pytest.raises(OSError, match="too long"):
            native.find_files(descriptor, ["here", "x" * 300])
    finally:
        os.close(descriptor)


LIMITED = """
import errno, resource, sys
from pathlib import Path
from kvtier.testing.blocks import NAMESPACE, block_of, key_of
from kvtier.tiers.fs.files import FilesTier
from kvtier.tiers.fs.io import scratch
from kvtier.tiers.fs.io import scratch
from kvtier.tiers.fs.native import probe_native
tier = FilesTier(
    Path(sys.argv[1]), NAMESPACE, direct=sys.argv[2] == "True", native=probe_native().files
)
small, large = scratch(8 * 4096), scratch(64 * 4096)
tier.write(key_of(1), (small,))
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
outcomes = tier.write_batch([key_of(2), key_of(2)], [(large[:4096], large[4096:]), (small,)])
print(errno.errorcode[outcomes[0].errno], outcomes[1])
"""


@pytest.mark.parametrize("direct", [False, True])
def test_a_write_that_is_cut_short_leaves_nothing(
    tmp_path: Path, native: NativeFiles, direct: bool
) -> None:
    """The kernel takes the bytes up to a limit and then refuses: of the second, whole block too
    nothing may be left of the first.
    """
    file_of(tmp_path, 2).parent.mkdir(parents=True)
    with python(LIMITED, tmp_path, direct) as child:
        assert child.stdout is not None
        assert child.stdout.read() == "EFBIG None\n"
    assert sorted(files_under(tmp_path)) == sorted(file_of(tmp_path, i) for i in (1, 2))
    assert file_of(tmp_path, 2).stat().st_size == 8 * 4096


# --- the call itself


WAITING = """
import os, sys, threading
from kvtier.tiers.fs.native import probe_native
write_files, outcomes = probe_native().files.write_files, []
writer = threading.Thread(
    target=lambda: outcomes.extend(
        write_files([os.fsencode(sys.argv[1])], [b"absent"], [(b"x",)], os.O_WRONLY, 0o600)
    )
)
writer.start()
with open(sys.argv[1], "rb"):
    writer.join()
print(outcomes)
"""


@pytest.mark.usefixtures("native")
def test_the_interpreter_runs_on_meanwhile(tmp_path: Path) -> None:
    """A call that waits for a reader: held, the interpreter would never get to open one."""
    os.mkfifo(tmp_path / "fifo")
    with python(WAITING, tmp_path / "fifo") as child:
        try:
            said, _ = child.communicate(timeout=60)
        finally:
            child.kill()
    assert said == "[False]\n", "no file, so it takes no bytes at an offset"


def test_memory_is_let_go_of(tmp_path: Path, native: NativeFiles) -> None:
    memory = bytearray(BLOCK_BYTES)
    view = memoryview(memory)
    path, temp = bytes(tmp_path / "block"), bytes(tmp_path / "temp")
    before = sys.getrefcount(path), sys.getrefcount(temp), sys.getrefcount(view)
    for _ in range(3):
        native.write_files([temp], [path], [(view[:1], view[1:])], WRITE_FLAGS, FILE_MODE)
        native.read_files([path], [(view[:1], view[1:])], os.O_RDONLY, 1.0)
    assert before == (sys.getrefcount(path), sys.getrefcount(temp), sys.getrefcount(view))
    view.release()
    memory.clear()  # refused while anybody holds a view


def test_calls_leave_no_memory(tmp_path: Path, native: NativeFiles) -> None:
    path, temp = bytes(tmp_path / "block"), bytes(tmp_path / "temp")
    into = (memoryview(bytearray(1)),)

    def call() -> None:
        native.write_files([temp] * 100, [path] * 100, [(b"x",)] * 100, WRITE_FLAGS, FILE_MODE)
        native.read_files([path] * 100, [into] * 100, os.O_RDONLY, 1.0)
        native.find_files(0, ["absent"] * 100)

    tracemalloc.start()
    try:
        call()
        before, _ = tracemalloc.get_traced_memory()
        for _ in range(100):
            call()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 100 * 100, "less than a byte for each block of each call"


@pytest.mark.parametrize(
    ("call", "arguments", "error"),
    [
        ("write_files", ([b"t"], [b"a", b"b"], [(b"x",)], 0, 0), ValueError),
        ("write_files", ([], [b"a"], [(b"x",)], 0, 0), ValueError),
        ("write_files", (["t"], ["a"], [(b"x",)], 0, 0), TypeError),
        ("write_files", ([b"t"], [b"a"], [("x",)], 0, 0), TypeError),
        ("write_files", ([b"t"], [b"a"], [1], 0, 0), TypeError),
        ("write_files", ([b"t"], [b"a"], 1, 0, 0), TypeError),
        ("read_files", ([b"a"], [(b"read only",)], 0, 1.0), BufferError),
        ("read_files", ([b"a"], [], 0, 1.0), ValueError),
        ("find_files", (0, [b"bytes"]), TypeError),
        ("find_files", (0, 1), TypeError),
    ],
)
def test_what_cannot_be_meant_is_refused(
    tmp_path: Path,
    native: NativeFiles,
    monkeypatch: pytest.MonkeyPatch,
    call: str,
    arguments: tuple[Any, ...],
    error: type[Exception],
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error):
        getattr(native, call)(*arguments)
    assert not list(tmp_path.iterdir())


def test_nothing_is_nothing(native: NativeFiles) -> None:
    assert native.write_files([], [], [], 0, 0) == []
    assert native.read_files([], [], 0, 1.0) == []
    assert native.find_files(0, []) == []


# --- the setting


@pytest.fixture
def not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kvtier.tiers.fs.native_files", None)
    monkeypatch.delattr("kvtier.tiers.fs.native_files", raising=False)


@pytest.mark.usefixtures("not_built")
def test_without_it_blocks_go_call_by_call(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = FsSettings(root_dir=str(tmp_path), layout="files")
    tier_type = FsTierType()
    tier_type.preflight(settings, "tiers[0]")
    with caplog.at_level("INFO"):
        tier = tier_type.open(settings, NAMESPACE, {})
    put(tier, key_of(1))
    assert get(tier, key_of(1)) == block_of(key_of(1))
    tier.close()
    assert "call by call (not built when kvtier was installed" in caplog.text


@pytest.mark.usefixtures("not_built")
def test_insisting_on_what_is_missing_is_an_error(tmp_path: Path) -> None:
    settings = FsSettings(root_dir=str(tmp_path), layout="files", native="on")
    with pytest.raises(
        ConfigError, match=r"tiers\[0\].native is 'on'.*C compiler.*'auto' or 'off'"
    ):
        FsTierType().preflight(settings, "tiers[0]")


@pytest.mark.parametrize(("setting", "said"), [("on", "native calls"), ("off", "native is off")])
def test_the_setting_is_heeded(
    tmp_path: Path,
    native: NativeFiles,
    caplog: pytest.LogCaptureFixture,
    setting: Any,
    said: str,
) -> None:
    settings = FsSettings(root_dir=str(tmp_path), layout="files", native=setting)
    tier_type = FsTierType()
    tier_type.preflight(settings, "tiers[0]")
    with caplog.at_level("INFO"):
        tier_type.open(settings, NAMESPACE, {}).close()
    assert said in caplog.text
