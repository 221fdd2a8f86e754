"""A file system that fails or hangs on demand, for programs that run above it unchanged.

Two ways. `BrokenCalls` is preloaded into another process and answers chosen calls below a directory
with an error, or not at all, until told otherwise: what a dying disk or a lost server does, in a
way that a kill ends. `LoopMount` is a small real file system, to be filled, made read-only, cut off
from its medium, or taken away; it needs the superuser.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Literal, Self

Group = Literal[
    "open",
    "create",
    "read",
    "write",
    "stat",
    "fstat",
    "sync",
    "rename",
    "unlink",
    "mkdir",
    "list",
    "lock",
    "touch",
    "statvfs",
    "all",
]
"""Which calls: `create` opens with O_CREAT, `write` also allocates and truncates, `unlink` also
removes directories, `touch` sets times and modes."""

HANG: Final = "hang"

_SOURCE = Path(__file__).with_name("broken_calls.c")
_FILL_STEP = 1 << 20
_BUSY_S = 3.0  # of retries while a write is under way


class UnavailableError(Exception):
    """This machine cannot break a medium in that way; the text says what is missing."""


class BrokenCalls:
    """Calls that fail below one directory, in processes that are started with `environment`.

    Args:
        below: the directory.
        scratch: where the control file is made; outside `below`.
        library: what `build` made.
    """

    def __init__(self, below: Path, scratch: Path, library: Path) -> None:
        self._control = scratch / "broken_calls.control"
        self.environment: Mapping[str, str] = {
            "LD_PRELOAD": str(library),
            "KVTIER_BROKEN_BELOW": str(below),
            "KVTIER_BROKEN_CONTROL": str(self._control),
        }

    @staticmethod
    def build(scratch: Path) -> Path:
        """Compile the library into a directory.

        Raises:
            UnavailableError: there is no C compiler, or it fails.
        """
        compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
        if compiler is None:
            raise UnavailableError("no C compiler")
        library = scratch / "broken_calls.so"
        _run(
            *(compiler, "-std=gnu11", "-O1", "-shared", "-fPIC", "-o", str(library)),
            *(str(_SOURCE), "-ldl"),
        )
        return library

    def answer(self, faults: Mapping[Group, int | Literal["hang"]], names: int = 0) -> None:
        """From now on calls of these groups fail with an errno, or hang; all others work again.

        Args:
            faults: errno or `HANG` per group.
            names: characters that the file system keeps of a name; 0 for all.
        """
        for group in faults:
            self._seen(group).unlink(missing_ok=True)
        lines = [f"{group} {what}\n" for group, what in faults.items()]
        if names:
            lines.append(f"names {names}\n")
        draft = self._control.with_suffix(".draft")
        draft.write_text("".join(lines))
        draft.rename(self._control)  # a reader sees the old or the new

    def heal(self) -> None:
        """From now on all calls work, those that hang too."""
        self.answer({})

    def is_hanging(self, group: Group) -> bool:
        """Whether a call of the group has begun to hang since `answer`."""
        return self._seen(group).exists()

    def _seen(self, group: str) -> Path:
        return self._control.with_name(f"{self._control.name}.{group}")


class LoopMount:
    """A small ext4 in a file, mounted on a directory of its own. A context manager.

    Args:
        scratch: holds the file and the directory.
        size_bytes: of the file; a few MiB are the least.

    Attributes:
        point: where it is mounted.

    Raises:
        UnavailableError: not the superuser, or a program or loop device is missing.
    """

    def __init__(self, scratch: Path, size_bytes: int = 32 << 20) -> None:
        self.point = scratch / "mount"
        self._image = scratch / "medium.ext4"
        self._size = size_bytes
        self._balloon = self.point / "balloon"
        if os.geteuid() != 0:
            raise UnavailableError("only the superuser can mount")
        with self._image.open("wb") as image:
            image.truncate(size_bytes)
        self.point.mkdir()
        _run("mkfs.ext4", "-q", "-F", "-m", "0", "-O", "^has_journal", str(self._image))
        _run("mount", "-o", "loop", str(self._image), str(self.point))
        self.point.chmod(0o700)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.take_away()

    def fill(self) -> None:
        """Let somebody else take all space that is left."""
        with self._balloon.open("ab", buffering=0) as balloon:
            step = _FILL_STEP
            while step:
                try:
                    balloon.write(bytes(step))
                except OSError:
                    step //= 2

    def make_room(self) -> None:
        """Give that space back."""
        self._balloon.unlink()

    def make_read_only(self) -> None:
        """As an administrator does it, or the kernel after an error of the medium.

        Raises:
            UnavailableError: a file stays open for writing.
        """
        end = time.monotonic() + _BUSY_S
        while True:
            try:
                _run("mount", "-o", "remount,ro", str(self.point))
            except UnavailableError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.01)
            else:
                return

    def make_writable(self) -> None:
        """Undo `make_read_only`."""
        _run("mount", "-o", "remount,rw", str(self.point))

    def lose_medium(self) -> None:
        """From now on whatever is not in memory cannot be read: it is lost, `restore` or not."""
        os.sync()
        kept = self._image.with_suffix(".kept")
        shutil.copyfile(self._image, kept)
        os.truncate(self._image, 0)
        self._resize()  # or a write would make the file long again, and all before it zeros
        drop_caches()

    def restore_medium(self) -> None:
        """Undo `lose_medium`, for what nobody wrote meanwhile."""
        with self._image.with_suffix(".kept").open("rb") as kept, self._image.open("r+b") as image:
            image.truncate(self._size)
            shutil.copyfileobj(kept, image)
        self._resize()
        drop_caches()

    def take_away(self) -> None:
        """Unmount, also while it is in use."""
        subprocess.run(["umount", "-l", self.point], capture_output=True, check=False)

    def bring_back(self) -> None:
        """Mount again what was taken away."""
        _run("mount", "-o", "loop", str(self._image), str(self.point))

    def _resize(self) -> None:
        """Have the loop device be as long as its file."""
        _run("losetup", "-c", _run("findmnt", "-n", "-o", "SOURCE", str(self.point)).strip())


def drop_caches() -> None:
    """Have the kernel forget clean pages, so that the next reads go to the medium."""
    os.sync()
    with contextlib.suppress(PermissionError), open("/proc/sys/vm/drop_caches", "w") as file:
        file.write("3")


def wait_until_hanging(calls: BrokenCalls, group: Group, timeout_s: float = 20.0) -> None:
    """Wait until a call of a group hangs.

    Raises:
        TimeoutError: none does.
    """
    end = time.monotonic() + timeout_s
    while not calls.is_hanging(group):
        if time.monotonic() > end:
            raise TimeoutError(f"no {group} hangs within {timeout_s:g} s")
        time.sleep(0.005)


def _run(*command: str) -> str:
    """Run a program; what it says."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except FileNotFoundError as error:
        raise UnavailableError(f"{command[0]} is not installed") from error
    except subprocess.CalledProcessError as error:
        raise UnavailableError(f"{' '.join(command)} fails: {error.stderr.strip()}") from error
