"""Plans against a dumb loop that moves byte by byte."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.errors import LayoutError
from kvtier.layout import Fragment, LayerPages, PageMapping, RowLayout
from kvtier.vllm import copy_plan
from kvtier.vllm.copy_plan import CopyPlan, CopyPlanner, DeviceTensor
from kvtier.vllm.executors.cpu import copy_piecewise

NUM_BLOCKS, NUM_SLOTS = 24, 24


@dataclass(frozen=True)
class Job:
    block_ids: list[int]
    group_sizes: list[int]
    block_indices: list[int]
    slots: list[int]


@st.composite
def mappings(draw: st.DrawFn) -> PageMapping:
    sizes = draw(st.lists(st.integers(1, 12), min_size=1, max_size=4))
    gaps = draw(st.lists(st.integers(0, 5), min_size=len(sizes), max_size=len(sizes)))
    tail = draw(st.integers(0, 5))
    order = draw(st.permutations(range(len(sizes))))
    canonical: dict[int, int] = {}
    end = 0
    for place in order:
        canonical[place] = end + gaps[place]
        end = canonical[place] + sizes[place]
    local, fragments = 0, []
    for place, size in enumerate(sizes):
        fragments.append(Fragment(local, canonical[place], size))
        local += size
    writers = draw(st.integers(1, 3))
    index = draw(st.integers(0, writers - 1))
    return PageMapping(end + tail, local, tuple(fragments), writers, index)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[RowLayout, list[int], list[int]]:
    """A layout, and per tensor its stride and how much of a block lies in front of its pages.

    Groups overlay the same tensors, as vLLM has it for hybrid models.
    """
    num_tensors = draw(st.integers(1, 3))
    groups = tuple(
        tuple(LayerPages(tensor, draw(mappings())) for tensor in range(num_tensors))
        for _ in range(draw(st.integers(1, 3)))
    )
    pads = draw(st.lists(st.integers(0, 9), min_size=num_tensors, max_size=num_tensors))
    strides = [
        max(group[tensor].mapping.local_bytes for group in groups) + pads[tensor]
        for tensor in range(num_tensors)
    ]
    per_chunk = draw(st.integers(1, 4))
    return RowLayout(groups, per_chunk), strides, pads


def draw_job(draw: st.DrawFn, layout: RowLayout) -> Job:
    per_chunk = layout.blocks_per_chunk
    blocks = draw(st.one_of(st.just(list(range(NUM_BLOCKS))), st.permutations(range(NUM_BLOCKS))))
    slots = draw(st.one_of(st.just(list(range(NUM_SLOTS))), st.permutations(range(NUM_SLOTS))))
    sizes, indices, num_slots = [], [], 0
    for _ in layout.groups:
        size = draw(st.integers(0, 8))
        index = draw(st.integers(0, 11))
        sizes.append(size)
        indices.append(index)
        num_slots += -(-(size + index % per_chunk) // per_chunk) if size else 0
    return Job(blocks[: sum(sizes)], sizes, indices, slots[:num_slots])


def dumb(
    layout: RowLayout, job: Job, tensors: list[np.ndarray], rows: np.ndarray, *, store: bool
) -> list[bool]:
    """Move the job's bytes one at a time; returns which slots are complete."""
    per_chunk = layout.blocks_per_chunk
    block_ids, slots, complete = list(job.block_ids), list(job.slots), []
    for group, (size, index) in enumerate(zip(job.group_sizes, job.block_indices, strict=True)):
        places = range(index % per_chunk, index % per_chunk + size)
        for chunk in sorted({place // per_chunk for place in places}):
            slot = slots.pop(0)
            subs = [place % per_chunk for place in places if place // per_chunk == chunk]
            complete.append(len(subs) == per_chunk)
            for sub in subs:
                block = block_ids.pop(0)
                for layer, offset in zip(
                    layout.groups[group], layout.layer_offsets[group], strict=True
                ):
                    mapping = layer.mapping
                    turn = (slot * per_chunk + sub) % mapping.num_writers
                    if store and turn != mapping.writer_index:
                        continue
                    page = tensors[layer.tensor][block]
                    at = offset + sub * mapping.canonical_bytes
                    for fragment in mapping.fragments:
                        for i in range(fragment.size):
                            local, row = fragment.local + i, at + fragment.canonical + i
                            if store:
                                rows[slot, row] = page[local]
                            else:
                                page[local] = rows[slot, row]
    return complete


def memory_of(layout: RowLayout, strides: list[int], seed: int) -> tuple[list, np.ndarray]:
    random = np.random.default_rng(seed)
    tensors = [random.integers(0, 256, (NUM_BLOCKS, stride), np.uint8) for stride in strides]
    return tensors, random.integers(0, 256, (NUM_SLOTS, layout.row_bytes), np.uint8)


def planner_of(layout: RowLayout, tensors: list[np.ndarray], rows: np.ndarray) -> CopyPlanner:
    device = [DeviceTensor(t.ctypes.data, t.strides[0], len(t)) for t in tensors]
    return CopyPlanner(layout, device, rows.ctypes.data, len(rows))


def plan_of(planner: CopyPlanner, job: Job, *, store: bool) -> CopyPlan:
    return planner.plan(
        np.array(job.block_ids, np.int32),
        job.group_sizes,
        job.block_indices,
        np.array(job.slots, np.int32),
        store=store,
    )


@settings(max_examples=150)
@given(layouts(), st.data(), st.booleans(), st.integers(0, 2**31))
def test_a_plan_moves_what_the_dumb_loop_moves(drawn, data, store, seed):
    layout, strides, _ = drawn
    job = draw_job(data.draw, layout)
    tensors, rows = memory_of(layout, strides, seed)
    wanted_tensors, wanted_rows = [t.copy() for t in tensors], rows.copy()
    complete = dumb(layout, job, wanted_tensors, wanted_rows, store=store)

    plan = plan_of(planner_of(layout, tensors, rows), job, store=store)
    copy_piecewise(plan.source, plan.destination, plan.size)

    assert (rows == wanted_rows).all()
    for tensor, wanted in zip(tensors, wanted_tensors, strict=True):
        assert (tensor == wanted).all()
    assert plan.complete.tolist() == complete
    assert plan.num_bytes == plan.size.sum()
    assert (plan.size > 0).all()


def bytes_of(plan: CopyPlan) -> list[tuple[int, int]]:
    pieces = zip(plan.source.tolist(), plan.destination.tolist(), plan.size.tolist(), strict=True)
    return [(source + i, target + i) for source, target, size in pieces for i in range(size)]


@settings(max_examples=60)
@given(layouts(), st.data(), st.booleans())
def test_joining_pieces_changes_no_byte(drawn, data, store):
    layout, strides, _ = drawn
    job = draw_job(data.draw, layout)
    tensors, rows = memory_of(layout, strides, 0)
    planner = planner_of(layout, tensors, rows)
    joined = plan_of(planner, job, store=store)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copy_plan, "_coalesce", lambda *arrays: arrays)
        apart = plan_of(planner, job, store=store)
    assert bytes_of(joined) == bytes_of(apart)
    assert len(joined.size) <= len(apart.size)


@settings(max_examples=40)
@given(layouts(), st.data(), st.integers(1, 4))
def test_the_writers_of_a_page_take_turns(drawn, data, writers):
    """Every byte of a row is written by exactly one of the ranks that hold it."""
    layout, strides, _ = drawn
    job = draw_job(data.draw, layout)
    tensors, rows = memory_of(layout, strides, 0)

    def as_writer(index: int) -> RowLayout:
        def page(layer: LayerPages) -> LayerPages:
            m = layer.mapping
            return LayerPages(
                layer.tensor,
                PageMapping(m.canonical_bytes, m.local_bytes, m.fragments, writers, index),
            )

        return RowLayout(
            tuple(tuple(page(layer) for layer in group) for group in layout.groups),
            layout.blocks_per_chunk,
        )

    load = plan_of(planner_of(as_writer(0), tensors, rows), job, store=False)
    wanted = sorted((device, row) for row, device in bytes_of(load))
    stored: list[tuple[int, int]] = []
    for index in range(writers):
        planner = planner_of(as_writer(index), tensors, rows)
        plan = plan_of(planner, job, store=True)
        stored += bytes_of(plan)
        assert len(plan.complete) == len(job.slots), "a rank with nothing to copy says so too"
    assert sorted(stored) == wanted


def simple(per_chunk: int = 2, size: int = 16) -> tuple[CopyPlanner, list[np.ndarray], np.ndarray]:
    layout = RowLayout(
        ((LayerPages(0, PageMapping(size, size, (Fragment(0, 0, size),))),),), per_chunk
    )
    tensors, rows = memory_of(layout, [size], 1)
    return planner_of(layout, tensors, rows), tensors, rows


def test_neighbours_become_one_piece():
    planner, tensors, rows = simple(per_chunk=4)
    plan = plan_of(planner, Job([3, 4, 5, 6, 9, 8], [6], [0], [2, 7]), store=True)
    assert plan.size.tolist() == [64, 16, 16]
    assert plan.source.tolist() == [tensors[0].ctypes.data + 16 * b for b in (3, 9, 8)]
    at = [rows[2].ctypes.data, rows[7].ctypes.data, rows[7].ctypes.data + 16]
    assert plan.destination.tolist() == at
    assert plan.complete.tolist() == [True, False]


def test_a_first_block_that_starts_late_is_not_complete():
    planner, *_ = simple(per_chunk=3)
    plan = plan_of(planner, Job([1, 2, 3, 4], [4], [2], [0, 1]), store=True)
    assert plan.complete.tolist() == [False, True]


def test_an_empty_job_is_an_empty_plan():
    planner, *_ = simple()
    plan = plan_of(planner, Job([], [0], [0], []), store=True)
    assert len(plan.size) == len(plan.source) == len(plan.complete) == plan.num_bytes == 0


@pytest.mark.parametrize(
    ("job", "message"),
    [
        (Job([1, 2, 3], [3], [0], [0]), "3 GPU blocks and 1 slots"),
        (Job([1, 2], [2], [0], [0, 1]), "2 GPU blocks and 2 slots"),
        (Job([1, 2], [2], [1], [0]), "2 GPU blocks and 1 slots"),
        (Job([], [0], [0], [0]), "0 GPU blocks and 1 slots"),
        (Job([1, 2, 3], [2], [0], [0]), "3 GPU blocks and 1 slots"),
        (Job([1], [2], [0], [0]), "1 GPU blocks and 1 slots"),
        (Job([1, 2], [1, 1], [0, 0], [0, 1]), "2 groups, not 1"),
        (Job([NUM_BLOCKS], [1], [0], [0]), f"outside 0..{NUM_BLOCKS - 1}"),
        (Job([0, -1], [2], [0], [0]), "GPU block outside"),
        (Job([1], [1], [0], [NUM_SLOTS]), f"slot outside 0..{NUM_SLOTS - 1}"),
        (Job([1], [1], [0], [-1]), "slot outside"),
    ],
)
def test_a_job_that_does_not_fit_together_is_refused(job: Job, message: str):
    planner, *_ = simple()
    for store in (True, False):
        with pytest.raises(LayoutError, match=message):
            plan_of(planner, job, store=store)


def test_plans_of_tensors_with_different_numbers_of_blocks_stay_inside_the_smallest():
    layout = RowLayout(
        (
            (
                LayerPages(0, PageMapping(8, 8, (Fragment(0, 0, 8),))),
                LayerPages(1, PageMapping(8, 8, (Fragment(0, 0, 8),))),
            ),
        ),
        1,
    )
    tensors = [np.zeros((9, 8), np.uint8), np.zeros((5, 8), np.uint8)]
    rows = np.zeros((4, layout.row_bytes), np.uint8)
    with pytest.raises(LayoutError, match=r"outside 0\.\.4"):
        plan_of(planner_of(layout, tensors, rows), Job([5], [1], [0], [0]), store=True)
