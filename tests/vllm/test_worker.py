"""Workers over one region: byte-exact across tensor-parallel sizes, and honest about failures."""

from __future__ import annotations

import pickle
import threading

import numpy as np
import pytest
import torch
from kv_caches import Model, Rank, caches_of, device_spec, pages_of, region_of
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    CanonicalPageMapping,
    CopyRun,
    GPULoadStoreSpec,
)

from kvtier.errors import LayoutError
from kvtier.region import Mark, Region
from kvtier.vllm.executors.cpu import copy_piecewise
from kvtier.vllm.worker import (
    NO_SLOT,
    PrimaryLoadStoreSpec,
    device_tensors,
    make_executor,
    row_layout,
)

MODEL = Model()


def finish(rank: Rank, job_id: int) -> bool:
    rank.worker.wait({job_id})
    (result,) = rank.worker.get_finished()
    assert result.job_id == job_id
    return result.success


def store(rank: Rank, job_id: int, blocks: list[int], slots: list[int], first: int = 0) -> bool:
    assert rank.worker.submit_store(job_id, device_spec(blocks, first), PrimaryLoadStoreSpec(slots))
    return finish(rank, job_id)


def load(rank: Rank, job_id: int, blocks: list[int], slots: list[int], first: int = 0) -> bool:
    assert rank.worker.submit_load(job_id, PrimaryLoadStoreSpec(slots), device_spec(blocks, first))
    return finish(rank, job_id)


def engine_of(
    tp: int, region: Region, model: Model = MODEL, *, per_chunk: int = 1, mapped: bool = True
) -> list[Rank]:
    return [Rank(model, tp, rank, region, per_chunk=per_chunk, mapped=mapped) for rank in range(tp)]


@pytest.mark.parametrize(("tp_from", "tp_to"), [(2, 1), (1, 2), (4, 1), (2, 4), (8, 1), (1, 8)])
@pytest.mark.parametrize("per_chunk", [1, 3])
def test_what_some_ranks_store_others_load(tp_from: int, tp_to: int, per_chunk: int):
    """With 4 heads, 8 ranks hold every byte twice and take turns in writing."""
    region = region_of(MODEL, 8, 6, per_chunk)
    blocks = [9, 2, 3, 17, 30, 1][: 2 * per_chunk]
    slots = [4, 1]
    pages = {block: pages_of(MODEL, block) for block in blocks}
    writers = engine_of(tp_from, region, per_chunk=per_chunk)
    for rank in writers:
        for block in blocks:
            rank.put(block, pages[block])
        assert store(rank, 1, blocks, slots)
        rank.worker.shutdown()
    assert (region.marks[:tp_from, slots] == Mark.COMPLETE).all()
    assert (region.marks[tp_from:] == Mark.UNTOUCHED).all()
    untouched = [slot for slot in range(6) if slot not in slots]
    assert not region.rows[untouched].any()

    into = [5, 6, 7, 20, 11, 12][: 2 * per_chunk]
    for rank in engine_of(tp_to, region, per_chunk=per_chunk):
        assert load(rank, 2, into, slots)
        for block, original in zip(into, blocks, strict=True):
            assert (rank.get(block) == rank.part_of(pages[original])).all()
        others = [block for block in range(32) if block not in into]
        assert not any(rank.get(block).any() for block in others)
        rank.worker.shutdown()
    assert (region.marks[tp_from:] == Mark.UNTOUCHED).all(), "loads leave no marks"


def test_rows_hold_the_same_bytes_whoever_stored_them():
    regions = []
    for tp in (1, 2, 4, 8):
        region = region_of(MODEL, tp, 2, 1)
        for rank in engine_of(tp, region):
            rank.put(3, pages_of(MODEL, 3))
            store(rank, 1, [3], [1])
            rank.worker.shutdown()
        regions.append(region.rows[1].copy())
    assert all((row == regions[0]).all() for row in regions)
    assert (regions[0][: 3 * MODEL.page_bytes] == pages_of(MODEL, 3).ravel()).all()


