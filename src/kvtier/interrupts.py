"""What commands that start processes do about Ctrl-C and SIGTERM.

Python raises `KeyboardInterrupt` between any two instructions of the main thread, so also after a
process was started and before anything knows of it that would end it.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def termination_as_interrupt() -> Iterator[None]:
    """Have SIGTERM end this like Ctrl-C does, so that it cleans up. On the main thread only."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    former = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, former)


@contextlib.contextmanager
def interrupts_held() -> Iterator[None]:
    """Have Ctrl-C, and SIGTERM where it interrupts, wait until the end of the block.

    Around what makes something that has to be ended or removed, and takes note of it. Short: what
    runs in it cannot be interrupted. Signals come to the main thread, so elsewhere it does nothing.

    Raises:
        KeyboardInterrupt: at the end of the block, if a signal came meanwhile.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    former = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    # one that ends the process at once, or is ignored, stays as it is
    held = [number for number, handler in former.items() if callable(handler)]
    try:
        for number in held:
            signal.signal(number, lambda number, _: came.append(number))
        yield
    finally:
        for number in held:
            signal.signal(number, former[number])
        if came:
            raise KeyboardInterrupt
