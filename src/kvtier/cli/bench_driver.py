"""A tier under measurement: it runs as it does below an engine, in a process of its own."""

from __future__ import annotations

import hashlib
import itertools
import secrets
from typing import TYPE_CHECKING, Self

from kvtier.core.types import TierId
from kvtier.interrupts import interrupts_held
from kvtier.offloader import Assignment, make_driver_for

if TYPE_CHECKING:
    from kvtier.drivers.base import SecondaryTierManager
    from kvtier.offloader import ConfiguredTier
    from kvtier.region import Region

_HANG_S = 60.0


class MeasuredTier:
    """Runs a tier over a fresh namespace while it is entered.

    Args:
        tier: what runs.
        region: whose slots are stored and loaded; stays the caller's.
    """

    def __init__(self, tier: ConfiguredTier, region: Region) -> None:
        self._namespace = hashlib.sha256(secrets.token_bytes(16)).hexdigest()
        self._job_ids = itertools.count(1)
        self._region = region
        facts = {"digest": self._namespace, "label": "kvtier-bench"}
        self._assignment = Assignment(tier, TierId(0), region, lambda _: facts, _HANG_S)
        self._started: SecondaryTierManager | None = None

    def __enter__(self) -> Self:
        try:
            with interrupts_held():
                self._started = make_driver_for(self._assignment)
            self._prepare()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the tier's process; what it stored stays."""
        if self._started is not None:
            self._started.close(timeout_s=10.0)

    def _prepare(self) -> None:
        """What has to be done before anything is measured."""

    @property
    def _driver(self) -> SecondaryTierManager:
        assert self._started is not None, "entered"
        return self._started
