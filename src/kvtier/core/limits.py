"""Every queue has a bound; every wait has an end."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one manager.

    Attributes:
        promoting_max: slots that promotions and holds may take together.
        writing_max: slots that the cascades to one tier may pin.
        job_deadline_s: seconds after which a job's keys are given up.
        wait_max_s: seconds a request may wait for tiers, over all its rounds.
        hold_s: seconds a promoted block waits for the request it was promoted for.
        absent_ttl_s: seconds before a tier is asked again for a key it did not have.
        known_max: beliefs kept per tier.
    """

    promoting_max: int
    writing_max: int
    job_deadline_s: float = 30.0
    wait_max_s: float = 30.0
    hold_s: float = 10.0
    absent_ttl_s: float = 10.0
    known_max: int = 1_000_000

    def __post_init__(self) -> None:
        assert self.promoting_max > 0, "a promotion needs a slot"
        assert self.writing_max > 0, "a cascade needs a slot"
