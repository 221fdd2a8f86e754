"""Copies between an accelerator and the rows. Needs torch.cuda (or ROCm) or torch.xpu.

    python -m pytest tests/gpu

On every machine: how device memory is found again by its address.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "vllm"))
from kv_caches import Model, Rank, device_spec, pages_of, region_of

from kvtier.region import Mark, Region
from kvtier.vllm.executors import cuda
from kvtier.vllm.executors.cuda import DeviceExecutor, _flat_storages
from kvtier.vllm.worker import PrimaryLoadStoreSpec


def accelerator() -> str | None:
    if torch.cuda.is_available():
        return "cuda"
    return "xpu" if hasattr(torch, "xpu") and torch.xpu.is_available() else None


DEVICE = accelerator()
needs_device = pytest.mark.skipif(DEVICE is None, reason="neither torch.cuda nor torch.xpu is here")
SMALL = Model(heads=8, block_size=16, head_bytes=256, layers=4)
LARGE = Model(heads=8, block_size=128, head_bytes=512, layers=2)


# -- on every machine -----------------------------------------------------


class OnlyAddresses(DeviceExecutor):
    """The part that finds memory, without streams."""

    def __init__(self, tensors: list[torch.Tensor], region: Region) -> None:
        self._storages = _flat_storages(tensors)
        self._rows = torch.from_numpy(region.rows.reshape(-1))
        self._rows_address = region.rows_address


def test_layers_of_one_allocation_are_one_storage():
    backing = torch.arange(96, dtype=torch.int8)
    layers = [layer.view(4, 8) for layer in backing.chunk(3)]
    ((address, flat),) = _flat_storages(layers)
    assert address == backing.data_ptr()
    assert (flat.dtype, flat.shape) == (torch.uint8, (96,))
    assert flat.tolist() == list(range(96))
    flat[9] = 77
    assert layers[0][1, 1] == 77, "the same memory"


def test_memory_is_found_by_its_address():
    region = region_of(SMALL, 1, 3, 1)
    backing = torch.arange(64, dtype=torch.int8)
    other = torch.full((32,), 5, dtype=torch.int8)
    found = OnlyAddresses([backing[32:].view(4, 8), other.view(4, 8)], region)
    assert found._bytes(backing.data_ptr() + 40, 3).tolist() == [40, 41, 42]
    assert found._bytes(other.data_ptr() + 31, 1).tolist() == [5]
    found._bytes(region.rows_address + region.slot_bytes, 4).fill_(9)
    assert region.rows[1, :5].tolist() == [9, 9, 9, 9, 0]
    found._bytes(region.rows_address + 3 * region.slot_bytes - 1, 1).fill_(8)
    assert region.rows[2, -1] == 8
    with pytest.raises(AssertionError, match="neither a row nor a KV tensor"):
        found._bytes(region.rows_address + 3 * region.slot_bytes, 1)


# -- on a device ----------------------------------------------------------


@pytest.fixture(params=["batch", "one by one"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With vLLM's batch of copies, where this build has it, and without."""
    if request.param == "one by one":
        monkeypatch.setattr(cuda, "batch_copy_op", lambda device_type: None)
    elif DEVICE is None or cuda.batch_copy_op(DEVICE) is None:
        pytest.skip("this vLLM has no swap_blocks_batch")
    return str(request.param)


