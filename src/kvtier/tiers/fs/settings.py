"""The options of `type: fs`, decoded strictly."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from kvtier.config import parse_size
from kvtier.tiers.fs.sizes import DEFAULT_MIN_FREE, mount_bytes, parse_capacity, parse_min_free

_Threads = Annotated[int, msgspec.Meta(ge=1, le=1024)]
_Path = Annotated[str, msgspec.Meta(min_length=1)]

ROOTS_MAX = 64


@dataclass(frozen=True, slots=True)
class Bounds:
    """What may be used of the mount of one root.

    Attributes:
        capacity: bytes that blocks may take there; None if only `min_free` bounds them.
        min_free: bytes of the mount that stay free.
    """

    capacity: int | None
    min_free: int


class FsSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options of `type: fs`.

    Attributes:
        root_dir: an existing directory that this user may write.
        root_dirs: instead of it, several, over which blocks are spread.
        layout: `files` keeps one file per block, for directories that hosts share; `segments`
            keeps blocks in large files, for a local disk; `auto` chooses by the file system.
        capacity: what blocks may take of all roots together, in bytes or as text with a unit; or a
            share of each root's mount, like "80%". None: what `min_free` leaves.
        min_free: what stays free of each mount, likewise.
        durability: `none`: blocks survive the death of processes; `data`: the loss of power too.
        direct: whether the page cache is passed by; `auto`: where that works.
        native: whether the compiled part of the `files` layout is used; `auto`: where it was built.
        segment_bytes: size of a file of the `segments` layout.
        threads: blocks, or runs of blocks, moved at once; None: measured. Instead of it, the two
            names below are taken as vLLM's own fs tier has them; every thread here serves both
            directions, so they add up.
        n_read_threads: see `threads`.
        n_write_threads: see `threads`.
    """

    root_dir: _Path | None = None
    root_dirs: Annotated[tuple[_Path, ...], msgspec.Meta(max_length=ROOTS_MAX)] = ()
    layout: Literal["auto", "files", "segments"] = "auto"
    capacity: int | str | None = None
    min_free: int | str = DEFAULT_MIN_FREE
    durability: Literal["none", "data"] = "none"
    direct: Literal["auto", "on", "off"] = "auto"
    native: Literal["auto", "on", "off"] = "auto"
    segment_bytes: int | str | None = None
    threads: Annotated[int, msgspec.Meta(ge=2, le=1024)] | None = None
    n_read_threads: _Threads | None = None
    n_write_threads: _Threads | None = None

    def __post_init__(self) -> None:
        if (self.root_dir is None) == (not self.root_dirs):
            raise ValueError("set `root_dir` to a directory, or `root_dirs` to a list of them")
        if self.threads is not None and (self.n_read_threads or self.n_write_threads):
            raise ValueError("set either `threads` or `n_read_threads` and `n_write_threads`")

    @property
    def roots(self) -> tuple[Path, ...]:
        """The directories."""
        return tuple(map(Path, self.root_dirs or ((self.root_dir,) if self.root_dir else ())))

    def setting_of(self, index: int, setting: str) -> str:
        """Path of the setting that names a root."""
        return f"{setting}.root_dirs[{index}]" if self.root_dirs else f"{setting}.root_dir"

    def bounds_of(self, root: Path, setting: str = "fs") -> Bounds:
        """What these settings allow on the mount of one of the roots.

        Args:
            root: one of `roots`.
            setting: path of the tier's settings, for the messages.

        Raises:
            ConfigError: not sizes or shares, or more than the mount has.
            OSError: the mount does not answer.
        """
        total = mount_bytes(root)
        min_free = parse_min_free(self.min_free, f"{setting}.min_free", total)
        name = f"{setting}.capacity"
        if isinstance(self.capacity, str) and "%" in self.capacity:
            return Bounds(parse_capacity(self.capacity, name, total), min_free)
        if self.capacity is None:
            return Bounds(None, min_free)
        share = parse_size(self.capacity, name) // len(self.roots)
        return Bounds(parse_capacity(max(share, 1), name, total), min_free)

    def segment_size(self, setting: str = "fs") -> int | None:
        """`segment_bytes` in bytes. Raises ConfigError."""
        if self.segment_bytes is None:
            return None
        return parse_size(self.segment_bytes, f"{setting}.segment_bytes")

    def threads_given(self) -> int | None:
        """How many threads the operator asked for; None if that is to be measured."""
        if self.threads is not None:
            return self.threads
        if self.n_read_threads is None and self.n_write_threads is None:
            return None
        return max(2, (self.n_read_threads or 1) + (self.n_write_threads or 1))
