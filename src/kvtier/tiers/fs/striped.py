"""Several roots behind one tier: each key has its root, and one that fails is left alone.

Rendezvous hashing gives every key an order of its own of the roots. A block is written to the first
of them that takes it and looked for in the same order, so a root that is added or lost moves its
own share of the keys and no others.

1. A root that fails is left alone for 1 s, doubling to 60 s; then one call tries it. Meanwhile its
   blocks are misses and what is written goes to the next root in the key's order.
2. Once a root was missing, blocks may lie one root further than they would: what the first in order
   does not have is asked of the second too. Not so after a restart: the few blocks that were
   written elsewhere are not found then, and age out.
3. Blocks of a batch are moved root after root, not in parallel: the driver runs several batches at
   once, which keeps all roots busy, and threads of our own would cost a hand-over per batch.
"""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING, cast

import xxhash

from kvtier.errors import MissingBlockError, TierUnreachableError
from kvtier.tiers.base import SupportsBatch, SupportsDelete, SupportsDropped, SupportsFigures
from kvtier.tiers.fs.roots import Place, Root, is_broken, is_unwritable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvtier.core.types import BlockKey
    from kvtier.tiers.base import Buffers, Tier

    Outcomes = Sequence[BaseException | None]

OPEN_WAIT_S = 2.0
"""How long opening waits for slow roots once one is there."""

OPEN_WAIT_MAX_S = 30.0
"""How long opening waits for the first root."""

CLOSE_WAIT_S = 5.0
"""How long closing waits for roots that hang."""

_ABSENT = MissingBlockError("absent")