@pytest.fixture(params=["pinned", "pageable"])
def pinning(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "pageable":

        def refuse(*_: object) -> int:
            return 1

        if DEVICE == "cuda":
            monkeypatch.setattr(
                torch.cuda,
                "cudart",
                type("Runtime", (), {"cudaHostRegister": staticmethod(refuse)}),
            )
    return str(request.param)


def finish(rank: Rank, job_id: int) -> bool:
    rank.worker.wait({job_id})
    (result,) = rank.worker.get_finished()
    assert result.job_id == job_id
    assert result.transfer_time is not None
    assert 0 <= result.transfer_time < 60, "seconds"
    return result.success


def rank_of(model: Model, tp: int, rank: int, region: Region, num_blocks: int = 64) -> Rank:
    assert DEVICE is not None
    return Rank(model, tp, rank, region, num_blocks=num_blocks, device=DEVICE)


@pytest.fixture
def ranks() -> Iterator[list[Rank]]:
    started: list[Rank] = []
    yield started
    for rank in started:
        rank.worker.shutdown()


@needs_device
@pytest.mark.parametrize("model", [SMALL, LARGE], ids=["many small", "few large"])
@pytest.mark.parametrize(("tp_from", "tp_to"), [(1, 1), (2, 1), (1, 4), (16, 1)])
def test_what_some_ranks_store_others_load(
    way: str, pinning: str, ranks: list[Rank], model: Model, tp_from: int, tp_to: int
):
    region = region_of(model, 16, 20, 1)
    blocks, slots = [9, 2, 3, 4, 17, 30], [4, 1, 19, 7, 8, 0]
    for number in range(tp_from):
        ranks.append(rank_of(model, tp_from, number, region))
        for block in blocks:
            ranks[-1].put(block, pages_of(model, block))
        ranks[-1].worker.submit_store(1, device_spec(blocks), PrimaryLoadStoreSpec(slots))
        assert finish(ranks[-1], 1)
    assert (region.marks[:tp_from, slots] == Mark.COMPLETE).all()
    for slot, block in zip(slots, blocks, strict=True):
        used = region.rows[slot, : model.layers * model.page_bytes]
        assert (used == pages_of(model, block).ravel()).all()
    into = [50, 51, 52, 60, 5, 6]
    for number in range(tp_to):
        ranks.append(rank_of(model, tp_to, number, region))
        ranks[-1].worker.submit_load(2, PrimaryLoadStoreSpec(slots), device_spec(into))
        assert finish(ranks[-1], 2)
        for block, original in zip(into, blocks, strict=True):
            assert (ranks[-1].get(block) == ranks[-1].part_of(pages_of(model, original))).all()


@needs_device
def test_a_copy_comes_after_what_the_device_computes(way: str, ranks: list[Rank]):
    """A long kernel writes the KV just before the store, and zeroes blocks before the load."""
    assert DEVICE is not None
    region = region_of(LARGE, 1, 4, 1)
    ranks.append(rank_of(LARGE, 1, 0, region))
    (rank,) = ranks
    busy = torch.randn(4096, 4096, device=DEVICE)
    tensors = [entry.tensor for entry in rank.caches.tensors]
    for _ in range(200):
        busy = busy @ busy
        busy /= busy.norm()
    value = (busy.sum() * 0 + 42).to(torch.int8)  # only known when the kernels have run
    for tensor in tensors:
        tensor[7] = value
    rank.worker.submit_store(1, device_spec([7]), PrimaryLoadStoreSpec([2]))
    assert finish(rank, 1)
    assert (region.rows[2, : LARGE.layers * LARGE.page_bytes] == 42).all()

    for _ in range(200):
        busy = busy @ busy
        busy /= busy.norm()
    for tensor in tensors:
        tensor[8] = (busy.sum() * 0).to(torch.int8)
    rank.worker.submit_load(2, PrimaryLoadStoreSpec([2]), device_spec([8]))
    assert finish(rank, 2)
    assert (rank.get(8) == 42).all()


@needs_device
def test_jobs_of_one_direction_end_in_order(way: str, ranks: list[Rank]):
    region = region_of(SMALL, 1, 32, 1)
    ranks.append(rank_of(SMALL, 1, 0, region))
    (rank,) = ranks
    for job in range(20):
        rank.worker.submit_store(job, device_spec([job + 1]), PrimaryLoadStoreSpec([job]))
    rank.worker.wait({19})
    done = [result.job_id for result in rank.worker.get_finished()]
    assert done == list(range(20))
    for job in range(20, 40):  # events are used again
        rank.worker.submit_store(job, device_spec([1]), PrimaryLoadStoreSpec([0]))
        assert finish(rank, job)


@needs_device
def test_a_copy_that_the_driver_refuses_is_a_failed_store(
    ranks: list[Rank], monkeypatch: pytest.MonkeyPatch
):
    region = region_of(SMALL, 1, 4, 1)
    ranks.append(rank_of(SMALL, 1, 0, region))
    (rank,) = ranks

    def refuse(*_: object, **__: object) -> object:
        raise RuntimeError("refused")

    monkeypatch.setattr(rank.worker._executor, "_copy", refuse)
    rank.worker.submit_store(1, device_spec([1]), PrimaryLoadStoreSpec([3]))
    assert finish(rank, 1)
    assert region.marks[0, 3] == Mark.FAILED
    rank.worker.submit_load(2, PrimaryLoadStoreSpec([3]), device_spec([2]))
    assert not finish(rank, 2)


@needs_device
@pytest.mark.skipif(DEVICE != "cuda", reason="only CUDA and ROCm register memory")
def test_the_rows_are_pinned_in_pieces_and_let_go(
    ranks: list[Rank], monkeypatch: pytest.MonkeyPatch
):
    region = region_of(SMALL, 1, 10, 1)
    monkeypatch.setattr(cuda, "_PIN_PIECE_BYTES", 3 * region.slot_bytes)
    executor = DeviceExecutor([torch.zeros(8, dtype=torch.int8, device="cuda")], region)
    assert len(executor._pins._registered) == 4
    assert torch.from_numpy(region.rows[9]).is_pinned()
    executor.close()
    assert not torch.from_numpy(np.asarray(region.rows[9])).is_pinned()


@needs_device
@pytest.mark.skipif(DEVICE != "cuda", reason="only CUDA and ROCm register memory")
def test_memory_that_cannot_be_pinned_is_used_as_it_is(ranks: list[Rank]):
    """Registering twice fails; the error must not come up again in the model's next kernel."""
    region = region_of(SMALL, 1, 4, 1)
    ranks.append(rank_of(SMALL, 1, 0, region))
    second = DeviceExecutor([torch.zeros(8, dtype=torch.int8, device="cuda")], region)
    assert second._pins._registered == []
    assert torch.ones(4, device="cuda").sum().item() == 4
    second.close()
