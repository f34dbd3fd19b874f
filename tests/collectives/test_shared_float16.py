"""Reductions of fp16 in compiled code: the bits of torch's sums in fp32, rounded once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from support.native_levels import all_reduce
from wanma.collectives.shared_memory.native_library import DTYPE_CODES, ReduceOperation
from wanma.parallel.mesh.backend_selection import load_collectives_library

EVERY = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.float16)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("elements", [2**16, 2**16 - 3])
def test_every_fp16_number_is_added_and_multiplied_as_by_torch(seed: int, elements: int) -> None:
    """Subnormals, overflow, infinities, and ties of the rounding included."""
    library = load_collectives_library().path
    if library is None:
        pytest.skip("needs the C++ compiler g++")
    order = torch.randperm(2**16, generator=torch.Generator().manual_seed(seed))
    one, other = EVERY[:elements].clone(), EVERY[order][:elements].clone()
    for operation, function in ((ReduceOperation.SUM, torch.add), (ReduceOperation.PRODUCT, torch.mul)):
        expected = function(one.float(), other.float()).half()
        given = all_reduce(library, DTYPE_CODES[torch.float16], operation, [one, other])
        reduced = torch.frombuffer(bytearray(given), dtype=torch.float16)
        assert torch.equal(reduced.isnan(), expected.isnan())
        assert torch.equal(_bits(reduced), _bits(expected))


def _bits(numbers: Tensor) -> Tensor:
    """Return the bits; of two not-a-numbers either may be kept."""
    return numbers.nan_to_num(nan=0.0, posinf=float("inf"), neginf=float("-inf")).view(torch.int16)
