"""One file per block: the layout for directories that engines and hosts share.

    <root>/<namespace>/namespace.json      what the namespace stands for, for humans
    <root>/<namespace>/<2 hex>/<key hex>   a block: header and row

The directory is the index and a file's mtime is its last use; nothing else is kept, so both are
common to all who use the directory, and survive them. Rules:

1. A block is published by a rename within its directory, so readers see all of it or nothing, also
   when its writer is killed.
2. The level comes from the first digits of the key: those are a hash, the last are the group. One
   level of 256 directories: they are all made with the first thousand blocks, and to make one
   takes as long as a small block. At 10^6 blocks each has 4,000 names, which every file system
   with hashed or sorted directories finds as fast.
3. Blocks are opened by absolute path: a descriptor of the namespace would save 0.2 us per call and
   go stale when somebody wipes the namespace or mounts the root again. A lookup of many keys opens
   one for itself.
4. Room is taken before a file is written, and given back by whoever removes it. Two who write one
   key at a time both take and one file stays: the inventory of the directory puts that right.
5. Where the compiled part is at hand, it has the first go at the blocks of a call; what it leaves,
   whatever the cause, is done here.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import threading
import time
from typing import TYPE_CHECKING, Literal

from kvtier.errors import MissingBlockError
from kvtier.tiers.fs.drafts import Draft, Drafts
from kvtier.tiers.fs.io import aligned, open_file, read_all
from kvtier.tiers.fs.namespace_directory import (
    FILE_MODE,
    WRITE_FLAGS,
    NamespaceDirectory,
    block_path,
)
from kvtier.tiers.fs.space import Space, Unbounded

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from kvtier.core.types import BlockKey
    from kvtier.tiers.base import Buffers
    from kvtier.tiers.fs.native import NativeFiles

Durability = Literal["none", "data"]
"""`none`: blocks survive the death of processes. `data`: the loss of power too."""

_READ_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_SYNC_TOGETHER = 16  # files of one call that are open until all are synced


class FilesTier:
    """Keeps blocks as files below `<root>/<namespace>`; any number of processes may share it.

    Args:
        root: an existing directory, see `kvtier.tiers.fs.checks`.
        namespace: hex digest under which the blocks are shared.
        description: written to `namespace.json` unless that exists; must hold no secret.
        space: what the bytes of blocks are taken from.
        durability: whether blocks are synced before they are published.
        direct: use `O_DIRECT`, see `kvtier.tiers.fs.medium.probe_direct`.
        touch_age_s: a use is written down if the last one is that long ago; on a network file
            system it costs a round trip.
        lookups_at_once: threads that may look keys up at a time; None for all. Where a call takes a
            microsecond, more than two only take the interpreter from each other.
        write_batch_bytes_min: see `kvtier.tiers.base.SupportsBatchBytes`.
        native: the compiled part, see `kvtier.tiers.fs.native`; None goes call by call. Blocks that
            are synced do so in any case: their syncs are what takes the time.

    Raises:
        OSError: the namespace directory or its description cannot be written.
    """

    def __init__(
        self,
        root: Path,
        namespace: str,
        description: Mapping[str, object] | None = None,
        space: Space | None = None,
        durability: Durability = "none",
        direct: bool = False,
        touch_age_s: float = 1.0,
        lookups_at_once: int | None = None,
        write_batch_bytes_min: int = 0,
        native: NativeFiles | None = None,
    ) -> None:
        self.write_batch_bytes_min = write_batch_bytes_min
        self._durable = durability == "data"
        self._directory = NamespaceDirectory(root, namespace, description, self._durable)
        self._space = space or Unbounded()
        self._drafts = Drafts(self._directory, self._space, self._durable, direct)
        self._direct = direct
        self._touch_age_s = touch_age_s
        self._native = native
        self._lookups = (
            contextlib.nullcontext()
            if lookups_at_once is None
            else threading.BoundedSemaphore(lookups_at_once)
        )
        self._removed = 0

    def exists(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Whether there is a file, per key: one `faccessat` each, below one descriptor.

        Raises:
            OSError: the medium failed; that is not the same as absent.
        """
        names = [block_path(key) for key in keys]
        try:
            descriptor = os.open(self._directory.path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            self._directory.check_root()
            return [False] * len(keys)
        try:
            self._directory.hold_again(os.fstat(descriptor))
            with self._lookups:
                if self._native is not None:
                    return self._native.find_files(descriptor, names)
                access = os.access
                found = [access(name, os.F_OK, dir_fd=descriptor) for name in names]
            if not all(found):
                # `access` says no to every error: one honest question tells absent from broken
                with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                    os.stat(names[found.index(False)], dir_fd=descriptor)
        finally:
            os.close(descriptor)
        return found

    def read(self, key: BlockKey, into: Buffers) -> None:
        """Read the file straight into `into`. A file of another length is removed.

        Raises:
            MissingBlockError: there is no such file, or it is not exactly as long as `into`.
            OSError: the medium failed.
        """
        path = self._path(key)
        try:
            descriptor = open_file(path, _READ_FLAGS, self._direct and aligned(into))
        except FileNotFoundError:
            self._directory.check_root()
            raise MissingBlockError(f"no file {path}") from None
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.ENXIO):
                raise
            raise MissingBlockError(f"{path} is not a file, but a link or the like") from None
        wanted = sum(view.nbytes for view in into)
        try:
            found = os.fstat(descriptor)
            whole = found.st_size == wanted and read_all(descriptor, into) == wanted
            if whole:
                self._touch(descriptor, found)
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
            self._directory.check_root()
            # NFS has no open files: another host removed this one while it was read
            raise MissingBlockError(f"{path} was removed") from None
        finally:
            os.close(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise MissingBlockError(f"{path} is not a file")
        if not whole:
            self._removed += 1
            with contextlib.suppress(OSError):
                self.delete(key)
            raise MissingBlockError(f"{path} is not a block of {wanted} bytes and was removed")

    def write(self, key: BlockKey, data: Buffers) -> None:
        """Write a file beside the others and rename it; nothing if the block is there already.

        Raises:
            TierFullError: the capacity is used up.
            OSError: disk full, quota, permissions; no temporary file is left behind.
        """
        (error,) = self.write_batch((key,), (data,))
        if error is not None:
            raise error

    def read_batch(
        self, keys: Sequence[BlockKey], into: Sequence[Buffers]
    ) -> list[BaseException | None]:
        """Like `read` for each; see `kvtier.tiers.base.SupportsBatch`."""
        outcomes: list[BaseException | None] = [None] * len(keys)
        for i in self._read_together(keys, into):
            try:
                self.read(keys[i], into[i])
            except BaseException as error:  # noqa: BLE001 - the caller's entry for this block
                outcomes[i] = error
        return outcomes

    def write_batch(
        self, keys: Sequence[BlockKey], data: Sequence[Buffers]
    ) -> list[BaseException | None]:
        """Like `write` for each, with syncs shared; see `kvtier.tiers.base.SupportsBatch`.

        A block whose directory could not be synced is reported as failed, and is there.
        """
        self._directory.hold()
        outcomes: list[BaseException | None] = [None] * len(keys)
        together = _SYNC_TOGETHER if self._durable else 1
        directories: dict[str, list[int]] = {}
        left = self._write_together(keys, data)
        for start in range(0, len(left), together):
            drafts: dict[int, Draft] = {}
            for i in left[start : start + together]:
                try:
                    draft = self._write_draft(self._path(keys[i]), data[i])
                except BaseException as error:  # noqa: BLE001 - as in read_batch
                    outcomes[i] = error
                else:
                    if draft is not None:
                        drafts[i] = draft
            # all of them are synced before the first is published
            for step in (self._drafts.finish, self._drafts.publish):
                for i, draft in drafts.items():
                    try:
                        if outcomes[i] is None:
                            step(draft)
                    except BaseException as error:  # noqa: BLE001 - as in read_batch
                        outcomes[i] = error
            for i, draft in drafts.items():
                if outcomes[i] is None:
                    directories.setdefault(os.path.dirname(draft.path), []).append(i)
        if self._durable:
            for directory, failure in self._drafts.sync(directories).items():
                for i in directories[directory]:
                    outcomes[i] = failure
        return outcomes

    def delete(self, key: BlockKey) -> None:
        """Remove the block's file; absent is fine.

        Raises:
            OSError: the medium failed.
        """
        path = self._path(key)
        size, _ = _stat(path)
        if size >= 0:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
                self._space.give_back(size)

    def figures(self) -> dict[str, float]:
        """`removed_blocks`: files that were removed since they had another length."""
        return {"removed_blocks": self._removed}

    def close(self) -> None:
        """Let go of the namespace; blocks stay where they are."""
        self._directory.close()

    def _path(self, key: BlockKey) -> str:
        return f"{self._directory.path}/{block_path(key)}"

    def _touch(self, file: int | str, found: os.stat_result) -> None:
        """Write down that a block is used now; that must not fail what uses it."""
        if abs(time.time() - found.st_mtime) > self._touch_age_s:
            with contextlib.suppress(OSError):
                os.utime(file)

    def _read_together(self, keys: Sequence[BlockKey], into: Sequence[Buffers]) -> Sequence[int]:
        """Read blocks in one call, as far as that goes. Returns the indexes of those left."""
        if self._native is None:
            return range(len(keys))
        paths = [os.fsencode(self._path(key)) for key in keys]
        flags = self._direct_flag(into) | _READ_FLAGS
        done = self._native.read_files(paths, into, flags, self._touch_age_s)
        return [i for i, read in enumerate(done) if not read]

    def _write_together(self, keys: Sequence[BlockKey], data: Sequence[Buffers]) -> Sequence[int]:
        """Write blocks in one call, as far as that goes. Returns the indexes of those left."""
        if self._native is None or self._durable:
            return range(len(keys))
        sizes = [sum(view.nbytes for view in block) for block in data]
        room = 0  # for so many of them
        done: Sequence[bool] = ()
        try:
            # why there is none for the next one is told when that is written by itself
            with contextlib.suppress(OSError):
                while room < len(keys) and self._space.take(sizes[room]):
                    room += 1
            paths = [self._path(key) for key in keys[:room]]
            new_name = self._directory.temp_names.new
            done = self._native.write_files(
                [os.fsencode(f"{os.path.dirname(path)}/{new_name()}") for path in paths],
                [os.fsencode(path) for path in paths],
                data[:room],
                self._direct_flag(data) | WRITE_FLAGS,
                FILE_MODE,
            )
        finally:
            for i in range(room):
                if not done or not done[i]:
                    self._space.give_back(sizes[i])
        return [i for i in range(len(keys)) if i >= room or not done[i]]

    def _direct_flag(self, blocks: Sequence[Buffers]) -> int:
        """`O_DIRECT` if it is used and the first block suits it: the others are made alike, and one
        that is not will be refused, and left.
        """
        return os.O_DIRECT if self._direct and blocks and aligned(blocks[0]) else 0

    def _write_draft(self, path: str, data: Buffers) -> Draft | None:
        """Write a block to a temporary file that is still open; None if it is there already."""
        nbytes = sum(view.nbytes for view in data)
        size, found = _stat(path)
        if size == nbytes and found is not None:
            self._touch(path, found)
            return None
        return self._drafts.write(path, data, max(size, 0))


def _stat(path: str) -> tuple[int, os.stat_result | None]:
    """Length in bytes of a block's file and its `stat`; -1 and None if there is none."""
    try:
        found = os.stat(path, follow_symlinks=False)
    except (FileNotFoundError, NotADirectoryError):
        return -1, None
    return (found.st_size, found) if stat.S_ISREG(found.st_mode) else (-1, None)
