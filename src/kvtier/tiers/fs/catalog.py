"""What lies in root directories, seen from outside: namespaces, their blocks, and what is not ours.

For the command line and other tools, never for an engine's I/O. Any number of engines may run in
the same directories:

1. Whatever is listed may vanish or be rewritten before it is looked at. That is no error.
2. What is not ours is never touched. It is counted, and told with `Findings`.
3. Each layout deletes its blocks in its own way (`LayoutBlocks`), safe beside readers and writers.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from kvtier.envelope import BLOCK_BYTES_MAX
from kvtier.errors import ConfigError
from kvtier.tiers.descriptions import (
    DESCRIPTION_BYTES_MAX,
    fact_of,
    label_of,
    parse_description,
)
from kvtier.tiers.fs.catalog_files import FileBlocks
from kvtier.tiers.fs.catalog_findings import Deleted, Findings
from kvtier.tiers.fs.catalog_segments import SegmentBlocks
from kvtier.tiers.fs.locks import try_lock, unlock
from kvtier.tiers.fs.marker import MARKER_FILE
from kvtier.tiers.fs.members import CONTROL_DIRECTORY
from kvtier.tiers.fs.namespace_directory import NAMESPACE_FILE
from kvtier.tiers.fs.segments.store import STORES_NAME
from kvtier.tiers.fs.temporary import is_temp

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from kvtier.tiers.fs.catalog_findings import BlockEntry
    from kvtier.tiers.fs.page_buffer import PageBuffer

_DIGEST = re.compile(r"[0-9a-f]{64}")
_OURS_IN_ROOT = frozenset({MARKER_FILE, CONTROL_DIRECTORY})
_NOBODYS_IN_ROOT = frozenset({"lost+found"})


class LayoutBlocks(Protocol):
    """The blocks of one namespace in one root that one layout keeps.

    Attributes:
        layout: `files` or `segments`.
    """

    layout: str

    def disk_bytes(self) -> int | None:
        """What it takes of the disk; None if that is just what the blocks have."""
        ...

    def blocks(self, findings: Findings) -> Iterator[BlockEntry]:
        """Every block, in no order. What else lies there goes into `findings`."""
        ...

    def read(
        self, entry: BlockEntry, buffer: PageBuffer, nbytes: int = BLOCK_BYTES_MAX
    ) -> memoryview:
        """Header and row as they are stored, or their first `nbytes`, in `buffer`; not verified.

        Raises:
            MissingBlockError: gone since it was listed.
            EnvelopeError: longer than any block.
            OSError: the medium failed.
        """
        ...

    def delete(self, entries: Sequence[BlockEntry], unless_used: bool = False) -> Deleted:
        """Remove blocks.

        Args:
            entries: as they were listed.
            unless_used: leave alone what was used since it was listed.
        """
        ...

    def is_used(self) -> bool:
        """Whether some process shows by something of this layout that it has the namespace open."""
        ...

    def clear(self, findings: Findings) -> None:
        """Remove what is left besides blocks, of a namespace that nobody uses."""
        ...


@dataclass(slots=True)
class Summary:
    """How much there is of something.

    Attributes:
        blocks: how many.
        nbytes: their headers and rows.
        last_use_s: latest use of any, seconds since the epoch; None without blocks.
    """

    blocks: int = 0
    nbytes: int = 0
    last_use_s: float | None = None

    def add(self, entry: BlockEntry) -> None:
        """Count one more."""
        self.blocks += 1
        self.nbytes += entry.nbytes
        self.last_use_s = max(self.last_use_s or entry.last_use_s, entry.last_use_s)


@dataclass(frozen=True, slots=True)
class NamespaceEntry:
    """One namespace in one root.

    Attributes:
        root: absolute path of the root.
        digest: 64 hex digits.
        description: content of its `namespace.json`; empty when that is missing or unreadable.
        created_s: when it was made, seconds since the epoch.
        live: whether some process has it open now, on any host.
        layouts: those that have something in it.
    """

    root: str
    digest: str
    description: Mapping[str, object] = field(compare=False)
    created_s: float
    live: bool
    layouts: Sequence[LayoutBlocks] = field(compare=False)

    @property
    def path(self) -> str:
        """Its directory."""
        return os.path.join(self.root, self.digest)

    @property
    def label(self) -> str | None:
        """The operator's label."""
        return label_of(self.description)

    def fact(self, *names: str) -> object:
        """A fact by its path below `facts`; None if there is no such."""
        return fact_of(self.description, *names)

    def blocks(self, findings: Findings) -> Iterator[tuple[LayoutBlocks, BlockEntry]]:
        """Every block with the layout that keeps it."""
        for layout in self.layouts:
            for entry in layout.blocks(findings):
                yield layout, entry

    def wipe(self, findings: Findings) -> Deleted:
        """Remove every block, and all the rest that is ours if nobody has the namespace open.

        An engine that has it open goes on with an empty namespace.
        """
        deleted = Deleted()
        description = os.path.join(self.path, NAMESPACE_FILE)
        with _alone(description) as alone:
            for layout in self.layouts:
                deleted += layout.delete(list(layout.blocks(findings)))
            if alone:
                for layout in self.layouts:
                    layout.clear(findings)
                with contextlib.suppress(OSError):  # gone meanwhile, or filled again
                    if set(os.listdir(self.path)) <= {NAMESPACE_FILE}:
                        with contextlib.suppress(FileNotFoundError):
                            os.unlink(description)
                        os.rmdir(self.path)
        return deleted


