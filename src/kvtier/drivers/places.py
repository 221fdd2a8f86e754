"""The tiers that a driver has open, one per namespace.

A place is opened by the first thread that needs it, and meanwhile no other thread waits for it:
they do jobs of other namespaces. All of it is called under the driver's lock, but for `close`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtier.core.types import Fault
from kvtier.drivers.faults import Cause

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvtier.tiers.base import Tier

OPEN_TIERS_MAX = 4
"""Namespaces kept open. A reset starts a new one, and jobs of the last few may still arrive."""

_FIRST_BACKOFF_S = 1.0
_LAST_BACKOFF_S = 60.0


@dataclass(slots=True)
class Place:
    """The tier of one namespace, or why there is none.

    Attributes:
        namespace: hex digest.
        tier: None until it is open.
        opening: a thread is at it.
        users: running tasks; a place is not closed under them.
        fault: of the last attempt to open it.
        cause: of the last attempt to open it, `faults.cause_of`.
    """

    namespace: str
    tier: Tier | None = None
    opening: bool = False
    users: int = 0
    fault: Fault = Fault.ERROR
    cause: Cause = Cause.OTHER
    _failed: int = 0  # attempts since the last success
    _retry_at: float = 0.0

    def opened(self, tier: Tier) -> None:
        """The attempt went well."""
        self.tier = tier
        self.opening = False
        self._failed = 0

    def failed(self, fault: Fault, cause: Cause, now: float) -> None:
        """The attempt went wrong: the next one is made after 1 s, doubling to 60 s."""
        self.opening = False
        self.fault = fault
        self.cause = cause
        self._retry_at = now + min(_LAST_BACKOFF_S, _FIRST_BACKOFF_S * 2**self._failed)
        self._failed += 1

    def may_open(self, now: float) -> bool:
        """Whether it is time for an attempt."""
        return not self._failed or now >= self._retry_at


class Places:
    """See the module."""

    def __init__(self) -> None:
        self._places: dict[str, Place] = {}  # last used last

    def __iter__(self) -> Iterator[Place]:
        return iter(self._places.values())

    def get(self, namespace: str) -> Place:
        """The place of a namespace, a closed one if it is new."""
        place = self._places.get(namespace)
        if place is None:
            place = self._places[namespace] = Place(namespace)
        return place

    def enter(self, place: Place) -> list[Place]:
        """Use a place until `users` is lowered again.

        Returns:
            Places to close: unused longest, beyond `OPEN_TIERS_MAX`.
        """
        self._places[place.namespace] = self._places.pop(place.namespace)
        place.users += 1
        surplus = len(self._places) - OPEN_TIERS_MAX
        idle = [each for each in self if each.users == 0 and not each.opening]
        closing = idle[: max(0, surplus)]
        for each in closing:
            del self._places[each.namespace]
        return closing
