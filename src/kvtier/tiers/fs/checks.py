"""Whether the settings of the fs tier can ever work, asked before the engine starts.

What an operator has to change is a `ConfigError`. What passes by itself is not: on a mount that is
full the engine starts, and its tier waits in that state as it would later.

Who may write a root matters, since whoever does can remove or plant files: refused are roots of
other users and roots that everybody may write. Allowed are those of the superuser, who may write
anything anyway, and those that a group may write, which is how volumes are handed to containers and
what a umask of 002 makes of every directory; `remarks` tells of the latter.
"""

from __future__ import annotations

import errno
import itertools
import os
import stat
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvtier.envelope import HEADER_BYTES
from kvtier.errors import ConfigError
from kvtier.tiers.fs.abilities import (
    MissingAbilityError,
    is_probe,
    probe_directory,
    remove_abandoned,
)
from kvtier.tiers.fs.locations import Location, location_of
from kvtier.tiers.fs.marker import MARKER_FILE
from kvtier.tiers.fs.members import CONTROL_DIRECTORY, NAMESPACE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

SMALLEST_BLOCK = HEADER_BYTES + 4096
"""Bytes of a file with a header and one page."""

ANSWER_S = 30.0
"""A mount that answers nothing for that long hangs; a start must not hang with it."""

_PASSING = frozenset({errno.ENOSPC, errno.EDQUOT})
_SCANNED_MAX = 10_000
_NAMED_MAX = 5
_IN_MEMORY = frozenset({"tmpfs", "ramfs"})
_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


def check_roots(
    roots: Sequence[Path], setting_of: Callable[[int], str], answer_s: float = ANSWER_S
) -> None:
    """Whether blocks can be kept below each of `roots`, and none of them disturbs another.

    Makes and removes a directory in each.

    Args:
        roots: the directories, one at least.
        setting_of: path of the setting that names the root of an index, for the messages.
        answer_s: seconds that the file systems have to answer, together.

    Raises:
        ConfigError: a root is missing, no directory, not usable by this user, somebody else's or
            everybody's, on a file system that cannot do what is needed or does not answer, named
            twice, or inside another root.
    """
    assert roots, "a tier has a root"
    done = threading.Event()
    failed: list[BaseException] = []
    at = 0

    def check() -> None:
        nonlocal at
        try:
            places = []
            for at, root in enumerate(roots):
                places.append(_check_root(root, setting_of(at)))
            _check_apart(roots, setting_of, places)
        except BaseException as error:  # noqa: BLE001 - raised again where somebody catches it
            failed.append(error)
        finally:
            done.set()

    # on a thread, since nothing else can be left behind in a call that hangs
    threading.Thread(target=check, name="kvtier-fs-check", daemon=True).start()
    if not done.wait(answer_s):
        raise ConfigError(
            f"{setting_of(at)} = {str(roots[at])!r} does not answer for {answer_s:g} s: it must be "
            "on a mount that works; look at its server or device, mount it again, or set "
            f"{setting_of(at)} to another directory"
        )
    if failed:
        raise failed[0]


def check_root(root: Path, setting: str) -> None:
    """`check_roots` of a single one."""
    check_roots([root], lambda _: setting)