class Catalog:
    """Read-mostly view of root directories.

    Args:
        roots: directories that tiers of `type: fs` use, or may use.
        say: told what a deletion waits for.

    Raises:
        ConfigError: one is missing, no directory, unreadable, a namespace, or named twice.
    """

    def __init__(
        self,
        roots: Sequence[str | os.PathLike[str]],
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.roots: list[str] = []
        self._say = say
        for given in roots:
            root = os.path.realpath(given)
            _check_root(str(given), root)
            if root in self.roots:
                raise ConfigError(f"{given} is named twice: name each directory once")
            self.roots.append(root)

    def namespaces(self, findings: Findings | None = None) -> list[NamespaceEntry]:
        """All namespaces, by root and then by digest; foreign entries go into `findings`."""
        findings = Findings() if findings is None else findings
        return [entry for root in self.roots for entry in _namespaces(root, findings, self._say)]

    def find(self, prefix: str) -> list[NamespaceEntry]:
        """The one namespace whose digest begins with `prefix`: one entry per root that has it.

        Raises:
            ConfigError: none or several do; the message names the candidates.
        """
        every = self.namespaces()
        found = [entry for entry in every if entry.digest.startswith(prefix.lower())]
        digests = {entry.digest for entry in found}
        if prefix and len(digests) == 1:
            return found
        candidates = _named(found if digests and prefix else every)
        if not every:
            raise ConfigError(
                f"namespace = {prefix!r}: there is no namespace in {', '.join(self.roots)}"
            )
        what = "begins several digests" if digests else "begins no digest"
        raise ConfigError(f"namespace = {prefix!r} {what}; there are: {candidates}")


def _check_root(given: str, root: str) -> None:
    try:
        os.listdir(root)
    except OSError as error:
        raise ConfigError(
            f"{given} cannot be listed ({error.strerror}): name an existing directory that this "
            f"user may read"
        ) from None
    if _DIGEST.fullmatch(os.path.basename(root)):
        raise ConfigError(
            f"{given} is a namespace: name the directory that it lies in, and it with "
            f"--namespace {os.path.basename(root)[:12]}"
        )


def _named(entries: Sequence[NamespaceEntry]) -> str:
    labels = {entry.digest: entry.label for entry in entries}
    shown = [f"{digest[:16]}{f' ({label})' if label else ''}" for digest, label in labels.items()]
    return ", ".join(shown[:8]) + (f" and {len(shown) - 8} more" if len(shown) > 8 else "")


def _namespaces(
    root: str, findings: Findings, say: Callable[[str], None]
) -> Iterator[NamespaceEntry]:
    try:
        with os.scandir(root) as scanned:
            entries = sorted(scanned, key=lambda entry: entry.name)
    except OSError as error:
        findings.unreadable(root, error)
        return
    for entry in entries:
        if _DIGEST.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
            found = _namespace(root, entry.name, findings, say)
            if found is not None:
                yield found
        elif is_temp(entry.name):
            findings.temporary(entry)
        elif entry.name not in _OURS_IN_ROOT | _NOBODYS_IN_ROOT:
            findings.foreign(entry.path)


def _namespace(
    root: str, digest: str, findings: Findings, say: Callable[[str], None]
) -> NamespaceEntry | None:
    path = os.path.join(root, digest)
    description_path = os.path.join(path, NAMESPACE_FILE)
    try:
        created_s = os.stat(path).st_mtime
    except FileNotFoundError:
        return None  # wiped meanwhile
    except OSError as error:
        findings.unreadable(path, error)
        return None
    description: dict[str, object] = {}
    live = False
    try:
        descriptor = _open_description(description_path)
    except FileNotFoundError:
        pass  # somebody removed it; the blocks are good all the same
    except OSError as error:
        findings.unreadable(description_path, error)
    else:
        with open(descriptor, "rb") as file:
            found = os.fstat(descriptor)
            if stat.S_ISREG(found.st_mode):
                created_s = found.st_mtime
                description = parse_description(file.read(DESCRIPTION_BYTES_MAX + 1))
                live = _is_locked(descriptor)
    layouts: list[LayoutBlocks] = [FileBlocks(path)]
    if os.path.isdir(os.path.join(path, STORES_NAME)):
        layouts.append(SegmentBlocks(path, say=say))
    live = live or any(layout.is_used() for layout in layouts)
    return NamespaceEntry(root, digest, description, created_s, live, layouts)


def _open_description(path: str) -> int:
    """A descriptor that can be locked: on NFS only one that may write can."""
    flags = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        return os.open(path, os.O_RDWR | flags)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
    return os.open(path, os.O_RDONLY | flags)


def _is_locked(descriptor: int) -> bool:
    """Whether some process holds a lock on the file: it has the namespace open."""
    try:
        free = try_lock(descriptor)
    except OSError:
        return False  # a file system without locks cannot tell
    if free:
        unlock(descriptor)
    return not free


@contextlib.contextmanager
def _alone(description_path: str) -> Iterator[bool]:
    """Whether nobody else has the namespace open, and nobody opens it until the end."""
    try:
        descriptor = _open_description(description_path)
    except FileNotFoundError:
        yield True  # nobody can hold what is not there
        return
    except OSError:
        yield False
        return
    try:
        try:
            alone = try_lock(descriptor)
        except OSError:
            alone = False  # without locks nobody can tell
        yield alone
    finally:
        os.close(descriptor)