def test_pages_that_nobody_certifies_come_back_to_their_rank():
    region = Region.create(region_of(MODEL, 2, 2, 1).geometry)
    ranks = engine_of(2, region, mapped=False)
    for rank in ranks:
        rank.put(3, pages_of(MODEL, 3))
        store(rank, 1, [3], [1])
    for rank in ranks:
        load(rank, 2, [8], [1])
        assert (rank.get(8) == rank.part_of(pages_of(MODEL, 3))).all()
        rank.worker.shutdown()


def test_a_load_that_starts_inside_a_block_skips_its_head():
    region = region_of(MODEL, 1, 2, 3)
    rank = Rank(MODEL, 1, 0, region, per_chunk=3)
    for block in (1, 2, 3):
        rank.put(block, pages_of(MODEL, block))
    store(rank, 1, [1, 2, 3], [0])
    assert load(rank, 2, [10, 11], [0], first=4)
    assert (rank.get(10) == pages_of(MODEL, 2)).all()
    assert (rank.get(11) == pages_of(MODEL, 3)).all()
    rank.worker.shutdown()


def test_an_incomplete_block_is_marked_partial():
    region = region_of(MODEL, 1, 4, 3)
    rank = Rank(MODEL, 1, 0, region, per_chunk=3)
    assert store(rank, 1, [1, 2, 3, 4], [0, 2])
    assert region.marks[0].tolist() == [Mark.COMPLETE, 0, Mark.PARTIAL, 0]
    assert store(rank, 2, [1, 2], [3], first=1)
    assert region.marks[0, 3] == Mark.PARTIAL
    rank.worker.shutdown()


# -- failures -------------------------------------------------------------


@pytest.fixture
def rank() -> Rank:
    return Rank(MODEL, 1, 0, region_of(MODEL, 1, 4, 1))


def break_copies(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arrays: object) -> None:
        raise MemoryError("no such luck")

    monkeypatch.setattr(rank.worker._executor, "_copy", broken)


def test_a_store_that_fails_succeeds_with_a_bad_mark(rank: Rank, monkeypatch: pytest.MonkeyPatch):
    assert store(rank, 1, [1, 2], [0, 3])
    break_copies(rank, monkeypatch)
    assert store(rank, 2, [1, 2], [3, 2])
    marks = rank.worker._region.marks[0].tolist()
    assert marks == [Mark.COMPLETE, Mark.UNTOUCHED, Mark.FAILED, Mark.FAILED]
    rank.worker.shutdown()


def test_a_load_that_fails_says_so(rank: Rank, monkeypatch: pytest.MonkeyPatch):
    store(rank, 1, [1], [0])
    break_copies(rank, monkeypatch)
    assert not load(rank, 2, [2], [0])
    assert rank.worker._region.marks[0, 0] == Mark.COMPLETE, "the row is as good as before"
    rank.worker.shutdown()


def test_a_load_of_a_block_that_is_gone_fails_and_moves_nothing(rank: Rank):
    rank.worker._region.rows[:] = 7
    assert not load(rank, 1, [2, 3], [0, NO_SLOT])
    assert not rank.get(2).any()
    assert not rank.get(3).any()
    rank.worker.shutdown()


@pytest.mark.parametrize(("blocks", "slots"), [([1, 2], [0]), ([99], [0]), ([], [0])])
def test_a_job_that_does_not_fit_together_is_refused(
    rank: Rank, blocks: list[int], slots: list[int]
):
    assert store(rank, 1, blocks, slots)
    assert (rank.worker._region.marks[0, slots] == Mark.FAILED).all()
    assert not load(rank, 2, blocks, slots)
    rank.worker.shutdown()


@pytest.mark.parametrize("slot", [4, -2, 1 << 20])
def test_a_slot_outside_the_region_is_refused(rank: Rank, slot: int):
    before = rank.worker._region.rows.copy()
    assert store(rank, 1, [1], [slot])
    assert not load(rank, 2, [1], [slot])
    assert (rank.worker._region.rows == before).all()
    rank.worker.shutdown()


# -- order ----------------------------------------------------------------


