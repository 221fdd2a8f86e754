"""How a block becomes a file: written aside, synced where that is asked for, renamed, and its
directory synced.

    draft ----> written ----> synced ----> published ----> its directory synced
      |            |            |                            (`data` only, once for all of a job)
      +------------+------------+--> discarded: no file, its room given back

Synced before it is renamed, so that a loss of power leaves no name without its bytes. All drafts of
a job are written before the first is synced: a journal then commits them together.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtier.errors import TierFullError
from kvtier.tiers.fs.io import aligned, open_file, sync_directory, write_all
from kvtier.tiers.fs.namespace_directory import (
    FILE_MODE,
    WRITE_FLAGS,
    NamespaceDirectory,
    make_directory,
    own_mode,
)

if TYPE_CHECKING:
    from collections.abc import Collection

    from kvtier.tiers.base import Buffers
    from kvtier.tiers.fs.space import Space

_OPEN_ATTEMPTS = 3  # a directory that vanishes between two calls is being wiped


@dataclass(slots=True)
class Draft:
    """A block in a temporary file.

    Attributes:
        path: of the block's file.
        temp: of the temporary one, in the same directory.
        nbytes: that were taken for it.
        replaced: bytes of the file of another length that it will replace.
        descriptor: of the temporary file; -1 once that is closed.
    """

    path: str
    temp: str
    nbytes: int
    replaced: int
    descriptor: int = -1

    def close(self) -> None:
        """Close the file, once."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


class Drafts:
    """Writes and publishes blocks in one namespace directory. Thread safe.

    Args:
        directory: of the namespace.
        space: what the bytes are taken from.
        durable: sync.
        direct: write with `O_DIRECT`.
    """

    def __init__(
        self, directory: NamespaceDirectory, space: Space, durable: bool, direct: bool
    ) -> None:
        self._directory = directory
        self._space = space
        self._durable = durable
        self._direct = direct
        self._synced: set[str] = set()  # directories whose own entry is known to be synced

    def write(self, path: str, data: Buffers, replaced: int) -> Draft:
        """Write a block to a temporary file, which stays open.

        Raises:
            TierFullError: no room.
            OSError: the medium failed. No file is left in either case.
        """
        nbytes = sum(view.nbytes for view in data)
        if not self._space.take(nbytes):
            raise TierFullError(
                f"the capacity of {self._directory.root} has no {nbytes} bytes left"
            )
        temp = os.path.join(os.path.dirname(path), self._directory.temp_names.new())
        draft = Draft(path, temp, nbytes, replaced)
        try:
            draft.descriptor = self._create(temp, self._direct and aligned(data))
            own_mode(draft.descriptor)
            write_all(draft.descriptor, data)
        except BaseException:
            self._discard(draft)
            raise
        return draft

    def finish(self, draft: Draft) -> None:
        """Sync a draft and close it.

        Raises:
            OSError: the medium failed; the draft is discarded.
        """
        try:
            if self._durable:
                os.fdatasync(draft.descriptor)
            draft.close()  # some file systems report a full disk only here
        except BaseException:
            self._discard(draft)
            raise

    def publish(self, draft: Draft) -> None:
        """Rename a finished draft to its block.

        Raises:
            OSError: the medium failed; the draft is discarded.
        """
        try:
            os.rename(draft.temp, draft.path)
        except BaseException:
            self._discard(draft)
            raise
        if draft.replaced:
            self._space.give_back(draft.replaced)

    def sync(self, directories: Collection[str]) -> dict[str, OSError]:
        """Sync what published blocks lie in: each directory once, and the one they are all in.

        Returns:
            The errors, by directory.
        """
        failed: dict[str, OSError] = {}
        new = set(directories) - self._synced
        for directory in directories:
            try:
                sync_directory(directory)
            except OSError as error:
                failed[directory] = error
        if new:
            try:
                # also for directories of others: they may have been killed before they synced it
                sync_directory(self._directory.path)
            except OSError as error:
                failed.update(dict.fromkeys(new, error))
            else:
                self._synced |= new
        return failed

    def _create(self, temp: str, direct: bool) -> int:
        directory = os.path.dirname(temp)
        for _ in range(_OPEN_ATTEMPTS - 1):
            try:
                return open_file(temp, WRITE_FLAGS, direct, FILE_MODE)
            except FileNotFoundError:
                self._synced.discard(directory)
                if not os.path.isdir(self._directory.path):
                    self._directory.make()
                make_directory(directory)
        return open_file(temp, WRITE_FLAGS, direct, FILE_MODE)

    def _discard(self, draft: Draft) -> None:
        """Undo a draft. What cannot be removed now is left to the sweep."""
        with contextlib.suppress(OSError):
            draft.close()
        with contextlib.suppress(OSError):
            os.unlink(draft.temp)
        self._space.give_back(draft.nbytes)
