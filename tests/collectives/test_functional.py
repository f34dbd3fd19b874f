"""The functional all-gather that replaces torch's on CPUs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from support.ranks import run_ranks
from wanma.job.plan.plan import Plan
from wanma.job.run.worker import WorkerContext
from wanma.job.sections.parallel import CollectiveTransport
from wanma.parallel.mesh.parallel_mesh import open_mesh

RANKS = 3
SHAPES = ((2,), (1, 3), (4, 2, 2), (0, 5))
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64)


def test_every_rank_gets_the_parts_of_all_in_their_order() -> None:
    for gathered in [
        *run_ranks(gather, RANKS, ("shared_memory",), is_reused=True),
        *run_ranks(gather, RANKS, ("gloo",), is_reused=True),
    ]:
        for shape in SHAPES:
            for dtype in DTYPES:
                expected = torch.cat([part_of(rank, shape, dtype) for rank in range(RANKS)])
                assert gathered[shape, dtype] == expected.tolist(), (shape, dtype)


def test_neither_eager_nor_compiled_code_goes_the_way_that_corrupts_memory() -> None:
    for operators in run_ranks(operators_of_a_gather, 2, ()):
        for kind, called in operators.items():
            assert "c10d::_allgather_base_" in called, kind
            assert not any("coalesced" in name for name in called), kind


def part_of(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return (torch.rand(shape, generator=generator) * 100).to(dtype)


def gather(worker: WorkerContext, collectives: CollectiveTransport) -> dict[Any, list[Any]]:
    with open_mesh(worker, Plan(dp_replicate=RANKS), 60, collectives) as grid:
        group = grid.dim_mesh("dp_replicate").get_group()
        return {
            (shape, dtype): whole(part_of(worker.rank, shape, dtype), RANKS, group.group_name).tolist()
            for shape in SHAPES
            for dtype in DTYPES
        }


def operators_of_a_gather(worker: WorkerContext) -> dict[str, list[str]]:
    with open_mesh(worker, Plan(dp_replicate=2), 60, "gloo") as grid:
        group = grid.dim_mesh("dp_replicate").get_group()
        part = torch.ones(2, 3)
        called = {}
        for kind, function in {"eager": whole, "compiled": torch.compile(whole, fullgraph=True)}.items():
            function(part, 2, group.group_name)
            with torch.profiler.profile() as profile:
                function(part, 2, group.group_name)
            called[kind] = [event.name for event in profile.events()]
        return called


def whole(part: Tensor, ranks: int, group: str) -> Tensor:
    functional = torch.ops._c10d_functional
    gathered: Tensor = functional.wait_tensor(functional.all_gather_into_tensor(part, ranks, group))
    return gathered
