"""Copies where the device is the CPU: the KV cache and the rows are both ordinary memory.

One thread does the copying. A piece-wise loop in Python would take the GIL for every piece, and a
busy main thread gives it away only every 5 ms; so a whole job is handed to the kernel, 1,024 pieces
a call, by `process_vm_readv` on the own process. Where that is forbidden, `memmove` does it.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Collection

import numpy as np

from kvtier.affinity import use_all_cores
from kvtier.errors import KVTierError
from kvtier.vllm.copy_plan import Addresses, CopyPlan
from kvtier.vllm.executors.base import CopyResult

log = logging.getLogger(__name__)

_PIECES_PER_CALL = 1024  # IOV_MAX
_BYTES_PER_CALL = 1 << 30  # a call moves at most 2 GiB - 4 KiB

_libc = ctypes.CDLL(None, use_errno=True)  # calls through it release the GIL
_process_vm_readv = _libc.process_vm_readv
_process_vm_readv.argtypes = [
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_ulong,
    ctypes.c_void_p,
    ctypes.c_ulong,
    ctypes.c_ulong,
]
_process_vm_readv.restype = ctypes.c_ssize_t


class CopyError(KVTierError):
    """A copy between device and primary memory failed."""


def copy_vectored(source: Addresses, destination: Addresses, size: Addresses) -> None:
    """Copy pieces of this process's memory, many per native call.

    Raises:
        CopyError: the kernel refused, or copied less than asked.
    """
    source, destination, size = _cut(source, destination, size)
    remote = np.ascontiguousarray(np.stack((source, size), axis=1).astype(np.uint64))
    local = np.ascontiguousarray(np.stack((destination, size), axis=1).astype(np.uint64))
    pid = os.getpid()
    start = 0
    while start < len(size):
        stop = min(start + _PIECES_PER_CALL, len(size))
        within = int(np.searchsorted(np.cumsum(size[start:stop]), _BYTES_PER_CALL, side="right"))
        stop = start + max(within, 1)
        count, wanted = stop - start, int(size[start:stop].sum())
        copied = _process_vm_readv(
            pid, local[start:].ctypes.data, count, remote[start:].ctypes.data, count, 0
        )
        if copied != wanted:
            reason = (
                os.strerror(ctypes.get_errno()) if copied < 0 else f"{copied} of {wanted} bytes"
            )
            raise CopyError(f"copying {count} pieces of memory: {reason}")
        start = stop


def _cut(
    source: Addresses, destination: Addresses, size: Addresses
) -> tuple[Addresses, Addresses, Addresses]:
    """The same bytes in pieces that each fit into a call."""
    counts = -(-size // _BYTES_PER_CALL)
    if not len(size) or counts.max() <= 1:
        return source, destination, size
    index = np.repeat(np.arange(len(size)), counts)
    offset = (np.arange(len(index)) - np.repeat(np.cumsum(counts) - counts, counts)) * (
        _BYTES_PER_CALL
    )
    size = np.minimum(size[index] - offset, _BYTES_PER_CALL)
    return source[index] + offset, destination[index] + offset, size


def copy_piecewise(source: Addresses, destination: Addresses, size: Addresses) -> None:
    """Copy pieces of this process's memory, one native call each."""
    for start, end, count in zip(source.tolist(), destination.tolist(), size.tolist(), strict=True):
        ctypes.memmove(end, start, count)


def _vectored_works() -> bool:
    source, destination = np.arange(64, dtype=np.uint8), np.zeros(64, dtype=np.uint8)
    one = np.array([64])
    try:
        copy_vectored(np.array([source.ctypes.data]), np.array([destination.ctypes.data]), one)
    except CopyError as error:
        log.info("Copies to and from the CPU pool are made piece by piece: %s", error)
        return False
    return bool((source == destination).all())


class CPUExecutor:
    """See the module."""

    def __init__(self) -> None:
        self._copy = copy_vectored if _vectored_works() else copy_piecewise
        self._changed = threading.Condition()
        self._queue: deque[tuple[int, CopyPlan]] = deque()
        self._running: set[int] = set()  # submitted and not ended
        self._finished: list[CopyResult] = []
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="kvtier-copy", daemon=True)
        self._thread.start()

    def submit(self, job_id: int, plan: CopyPlan, *, store: bool) -> None:
        """Queue a copy. The forward pass of the CPU is synchronous: what it wrote is there."""
        with self._changed:
            self._queue.append((job_id, plan))
            self._running.add(job_id)
            self._changed.notify_all()

    def finished(self) -> list[CopyResult]:
        """Copies that ended since the last call."""
        with self._changed:
            finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: Collection[int]) -> None:
        """Block until these have ended."""
        wanted = set(job_ids)
        with self._changed:
            self._changed.wait_for(lambda: self._running.isdisjoint(wanted))

    def close(self) -> None:
        """Finish what was submitted, and stop."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        use_all_cores()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._closing)
                if not self._queue:
                    return
                job_id, plan = self._queue.popleft()
            started = time.perf_counter()
            error = None
            try:
                self._copy(plan.source, plan.destination, plan.size)
            except Exception as problem:  # noqa: BLE001 - whatever it was, these bytes are not good
                error = str(problem)
            took = time.perf_counter() - started
            with self._changed:
                self._running.discard(job_id)
                self._finished.append(CopyResult(job_id, error, plan.num_bytes, took))
                self._changed.notify_all()
