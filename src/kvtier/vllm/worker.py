"""The device side: moves blocks between a worker's KV tensors and the rows of the region."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import torch
from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
    CanonicalKVCaches,
    CanonicalPageMapping,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)

from kvtier.errors import LayoutError
from kvtier.layout import Fragment, LayerPages, PageMapping, RowLayout, coalesce
from kvtier.region import Mark, Region
from kvtier.vllm.copy_plan import CopyPlanner, DeviceTensor
from kvtier.vllm.executors.base import Executor
from kvtier.vllm.executors.cpu import CPUExecutor

log = logging.getLogger(__name__)

NO_SLOT = -1
"""In a job's slots: the block was not readable when the load was prepared. Such a load fails."""


class PrimaryLoadStoreSpec(BlockIDsLoadStoreSpec):
    """Slots of the primary region, one per block of the job, in the job's order."""


class KVTierWorker(OffloadingWorker):
    """One worker's transfers.

    A store that fails or is incomplete is told to the scheduler by marks in the region, and its
    block never becomes readable; the job itself succeeds, as vLLM wants it. A load that fails is
    reported as failed.

    Args:
        kv_caches: the worker's KV tensors, as vLLM registers them.
        layout: how their pages lie in a row.
        region: shared with the scheduler.
        rank: of this worker.
    """

    def __init__(
        self, kv_caches: CanonicalKVCaches, layout: RowLayout, region: Region, rank: int
    ) -> None:
        self._region = region
        self._marks = region.marks[rank]
        tensors = [tensor.tensor for tensor in kv_caches.tensors]
        self._planner = CopyPlanner(
            layout, device_tensors(kv_caches), region.rows_address, region.geometry.num_slots
        )
        self._executor = make_executor(tensors, region)
        self._stores: dict[int, tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]] = {}
        self._refused: list[TransferResult] = []

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        """Start a store. Always accepted; what went wrong shows in the marks."""
        assert isinstance(dst_spec, PrimaryLoadStoreSpec), "slots come from kvtier's manager"
        slots = dst_spec.block_ids
        try:
            plan = self._planner.plan(
                src_spec.block_ids,
                src_spec.group_sizes,
                src_spec.block_indices,
                slots,
                store=True,
            )
        except LayoutError as error:
            log.error("A store of %d blocks is refused: %s", len(slots), error)
            self._marks[[slot for slot in slots if 0 <= slot < len(self._marks)]] = Mark.FAILED
            self._refused.append(TransferResult(job_id, True, 0, 0.0))
            return True
        self._stores[job_id] = (slots, plan.complete)
        self._executor.submit(job_id, plan, store=True)
        return True

    def submit_load(
        self,
        job_id: int,
        src_spec: LoadStoreSpec,
        dst_spec: GPULoadStoreSpec,
        expedited: bool = False,
    ) -> bool:
        """Start a load. Always accepted; a failure shows in the result."""
        assert isinstance(src_spec, PrimaryLoadStoreSpec), "slots come from kvtier's manager"
        slots = src_spec.block_ids
        try:
            if (slots == NO_SLOT).any():
                raise LayoutError("a block was gone when its load was prepared")
            plan = self._planner.plan(
                dst_spec.block_ids,
                dst_spec.group_sizes,
                dst_spec.block_indices,
                slots,
                store=False,
            )
        except LayoutError as error:
            log.error("A load of %d blocks is refused: %s", len(slots), error)
            self._refused.append(TransferResult(job_id, False, 0, 0.0))
            return True
        self._executor.submit(job_id, plan, store=False)
        return True

    def get_finished(self) -> list[TransferResult]:
        """Jobs that ended since the last call."""
        results, self._refused = self._refused, []
        for copy in self._executor.finished():
            store = self._stores.pop(copy.job_id, None)
            if copy.error is not None:
                log.error("Copying %d bytes failed: %s", copy.num_bytes, copy.error)
            if store is not None:
                slots, complete = store
                good = np.where(complete, Mark.COMPLETE, Mark.PARTIAL)
                self._marks[slots] = good if copy.error is None else Mark.FAILED
            success = copy.error is None or store is not None
            results.append(TransferResult(copy.job_id, success, copy.num_bytes, copy.seconds))
        return results

    def wait(self, job_ids: set[int]) -> None:
        """Block until these jobs have ended."""
        self._executor.wait(job_ids)

    def shutdown(self) -> None:
        """Finish what runs, and let go of the region."""
        self._executor.close()
        self._region.close()


def make_executor(tensors: list[torch.Tensor], region: Region) -> Executor:
    """The executor for the device on which the KV tensors lie.

    Raises:
        LayoutError: a kind of device that kvtier does not know.
    """
    kinds = {tensor.device.type for tensor in tensors}
    if kinds == {"cpu"}:
        return CPUExecutor()
    if len(kinds) == 1 and kinds <= {"cuda", "xpu"}:
        from kvtier.vllm.executors.cuda import DeviceExecutor  # noqa: PLC0415 - needs a device

        return DeviceExecutor(tensors, region)
    raise LayoutError(
        f"the KV cache lies on {', '.join(sorted(kinds))}; kvtier copies from cpu, cuda and xpu"
    )


def device_tensors(kv_caches: CanonicalKVCaches) -> list[DeviceTensor]:
    """Addresses and strides of the KV tensors.

    Raises:
        LayoutError: a tensor that is not rows of contiguous bytes.
    """
    found = []
    for place, entry in enumerate(kv_caches.tensors):
        tensor = entry.tensor
        if tensor.dim() != 2 or tensor.element_size() != 1 or tensor.stride(1) != 1:
            raise LayoutError(
                f"KV tensor {place} has shape {tuple(tensor.shape)}, strides {tensor.stride()} and "
                f"type {tensor.dtype}; kvtier needs (blocks, bytes) with contiguous bytes"
            )
        found.append(DeviceTensor(tensor.data_ptr(), tensor.stride(0), tensor.shape[0]))
    return found


def row_layout(
    kv_caches: CanonicalKVCaches, blocks_per_chunk: int, rank: int, num_ranks: int
) -> RowLayout:
    """The layout of rows that vLLM's mappings certify; pages without one stay apart per rank.

    Raises:
        LayoutError: a mapping contradicts itself or its tensor.
    """
    groups = []
    for refs in kv_caches.group_data_refs:
        layers = []
        for ref in refs:
            if ref.mapping is None:
                mapping = PageMapping.exclusive(ref.page_size_bytes, rank, num_ranks)
            else:
                mapping = _page_mapping(ref.mapping)
            width = kv_caches.tensors[ref.tensor_idx].tensor.shape[1]
            if mapping.local_bytes != ref.page_size_bytes or mapping.local_bytes > width:
                raise LayoutError(
                    f"a page of {ref.page_size_bytes} bytes in a tensor of {width} bytes per block "
                    f"is mapped as {mapping.local_bytes} bytes"
                )
            layers.append(LayerPages(ref.tensor_idx, mapping))
        groups.append(tuple(layers))
    return RowLayout(tuple(groups), blocks_per_chunk)


def _page_mapping(mapping: CanonicalPageMapping) -> PageMapping:
    fragments = [
        Fragment(
            run.local_offset + i * run.local_stride,
            run.canonical_offset + i * run.canonical_stride,
            run.fragment_size,
        )
        for run in mapping.runs
        for i in range(run.num_fragments)
    ]
    return PageMapping(
        mapping.canonical_page_size_bytes,
        mapping.local_page_size_bytes,
        coalesce(fragments),
        mapping.num_writers,
        mapping.writer_index,
        mapping.parallelism_agnostic,
    )