def test_the_mark_is_made_when_the_store_is_reported(rank: Rank, monkeypatch: pytest.MonkeyPatch):
    entered, released = threading.Event(), threading.Event()

    def slow(source: np.ndarray, destination: np.ndarray, size: np.ndarray) -> None:
        entered.set()
        released.wait()
        copy_piecewise(source, destination, size)

    monkeypatch.setattr(rank.worker._executor, "_copy", slow)
    marks = rank.worker._region.marks
    rank.worker.submit_store(1, device_spec([1]), PrimaryLoadStoreSpec([2]))
    entered.wait()
    assert rank.worker.get_finished() == []
    assert marks[0, 2] == Mark.UNTOUCHED
    released.set()
    assert finish(rank, 1)
    assert marks[0, 2] == Mark.COMPLETE
    rank.worker.shutdown()


def test_waiting_keeps_a_block_from_being_overwritten(rank: Rank, monkeypatch: pytest.MonkeyPatch):
    """The engine overwrites a GPU block right after `wait`: the row must have the old bytes."""
    released = threading.Event()

    def slow(source: np.ndarray, destination: np.ndarray, size: np.ndarray) -> None:
        released.wait()
        copy_piecewise(source, destination, size)

    monkeypatch.setattr(rank.worker._executor, "_copy", slow)
    rank.put(1, pages_of(MODEL, 1))
    rank.worker.submit_store(1, device_spec([1]), PrimaryLoadStoreSpec([0]))

    def engine() -> None:
        rank.worker.wait({1})
        rank.put(1, pages_of(MODEL, 99))

    step = threading.Thread(target=engine)
    step.start()
    step.join(0.05)
    assert step.is_alive()
    released.set()
    step.join(20)
    row = rank.worker._region.rows[0][: 3 * MODEL.page_bytes]
    assert (row == pages_of(MODEL, 1).ravel()).all()
    rank.worker.shutdown()


def test_several_jobs_are_reported_once_each(rank: Rank):
    for job in range(1, 6):
        rank.worker.submit_store(job, device_spec([job]), PrimaryLoadStoreSpec([job % 4]))
    rank.worker.submit_load(6, PrimaryLoadStoreSpec([NO_SLOT]), device_spec([9]))
    rank.worker.wait(set(range(1, 7)))
    results = {result.job_id: result.success for result in rank.worker.get_finished()}
    assert results == {1: True, 2: True, 3: True, 4: True, 5: True, 6: False}
    assert rank.worker.get_finished() == []
    rank.worker.shutdown()


def test_shutdown_finishes_open_jobs(rank: Rank, monkeypatch: pytest.MonkeyPatch):
    released = threading.Event()

    def slow(source: np.ndarray, destination: np.ndarray, size: np.ndarray) -> None:
        released.wait()
        copy_piecewise(source, destination, size)

    monkeypatch.setattr(rank.worker._executor, "_copy", slow)
    region = rank.worker._region
    for slot, block in enumerate((5, 6, 7)):
        rank.put(block, pages_of(MODEL, block))
        rank.worker.submit_store(block, device_spec([block]), PrimaryLoadStoreSpec([slot]))
    stopping = threading.Thread(target=rank.worker.shutdown)
    stopping.start()
    released.set()
    stopping.join(20)
    assert not stopping.is_alive()
    for slot, block in enumerate((5, 6, 7)):
        assert (region.rows[slot][: 3 * MODEL.page_bytes] == pages_of(MODEL, block).ravel()).all()
    assert region.fd == -1


def test_an_expedited_load_is_accepted(rank: Rank):
    store(rank, 1, [1], [0])
    rank.worker.submit_load(2, PrimaryLoadStoreSpec([0]), device_spec([2]), expedited=True)
    assert finish(rank, 2)
    rank.worker.shutdown()


def test_slots_travel_to_the_workers():
    spec = pickle.loads(pickle.dumps(PrimaryLoadStoreSpec([3, 1, NO_SLOT])))
    assert isinstance(spec, PrimaryLoadStoreSpec)
    assert spec.block_ids.tolist() == [3, 1, -1]


# -- layouts --------------------------------------------------------------


