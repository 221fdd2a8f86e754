"""Running totals of one engine, gathered from where they are known."""

from __future__ import annotations

from collections.abc import Iterator

from kvtier import metrics
from kvtier.config import PRIMARY_NAME
from kvtier.core.health import State
from kvtier.core.types import TierId
from kvtier.metrics import Series
from kvtier.offloader import Offloader


class Totals:
    """See the module.

    Attributes:
        lookups: blocks that the engine asked for.
    """

    def __init__(self, offloader: Offloader) -> None:
        self.lookups = 0
        self._offloader = offloader
        names = [PRIMARY_NAME, *(tier.name for tier in offloader.tiers)]
        self._hit_blocks = dict.fromkeys(names, 0)
        self._hit_tokens = dict.fromkeys(names, 0)

    def hit(self, tier: TierId | None, tokens: int) -> None:
        """A block is being loaded that came from this tier; None: it was in the primary."""
        name = PRIMARY_NAME if tier is None else self._offloader.tiers[tier].name
        self._hit_blocks[name] += 1
        self._hit_tokens[name] += tokens

    def collect(self, internal_errors: int) -> dict[Series, float]:
        """All totals and levels as they stand."""
        totals = dict(self._of_primary())
        totals[Series(metrics.INTERNAL_ERRORS)] = internal_errors
        for place, tier in enumerate(self._offloader.tiers):
            totals.update(self._of_tier(place, tier.name))
        for name, blocks in self._hit_blocks.items():
            totals[Series(metrics.HIT_BLOCKS, (name,))] = blocks
            totals[Series(metrics.HIT_TOKENS, (name,))] = self._hit_tokens[name]
        return totals

    def _of_primary(self) -> Iterator[tuple[Series, float]]:
        core = self._offloader.core
        label = (PRIMARY_NAME,)
        yield Series(metrics.LOOKUP_BLOCKS, label), self.lookups
        yield Series(metrics.SKIPPED_STORE_BLOCKS, label), core.ledger.counts.unstored_blocks
        yield Series(metrics.EXPIRED_WAITS, label), core.ledger.counts.expired_waits
        yield Series(metrics.RECOMPUTED_BLOCKS, label), core.ledger.counts.recomputed_blocks
        yield Series(metrics.FILTERED_BLOCKS, label), core.ledger.cascades.filtered
        yield Series(metrics.USED_SLOTS, label), core.pool.used
        yield Series(metrics.TOTAL_SLOTS, label), core.pool.num_slots
        yield Series(metrics.PINNED_SLOTS, label), core.pool.pinned

    def _of_tier(self, place: int, name: str) -> Iterator[tuple[Series, float]]:
        core, counters = self._offloader.core, self._offloader.drivers[place].counters()
        label = (name,)
        yield Series(metrics.LOOKUP_BLOCKS, label), counters.lookup_blocks
        yield Series(metrics.READ_BYTES, label), counters.read_bytes
        yield Series(metrics.READ_SECONDS, label), counters.read_seconds
        yield Series(metrics.READ_FAILURES, label), counters.read_failures
        yield Series(metrics.WRITE_BYTES, label), counters.write_bytes
        yield Series(metrics.WRITE_SECONDS, label), counters.write_seconds
        yield Series(metrics.WRITE_FAILURES, label), counters.write_failures
        yield Series(metrics.CORRUPT_BLOCKS, label), counters.corrupt_blocks
        skipped = core.ledger.cascades.skipped[place]
        yield Series(metrics.SKIPPED_STORE_BLOCKS, label), skipped
        yield Series(metrics.PINNED_SLOTS, label), core.ledger.cascades.writing[place]
        reads, writes = core.ledger.reads[place], core.ledger.writes[place]
        yield Series(metrics.EXPIRED_JOBS, label), core.ledger.counts.expired_jobs[place]
        yield Series(metrics.DRIVER_ERRORS, label), self._offloader.drivers[place].errors
        yield Series(metrics.READS_OPEN, label), float(reads.state is not State.CLOSED)
        yield Series(metrics.WRITES_OPEN, label), float(writes.state is not State.CLOSED)
        yield Series(metrics.TIMES_OPENED, label), reads.opened + writes.opened
        yield Series(metrics.PROCESS_STARTS, label), counters.process_starts
        yield Series(metrics.PROCESS_KILLS, label), counters.process_kills
        yield Series(metrics.PROCESS_CRASHES, label), counters.process_crashes
        for cause, count in counters.faults.items():
            yield Series(metrics.FAULTS, (name, cause)), count
        for figure, metric in metrics.FIGURES.items():
            if figure in counters.figures:
                yield Series(metric, label), counters.figures[figure]
        yield Series(metrics.JOBS_IN_FLIGHT, label), core.ledger.jobs_in_flight[place]
