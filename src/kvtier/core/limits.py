"""Every queue has a bound; every wait has an end."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvtier.core.health import Patience


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one manager.

    The shares of the pool are to add up: what promotions, cascades and leases may take leaves room
    for running stores, and `storing_max` leaves room for promotions.

    Attributes:
        promoting_max: slots that promotions and holds may take together.
        writing_max: slots that the cascades to one tier may pin.
        reading_max: slots that the reads from one tier may take, those of hung reads included;
            None: as many as promotions may take.
        storing_max: slots that running stores of the device may take; None: the whole pool.
        lending_max: slots that may be lent.
        job_max: blocks that one job moves at most, so that a tier that works shows progress.
        job_deadline_s: seconds after which a job's keys are given up.
        wait_max_s: seconds a request may wait for tiers, over all its rounds.
        wait_min_s: a wait is not shortened below this by what recomputing would take.
        hold_s: seconds a promoted block waits for the request it was promoted for.
        lease_s: seconds for which blocks are lent, unless the lease is renewed.
        lease_max_s: seconds for which a lease can be renewed at all.
        absent_ttl_s: seconds before a tier is asked again for a key it did not have.
        known_max: beliefs kept per tier.
        second_touch: cascade only blocks whose key was met before.
        patience: when a tier counts as failing, and when it is tried again.
    """

    promoting_max: int
    writing_max: int
    reading_max: int | None = None
    storing_max: int | None = None
    lending_max: int = 0
    job_max: int = 256
    job_deadline_s: float = 30.0
    wait_max_s: float = 30.0
    wait_min_s: float = 0.05
    hold_s: float = 10.0
    lease_s: float = 30.0
    lease_max_s: float = 300.0
    absent_ttl_s: float = 10.0
    known_max: int = 1_000_000
    second_touch: bool = False
    patience: Patience = field(default_factory=Patience)

    def __post_init__(self) -> None:
        assert self.promoting_max > 0, "a promotion needs a slot"
        assert self.writing_max > 0, "a cascade needs a slot"
        assert self.reading_max is None or self.reading_max > 0, "a read needs a slot"
        assert self.storing_max is None or self.storing_max > 0, "a store needs a slot"
        assert self.job_max >= self.patience.trial_max, "a trial is one job"
        assert self.lease_s <= self.lease_max_s, "a lease may last as long as the first one"
