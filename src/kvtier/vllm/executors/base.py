"""What a worker needs of an executor."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

from kvtier.vllm.copy_plan import CopyPlan


@dataclass(frozen=True, slots=True)
class CopyResult:
    """One finished copy.

    Attributes:
        job_id: as submitted.
        error: what went wrong; None if every byte was copied.
        num_bytes: bytes of the plan.
        seconds: time that the copy itself took.
    """

    job_id: int
    error: str | None
    num_bytes: int
    seconds: float


class Executor(Protocol):
    """Copies between device and rows, asynchronously. Used by one thread."""

    def submit(self, job_id: int, plan: CopyPlan, *, store: bool) -> None:
        """Start a copy, after everything that the device computed so far."""
        ...

    def finished(self) -> list[CopyResult]:
        """Copies that ended since the last call."""
        ...

    def wait(self, job_ids: Collection[int]) -> None:
        """Block until these have ended: the only fence before their memory is used again."""
        ...

    def close(self) -> None:
        """Wait for everything and stop."""
        ...
