"""Looks at the blocks of a catalog on several threads."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

Block = TypeVar("Block")


def look_at_all(
    blocks: Iterable[Block], num_threads: int, make_look: Callable[[], Callable[[Block], None]]
) -> None:
    """Look at each block once.

    Args:
        blocks: taken one by one, by one thread at a time.
        num_threads: at least 1.
        make_look: called once on each thread, for what looks at the blocks there.

    Raises:
        BaseException: what interrupted it, or what one look or `blocks` raised first; the threads
            have ended then.
    """
    _Looks(blocks, make_look).run(num_threads)


class _Looks(Generic[Block]):
    def __init__(
        self, blocks: Iterable[Block], make_look: Callable[[], Callable[[Block], None]]
    ) -> None:
        self._blocks = iter(blocks)
        self._make_look = make_look
        self._taking = threading.Lock()
        self._error: BaseException | None = None
        self._stopped = False

    def run(self, num_threads: int) -> None:
        threads = [
            threading.Thread(target=self._serve, name=f"kvtier-verify-{i}", daemon=True)
            for i in range(num_threads)
        ]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        finally:
            self._stopped = True
            for thread in threads:
                thread.join()
        if self._error is not None:
            raise self._error

    def _serve(self) -> None:
        try:
            look = self._make_look()
            while (block := self._take()) is not None:
                look(block)
        except BaseException as error:  # noqa: BLE001 - raised again where it is waited for
            self._error = error
            self._stopped = True

    def _take(self) -> Block | None:
        with self._taking:
            return None if self._stopped else next(self._blocks, None)
