from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from kvtier.tiers.object.parallel import Parallel

if TYPE_CHECKING:
    from collections.abc import Iterator

PATIENCE_S = 20.0


@pytest.fixture
def parallel() -> Iterator[Parallel]:
    parallel = Parallel(4, "test")
    yield parallel
    parallel.close()


def test_results_come_in_order(parallel: Parallel) -> None:
    assert parallel.run(lambda i: i * i, range(100)) == [i * i for i in range(100)]
    assert parallel.run(lambda i: i * i, [3]) == [9]
    assert parallel.run(lambda i: i * i, []) == []


def test_an_error_is_the_result_of_its_item(parallel: Parallel) -> None:
    class Panic(BaseException):
        pass

    def call(i: int) -> int:
        if i == 3:
            raise Panic
        return i

    results = parallel.run(call, range(10))
    assert isinstance(results.pop(3), Panic)
    assert results == [0, 1, 2, 4, 5, 6, 7, 8, 9]


def test_calls_run_side_by_side_but_no_more_than_allowed(parallel: Parallel) -> None:
    """Of two callers together. Each call waits until as many as allowed have begun."""
    lock, running, peak = threading.Lock(), [0], [0]
    all_begun = threading.Barrier(4)

    def call(_: int) -> None:
        with lock:
            running[0] += 1
            peak[0] = max(peak[0], running[0])
        all_begun.wait(PATIENCE_S)
        with lock:
            running[0] -= 1

    callers = [threading.Thread(target=parallel.run, args=(call, range(8))) for _ in range(2)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert peak == [4]


def test_the_first_error_stops_the_others(parallel: Parallel) -> None:
    calls: list[int] = []
    begun = threading.Barrier(4)

    def call(i: int) -> None:
        calls.append(i)
        begun.wait(PATIENCE_S)
        raise ValueError(i)

    with pytest.raises(ValueError, match=r"[0-3]"):
        parallel.run(call, range(100), stop_at_error=True)
    assert sorted(calls) == [0, 1, 2, 3]
