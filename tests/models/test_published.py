"""Places of parameters in published checkpoints: boxes there and back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from wanma.models.state_dict.tensor_mapping import (
    TensorSlice,
    map_moe_parameter,
    map_tensor,
    map_unstacked_rows,
    select_mapping,
    tensor_shapes,
)


@st.composite
def pieces_and_boxes(draw: st.DrawFn) -> tuple[TensorSlice, tuple[int, ...], tuple[int, ...]]:
    """A piece and a box inside it."""
    kind = draw(st.sampled_from(["plain", "transposed", "stacked", "rotary", "fused"]))
    rows, columns = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    if kind == "stacked":
        shape: tuple[int, ...] = (1, rows, columns)
        piece = TensorSlice("t", 3, shape, (0, 0), is_single_row=True, is_transposed=draw(st.booleans()))
    elif kind == "rotary":
        width = 2 * draw(st.integers(1, 4))
        shape = (rows * width, columns)
        piece = map_tensor("t", shape, head_dim=width)
    else:
        shape = (rows, columns)
        offset = (2, 1) if kind == "fused" else (0, 0)
        piece = TensorSlice("t", 0, shape, offset, is_transposed=kind == "transposed")
    start = tuple(draw(st.integers(0, size - 1)) for size in shape)
    extent = tuple(draw(st.integers(1, size - at)) for size, at in zip(shape, start, strict=True))
    return piece, start, extent


@given(pieces_and_boxes())
def test_a_box_of_a_parameter_is_read_from_its_region_alone(
    drawn: tuple[TensorSlice, tuple[int, ...], tuple[int, ...]],
) -> None:
    piece, offset, shape = drawn
    parameter = torch.arange(torch.Size(piece.shape).numel()).view(piece.shape)
    ends = [at + size for at, size in zip(piece.offset, piece.tensor_shape, strict=True)]
    published = torch.full(ends, -1)
    published[tuple(map(slice, piece.offset, ends))] = piece.to_huggingface(parameter)
    at, extent = piece.locate_box(offset, shape)
    region = published[tuple(slice(a, a + n) for a, n in zip(at, extent, strict=True))]
    box = tuple(slice(a, a + n) for a, n in zip(offset, shape, strict=True))
    assert torch.equal(piece.from_huggingface(offset, shape, region), parameter[box])


def test_heads_turn_pairs_here_and_halves_as_published() -> None:
    ours = torch.arange(8)  # two heads of width 4
    published: Tensor = map_tensor("t", (8,), head_dim=4).to_huggingface(ours)
    assert published.tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_experts_are_published_one_by_one() -> None:
    pieces = map_unstacked_rows("experts.{}.w", (3, 2, 5))
    assert [(piece.tensor_name, piece.first_row) for piece in pieces] == [
        ("experts.0.w", 0),
        ("experts.1.w", 1),
        ("experts.2.w", 2),
    ]
    assert tensor_shapes([pieces]) == {f"experts.{n}.w": (2, 5) for n in range(3)}


@pytest.mark.parametrize(
    ("family", "single"),
    [
        ("mixtral", "b.block_sparse_moe.experts.0.w3.weight"),
        ("qwen3_moe", "b.mlp.experts.0.up_proj.weight"),
    ],
)
def test_the_upper_half_of_fused_experts_is_the_second(family: str, single: str) -> None:
    ways = map_moe_parameter("b", "up", (2, 3, 4), family)
    assert ways[0][0].tensor_name == single
    fused = select_mapping(ways, {"b.mlp.experts.gate_up_proj": None})
    assert fused is not None
    assert (fused[0].offset, tensor_shapes([fused])) == (
        (0, 3, 0),
        {"b.mlp.experts.gate_up_proj": (2, 6, 4)},
    )
