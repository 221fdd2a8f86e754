"""One root of this process: what is decided once for all namespaces that are open in it.

first namespace opened --> layout, direct I/O, share of the capacity, sweeper
last namespace closed  --> all let go, spare room given back
"""

from __future__ import annotations

import errno
import logging
import threading
from collections import deque
from typing import TYPE_CHECKING

from kvtier.errors import TierError, TierUnreachableError
from kvtier.tiers.base import SupportsBatchBytes, SupportsDropped
from kvtier.tiers.fs.capacity import Capacity
from kvtier.tiers.fs.checks import remarks
from kvtier.tiers.fs.files import FilesTier
from kvtier.tiers.fs.marker import MARKER_FILE, mark, read_marker
from kvtier.tiers.fs.medium import DirectProbe, Medium, probe_direct
from kvtier.tiers.fs.native import NativeProbe, probe_native
from kvtier.tiers.fs.segments.tier import DEFAULT_SEGMENT_BYTES, SegmentsTier

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from kvtier.core.types import BlockKey
    from kvtier.tiers.base import Buffers
    from kvtier.tiers.fs.marker import Layout
    from kvtier.tiers.fs.native import NativeFiles
    from kvtier.tiers.fs.settings import FsSettings

logger = logging.getLogger(__name__)

_SEGMENTS_PER_CAPACITY = 32

_TOTALS_OF_BOTH = ("evicted_blocks",)  # an owner of segments evicts, and so does a sweeper

_PASSING = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)

# of files, call by call: the calls are short, and threads get in each other's way between them
_LOOKUPS_LOCAL = 2

_WRITE_BATCH_BYTES_LOCAL = 2 << 20

_TOUCH_AGE_LOCAL_S = 1.0
_TOUCH_AGE_SHARED_S = 60.0  # writing a use down costs a round trip there


def prepare(root: Path, settings: FsSettings) -> None:
    """Mark a checked root as ours, so that the place where it was mounted is not taken for it.

    Raises:
        TierError: the root is marked by another release, or the marker is damaged.
        OSError: the root cannot be asked, or written for another reason than want of room.
    """
    try:
        mark(root, layout_of(root, settings, Medium.of(root)))
    except OSError as error:
        if error.errno not in _PASSING:
            raise


def layout_of(root: Path, settings: FsSettings, medium: Medium) -> Layout:
    """The layout to use below a root: what the settings say, else what its marker says, else
    `files` where other hosts may see the directory and `segments` where not.

    Raises:
        TierError: the root is marked by another release, or the marker is damaged.
        OSError: the root cannot be read.
    """
    marked = read_marker(root)
    if settings.layout != "auto":
        return settings.layout
    return marked or ("files" if medium.shared else "segments")


def direct_of(root: Path, settings: FsSettings) -> DirectProbe:
    """Whether to use direct I/O below a root: not if the settings say so, else if it works there.
    It is tried each time, since another file system may be mounted there by now. Raises nothing.
    """
    if settings.direct == "off":
        return DirectProbe(False, "direct is off")
    return probe_direct(root)


def native_of(settings: FsSettings) -> NativeProbe:
    """The compiled part of the `files` layout, unless the settings say no. Raises nothing."""
    if settings.native == "off":
        return NativeProbe(None, "native is off")
    return probe_native()


class Home:
    """See the module. Thread safe.

    Args:
        root: a checked directory.
        settings: of the tier.
    """

    def __init__(self, root: Path, settings: FsSettings) -> None:
        self._root = root
        self._settings = settings
        self._lock = threading.Lock()
        self._users = 0
        self._opened: _Opened | None = None

    def open(self, namespace: str, facts: Mapping[str, object]) -> NamespaceTier:
        """Open a namespace below a root that was prepared.

        Raises:
            TierUnreachableError: the root is not marked: something else is where it was mounted.
            TierError: the root is of another release, or its control directory is kept locked.
            OSError: the root cannot be written.
        """
        with self._lock:
            if self._opened is None:
                self._opened = _Opened(self._root, self._settings)
            self._users += 1
            opened = self._opened
        try:
            return NamespaceTier(self, opened, namespace, opened.tier(namespace, facts))
        except BaseException:
            self.leave()
            raise

    def leave(self) -> None:
        """A namespace was closed."""
        with self._lock:
            self._users -= 1
            if self._users or self._opened is None:
                return
            opened, self._opened = self._opened, None
        opened.capacity.close()


