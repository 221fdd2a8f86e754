"""What a walk through a root directory yields: blocks, and what lies beside them."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtier.tiers.deletion import Deletion
from kvtier.tiers.fs.temporary import is_stale_temp

if TYPE_CHECKING:
    import os

    from kvtier.core.types import BlockKey

SHOWN_MAX = 1000
"""Paths of each kind that are kept; the rest is only counted."""


@dataclass(frozen=True, slots=True)
class BlockEntry:
    """One stored block, as it was listed.

    Attributes:
        key: its key.
        nbytes: header and row.
        last_use_s: seconds since the epoch.
        place: where in its layout, for the layout itself.
    """

    key: BlockKey
    nbytes: int
    last_use_s: float
    place: object = None


@dataclass(frozen=True, slots=True)
class TemporaryFile:
    """A file that is being written, or whose writer was killed.

    Attributes:
        path: of the file.
        nbytes: so far.
        written_s: last write, seconds since the epoch.
        stale: whether its writer is surely gone.
    """

    path: str
    nbytes: int
    written_s: float
    stale: bool


Deleted = Deletion[BlockEntry]
"""What a deletion did there."""


class Findings:
    """What lies beside the blocks: counted, the first `SHOWN_MAX` of each kind named.

    Attributes:
        foreign_paths: not ours; never touched.
        num_foreign: how many.
        temporaries: files of writers, all of them.
        problems: paths that could not be listed or read, each with the reason.
    """

    def __init__(self) -> None:
        self.foreign_paths: list[str] = []
        self.num_foreign = 0
        self.temporaries: list[TemporaryFile] = []
        self.problems: list[tuple[str, str]] = []

    def foreign(self, path: str) -> None:
        """Something that is not ours."""
        self.num_foreign += 1
        if len(self.foreign_paths) < SHOWN_MAX:
            self.foreign_paths.append(path)

    def temporary(self, entry: os.DirEntry[str]) -> None:
        """A file of a writer; one that is gone meanwhile is none."""
        try:
            found = entry.stat(follow_symlinks=False)
        except FileNotFoundError:
            return
        except OSError as error:
            self.unreadable(entry.path, error)
            return
        stale = is_stale_temp(entry.name, found, time.time())
        self.temporaries.append(TemporaryFile(entry.path, found.st_size, found.st_mtime, stale))

    def unreadable(self, path: str, error: OSError) -> None:
        """Something of ours that cannot be looked at."""
        self.problems.append((path, error.strerror or str(error)))