def test_layers_that_overlay_one_tensor_use_their_own_parts_of_rows():
    """Two cache groups over the same two tensors, of one job."""
    tensors = [CanonicalKVCacheTensor(torch.zeros((8, 96), dtype=torch.int8), 96) for _ in "ab"]

    def ref(tensor: int, size: int) -> CanonicalKVCacheRef:
        run = CopyRun(0, 0, size, 1, size, size)
        mapping = CanonicalPageMapping(size, size, (run,), 1, 0, True)
        return CanonicalKVCacheRef(tensor, size, mapping)

    caches = CanonicalKVCaches(tensors, [[ref(0, 96), ref(1, 96)], [ref(0, 64), ref(1, 64)]])
    layout = row_layout(caches, 2, 0, 1)
    assert layout.group_bytes == (384, 256)
    assert layout.row_bytes == 4096


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.zeros((4, 8), dtype=torch.float16), "float16"),
        (torch.zeros((4, 2, 8), dtype=torch.int8), "shape"),
        (torch.zeros((8, 4), dtype=torch.int8).t(), "strides"),
    ],
)
def test_a_tensor_that_is_no_row_of_bytes_is_refused(tensor: torch.Tensor, message: str):
    caches = CanonicalKVCaches([CanonicalKVCacheTensor(tensor, 8)], [[CanonicalKVCacheRef(0, 8)]])
    with pytest.raises(LayoutError, match=message):
        device_tensors(caches)


def test_strides_may_be_larger_than_pages():
    backing = torch.zeros(4 * 40, dtype=torch.int8)
    tensor = backing.as_strided((4, 32), (40, 1), 8)
    (found,) = device_tensors(
        CanonicalKVCaches([CanonicalKVCacheTensor(tensor, 32)], [[CanonicalKVCacheRef(0, 32)]])
    )
    assert found.address == backing.data_ptr() + 8
    assert (found.block_stride, found.num_blocks) == (40, 4)


@pytest.mark.parametrize(("page", "local"), [(32, 16), (48, 48)])
def test_a_mapping_that_contradicts_its_tensor_is_refused(page: int, local: int):
    run = CopyRun(0, 0, local, 1, local, local)
    mapping = CanonicalPageMapping(local, local, (run,), 1, 0, True)
    tensor = CanonicalKVCacheTensor(torch.zeros((4, 32), dtype=torch.int8), 32)
    caches = CanonicalKVCaches([tensor], [[CanonicalKVCacheRef(0, page, mapping)]])
    with pytest.raises(LayoutError, match=f"{page} bytes in a tensor of 32 bytes"):
        row_layout(caches, 1, 0, 1)


def test_a_device_that_is_unknown_is_refused():
    region = region_of(MODEL, 1, 2, 1)
    with pytest.raises(LayoutError, match="meta; kvtier copies from cpu, cuda and xpu"):
        make_executor([torch.zeros(8, device="meta")], region)
    with pytest.raises(LayoutError, match="cpu, meta"):
        make_executor([torch.zeros(8, device="meta"), torch.zeros(8)], region)


def test_a_job_of_two_groups():
    tensors = [CanonicalKVCacheTensor(torch.zeros((8, 64), dtype=torch.int8), 64)]
    caches = CanonicalKVCaches(
        tensors, [[CanonicalKVCacheRef(0, 64)], [CanonicalKVCacheRef(0, 32)]]
    )
    region = region_of(Model(layers=1), 1, 4, 1)
    rank = Rank.__new__(Rank)
    rank.worker = worker = _worker_of(caches, region)
    tensors[0].tensor[2], tensors[0].tensor[5] = 22, 55
    worker.submit_store(1, GPULoadStoreSpec([2, 5], [1, 1], [0, 0]), PrimaryLoadStoreSpec([3, 0]))
    assert finish(rank, 1)
    assert (region.rows[3][:64] == 22).all()
    assert (region.rows[0][:32] == 55).all()
    assert not region.rows[0][32:].any()
    worker.shutdown()


def _worker_of(caches: CanonicalKVCaches, region: Region):
    from kvtier.vllm.worker import KVTierWorker

    return KVTierWorker(caches, row_layout(caches, 1, 0, 1), region, 0)


def test_the_caches_of_these_tests_are_what_they_say():
    """A canonical page is the pages of all ranks, side by side."""
    tensors = [caches_of(MODEL, 2, rank, 4).tensors[1].tensor for rank in range(2)]
    assert [tuple(t.shape) for t in tensors] == [(4, MODEL.page_bytes // 2)] * 2
