"""KV caches of small models as vLLM registers them, for the ranks of one engine in this process."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    CanonicalPageMapping,
    CopyRun,
    GPULoadStoreSpec,
)

from kvtier.region import Geometry, Region
from kvtier.vllm.worker import KVTierWorker, row_layout


@dataclass(frozen=True)
class Model:
    """Layers of one cache group whose pages are heads x tokens x bytes, heads outermost."""

    heads: int = 4
    block_size: int = 16
    head_bytes: int = 24
    layers: int = 3

    @property
    def page_bytes(self) -> int:
        return self.heads * self.block_size * self.head_bytes

    def head_range(self, tp: int, rank: int) -> slice:
        """The bytes of a canonical page that a rank holds."""
        shards = min(tp, self.heads)
        size = self.page_bytes // shards
        shard = rank // (tp // shards)
        return slice(shard * size, (shard + 1) * size)


def caches_of(
    model: Model, tp: int, rank: int, num_blocks: int, device: str = "cpu", *, mapped: bool = True
) -> CanonicalKVCaches:
    """Zeroed KV caches: all layers in one allocation, one tensor per layer."""
    held = model.head_range(tp, rank)
    local = held.stop - held.start
    backing = torch.zeros(model.layers * num_blocks * local, dtype=torch.int8, device=device)
    replication = tp // min(tp, model.heads)
    mapping = CanonicalPageMapping(
        canonical_page_size_bytes=model.page_bytes,
        local_page_size_bytes=local,
        runs=(
            CopyRun(
                local_offset=0,
                canonical_offset=held.start,
                fragment_size=model.head_bytes,
                num_fragments=local // model.head_bytes,
                local_stride=model.head_bytes,
                canonical_stride=model.head_bytes,
            ),
        ),
        num_writers=replication,
        writer_index=rank % replication,
        parallelism_agnostic=True,
    )
    tensors = [
        CanonicalKVCacheTensor(layer.view(num_blocks, local), local)
        for layer in backing.chunk(model.layers)
    ]
    refs = [CanonicalKVCacheRef(i, local, mapping if mapped else None) for i in range(model.layers)]
    return CanonicalKVCaches(tensors, [refs])


def region_of(model: Model, num_ranks: int, num_slots: int, per_chunk: int) -> Region:
    layout = row_layout(caches_of(model, num_ranks, 0, 1), per_chunk, 0, num_ranks)
    return Region.create(Geometry(num_slots, layout.row_bytes, num_ranks))


class Rank:
    """One worker with its KV cache."""

    def __init__(
        self,
        model: Model,
        tp: int,
        rank: int,
        region: Region,
        *,
        per_chunk: int = 1,
        num_blocks: int = 32,
        device: str = "cpu",
        mapped: bool = True,
    ) -> None:
        self.model, self.tp, self.rank = model, tp, rank
        self.caches = caches_of(model, tp, rank, num_blocks, device, mapped=mapped)
        layout = row_layout(self.caches, per_chunk, rank, tp)
        self.worker = KVTierWorker(self.caches, layout, region, rank)

    def put(self, block: int, pages: np.ndarray) -> None:
        """Write this rank's part of canonical pages, shape (layers, page_bytes), into a block."""
        held = self.model.head_range(self.tp, self.rank)
        for entry, page in zip(self.caches.tensors, pages, strict=True):
            entry.tensor[block] = torch.from_numpy(page[held].view(np.int8).copy())

    def get(self, block: int) -> np.ndarray:
        """What this rank holds in a block, shape (layers, local bytes)."""
        return np.stack([e.tensor[block].cpu().numpy().view(np.uint8) for e in self.caches.tensors])

    def part_of(self, pages: np.ndarray) -> np.ndarray:
        """This rank's part of canonical pages."""
        return pages[:, self.model.head_range(self.tp, self.rank)]


def pages_of(model: Model, seed: int) -> np.ndarray:
    """Canonical pages of one GPU block, shape (layers, page_bytes)."""
    random = np.random.default_rng(seed)
    return random.integers(0, 256, (model.layers, model.page_bytes), np.uint8)


def device_spec(blocks: list[int], first_index: int = 0) -> GPULoadStoreSpec:
    """GPU blocks of the only group."""
    return GPULoadStoreSpec(blocks, [len(blocks)], [first_index])
