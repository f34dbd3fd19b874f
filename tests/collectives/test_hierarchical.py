"""Sums by levels: right on even and uneven nodes, bit for bit alike, and clear about who is missing."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from support.ranks import run_ranks
from wanma.collectives.algorithms.hierarchical_all_reduce import (
    group_ranks_by_node,
    hierarchical_all_reduce,
    list_bucket_segments,
)
from wanma.job.errors import WanmaError
from wanma.job.plan.plan import Plan
from wanma.job.run.worker import WorkerContext
from wanma.parallel.mesh.parallel_mesh import open_mesh

SIZES = (0, 1, 2, 5, 6, 7, 1001)

RANKS_BY_NODE = st.lists(st.integers(1, 5), min_size=1, max_size=4)


@given(RANKS_BY_NODE, st.integers(0, 60))
def test_each_element_has_one_owner_on_every_node(counts: list[int], elements: int) -> None:
    nodes = group_ranks_by_node(range(sum(counts)), counts)
    assert [len(node) for node in nodes] == counts
    covered: list[int] = []
    for segment in list_bucket_segments(elements, nodes):
        assert segment.start < segment.stop
        covered += range(segment.start, segment.stop)
        for owner, node in zip(segment.owners, nodes, strict=True):
            assert owner in node
            part = node.index(owner)
            assert elements * part // len(node) <= segment.start
            assert segment.stop <= elements * (part + 1) // len(node)
    assert covered == list(range(elements))


def test_ranks_of_a_group_are_found_on_their_nodes_whatever_the_group() -> None:
    assert group_ranks_by_node([0, 2, 4, 6], (3, 4)) == [[0, 1], [2, 3]]
    assert group_ranks_by_node([1, 3, 5], (2, 2, 2)) == [[0], [1], [2]]
    assert group_ranks_by_node([0, 1], ()) == [[0, 1]]


@pytest.mark.parametrize("counts", [(2, 2), (3, 2), (1, 3), (1, 2, 2), (4,)], ids=str)
def test_sums_equal_plain_ones_and_repeat_bit_for_bit(counts: tuple[int, ...]) -> None:
    ranks = sum(counts)
    found = run_ranks(summed, ranks, (counts,), is_reused=True)
    for size in SIZES:
        plain = torch.stack([numbers(rank, size) for rank in range(ranks)]).sum(0)
        for sums, again in (of_rank[size] for of_rank in found):
            assert sums == again
            assert sums == found[0][size][0]  # alike on all ranks
            assert (
                torch.tensor(sums, dtype=torch.float64).sub(plain).abs().max().item() < 1e-12
                if size
                else True
            )


def test_nodes_that_are_not_those_of_the_group_are_refused() -> None:
    assert (
        run_ranks(refused, 2, (), is_reused=True)
        == ["nodes [[0], [0]] do not hold the 2 ranks of the group, each once"] * 2
    )


def test_a_rank_that_is_gone_is_named() -> None:
    told = run_ranks(left_alone, 4, (), is_reused=True)
    assert told[3] == "left"
    # Those that ask it for something; rank 0 hears of it from rank 1, which leaves as well.
    assert "rank 3 sends nothing to rank 2" in told[2] or "rank 3 receives nothing from rank 2" in told[2]
    assert "to rank 1" in told[1] or "from rank 1" in told[1]


def numbers(rank: int, size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(size, generator=generator, dtype=torch.float64)


def summed(worker: WorkerContext, counts: Sequence[int]) -> dict[int, tuple[list[float], list[float]]]:
    with open_mesh(worker, Plan(dp_replicate=worker.world_size), 60) as grid:
        group = grid.dim_mesh("dp_replicate").get_group()
        nodes = group_ranks_by_node(range(worker.world_size), counts)
        found = {}
        for size in SIZES:
            once, again = numbers(worker.rank, size), numbers(worker.rank, size)
            hierarchical_all_reduce(once, group, nodes)
            hierarchical_all_reduce(again, group, nodes)
            found[size] = once.tolist(), again.tolist()
        return found


def refused(worker: WorkerContext) -> str:
    with open_mesh(worker, Plan(dp_replicate=2), 60) as grid:
        with pytest.raises(ValueError) as error:  # noqa: PT011  # its text is what is returned
            hierarchical_all_reduce(torch.ones(3), grid.dim_mesh("dp_replicate").get_group(), [[0], [0]])
        return str(error.value)


def left_alone(worker: WorkerContext) -> str:
    with open_mesh(worker, Plan(dp_replicate=4), 60) as grid:
        group = grid.dim_mesh("dp_replicate").get_group()
        hierarchical_all_reduce(torch.ones(4), group, [[0, 1], [2, 3]])  # all connections are made
        dist.barrier(group)  # nobody leaves, nor hears of it, while others are at that sum
        if worker.rank == 3:
            return "left"
        try:
            hierarchical_all_reduce(torch.ones(1 << 20), group, [[0, 1], [2, 3]])
        except WanmaError as error:
            return str(error)
    return "summed"
