"""What is believed about the blocks of one namespace, so that the store is not asked twice.

A belief has the time at which the question was asked, not the one at which the answer came: what
happened in between, a write of our own for instance, is newer.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from kvtier.core.types import BlockKey

MAX_BELIEFS = 1 << 18
"""About 45 MiB; the oldest go first."""


class Beliefs:
    """Which blocks are there, each for a while. Thread safe.

    Args:
        present_ttl_s: how long a block is believed to be there. If somebody deletes it meanwhile,
            one read fails.
        absent_ttl_s: how long a block is believed to be absent. If somebody writes it meanwhile, it
            is computed or asked for again.
        clock: seconds, monotonic.
    """

    def __init__(
        self, present_ttl_s: float, absent_ttl_s: float, clock: Callable[[], float]
    ) -> None:
        self._present_ttl_s = present_ttl_s
        self._absent_ttl_s = absent_ttl_s
        self._clock = clock
        self._lock = threading.Lock()
        self._known: dict[BlockKey, tuple[bool, float]] = {}  # oldest belief first
        self._all_known_at = float("-inf")

    def __len__(self) -> int:
        return len(self._known)

    def answers(self, keys: Sequence[BlockKey]) -> list[bool | None]:
        """Whether each key is there, in order; None if that is not known (any more)."""
        now = self._clock()
        present_since = now - self._present_ttl_s
        absent_since = now - self._absent_ttl_s
        never = (False, float("-inf"))
        with self._lock:
            listed_at = self._all_known_at
            beliefs = [self._known.get(key, never) for key in keys]
        answers: list[bool | None] = []
        for there, asked_at in beliefs:
            if there and asked_at >= listed_at and asked_at > present_since:
                answers.append(True)
            else:  # a block that was seen before the listing, and is not in it, is gone
                absent_at = listed_at if there else max(listed_at, asked_at)
                answers.append(False if absent_at > absent_since else None)
        return answers

    def learn(self, key: BlockKey, there: bool, asked_at: float) -> None:
        """One answer of the store, or one write or delete of our own that ended at `asked_at`."""
        self._learn_all((key,), (there, asked_at))

    def learn_present(self, keys: Iterable[BlockKey], asked_at: float) -> None:
        """A part of a listing: these were there."""
        self._learn_all(keys, (True, asked_at))

    def learn_all(self, present: Iterable[BlockKey], asked_at: float) -> None:
        """A listing of the whole namespace: what is not among `present` was absent."""
        self._learn_all(present, (True, asked_at))
        with self._lock:
            self._all_known_at = max(self._all_known_at, asked_at)

    def _learn_all(self, keys: Iterable[BlockKey], belief: tuple[bool, float]) -> None:
        with self._lock:
            for key in keys:
                before = self._known.pop(key, belief)
                self._known[key] = before if before[1] > belief[1] else belief
            for _ in range(len(self._known) - MAX_BELIEFS):
                del self._known[next(iter(self._known))]
