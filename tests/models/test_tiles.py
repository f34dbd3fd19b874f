"""Any box of a parameter's initial value is the same box of the whole value."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from wanma.models.structure.parameter_initialization import draw_initial_shard, draw_initial_value, tile_shape


class Normal(nn.Module):
    def initialize_parameter(self, name: str, tensor: Tensor, generator: torch.Generator) -> None:
        assert name == "weight"
        tensor.normal_(generator=generator)


@st.composite
def boxes(draw: st.DrawFn) -> tuple[list[int], list[int], list[int]]:
    shape = draw(st.sampled_from([[700_000], [1100, 700], [3, 600, 512], [1, 5], [70, 3, 5, 5], [0, 4]]))
    offset = [draw(st.integers(0, dim)) for dim in shape]
    size = [draw(st.integers(0, dim - start)) for dim, start in zip(shape, offset, strict=True)]
    return shape, offset, size


@given(boxes())
@settings(max_examples=30, deadline=None)
def test_a_box_is_cut_out_of_the_whole(box: tuple[list[int], list[int], list[int]]) -> None:
    shape, offset, size = box
    whole = draw_initial_value(Normal(), "weight", shape, torch.float32, 3)
    part = draw_initial_shard(Normal(), "weight", shape, offset, size, torch.float32, 3)
    inside = tuple(slice(start, start + length) for start, length in zip(offset, size, strict=True))
    assert torch.equal(part, whole[inside])


def test_tiles_differ_from_each_other() -> None:
    value = draw_initial_value(Normal(), "weight", (1024, 1024), torch.float32, 3)
    assert not torch.equal(value[:512, :512], value[512:, :512])
    assert not torch.equal(value[:512, :512], value[:512, 512:])
    assert float(value.std()) == pytest.approx(1.0, rel=0.01)


@pytest.mark.parametrize("shape", [(53248, 16384), (256, 2048, 7168), (128256,), (64, 3, 7, 7)])
def test_a_tile_is_small_whatever_the_parameter(shape: tuple[int, ...]) -> None:
    assert math.prod(tile_shape(shape)) <= 1 << 18
