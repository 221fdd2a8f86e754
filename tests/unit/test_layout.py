"""Rows do not depend on the number of ranks: gathered by some, scattered to others, all bytes come
back where they belong.

The mappings are built here as vLLM derives them for attention and for replicated latents.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.errors import LayoutError
from kvtier.layout import PAGE, Fragment, LayerPages, PageMapping, RowLayout, coalesce

POWERS = st.sampled_from([1, 2, 4, 8])


@dataclass(frozen=True)
class Attention:
    """One layer of a model, without parallelism."""

    heads: int
    block_size: int
    head_bytes: int  # of one token, K and V
    order: str  # NHD, HND, or split halves of either

    @property
    def canonical_bytes(self) -> int:
        return self.heads * self.block_size * self.head_bytes

    def array(self, page: np.ndarray, heads: int) -> np.ndarray:
        """A page as (heads, tokens, halves, bytes), whatever its order: a view."""
        half = self.head_bytes // 2
        tokens = self.block_size
        if self.order == "NHD":
            return page.reshape(tokens, heads, 2, half).transpose(1, 0, 2, 3)
        if self.order == "HND":
            return page.reshape(heads, tokens, 2, half)
        if self.order == "split-NHD":
            return page.reshape(2, tokens, heads, half).transpose(2, 1, 0, 3)
        return page.reshape(2, heads, tokens, half).transpose(1, 2, 0, 3)

    def local_page(self, page: np.ndarray, tp: int, rank: int) -> np.ndarray:
        """What the rank holds of a canonical page: its heads, in the same order of dimensions."""
        shards = min(self.heads, tp)
        per_rank = self.heads // shards
        first = rank // (tp // shards) * per_rank
        local = np.zeros(page.size // shards, np.uint8)
        self.array(local, per_rank)[...] = self.array(page, self.heads)[first : first + per_rank]
        return local

    def mapping(self, tp: int, rank: int) -> PageMapping:
        """Byte by byte, out of where each byte of a canonical page ends up; then coalesced."""
        shards = min(self.heads, tp)
        replication = tp // shards
        size = self.canonical_bytes
        where = np.arange(size)
        order = np.zeros(size // shards, np.int64)
        per_rank = self.heads // shards
        first = rank // replication * per_rank
        self.array(order, per_rank)[...] = self.array(where, self.heads)[first : first + per_rank]
        fragments = coalesce([Fragment(i, int(c), 1) for i, c in enumerate(order)])
        return PageMapping(
            size, size // shards, fragments, replication, rank % replication, portable=True
        )


@dataclass(frozen=True)
class Latent:
    """An MLA layer: every rank holds all of it."""

    canonical_bytes: int

    def local_page(self, page: np.ndarray, tp: int, rank: int) -> np.ndarray:
        return page.copy()

    def mapping(self, tp: int, rank: int) -> PageMapping:
        size = self.canonical_bytes
        return PageMapping(size, size, (Fragment(0, 0, size),), tp, rank)


layers = st.one_of(
    st.builds(
        Attention,
        heads=POWERS,
        block_size=st.sampled_from([1, 4, 16]),
        head_bytes=st.sampled_from([2, 8, 12]),
        order=st.sampled_from(["NHD", "HND", "split-NHD", "split-HND"]),
    ),
    st.builds(Latent, st.integers(1, 700)),
)
models = st.lists(st.lists(layers, min_size=1, max_size=3), min_size=1, max_size=2)


def row_layout(model: list[list[Attention | Latent]], tp: int, rank: int, per_chunk: int):
    groups, tensor = [], 0
    for group in model:
        pages = []
        for layer in group:
            pages.append(LayerPages(tensor, layer.mapping(tp, rank)))
            tensor += 1
        groups.append(tuple(pages))
    return RowLayout(tuple(groups), per_chunk)


@settings(max_examples=60)
@given(models, POWERS, POWERS, st.integers(1, 3), st.integers(0, 7), st.integers(0, 2**32 - 1))
def test_what_some_ranks_gather_others_scatter(model, tp_from, tp_to, per_chunk, slot, seed):
    random = np.random.default_rng(seed)
    for group, group_layers in enumerate(model):
        canonical = [
            [random.integers(0, 256, layer.canonical_bytes, np.uint8) for layer in group_layers]
            for _ in range(per_chunk)
        ]
        first = row_layout(model, tp_from, 0, per_chunk)
        row = np.full(first.row_bytes, 0xEE, np.uint8)
        times_written = np.zeros(first.row_bytes, np.int64)
        for rank in range(tp_from):
            layout = row_layout(model, tp_from, rank, per_chunk)
            assert layout.row_bytes == first.row_bytes
            assert layout.group_bytes == first.group_bytes
            for sub in range(per_chunk):
                for index, layer in enumerate(group_layers):
                    mapping = layout.groups[group][index].mapping
                    if (slot * per_chunk + sub) % mapping.num_writers != mapping.writer_index:
                        continue
                    page = layer.local_page(canonical[sub][index], tp_from, rank)
                    at = layout.layer_offsets[group][index] + sub * mapping.canonical_bytes
                    for f in mapping.fragments:
                        target = slice(at + f.canonical, at + f.canonical + f.size)
                        row[target] = page[f.local : f.local + f.size]
                        times_written[target] += 1
        used = first.group_bytes[group]
        assert (times_written[:used] == 1).all(), "writers tile what is used exactly once"
        assert not times_written[used:].any()
        for rank in range(tp_to):
            layout = row_layout(model, tp_to, rank, per_chunk)
            assert layout.row_bytes == first.row_bytes, "the size of a row is that of the model"
            for sub in range(per_chunk):
                for index, layer in enumerate(group_layers):
                    mapping = layout.groups[group][index].mapping
                    page = np.full(mapping.local_bytes, 0x11, np.uint8)
                    at = layout.layer_offsets[group][index] + sub * mapping.canonical_bytes
                    for f in mapping.fragments:
                        source = slice(at + f.canonical, at + f.canonical + f.size)
                        page[f.local : f.local + f.size] = row[source]
                    wanted = layer.local_page(canonical[sub][index], tp_to, rank)
                    assert (page == wanted).all()


@settings(deadline=None)
@given(models, POWERS, st.integers(1, 4))
def test_rows_are_whole_pages_of_the_largest_group(model, tp, per_chunk):
    layout = row_layout(model, tp, tp - 1, per_chunk)
    largest = max(sum(layer.canonical_bytes for layer in group) for group in model) * per_chunk
    assert layout.row_bytes % PAGE == 0
    assert largest <= layout.row_bytes < largest + PAGE
    assert layout.portable
    assert layout.describe() == [[layer.canonical_bytes for layer in group] for group in model]


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 3)), min_size=1, max_size=20))
def test_coalescing_keeps_every_byte_where_it_is(steps):
    fragments, local, canonical = [], 0, 0
    for size, gap in steps:
        canonical += gap
        fragments.append(Fragment(local, canonical, size))
        local, canonical = local + size, canonical + size

    def bytes_of(pieces):
        return [(f.local + i, f.canonical + i) for f in pieces for i in range(f.size)]

    joined = coalesce(fragments)
    assert bytes_of(joined) == bytes_of(fragments)
    assert len(joined) == 1 + sum(gap > 0 for _, gap in steps[1:])


@given(st.integers(1, 8), st.integers(1, 5000))
def test_exclusive_pages_are_disjoint_and_not_portable(num_ranks, page_bytes):
    covered = np.zeros(num_ranks * page_bytes, np.int64)
    for rank in range(num_ranks):
        mapping = PageMapping.exclusive(page_bytes, rank, num_ranks)
        assert mapping.canonical_bytes == covered.size
        assert (mapping.num_writers, mapping.writer_index) == (1, 0)
        (fragment,) = mapping.fragments
        covered[fragment.canonical : fragment.canonical + fragment.size] += 1
        assert not RowLayout(((LayerPages(0, mapping),),), 1).portable
    assert (covered == 1).all()


def test_one_page_that_is_not_portable_makes_the_row_so():
    portable = LayerPages(0, PageMapping(64, 64, (Fragment(0, 0, 64),)))
    exclusive = LayerPages(0, PageMapping.exclusive(64, 0, 1))
    assert RowLayout(((portable,),), 1).portable
    assert not RowLayout(((portable,), (portable, exclusive)), 1).portable


@pytest.mark.parametrize(
    ("canonical", "local", "fragments", "message"),
    [
        (64, 64, [(0, 0, 16), (32, 32, 32)], "hole in the worker's page at byte 16"),
        (64, 64, [(16, 16, 48)], "hole in the worker's page at byte 0"),
        (64, 64, [(0, 0, 32)], "covers 32 of 64 local bytes"),
        (64, 32, [(0, 0, 64)], "covers 64 of 32 local bytes"),
        (64, 32, [], "covers 0 of 32 local bytes"),
        (64, 32, [(0, 0, 32), (16, 40, 16)], "hole in the worker's page at byte 32"),
        (64, 32, [(0, 0, 16), (16, 8, 16)], "share canonical byte 15"),
        (64, 32, [(0, 40, 32)], "ends at byte 72 of a canonical page of 64"),
        (64, 32, [(0, -8, 32)], "canonical"),
        (64, 32, [(0, 0, 32), (32, 32, 0)], "hole"),
    ],
)
def test_a_mapping_that_contradicts_itself_is_refused(canonical, local, fragments, message):
    with pytest.raises(LayoutError, match=message):
        PageMapping(canonical, local, tuple(Fragment(*f) for f in fragments))


@pytest.mark.parametrize(("index", "writers"), [(1, 1), (-1, 2), (0, 0)])
def test_a_writer_that_does_not_exist_is_refused(index, writers):
    with pytest.raises(LayoutError, match=f"writer {index} of {writers}"):
        PageMapping(8, 8, (Fragment(0, 0, 8),), writers, index)


def test_a_layout_needs_layers_and_blocks():
    page = LayerPages(0, PageMapping(8, 8, (Fragment(0, 0, 8),)))
    with pytest.raises(LayoutError, match="blocks_per_chunk is 0"):
        RowLayout(((page,),), 0)
    for groups in ((), ((),), ((page,), ())):
        with pytest.raises(LayoutError, match="without layers"):
            RowLayout(groups, 1)
