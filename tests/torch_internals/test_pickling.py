"""Tensors of every dtype travel to other processes."""

from __future__ import annotations

import pickle

import pytest
import torch

from wanma.torch_internals.pickling import dumps_by_value


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64, torch.float8_e5m2, torch.int8])
def test_a_tensor_arrives_as_it_is(dtype: torch.dtype) -> None:
    tensor = torch.arange(6).to(dtype).view(2, 3)
    (found,) = pickle.loads(dumps_by_value([tensor.t()]))
    assert (found.dtype, found.shape) == (dtype, (3, 2))
    assert found.to(torch.float32).tolist() == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]