class StripedTier:
    """Spreads blocks over several roots.

    Args:
        roots: at least one, with distinct identities.
        open_wait_s: how long to wait for slow roots once one is open.
        open_wait_max_s: how long to wait for the first.
        clock: seconds, monotonic; of the times for which failing roots are left alone.

    Raises:
        TierUnreachableError: no root was open in time.
        Exception: the last error, if no root can be opened.
    """

    def __init__(
        self,
        roots: Sequence[Root],
        open_wait_s: float = OPEN_WAIT_S,
        open_wait_max_s: float = OPEN_WAIT_MAX_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        assert roots, "there is a root"
        assert len({root.identity for root in roots}) == len(roots), "identities differ"
        self._opened = threading.Condition()
        self._displaced = False  # whether blocks may lie one root further
        self._places = [Place(root, clock, self._tell_opened) for root in roots]
        self._seeds = {
            place: xxhash.xxh3_64_intdigest(place.identity.encode()) for place in self._places
        }
        for place in self._places:
            place.start_opening()
        try:
            self._await_roots(open_wait_s, open_wait_max_s)
        except BaseException:
            self.close()
            raise

    def exists(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Whether a root that is not left alone holds each key.

        Raises:
            Exception: the last error, if all roots fail.
        """

        def ask(tier: Tier, members: Sequence[int]) -> Outcomes:
            try:
                answers = tier.exists([keys[i] for i in members])
            except BaseException as error:  # noqa: BLE001 - judged as that of every key
                return [error] * len(members)
            return [None if there else _ABSENT for there in answers]

        outcomes = self._ask(keys, ask, writing=False)
        for error in outcomes:
            if error is not None and not isinstance(error, MissingBlockError):
                raise error
        return [error is None for error in outcomes]

    def read(self, key: BlockKey, into: Buffers) -> None:
        """Read from the root that holds the block.

        Raises:
            MissingBlockError: absent, or its root is failing.
            Exception: the last error, if all roots fail.
        """
        (error,) = self.read_batch((key,), (into,))
        if error is not None:
            raise error

    def write(self, key: BlockKey, data: Buffers) -> None:
        """Write to the first root in the key's order that takes the block.

        Raises:
            Exception: the last error, if all roots fail.
        """
        (error,) = self.write_batch((key,), (data,))
        if error is not None:
            raise error

    def read_batch(self, keys: Sequence[BlockKey], into: Sequence[Buffers]) -> Outcomes:
        """Like `read` for each; see `kvtier.tiers.base.SupportsBatch`."""

        def ask(tier: Tier, members: Sequence[int]) -> Outcomes:
            if isinstance(tier, SupportsBatch):
                return tier.read_batch([keys[i] for i in members], [into[i] for i in members])
            return [_outcome(tier.read, keys[i], into[i]) for i in members]

        return self._ask(keys, ask, writing=False)

    def write_batch(self, keys: Sequence[BlockKey], data: Sequence[Buffers]) -> Outcomes:
        """Like `write` for each; see `kvtier.tiers.base.SupportsBatch`."""

        def ask(tier: Tier, members: Sequence[int]) -> Outcomes:
            if isinstance(tier, SupportsBatch):
                return tier.write_batch([keys[i] for i in members], [data[i] for i in members])
            return [_outcome(tier.write, keys[i], data[i]) for i in members]

        return self._ask(keys, ask, writing=True)

    def delete(self, key: BlockKey) -> None:
        """Forget a block wherever it may be, in roots that can; absent is fine.

        Raises:
            Exception: the last error, if all roots fail.
        """

        def ask(tier: Tier, _: Sequence[int]) -> Outcomes:
            if isinstance(tier, SupportsDelete):
                try:
                    tier.delete(key)
                except BaseException as error:  # noqa: BLE001 - judged by the caller
                    return [error]
            return [_ABSENT]  # and so in the next root, if it may be there

        (error,) = self._ask((key,), ask, writing=False)
        if error is not None and not isinstance(error, MissingBlockError):
            raise error

    def take_dropped(self) -> list[BlockKey]:
        """What the roots gave up since the last call."""
        return [
            key
            for tier in self._tiers()
            if isinstance(tier, SupportsDropped)
            for key in tier.take_dropped()
        ]

    def figures(self) -> dict[str, float]:
        """Sums over the roots, with `roots`, `roots_failing` and `root_failures` (a total)."""
        figures = {
            "roots": float(len(self._places)),
            "roots_failing": float(sum(place.is_failing for place in self._places)),
            "root_failures": float(sum(place.failures for place in self._places)),
        }
        for tier in self._tiers():
            if isinstance(tier, SupportsFigures):
                for name, value in tier.figures().items():
                    figures[name] = figures.get(name, 0.0) + value
        return figures

    def close(self) -> None:
        """Close all roots; one that hangs is left behind after `CLOSE_WAIT_S`."""
        closers = [
            threading.Thread(target=place.close, name="kvtier-fs-close", daemon=True)
            for place in self._places
        ]
        deadline = time.monotonic() + CLOSE_WAIT_S
        for closer in closers:
            closer.start()
        for closer in closers:
            closer.join(max(0.0, deadline - time.monotonic()))

    def _ask(
        self,
        keys: Sequence[BlockKey],
        ask: Callable[[Tier, Sequence[int]], Outcomes],
        writing: bool,
    ) -> list[BaseException | None]:
        """Ask roots for each key, in the key's order, until one answers for it.

        Args:
            keys: of the blocks.
            ask: asks one root about some of the keys, given as positions; raises nothing.
            writing: what it does.

        Returns:
            Per key None if a root did it; else that it is missing, if a root said so; else the last
            error.
        """
        outcomes: list[BaseException | None] = [None] * len(keys)
        with self._usable(writing) as usable:
            if not usable:
                return [self._last_error()] * len(keys)
            left = dict.fromkeys(range(len(keys)), usable)  # the roots not asked yet, per key
            while left:
                by_place: dict[Place, list[int]] = {}
                for i, places in left.items():
                    by_place.setdefault(self._first(keys[i], places), []).append(i)
                again: dict[int, tuple[Place, ...]] = {}
                for place, members in by_place.items():
                    errors = ask(cast("Tier", place.tier), members)
                    self._judge(place, errors, writing)
                    for i, error in zip(members, errors, strict=True):
                        if error is None or not isinstance(outcomes[i], MissingBlockError):
                            outcomes[i] = error
                        others = tuple(other for other in left[i] if other is not place)
                        second = len(others) + 1 == len(usable)
                        missing = isinstance(error, MissingBlockError)
                        if others and (
                            (missing and second and self._displaced)
                            or _is_root_error(error, writing)
                        ):
                            again[i] = others
                left = again
        return outcomes

    @contextlib.contextmanager
    def _usable(self, writing: bool) -> Iterator[tuple[Place, ...]]:
        """The roots that are not left alone now."""
        usable = tuple(place for place in self._places if place.admits(writing))
        try:
            if len(usable) < len(self._places):
                self._displaced = True
            yield usable
        finally:
            for place in usable:
                place.pass_by(writing)

    def _judge(self, place: Place, errors: Outcomes, writing: bool) -> None:
        """What the outcomes of one call say about its root."""
        of_root = [error for error in errors if _is_root_error(error, writing)]
        worked = len(of_root) < len(errors)
        # one block that cannot be read may be a bad sector; a full root may have taken some
        if of_root and of_root[-1] is not None and (writing or not worked):
            self._displaced = True
            place.fail(of_root[-1], writing)
        elif worked:
            place.work(writing)

    def _first(self, key: BlockKey, places: tuple[Place, ...]) -> Place:
        """Of these roots the first in the key's order."""
        if len(places) == 1:
            return places[0]
        seeds = self._seeds
        return max(places, key=lambda place: xxhash.xxh3_64_intdigest(key, seeds[place]))

    def _tiers(self) -> list[Tier]:
        return [place.tier for place in self._places if place.tier is not None]

    def _last_error(self) -> BaseException:
        failed = [place for place in self._places if place.error is not None]
        if failed:
            error = max(failed, key=lambda place: place.failed_at).error
            assert error is not None
            return error.with_traceback(None)  # it would grow with every raise
        return TierUnreachableError(f"none of {len(self._places)} directories is open yet")

    def _tell_opened(self) -> None:
        with self._opened:
            self._opened.notify_all()

    def _await_roots(self, wait_s: float, wait_max_s: float) -> None:
        started = time.monotonic()
        with self._opened:
            while any(place.is_opening for place in self._places):
                limit = wait_s if self._tiers() else wait_max_s
                remaining = started + limit - time.monotonic()
                if remaining <= 0:
                    break
                self._opened.wait(remaining)
        if not self._tiers():
            raise self._last_error()


def _is_root_error(error: BaseException | None, writing: bool) -> bool:
    return error is not None and (is_broken(error) or (writing and is_unwritable(error)))


def _outcome(
    move: Callable[[BlockKey, Buffers], None], key: BlockKey, block: Buffers
) -> BaseException | None:
    try:
        move(key, block)
    except BaseException as error:  # noqa: BLE001 - the caller's entry for this block
        return error
    return None
