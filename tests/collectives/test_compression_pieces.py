"""Cuts of a bucket, and tensors that become thin matrices."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from wanma.collectives.compression import bucket_tensors as module
from wanma.collectives.compression.bucket_tensors import (
    BucketTensor,
    compute_row_elements,
    slice_bucket,
)
from wanma.collectives.compression.compression_traits import CODEC_BLOCK_ELEMENTS
from wanma.collectives.compression.power_sgd import choose_approximation_rank, draw_initial_q
from wanma.collectives.compression.top_k import TopK


@given(st.lists(st.integers(0, 3000), max_size=6), st.integers(1, 4))
def test_slices_cover_every_element_once_and_lie_beside_each_other(lengths: list[int], ranks: int) -> None:
    before = module.MAX_SLICE_ELEMENTS
    module.MAX_SLICE_ELEMENTS = 1024
    try:
        pieces = [BucketTensor(torch.zeros(ranks, length)) for length in lengths]
        found = list(slice_bucket(pieces, ranks))
    finally:
        module.MAX_SLICE_ELEMENTS = before
    covered = {id(piece): 0 for piece in pieces}
    for run in found:
        assert (
            compute_row_elements(run) <= max(1024 // ranks // CODEC_BLOCK_ELEMENTS, 1) * CODEC_BLOCK_ELEMENTS
        )
        end = 0
        for one in run:
            assert one.offset % CODEC_BLOCK_ELEMENTS == 0
            assert one.offset >= end
            assert one.start == covered[id(one.tensor)]
            covered[id(one.tensor)] = one.stop
            end = one.offset + one.stop - one.start
    assert [covered[id(piece)] for piece in pieces] == lengths


@pytest.mark.parametrize(
    ("rows", "columns", "asked", "rank"),
    [(100, 100, 4, 4), (100, 100, 30, 0), (100, 1, 4, 0), (3, 1000, 4, 0), (8, 1000, 2, 2), (1000, 8, 2, 2)],
)
def test_only_what_becomes_half_as_large_becomes_thin(rows: int, columns: int, asked: int, rank: int) -> None:
    assert choose_approximation_rank(rows, columns, asked) == rank


def test_an_iteration_begins_alike_on_every_rank_and_elsewhere_for_every_tensor() -> None:
    assert torch.equal(draw_initial_q("a", 8, 2, seed=1), draw_initial_q("a", 8, 2, seed=1))
    assert not torch.equal(draw_initial_q("a", 8, 2, seed=1), draw_initial_q("b", 8, 2, seed=1))
    assert not torch.equal(draw_initial_q("a", 8, 2, seed=1), draw_initial_q("a", 8, 2, seed=2))


@pytest.mark.parametrize(("length", "kept"), [(0, 0), (1, 1), (50, 1), (100, 1), (101, 2), (1000, 10)])
def test_at_least_one_element_of_a_tensor_is_sent(length: int, kept: int) -> None:
    assert TopK(0.01).count_selected(length) == kept
