"""Counts what a catalog lists, chooses what goes, and removes it.

Nothing here keeps blocks: what is needed of them is counted by the second of their last use, and
whoever removes lists again.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvtier.errors import ConfigError, TierError
from kvtier.tiers.catalog import Removed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvtier.tiers.catalog import Page, RemoteBlock, RemoteCatalog

NAMES_MAX = 1000
"""Foreign names, and failures, that are kept; the rest is only counted."""

_DIGITS = re.compile(r"[0-9a-f]{1,64}")
_DIGITS_SHOWN = 16
_CANDIDATES_SHOWN = 8


@dataclass(slots=True)
class Totals:
    """How much there is of one namespace.

    Attributes:
        blocks: how many.
        nbytes: of them.
        last_use_s: latest of any, seconds since the epoch; None where that is not known.
        first_written_s: of the oldest; likewise.
        ageless: blocks of which neither is known.
        by_second: bytes by the second of last use, or of the write where no use is known.
    """

    blocks: int = 0
    nbytes: int = 0
    last_use_s: float | None = None
    first_written_s: float | None = None
    ageless: int = 0
    by_second: Counter[int] = field(default_factory=Counter)

    def add(self, block: RemoteBlock) -> None:
        """Count one more."""
        self.blocks += 1
        self.nbytes += block.nbytes
        if block.used_s is not None:
            self.last_use_s = max(self.last_use_s or block.used_s, block.used_s)
        if block.written_s is not None:
            self.first_written_s = min(self.first_written_s or block.written_s, block.written_s)
        if block.last_s is None:
            self.ageless += 1
        else:
            self.by_second[int(block.last_s)] += block.nbytes


@dataclass(slots=True)
class Survey:
    """What there is.

    Attributes:
        namespaces: by their digits, as they were listed.
        described: those that say something of themselves.
        num_foreign: how many things are not ours.
        foreign: names of the first `NAMES_MAX` of them.
    """

    namespaces: dict[str, Totals] = field(default_factory=dict)
    described: set[str] = field(default_factory=set)
    num_foreign: int = 0
    foreign: list[str] = field(default_factory=list)

    @property
    def blocks(self) -> int:
        """Of all namespaces."""
        return sum(totals.blocks for totals in self.namespaces.values())

    @property
    def nbytes(self) -> int:
        """Of all namespaces."""
        return sum(totals.nbytes for totals in self.namespaces.values())

    def add(self, page: Page) -> None:
        """Count a page."""
        for block in page.blocks:
            self.namespaces.setdefault(block.namespace, Totals()).add(block)
        for namespace in page.described:
            self.namespaces.setdefault(namespace, Totals())
            self.described.add(namespace)
        self.num_foreign += len(page.foreign)
        self.foreign += page.foreign[: NAMES_MAX - len(self.foreign)]


@dataclass(frozen=True, slots=True)
class Cut:
    """Which blocks go.

    Attributes:
        before_s: only those last used before this, seconds since the epoch.
        until_second: only those last used in this second or before.
        surplus: no more than are needed to have so many bytes gone.
    """

    before_s: float | None = None
    until_second: int | None = None
    surplus: int | None = None


@dataclass(slots=True)
class Evicted:
    """What an eviction chose and did.

    Attributes:
        blocks: chosen.
        nbytes: of them.
        first_s: last use of the one that was not used for longest; None if nothing was chosen.
        last_s: of the one that was used last.
        removed: what became of them.
    """

    blocks: int = 0
    nbytes: int = 0
    first_s: float | None = None
    last_s: float | None = None
    removed: Removed = field(default_factory=Removed)


def survey(catalog: RemoteCatalog, prefix: str | None, told: Callable[[Survey], None]) -> Survey:
    """Count everything, or the one namespace that a prefix names. Removes nothing.

    Args:
        catalog: of the place.
        prefix: first digits of a digest.
        told: how far it is, after each page.

    Raises:
        ConfigError: the place refuses or cannot be reached; or the prefix names no namespace, or
            several.
    """
    if prefix is not None:
        prefix = prefix.lower()
        if not _DIGITS.fullmatch(prefix):
            raise ConfigError(f"namespace = {prefix!r} must be 1 to 64 digits, of 0-9 and a-f")
    found = _counted(catalog, prefix or "", told)
    if prefix is None:
        return found
    if len(found.namespaces) != 1:
        what = "begins several digests" if found.namespaces else "begins no digest"
        every = found if found.namespaces else _counted(catalog, "", told)
        raise ConfigError(_no_namespace(catalog, prefix, what, sorted(every.namespaces)))
    (digits,) = found.namespaces
    if len(prefix) > len(digits):  # the place keeps fewer digits than were given
        digest = catalog.describe(digits).content.get("digest")
        if not (isinstance(digest, str) and digest.startswith(prefix)):
            what = f"has more digits than {catalog.url} knows of it"
            raise ConfigError(_no_namespace(catalog, prefix, what, [digits]))
    return found


def choose_cut(found: Survey, used_before_s: float | None, to_bytes: int | None) -> Cut | None:
    """What has to go, oldest last use first; None if nothing has.

    Args:
        found: what there is to choose from.
        used_before_s: only blocks last used before this, seconds since the epoch.
        to_bytes: no more than needed for the rest to have at most this.
    """
    if to_bytes is None:
        return Cut(before_s=used_before_s)
    surplus = found.nbytes - to_bytes
    if surplus <= 0:
        return None
    by_second = Counter[int]()
    for totals in found.namespaces.values():
        by_second.update(totals.by_second)
    counted = 0
    second = 0
    for second in sorted(by_second):
        counted += by_second[second]
        if counted >= surplus:
            break
    return Cut(used_before_s, second, surplus)


def evict(
    catalog: RemoteCatalog,
    found: Survey,
    cut: Cut,
    dry_run: bool,
    progress: Callable[[int], None],
) -> Evicted:
    """List once more, and remove what the cut says, of the namespaces that were found.

    Args:
        catalog: of the place.
        found: what it listed.
        cut: what goes.
        dry_run: only count it.
        progress: told the bytes of each page.

    Raises:
        TierError: the place cannot be reached any more.
    """
    done = Evicted()
    for page in _pages_of(catalog, found):
        chosen = []
        for block in page:
            if _goes(block, cut, done.nbytes, catalog.time_error_s):
                chosen.append(block)
                assert block.last_s is not None, "it was old enough"
                done.blocks += 1
                done.nbytes += block.nbytes
                done.first_s = min(done.first_s or block.last_s, block.last_s)
                done.last_s = max(done.last_s or block.last_s, block.last_s)
        if not dry_run:
            _add(done.removed, catalog.remove(chosen, unless_used=True))
        progress(sum(block.nbytes for block in chosen))
        if cut.surplus is not None and done.nbytes >= cut.surplus:
            break
    return done


def wipe(
    catalog: RemoteCatalog, found: Survey, progress: Callable[[int], None]
) -> dict[str, Removed]:
    """Remove every block of the namespaces that were found, and then what these say of themselves.

    Returns:
        What was removed, by namespace.

    Raises:
        TierError: the place cannot be reached any more.
    """
    done = {namespace: Removed() for namespace in found.namespaces}
    for page in _pages_of(catalog, found):
        for namespace in {block.namespace for block in page}:
            blocks = [block for block in page if block.namespace == namespace]
            _add(done[namespace], catalog.remove(blocks))
            progress(sum(block.nbytes for block in blocks))
    for namespace in found.described:
        if not done[namespace].failures:
            catalog.remove_description(namespace)
    return done


def left_of(catalog: RemoteCatalog, found: Survey) -> set[str]:
    """Namespaces of those that were found of which something is there now.

    Raises:
        ConfigError: the place cannot be reached any more.
    """
    prefix = next(iter(found.namespaces)) if len(found.namespaces) == 1 else ""
    return set(_counted(catalog, prefix, lambda _: None).namespaces) & set(found.namespaces)


def _counted(catalog: RemoteCatalog, prefix: str, told: Callable[[Survey], None]) -> Survey:
    found = Survey()
    try:
        for page in catalog.pages(prefix):
            found.add(page)
            told(found)
    except TierError as error:
        raise ConfigError(str(error)) from None
    return found


def _pages_of(catalog: RemoteCatalog, found: Survey) -> Iterator[list[RemoteBlock]]:
    """Blocks of the namespaces that were found, and of no other."""
    prefix = next(iter(found.namespaces)) if len(found.namespaces) == 1 else ""
    for page in catalog.pages(prefix):
        yield [block for block in page.blocks if block.namespace in found.namespaces]


def _goes(block: RemoteBlock, cut: Cut, gone: int, error_s: float) -> bool:
    if block.last_s is None:
        return False
    if cut.before_s is not None and block.last_s >= cut.before_s:
        return False
    if cut.surplus is None or cut.until_second is None:
        return True
    return gone < cut.surplus and block.last_s < cut.until_second + 1 + error_s


def _add(total: Removed, part: Removed) -> None:
    total += part
    del total.failures[NAMES_MAX:]


def _no_namespace(catalog: RemoteCatalog, prefix: str, what: str, names: list[str]) -> str:
    if not names:
        return f"namespace = {prefix!r}: there is no namespace at {catalog.url}"
    shown = ", ".join(name[:_DIGITS_SHOWN] for name in names[:_CANDIDATES_SHOWN])
    more = len(names) - _CANDIDATES_SHOWN
    return f"namespace = {prefix!r} {what}; there are: {shown}" + (
        f" and {more} more" if more > 0 else ""
    )
