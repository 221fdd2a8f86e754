"""On which cores a thread may run."""

from __future__ import annotations

import contextlib
import os


def use_all_cores() -> None:
    """Let the calling thread run wherever the process may: the engine pins its main thread to one
    core, and threads inherit that.
    """
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
