"""Sums that are begun and waited for later, whole and rounded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from support.ranks import run_ranks
from wanma.collectives.all_reduce.site_all_reduce import CODECS
from wanma.collectives.all_reduce.site_all_reduce import SiteAllReduce as SumOf
from wanma.collectives.compression.compression_traits import CODEC_BLOCK_ELEMENTS
from wanma.job.plan.plan import Plan
from wanma.job.sections.parallel import OuterCompression
from wanma.planner.cost.site_synchronization import wire_element_bytes

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


@pytest.mark.parametrize("compression", ["none", "bf16", "int8"])
def test_three_ranks_have_the_same_sum(compression: OuterCompression) -> None:
    sums = [torch.tensor(there) for there in run_ranks(_sum, 3, (compression,), is_reused=True)]
    assert torch.equal(sums[0], sums[1])
    assert torch.equal(sums[0], sums[2])
    parts = [numbers(rank) for rank in range(3)]
    if compression == "none":
        assert torch.allclose(sums[0], sum(parts), rtol=1e-6)
    else:
        assert torch.equal(sums[0], sum(rounded(part, compression) for part in parts))


def rounded(flat: torch.Tensor, compression: OuterCompression) -> torch.Tensor:
    """There and back."""
    codec = CODECS[compression]
    whole_blocks = torch.nn.functional.pad(flat, (0, -len(flat) % CODEC_BLOCK_ELEMENTS))
    return codec.decode(codec.encode(whole_blocks[None]))[0, : len(flat)]


@given(seed=st.integers(0, 100), size=st.integers(1, 3 * CODEC_BLOCK_ELEMENTS))
def test_eight_bits_are_within_half_a_step_of_each_blocks_largest(seed: int, size: int) -> None:
    flat = torch.randn(size, generator=torch.Generator().manual_seed(seed))
    got = rounded(flat, "int8")
    for start in range(0, size, CODEC_BLOCK_ELEMENTS):
        block = flat[start : start + CODEC_BLOCK_ELEMENTS]
        assert (
            got[start : start + CODEC_BLOCK_ELEMENTS] - block
        ).abs().max() <= block.abs().max() / 127 / 2 * 1.001


def test_zeros_stay_zeros_and_what_is_not_finite_stays_so() -> None:
    assert rounded(torch.zeros(300), "int8").count_nonzero() == 0
    broken = torch.ones(2 * CODEC_BLOCK_ELEMENTS)
    broken[3] = float("nan")
    got = rounded(broken, "int8")
    assert not torch.isfinite(got[:CODEC_BLOCK_ELEMENTS]).any()
    assert torch.allclose(got[CODEC_BLOCK_ELEMENTS:], torch.ones(CODEC_BLOCK_ELEMENTS))


@pytest.mark.parametrize("compression", ["bf16", "int8"])
def test_forecasts_know_what_travels(compression: OuterCompression) -> None:
    encoded = CODECS[compression].encode(torch.ones(1, CODEC_BLOCK_ELEMENTS))
    assert wire_element_bytes(Plan(), compression) * CODEC_BLOCK_ELEMENTS == encoded.numel()
