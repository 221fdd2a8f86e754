"""Blocking calls side by side, so many at once.

Threads, not an event loop: the client's blocking calls release the GIL for as long as a request
takes and cost 50 us of Python each, its asynchronous ones twice that, for the hand-over to a loop.
"""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Item = TypeVar("Item")
Result = TypeVar("Result")


class Parallel:
    """Threads for calls of any number of callers, made when they are first needed.

    Args:
        width: calls that run at once, over all callers.
        name: of the threads.
    """

    def __init__(self, width: int, name: str) -> None:
        self._width = width
        self._pool = ThreadPoolExecutor(width, thread_name_prefix=name)

    def run(
        self,
        call: Callable[[Item], Result],
        items: Sequence[Item],
        stop_at_error: bool = False,
    ) -> list[Result | BaseException]:
        """`call(item)` for each, in order: what it returned, or raised.

        Args:
            call: runs on several threads at once.
            items: what to call it with.
            stop_at_error: begin no further call after one that raised.

        Raises:
            BaseException: with `stop_at_error`, the first error, once no call runs any more.
        """
        results: list[Result | BaseException] = [_NOT_CALLED] * len(items)
        numbers = itertools.count()  # next() on it is atomic
        failed = threading.Event()
        errors: list[BaseException] = []

        def work() -> None:
            while not failed.is_set() and (i := next(numbers)) < len(items):
                try:
                    results[i] = call(items[i])
                except BaseException as error:  # noqa: BLE001 - the client raises panics as such
                    results[i] = error
                    if stop_at_error:
                        errors.append(error)
                        failed.set()

        if len(items) <= 1:
            work()
        else:
            workers = [self._pool.submit(work) for _ in range(min(self._width, len(items)))]
            for worker in workers:
                worker.result()
        if errors:
            raise errors[0]
        return results

    def close(self) -> None:
        """Let the threads end. Called when no call runs."""
        self._pool.shutdown()


_NOT_CALLED = RuntimeError("not called")
