"""Sums that are begun and waited for later, whole and rounded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from support.ranks import run_ranks
from wanma.collectives.site_sums import BLOCK, _pack_int8, _read_int8
from wanma.collectives.site_sums import Sum as SumOf
from wanma.job.sections import OuterCompression
from wanma.planner.cost.sites import SENT_BYTES

SIZE = 1000  # no multiple of a block


def numbers(rank: int) -> torch.Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(rank)) * 10.0 ** (rank - 1)


def _sum(worker: Any, compression: OuterCompression) -> list[float]:
    store = dist.TCPStore("127.0.0.1", worker.store_port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=worker.rank, world_size=worker.world_size)
    try:
        group = dist.group.WORLD
        assert group is not None
        under_way = SumOf(numbers(worker.rank), group, compression)
        first = under_way.wait().clone()
        assert torch.equal(under_way.wait(), first)
        numbers_there: list[float] = first.tolist()
        return numbers_there
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("compression", ["nothing", "bf16", "int8"])
def test_three_ranks_have_the_same_sum(compression: OuterCompression) -> None:
    sums = [torch.tensor(there) for there in run_ranks(_sum, 3, (compression,))]
    assert torch.equal(sums[0], sums[1])
    assert torch.equal(sums[0], sums[2])
    parts = [numbers(rank) for rank in range(3)]
    if compression == "nothing":
        assert torch.allclose(sums[0], sum(parts), rtol=1e-6)
    elif compression == "bf16":
        assert torch.equal(sums[0], sum(part.bfloat16().float() for part in parts))
    else:
        assert torch.equal(sums[0], sum(_read_int8(_pack_int8(part), SIZE) for part in parts))


@given(seed=st.integers(0, 100), size=st.integers(1, 3 * BLOCK))
def test_eight_bits_are_within_half_a_step_of_each_blocks_largest(seed: int, size: int) -> None:
    flat = torch.randn(size, generator=torch.Generator().manual_seed(seed))
    packed = _pack_int8(flat)
    assert packed.numel() == -(-size // BLOCK) * (BLOCK + 4)
    for start in range(0, size, BLOCK):
        block = flat[start : start + BLOCK]
        got = _read_int8(packed, size)[start : start + BLOCK]
        assert (got - block).abs().max() <= block.abs().max() / 127 / 2 * 1.001


def test_zeros_stay_zeros_and_what_is_not_finite_stays_so() -> None:
    assert _read_int8(_pack_int8(torch.zeros(300)), 300).count_nonzero() == 0
    broken = torch.ones(2 * BLOCK)
    broken[3] = float("nan")
    got = _read_int8(_pack_int8(broken), 2 * BLOCK)
    assert not torch.isfinite(got[:BLOCK]).any()
    assert torch.equal(got[BLOCK:], torch.ones(BLOCK))


def test_forecasts_know_what_travels() -> None:
    assert SENT_BYTES["int8"] * BLOCK == _pack_int8(torch.ones(BLOCK)).numel()
    assert SENT_BYTES["bf16"] * BLOCK == torch.ones(BLOCK).bfloat16().nbytes
