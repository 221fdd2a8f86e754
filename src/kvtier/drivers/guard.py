"""A driver that may raise, made safe to call on the scheduler thread.

A driver of somebody else's may break its promise and raise. That costs its own jobs and nothing
else: the error is counted, logged once per cause, and the job ends as failed, so the tier's
circuit opens. A submit that raised has not taken its job.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

from kvtier.core.types import BlockKey, Completion, Done
from kvtier.drivers.base import JobMetadata, SecondaryTierManager, TierCounters
from kvtier.drivers.faults import fault_of

log = logging.getLogger(__name__)

T = TypeVar("T")


class GuardedDriver(SecondaryTierManager):
    """See the module.

    Attributes:
        errors: exceptions that the driver raised.
    """

    def __init__(self, name: str, driver: SecondaryTierManager) -> None:
        self.errors = 0
        self._name = name
        self._driver = driver
        self._failed: list[Completion] = []
        self._causes: set[str] = set()
        self._last_counters = TierCounters()

    def submit_store(self, job: JobMetadata) -> None:
        """Pass a store on; a job that is not taken ends as failed."""
        self._submit("submit_store", lambda: self._driver.submit_store(job), job)

    def submit_load(self, job: JobMetadata) -> None:
        """Pass a load on; a job that is not taken ends as failed."""
        self._submit("submit_load", lambda: self._driver.submit_load(job), job)

    def submit_lookup(self, job: JobMetadata) -> None:
        """Pass a lookup on; a job that is not taken ends as failed."""
        self._submit("submit_lookup", lambda: self._driver.submit_lookup(job), job)

    def submit_lend(self, ticket: int, job: JobMetadata, missing: Sequence[BlockKey]) -> None:
        """Pass an answer on; one that is not taken gives back what was lent."""
        self._submit("submit_lend", lambda: self._driver.submit_lend(ticket, job, missing), job)

    def get_finished(self) -> list[Completion]:
        """Completions since the last call."""
        failed, self._failed = self._failed, []
        return failed + self._ask("get_finished", self._driver.get_finished, list)

    def touch(self, keys: Sequence[BlockKey]) -> None:
        """Pass a hint on."""
        self._ask("touch", lambda: self._driver.touch(keys), lambda: None)

    def counters(self) -> TierCounters:
        """Running totals; the last known ones if the driver does not tell."""
        self._last_counters = self._ask(
            "counters", self._driver.counters, lambda: self._last_counters
        )
        return self._last_counters

    def close(self, timeout_s: float = 5.0) -> bool:
        """Stop the driver; False if it raises, since something may be running then."""
        return self._ask("close", lambda: self._driver.close(timeout_s), lambda: False)

    def _submit(self, where: str, submit: Callable[[], None], job: JobMetadata) -> None:
        try:
            submit()
        except Exception as error:  # noqa: BLE001 - a tier's fault is not the engine's
            self._count(where, error)
            self._failed.append(Done(job.job_id, frozenset(), fault_of(error)))

    def _ask(self, where: str, question: Callable[[], T], otherwise: Callable[[], T]) -> T:
        try:
            return question()
        except Exception as error:  # noqa: BLE001 - a tier's fault is not the engine's
            self._count(where, error)
            return otherwise()

    def _count(self, where: str, error: Exception) -> None:
        self.errors += 1
        cause = f"{where}: {type(error).__name__}"
        if cause not in self._causes:
            self._causes.add(cause)
            log.error("Tier %s raised in %s", self._name, where, exc_info=error)
