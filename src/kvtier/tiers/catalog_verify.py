"""Reads the blocks of a catalog and tells which are damaged, beside engines that use them.

A block that is gone when it is read, or that is whole when it is read once more, was evicted or
rewritten meanwhile: that is no damage. Nor is one of which the server evicted a part.
"""

from __future__ import annotations

import random
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvtier.envelope import BLOCK_BYTES_MAX, open_envelope, verify
from kvtier.errors import EnvelopeError, MissingBlockError, TierError
from kvtier.tiers.catalog_threads import look_at_all

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from kvtier.tiers.catalog import Found, RemoteBlock, RemoteCatalog

_ATTEMPTS = 2
"""Reads of a block before it counts as damaged."""

_FAILURES_MAX = 20
"""Blocks in a row that cannot be read, until nothing more is tried."""


@dataclass(frozen=True, slots=True)
class RemoteDamage:
    """A block that is not what its key says, or cannot be read.

    Attributes:
        block: as it was listed.
        reason: what is wrong.
        readable: False if the place failed; such a block is not removed.
        removed: whether it is gone now.
    """

    block: RemoteBlock
    reason: str
    readable: bool
    removed: bool


@dataclass(slots=True)
class RemoteVerification:
    """What a verification found.

    Attributes:
        blocks: read and found whole.
        nbytes: of them.
        vanished: gone before they could be read, or rewritten before they could be removed.
        incomplete: a part was missing, evicted by the server: a miss, and no damage.
        removed_incomplete: how many of those are gone now.
        damages: what is not whole.
    """

    blocks: int = 0
    nbytes: int = 0
    vanished: int = 0
    incomplete: int = 0
    removed_incomplete: int = 0
    damages: list[RemoteDamage] = field(default_factory=list)


def damage_in(block: RemoteBlock, found: Found) -> str | None:
    """What is wrong with a block; None if nothing is.

    Args:
        block: as it was listed.
        found: as it was read; both parts are there.
    """
    assert found.header is not None, "checked before"
    assert found.row is not None, "checked before"
    if block.nbytes > BLOCK_BYTES_MAX:
        return f"length: {block.nbytes} bytes, longer than any block"
    try:
        namespace = open_envelope(found.header).namespace
        if not namespace.startswith(block.namespace):
            return f"namespace: {namespace} instead of {block.namespace}"
        verify(found.header, namespace, block.key, found.row)
    except EnvelopeError as error:
        return str(error)
    return None


def sampled(blocks: Iterable[RemoteBlock], wanted: int, population: int) -> Iterator[RemoteBlock]:
    """So many of a stream, at random, each as likely as any other.

    Args:
        blocks: of which there are about `population`.
        wanted: how many.
        population: as it was counted before.
    """
    left = population
    for block in blocks:
        if wanted <= 0:
            return
        if random.random() * max(left, wanted) < wanted:  # noqa: S311 - a sample, no secret
            wanted -= 1
            yield block
        left -= 1


def verify_remote(
    catalog: RemoteCatalog,
    blocks: Iterable[RemoteBlock],
    repair: bool,
    num_threads: int,
    progress: Callable[[int], None],
) -> RemoteVerification:
    """Read blocks on several threads and verify each.

    Args:
        catalog: of the place.
        blocks: which ones.
        repair: remove what is damaged or incomplete.
        num_threads: at least 1.
        progress: told the bytes of each block that was looked at; called on the threads.

    Raises:
        TierError: the place cannot be reached any more.
    """
    verifier = _Verifier(catalog, repair)

    def look(block: RemoteBlock) -> None:
        verifier.look_at(block)
        progress(block.nbytes)

    look_at_all(blocks, num_threads, lambda: look)
    return verifier.found


class _Verifier:
    """Judges blocks, on any thread."""

    def __init__(self, catalog: RemoteCatalog, repair: bool) -> None:
        self._catalog = catalog
        self._repair = repair
        self._lock = threading.Lock()  # guards what follows
        self.found = RemoteVerification()
        self._failures = 0

    def look_at(self, block: RemoteBlock) -> None:
        try:
            reason, is_whole = self._judged(block)
        except MissingBlockError:
            with self._lock:
                self.found.vanished += 1
            return
        except TierError as error:
            with self._lock:
                self._failures += 1
                self.found.damages.append(RemoteDamage(block, str(error), False, False))
                if self._failures >= _FAILURES_MAX:
                    raise
            return
        if reason is not None:
            self._condemn(block, reason, is_whole)
        with self._lock:
            self._failures = 0
            if reason is None:
                self.found.blocks += 1
                self.found.nbytes += block.nbytes

    def _condemn(self, block: RemoteBlock, reason: str, is_whole: bool) -> None:
        """Note what is wrong with a block, and remove it if that is wanted."""
        removed = refused = False
        if self._repair:
            try:
                removed = self._catalog.remove_if(block, lambda found: _is_bad(block, found))
            except MissingBlockError:
                pass
            except TierError as error:
                refused, reason = True, f"{reason}; cannot be removed: {error}"
        with self._lock:
            if self._repair and not removed and not refused:
                self.found.vanished += 1  # or it has been rewritten, and is not bad any more
            elif is_whole or refused:
                self.found.damages.append(RemoteDamage(block, reason, True, removed))
            else:
                self.found.incomplete += 1
                self.found.removed_incomplete += removed

    def _judged(self, block: RemoteBlock) -> tuple[str | None, bool]:
        """What is wrong with a block, if anything, and whether all of its parts are there."""
        reason, is_whole = None, True
        for _ in range(_ATTEMPTS):
            found = self._catalog.read(block)
            is_whole = found.header is not None and found.row is not None
            reason = damage_in(block, found) if is_whole else "incomplete: a part was evicted"
            if reason is None:
                break
        return reason, is_whole


def _is_bad(block: RemoteBlock, found: Found) -> bool:
    return found.header is None or found.row is None or damage_in(block, found) is not None
