"""Copies between an accelerator (CUDA, ROCm, XPU) and the rows, on streams of their own.

Each direction has one stream, so its copies run in the order of submission. Both wait for the
compute stream first: stores because the model still writes the KV, loads because pending writes
and zeroing of their destination are ordered by nothing else.

The rows are registered with the driver, in pieces; where that fails, copies are pageable, slower.
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvtier.region import Region
from kvtier.vllm.compat import batch_copy_op
from kvtier.vllm.copy_plan import CopyPlan
from kvtier.vllm.executors.base import CopyResult

log = logging.getLogger(__name__)

_PIN_PIECE_BYTES = 64 << 30
"""Registering half a terabyte or more in one call fails on some drivers."""


@dataclass(slots=True)
class _Running:
    """One copy on a stream. The arrays live until it ended."""

    job_id: int
    started: Any
    ended: Any
    num_bytes: int
    keep: object
    error: str | None


class DeviceExecutor:
    """See the module.

    Args:
        tensors: the worker's KV tensors, all on one device.
        region: the primary region.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], region: Region) -> None:
        device = tensors[0].device
        self._device = device
        self._module: Any = torch.get_device_module(device)
        self._streams = {store: self._module.Stream(device) for store in (True, False)}
        self._running: dict[bool, deque[_Running]] = {True: deque(), False: deque()}
        self._events: list[Any] = []
        self._batch_copy = batch_copy_op(device.type)
        self._storages = _flat_storages(tensors)
        self._rows = torch.from_numpy(region.rows.reshape(-1))
        self._rows_address = region.rows_address
        self._pins = _Pins(device, region)

    def submit(self, job_id: int, plan: CopyPlan, *, store: bool) -> None:
        """Queue a copy on the direction's stream, behind what the device computes now."""
        stream = self._streams[store]
        started, ended = self._event(), self._event()
        stream.wait_stream(self._module.current_stream(self._device))
        keep, error = None, None
        with self._module.stream(stream):
            started.record(stream)
            try:
                keep = self._copy(plan, store=store)
            except Exception as problem:  # noqa: BLE001 - whatever it was, these bytes are not good
                error = str(problem)
            ended.record(stream)  # also behind the copies of a plan that failed half-way
        self._running[store].append(_Running(job_id, started, ended, plan.num_bytes, keep, error))

    def _copy(self, plan: CopyPlan, *, store: bool) -> object:
        if not len(plan.size):
            return plan  # another rank's turn to write; drivers refuse an empty batch
        if self._batch_copy is not None:
            dtype = np.uint64 if self._device.type == "xpu" else np.int64  # as each driver wants
            arrays = tuple(
                torch.from_numpy(np.ascontiguousarray(array).astype(dtype))
                for array in (plan.source, plan.destination, plan.size)
            )
            # Nothing on the device writes the rows, so a load's source may be read in any order.
            self._batch_copy(*arrays, is_src_access_order_any=not store)
            return arrays
        for source, destination, size in zip(
            plan.source.tolist(), plan.destination.tolist(), plan.size.tolist(), strict=True
        ):
            self._bytes(destination, size).copy_(self._bytes(source, size), non_blocking=True)
        return plan

    def _bytes(self, address: int, size: int) -> torch.Tensor:
        at = address - self._rows_address
        if 0 <= at < self._rows.numel():
            return self._rows[at : at + size]
        for start, storage in self._storages:
            if start <= address < start + storage.numel():
                return storage[address - start : address - start + size]
        raise AssertionError("a plan names memory that is neither a row nor a KV tensor")

    def finished(self) -> list[CopyResult]:
        """Copies that ended since the last call, in order per direction."""
        done = []
        for running in self._running.values():
            while running and running[0].ended.query():
                copy = running.popleft()
                seconds = copy.started.elapsed_time(copy.ended) / 1e3
                self._events += (copy.started, copy.ended)
                done.append(CopyResult(copy.job_id, copy.error, copy.num_bytes, seconds))
        return done

    def wait(self, job_ids: Collection[int]) -> None:
        """Block until these have ended."""
        for running in self._running.values():
            for copy in running:
                if copy.job_id in job_ids:
                    copy.ended.synchronize()

    def close(self) -> None:
        """Wait for everything, and let the driver go of the rows."""
        for stream in self._streams.values():
            stream.synchronize()
        self._pins.release()

    def _event(self) -> Any:
        return self._events.pop() if self._events else self._module.Event(enable_timing=True)


def _flat_storages(tensors: Sequence[torch.Tensor]) -> list[tuple[int, torch.Tensor]]:
    flat: dict[int, torch.Tensor] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in flat:
            whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
            flat[storage.data_ptr()] = whole.set_(storage)
    return list(flat.items())


class _Pins:
    """Registration of the rows with the driver, all of them or none."""

    def __init__(self, device: torch.device, region: Region) -> None:
        self._registered: list[int] = []
        if device.type != "cuda":
            return
        self._runtime: Any = torch.cuda.cudart()
        row_bytes = region.geometry.row_bytes
        step = max(_PIN_PIECE_BYTES // row_bytes, 1) * row_bytes
        total = region.geometry.num_slots * row_bytes
        for start in range(0, total, step):
            address = region.rows_address + start
            status = self._runtime.cudaHostRegister(address, min(step, total - start), 0)
            if int(status) != 0:
                log.warning(
                    "The CPU pool could not be pinned (error %s): copies to and from the device "
                    "are slower",
                    int(status),
                )
                self.release()
                # The runtime keeps the failure as its last error, and the next launch reports it.
                with contextlib.suppress(RuntimeError):
                    torch.ones(1, device=device)
                return
            self._registered.append(address)

    def release(self) -> None:
        """Unregister what is registered."""
        for address in self._registered:
            self._runtime.cudaHostUnregister(address)
        self._registered.clear()