class _Opened:
    """What is found out, and joined, when the first namespace is opened."""

    def __init__(self, root: Path, settings: FsSettings) -> None:
        self._root = root
        self._settings = settings
        marked = read_marker(root)
        if marked is None:
            raise TierUnreachableError(
                f"{root} has no {MARKER_FILE}, which it had when it was checked: is it mounted?"
            )
        medium = Medium.of(root)
        self.layout = layout_of(root, settings, medium)
        direct = direct_of(root, settings)
        self._direct = direct.works
        self._native: NativeFiles | None = None
        calls = ""
        if self.layout == "files":
            native = native_of(settings)
            self._native = native.files
            calls = " in native calls" if native.files else f" call by call ({native.reason})"
        self._touch_age_s = _TOUCH_AGE_SHARED_S if medium.shared else _TOUCH_AGE_LOCAL_S
        self._lookups_at_once = None if medium.shared or self._native else _LOOKUPS_LOCAL
        self._write_batch_bytes_min = 0 if medium.shared else _WRITE_BATCH_BYTES_LOCAL
        bounds = settings.bounds_of(root)
        if settings.direct == "on" and not direct.works:
            raise TierError(f"{root} takes no direct I/O ({direct.reason}): set direct to auto")
        self._segment_bytes = DEFAULT_SEGMENT_BYTES
        if bounds.capacity is not None:
            share = bounds.capacity // _SEGMENTS_PER_CAPACITY
            self._segment_bytes = min(DEFAULT_SEGMENT_BYTES, share)
        self._segment_bytes = settings.segment_size() or self._segment_bytes
        said = remarks(root)
        self.capacity = Capacity(
            root, bounds.capacity, bounds.min_free, owning=self.layout == "segments"
        )
        self._lock = threading.Lock()
        self.segments: tuple[SegmentsTier, ...] = ()  # that are open; replaced, never changed
        self.capacity.space.measure_owned = lambda: sum(
            tier.owned_bytes() for tier in self.segments
        )
        for remark in said:
            logger.warning("%s", remark)
        logger.info(
            "%s is on %s (%s), layout %s%s%s, %s, durability %s, capacity %s, min_free %d bytes",
            root,
            medium.mount_point,
            medium.file_system,
            self.layout,
            "" if marked == self.layout else f" (others use {marked} there)",
            calls,
            "direct I/O" if direct.works else f"buffered I/O ({direct.reason})",
            settings.durability,
            "not set" if bounds.capacity is None else f"{bounds.capacity} bytes",
            bounds.min_free,
        )

    def tier(self, namespace: str, facts: Mapping[str, object]) -> FilesTier | SegmentsTier:
        """The layout's tier over a namespace."""
        if self.layout == "files":
            return FilesTier(
                self._root,
                namespace,
                facts,
                self.capacity.space,
                self._settings.durability,
                self._direct,
                self._touch_age_s,
                self._lookups_at_once,
                self._write_batch_bytes_min,
                self._native,
            )
        tier = SegmentsTier(
            self._root,
            namespace,
            facts,
            space=self.capacity.space,
            durability=self._settings.durability,
            direct=self._direct,
            segment_bytes=self._segment_bytes,
        )
        with self._lock:
            self.segments += (tier,)
        return tier

    def forget(self, tier: FilesTier | SegmentsTier) -> None:
        """A tier was closed."""
        with self._lock:
            self.segments = tuple(other for other in self.segments if other is not tier)


class NamespaceTier:
    """A namespace of a root: the layout's tier, and what the sweeper does with it."""

    def __init__(
        self, home: Home, opened: _Opened, namespace: str, inner: FilesTier | SegmentsTier
    ) -> None:
        self._home = home
        self._opened = opened
        self._capacity = opened.capacity
        self._namespace = namespace
        self._inner = inner
        self._evicted: deque[BlockKey] = deque()
        self._capacity.listen(namespace, self._on_evicted)

    @property
    def write_batch_bytes_min(self) -> int:
        """See `SupportsBatchBytes`."""
        return (
            self._inner.write_batch_bytes_min if isinstance(self._inner, SupportsBatchBytes) else 0
        )

    def exists(self, keys: Sequence[BlockKey]) -> Sequence[bool]:
        """See `Tier`."""
        return self._inner.exists(keys)

    def read(self, key: BlockKey, into: Buffers) -> None:
        """See `Tier`."""
        self._inner.read(key, into)

    def write(self, key: BlockKey, data: Buffers) -> None:
        """See `Tier`."""
        self._inner.write(key, data)

    def read_batch(
        self, keys: Sequence[BlockKey], into: Sequence[Buffers]
    ) -> Sequence[BaseException | None]:
        """See `SupportsBatch`."""
        return self._inner.read_batch(keys, into)

    def write_batch(
        self, keys: Sequence[BlockKey], data: Sequence[Buffers]
    ) -> Sequence[BaseException | None]:
        """See `SupportsBatch`."""
        return self._inner.write_batch(keys, data)

    def delete(self, key: BlockKey) -> None:
        """See `SupportsDelete`."""
        self._inner.delete(key)

    def take_dropped(self) -> list[BlockKey]:
        """What the layout gave up, and what this process's sweeper evicted."""
        dropped: list[BlockKey] = []
        if isinstance(self._inner, SupportsDropped):
            dropped += self._inner.take_dropped()
        while self._evicted:
            dropped.append(self._evicted.popleft())
        return dropped

    def figures(self) -> dict[str, float]:
        """Of the layout and of the whole root. Where both have one, running totals add up, and of
        levels the root's counts.
        """
        layout, root = self._inner.figures(), self._capacity.figures()
        both = {name: layout.get(name, 0) + root.get(name, 0) for name in _TOTALS_OF_BOTH}
        return {**layout, **root, **both}

    def close(self) -> None:
        """Close the namespace, and the root with its last one."""
        self._capacity.ignore(self._namespace, self._on_evicted)
        try:
            self._inner.close()
        finally:
            self._opened.forget(self._inner)
            self._home.leave()

    def _on_evicted(self, namespace: str, keys: Sequence[BlockKey]) -> None:  # noqa: ARG002
        self._evicted.extend(keys)
