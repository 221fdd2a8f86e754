"""The table of metrics, and increments out of totals."""

import re

from hypothesis import given
from hypothesis import strategies as st

from kvtier.metrics import (
    FAULTS,
    INTERNAL_ERRORS,
    JOBS_IN_FLIGHT,
    METRICS,
    READ_BYTES,
    USED_SLOTS,
    Collector,
    Kind,
    Series,
)

BYTES = Series(READ_BYTES, ("fs",))
OTHER = Series(READ_BYTES, ("valkey",))
SLOTS = Series(USED_SLOTS, ("primary",))
JOBS = Series(JOBS_IN_FLIGHT, ("fs",))


def test_table_is_well_formed():
    names = {
        *("lookup_blocks", "hit_blocks", "hit_tokens"),
        *("read_bytes", "read_seconds", "read_failures"),
        *("write_bytes", "write_seconds", "write_failures"),
        *("corrupt_blocks", "skipped_store_blocks", "expired_waits", "internal_errors"),
        *("expired_jobs", "recomputed_blocks", "filtered_blocks", "driver_errors"),
        *("tier_faults", "process_starts", "process_kills", "process_crashes"),
        *("used_bytes", "capacity_bytes", "evicted_blocks", "roots_failing", "refused_takes"),
        *("reads_open", "writes_open", "times_opened"),
        *("used_slots", "total_slots", "pinned_slots", "jobs_in_flight"),
    }
    assert set(METRICS) == {f"vllm:kvtier_{name}" for name in names}
    for name, metric in METRICS.items():
        assert metric.name == name
        assert re.fullmatch(r"vllm:kvtier_[a-z_]+", name)
        assert metric.documentation.endswith(".")
        labels = {INTERNAL_ERRORS: (), FAULTS: ("tier", "cause")}
        assert metric.labels == labels.get(metric, ("tier",))


def test_only_what_changed_is_emitted():
    collector = Collector()
    first = collector.collect({BYTES: 10, OTHER: 0, SLOTS: 0, JOBS: 2, Series(INTERNAL_ERRORS): 1})
    assert first.counters == {BYTES: 10, Series(INTERNAL_ERRORS): 1}
    assert first.gauges == {SLOTS: 0, JOBS: 2}
    assert not collector.collect({BYTES: 10, OTHER: 0, SLOTS: 0, JOBS: 2})
    second = collector.collect({BYTES: 15, OTHER: 3, SLOTS: 0, JOBS: 0})
    assert second
    assert second.counters == {BYTES: 5, OTHER: 3}
    assert second.gauges == {JOBS: 0}


def test_a_counter_that_fell_was_restarted():
    collector = Collector()
    collector.collect({BYTES: 10})
    assert collector.collect({BYTES: 4}).counters == {BYTES: 4}
    assert not collector.collect({BYTES: 0})
    assert collector.collect({BYTES: 3}).counters == {BYTES: 3}


def test_a_series_that_is_not_reported_keeps_its_value():
    collector = Collector()
    collector.collect({BYTES: 10})
    collector.collect({})
    assert collector.collect({BYTES: 12}).counters == {BYTES: 2}


@given(st.lists(st.lists(st.integers(0, 50), min_size=2, max_size=2)))
def test_increments_add_up_to_the_total(steps):
    collector = Collector()
    totals = {BYTES: 0, OTHER: 0}
    seen = {BYTES: 0, OTHER: 0}
    for a, b in steps:
        totals = {BYTES: totals[BYTES] + a, OTHER: totals[OTHER] + b}
        delta = collector.collect(totals)
        assert all(increment > 0 for increment in delta.counters.values())
        for series, increment in delta.counters.items():
            assert series.metric.kind is Kind.COUNTER
            seen[series] += increment
    assert seen == totals