def check_bounds(
    roots: Sequence[Path], capacity: int | None, min_free: int, setting: str, given: str = ""
) -> None:
    """Whether the mount of each root can have these bounds.

    Args:
        roots: checked ones; each has the bounds for itself.
        capacity: bytes that blocks may take in each; None if that is not bounded.
        min_free: bytes of the mount that stay free.
        setting: path of the tier's settings, e.g. `secondary_tiers[0]`.
        given: the capacity as it was written, if that was not bytes.

    Raises:
        ConfigError: no block fits, or the mount is smaller than a bound, or than the capacities of
            several roots on it together.
        OSError: the mount cannot be asked.
    """
    if capacity is not None:
        check_capacity(capacity, SMALLEST_BLOCK, setting)
    on_mount: dict[int, list[Path]] = {}
    for root in roots:
        on_mount.setdefault(os.stat(root).st_dev, []).append(root)
    for together in on_mount.values():
        found = os.statvfs(together[0])
        size = found.f_blocks * found.f_frsize
        if size == 0:
            continue  # some network file systems do not tell
        where = f"the mount of {str(together[0])!r}, which has {_figure(size)}"
        if min_free > size - SMALLEST_BLOCK:
            raise ConfigError(
                f"{setting}.min_free = {_figure(min_free)} leaves no room for a block on {where}: "
                f"it must be below {size - SMALLEST_BLOCK}; lower min_free (10 % of the mount is "
                "the default)"
            )
        if capacity is None or capacity * len(together) <= size:
            continue
        written = f"{given!r} = {_figure(capacity)}" if given else _figure(capacity)
        times = f" for each of {len(together)} roots there" if len(together) > 1 else ""
        raise ConfigError(
            f"{setting}.capacity = {written}{times} is more than {where}: it may be at most "
            f"{size // len(together)}; lower capacity, give a share of the mount such as "
            f'"80%", or set another directory'
        )


def check_capacity(capacity: int, least: int, setting: str) -> None:
    """Whether at least one block, or one segment, fits.

    Args:
        capacity: bytes.
        least: bytes of one file that keeps a block, header included.
        setting: path of the tier's settings.

    Raises:
        ConfigError: it does not.
    """
    if capacity < least:
        raise ConfigError(
            f"{setting}.capacity = {_figure(capacity)} cannot hold one block: it must be at least "
            f"{_figure(least)}, and many times that to be useful; raise capacity"
        )


@dataclass(frozen=True, slots=True)
class Foreign:
    """Entries of a root that are not ours.

    Attributes:
        names: the first few, in order.
        count: how many were seen.
        all_seen: False if the scan ended before the directory did.
    """

    names: tuple[str, ...]
    count: int
    all_seen: bool


def foreign_entries(root: Path, scanned_max: int = _SCANNED_MAX) -> Foreign:
    """What lies in a root besides namespaces and what belongs to them; nothing is touched.

    Looks at its top level only, at `scanned_max` entries at most.

    Raises:
        OSError: the root cannot be listed.
    """
    with os.scandir(root) as entries:
        seen = list(itertools.islice(entries, scanned_max + 1))
    names = sorted(entry.name for entry in seen[:scanned_max] if not _is_ours(entry))
    return Foreign(tuple(names[:_NAMED_MAX]), len(names), len(seen) <= scanned_max)


def remarks(root: Path) -> list[str]:
    """What an operator should know of a checked root, one sentence each, for the log at start.

    Raises:
        OSError: the root cannot be looked at.
    """
    said = []
    if location_of(root).kind in _IN_MEMORY:
        said.append(
            f"{root} is in memory (tmpfs): its blocks take the host's memory and are gone after a "
            "reboot"
        )
    if os.stat(root).st_mode & stat.S_IWGRP:
        said.append(f"{root} may be written by its group, which can remove or plant files there")
    foreign = foreign_entries(root)
    if foreign.count:
        more = "" if foreign.count == len(foreign.names) else ", ..."
        least = "" if foreign.all_seen else "at least "
        said.append(
            f"{root} holds {least}{foreign.count} entries that are not kvtier's, which are left "
            f"alone and not counted: {', '.join(map(repr, foreign.names))}{more}"
        )
    return said


