"""What the manager believes about one tier.

A belief is shared by all requests and lasts until it is contradicted. It may be wrong, since a
tier may evict at any time: a failed read corrects it.

A belief is one float, so that a million of them stay small: `PRESENT`, minus the number of the
probe that is asking, or the time until which the key counts as absent.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from enum import Enum

from kvtier.core.types import BlockKey, JobId

PRESENT = math.inf


class Belief(Enum):
    """What `Presence.get` answers besides the number of a running probe."""

    UNKNOWN = "unknown"
    PROBING = "probing"
    PRESENT = "present"
    ABSENT = "absent"


class Presence:
    """Beliefs about one tier, bounded in number; the oldest are forgotten first.

    Args:
        known_max: beliefs kept.
        absent_ttl_s: seconds before a key believed absent is asked for again.
    """

    def __init__(self, known_max: int, absent_ttl_s: float) -> None:
        self._known_max = known_max
        self._absent_ttl_s = absent_ttl_s
        self.beliefs: dict[BlockKey, float] = {}

    def get(self, key: BlockKey, now: float) -> Belief:
        """The belief about a key."""
        belief = self.beliefs.get(key)
        if belief is None:
            return Belief.UNKNOWN
        if belief == PRESENT:
            return Belief.PRESENT
        if belief < 0:
            return Belief.PROBING
        return Belief.ABSENT if now < belief else Belief.UNKNOWN

    def probe_of(self, key: BlockKey) -> JobId | None:
        """The probe that is asking for this key, if one is."""
        belief = self.beliefs.get(key)
        return JobId(int(-belief)) if belief is not None and belief < 0 else None

    def set_present(self, keys: Iterable[BlockKey]) -> list[BlockKey]:
        """Believe these present; returns those for which this is news."""
        beliefs = self.beliefs
        news: list[BlockKey] = []
        for key in keys:
            if beliefs.pop(key, None) != PRESENT:
                news.append(key)
            beliefs[key] = PRESENT
        self._shrink()
        return news

    def set_absent(self, keys: Iterable[BlockKey], now: float) -> list[BlockKey]:
        """Believe these absent for a while; returns those that were believed present."""
        beliefs = self.beliefs
        until = now + self._absent_ttl_s
        lost: list[BlockKey] = []
        for key in keys:
            if beliefs.pop(key, None) == PRESENT:
                lost.append(key)
            beliefs[key] = until
        self._shrink()
        return lost

    def set_probing(self, keys: Iterable[BlockKey], job: JobId) -> None:
        """A probe for these is on its way. What became present meanwhile stays so."""
        assert job > 0, "probe numbers are positive"
        beliefs = self.beliefs
        value = float(-job)
        for key in keys:
            if beliefs.get(key) != PRESENT:
                beliefs[key] = value

    def unanswered(self, keys: Iterable[BlockKey], job: JobId) -> list[BlockKey]:
        """Those about which nothing was learned since this probe was sent."""
        beliefs = self.beliefs
        asking = float(-job)
        return [key for key in keys if beliefs.get(key, asking) == asking]

    def clear(self) -> None:
        """Believe nothing."""
        self.beliefs.clear()

    def _shrink(self) -> None:
        beliefs = self.beliefs
        for _ in range(len(beliefs) - self._known_max):
            del beliefs[next(iter(beliefs))]
