"""What is counted of what the threads of a driver did."""

from __future__ import annotations

import pytest

from kvtier.drivers.faults import Cause
from kvtier.drivers.moving import Moved
from kvtier.drivers.tally import Operation, Tally
from kvtier.testing.blocks import key_of


@pytest.mark.parametrize(
    ("operation", "name", "count"),
    [
        (Operation.LOOKUP, "lookup_failures", 1),
        (Operation.LOAD, "read_failures", 7),
        (Operation.STORE, "write_failures", 7),
    ],
)
def test_a_batch_of_a_lookup_fails_as_one_and_blocks_each(
    operation: Operation, name: str, count: int
) -> None:
    tally = Tally()
    tally.failed(operation, Cause.EIO, 7)
    counters = tally.counters()
    assert getattr(counters, name) == count
    assert counters.faults == {"eio": count}
    assert counters.lookup_failures + counters.read_failures + counters.write_failures == count


@pytest.mark.parametrize(
    ("operation", "name"), [(Operation.LOAD, "read"), (Operation.STORE, "write")]
)
def test_time_without_a_block_is_not_counted(operation: Operation, name: str) -> None:
    tally = Tally()
    tally.moved(operation, Moved(), 4096, 3.0)
    tally.moved(operation, Moved(ok=[key_of(1), key_of(2)]), 4096, 0.5)
    counters = tally.counters()
    assert getattr(counters, f"{name}_seconds") == 0.5
    assert getattr(counters, f"{name}_bytes") == 8192
    assert getattr(counters, f"{name}_blocks") == 2


def test_a_copy_stays_as_it_is() -> None:
    tally = Tally()
    assert tally.told({"blocks": 1.0})
    before = tally.counters()
    assert not tally.told({"blocks": 1.0})
    assert tally.told({"blocks": 2.0})
    assert before.figures == {"blocks": 1.0}