def _check_root(root: Path, setting: str) -> Location:
    try:
        found = os.stat(root)
    except (FileNotFoundError, NotADirectoryError):
        tilde = "; `~` is not expanded here" if str(root).startswith("~") else ""
        raise ConfigError(
            f"{setting} = {str(root)!r} does not exist{tilde}: it must be an existing directory; "
            f"create it (mkdir -p -m 700 {root}), or mount it, or set {setting} to another one"
        ) from None
    except (OSError, ValueError) as error:  # a null character is a ValueError
        raise _unusable(root, setting, error) from error
    if not stat.S_ISDIR(found.st_mode):
        raise ConfigError(
            f"{setting} = {str(root)!r} is not a directory: set it to a directory that this user "
            "may write"
        )
    if found.st_mode & stat.S_IWOTH:
        raise ConfigError(
            f"{setting} = {str(root)!r} may be written by everybody (mode "
            f"{stat.S_IMODE(found.st_mode):o}), who could remove or plant blocks: only its owner "
            f"may write it; chmod o-w {root}, or set {setting} to a directory below it that you "
            f"make (mkdir -m 700 {root / 'kvtier'})"
        )
    try:
        place = location_of(root)
    except OSError as error:
        raise _unusable(root, setting, error) from error
    _refuse_inner(root, setting)
    user = os.geteuid()
    try:
        remove_abandoned(str(root))
        # as the file system sees us: some mounts give all files to one user
        user = probe_directory(str(root))
    except MissingAbilityError as missing:
        raise ConfigError(
            f"{setting} = {str(root)!r} is on a file system ({place.kind or 'unknown'}) that "
            f"{missing}: the fs tier needs one like ext4, xfs, btrfs, tmpfs or NFS; set {setting} "
            "to a directory on one, or mount this one with other options"
        ) from missing
    except OSError as error:
        if error.errno not in _PASSING:
            raise _unusable(root, setting, error) from error
    if found.st_uid not in (user, 0):
        raise ConfigError(
            f"{setting} = {str(root)!r} belongs to user {found.st_uid}, who could remove or plant "
            f"blocks: it must belong to user {user}, as which this process runs, or to root; "
            f"chown {user} {root}, or set {setting} to a directory of your own"
        )
    return place


def _refuse_inner(root: Path, setting: str) -> None:
    """Refuse a directory below one that is a root already, of whichever engine."""
    for outer in Path(os.path.realpath(root)).parents:
        if os.path.lexists(outer / MARKER_FILE):
            raise ConfigError(
                f"{setting} = {str(root)!r} lies inside {str(outer)!r}, which is a root itself "
                f"(it has a {MARKER_FILE}): roots must not lie in each other; set {setting} to "
                f"{str(outer)!r} or to a directory outside it"
            )


def _check_apart(
    roots: Sequence[Path], setting_of: Callable[[int], str], places: Sequence[Location]
) -> None:
    for one, other in itertools.combinations(range(len(roots)), 2):
        # the second for file systems to which `a` and `A` are one name
        if places[one].is_at(places[other]) or os.path.samefile(roots[one], roots[other]):
            raise ConfigError(
                f"{setting_of(other)} = {str(roots[other])!r} is the same directory as "
                f"{setting_of(one)} = {str(roots[one])!r}: each root must be named once; remove "
                "one of them"
            )
        for outer, inner in ((one, other), (other, one)):
            if places[outer].holds(places[inner]):
                raise ConfigError(
                    f"{setting_of(inner)} = {str(roots[inner])!r} lies inside "
                    f"{setting_of(outer)} = {str(roots[outer])!r}: roots must not lie in each "
                    "other, since each counts what it holds; set one of them to another directory"
                )


def _is_ours(entry: os.DirEntry[str]) -> bool:
    name = entry.name
    if entry.is_symlink():
        return False
    if name == MARKER_FILE:
        return entry.is_file()
    if name == "lost+found":  # every ext file system has one at its top
        return entry.is_dir()
    mine = name == CONTROL_DIRECTORY or NAMESPACE.fullmatch(name) is not None or is_probe(name)
    return mine and entry.is_dir()


def _unusable(root: Path, setting: str, error: OSError | ValueError) -> ConfigError:
    reason = error.strerror if isinstance(error, OSError) else error
    return ConfigError(
        f"{setting} = {str(root)!r} cannot be used by user {os.geteuid()} ({reason}): make it "
        "readable, writable and searchable for this user (chown, chmod, mount it read-write), or "
        f"set {setting} to another directory"
    )


def _figure(size: int) -> str:
    for power in range(len(_UNITS) - 1, 0, -1):
        if size >= 1024**power:
            return f"{size} bytes ({size / 1024**power:.2f} {_UNITS[power]})"
    return f"{size} bytes"
