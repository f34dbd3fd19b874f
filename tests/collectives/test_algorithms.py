"""Collectives made of messages, run by real processes: the sums, their bits, and who is told to be lost."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from support.ranks import run_ranks
from support.shared import shared_world
from wanma.collectives.algorithms.algorithm_table import ALGORITHMS, run_schedule
from wanma.collectives.algorithms.communication_schedules import compute_chunk_bounds, ring_all_reduce
from wanma.collectives.algorithms.hierarchical_all_reduce import hierarchical_all_reduce
from wanma.job.errors import WanmaError
from wanma.job.run.worker import WorkerContext
from wanma.torch_internals.fake_tensors import FAKE_BACKEND, FakeStore

SIZES = (0, 1, 5, 1 << 12, (1 << 16) + 3)
DTYPES = (torch.float32, torch.float64, torch.bfloat16)


def joined(worker: WorkerContext) -> dist.ProcessGroup:
    store = dist.TCPStore(worker.store_host, worker.store_port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=worker.rank, world_size=worker.world_size)
    group = dist.group.WORLD
    assert group is not None
    return group


def one_node(group: dist.ProcessGroup) -> list[range]:
    return [range(group.size())]


def noise(rank: int, elements: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + elements)
    return torch.randn(elements, generator=generator, dtype=torch.float64).to(dtype)


def reduce_all(worker: WorkerContext) -> dict[Any, bytes]:
    group = joined(worker)
    try:
        return every_sum(worker, group)
    finally:
        dist.destroy_process_group()


def reduce_all_in_shared_memory(worker: WorkerContext) -> dict[Any, bytes]:
    with shared_world(worker) as (group, _):
        return every_sum(worker, group)


def every_sum(worker: WorkerContext, group: dist.ProcessGroup) -> dict[Any, bytes]:
    """Every all-reduce of every size, beside the sum in fp64; returns the bytes of the results."""
    found: dict[Any, bytes] = {}
    for name, run in ALGORITHMS["all_reduce"].items():
        for size in SIZES:
            for dtype in DTYPES:
                buffer = noise(worker.rank, size, dtype)
                run(buffer, group, one_node(group))
                exact = sum(noise(rank, size, dtype).double() for rank in range(worker.world_size))
                tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.1}[dtype]
                error = (buffer.double() - exact).abs().max().item() if size else 0.0
                assert error <= tolerance, (name, size, dtype, error)
                again = noise(worker.rank, size, dtype)
                run(again, group, one_node(group))
                assert torch.equal(again, buffer), f"{name} repeats bit for bit"
                found[name, size, str(dtype)] = buffer.view(torch.uint8).numpy().tobytes()
    return found


@pytest.mark.parametrize(
    "ranks", [1, 2, 3, *(pytest.param(ranks, marks=pytest.mark.full) for ranks in (4, 5, 6, 7, 8))]
)
def test_every_rank_has_the_same_bits_of_the_right_sum(ranks: int) -> None:
    first, *others = run_ranks(reduce_all, ranks, (), is_reused=True)
    assert len(first) == len(ALGORITHMS["all_reduce"]) * len(SIZES) * len(DTYPES)
    assert all(other == first for other in others)


@pytest.mark.parametrize("ranks", [3, pytest.param(6, marks=pytest.mark.full)])
def test_sums_have_the_same_bits_over_tcp_and_shared_memory(ranks: int) -> None:
    over_tcp = run_ranks(reduce_all, ranks, (), is_reused=True)
    assert run_ranks(reduce_all_in_shared_memory, ranks, (), is_reused=True) == over_tcp


def others_run(worker: WorkerContext) -> None:
    group = joined(worker)
    me, ranks = worker.rank, worker.world_size
    elements = 4 * ranks
    first, last = compute_chunk_bounds(me, ranks, elements)
    try:
        scattered = torch.arange(elements, dtype=torch.float64) + me
        ALGORITHMS["reduce_scatter"]["ring"](scattered, group, one_node(group))
        expected = ranks * torch.arange(first, last, dtype=torch.float64) + sum(range(ranks))
        assert torch.equal(scattered[first:last], expected)
        gathered = torch.zeros(elements)
        gathered[first:last] = me + 1.0
        ALGORITHMS["all_gather"]["ring"](gathered, group, one_node(group))
        assert gathered.tolist() == [rank + 1.0 for rank in range(ranks) for _ in range(4)]
        passed = torch.full((elements,), float(me + 7))
        ALGORITHMS["broadcast"]["tree"](passed, group, one_node(group))
        assert passed.tolist() == [7.0] * elements
    finally:
        dist.destroy_process_group()


def test_scatters_gathers_and_broadcasts_do_what_they_say() -> None:
    run_ranks(others_run, 3, (), is_reused=True)


def in_a_part_of_the_world(worker: WorkerContext) -> list[float]:
    joined(worker)
    try:
        group = dist.new_group([0, 2])
        buffer = torch.full((3,), float(worker.rank + 1))
        if worker.rank != 1:
            assert group is not None
            for run in ALGORITHMS["all_reduce"].values():
                run(buffer, group, one_node(group))
        dist.barrier()
    finally:
        dist.destroy_process_group()
    result: list[float] = buffer.tolist()
    return result


def test_a_group_of_some_ranks_adds_up_among_itself() -> None:
    assert run_ranks(in_a_part_of_the_world, 3, (), is_reused=True) == [[32.0] * 3, [2.0] * 3, [32.0] * 3]


def one_leaves(worker: WorkerContext) -> str:
    group = joined(worker)
    run_schedule(ring_all_reduce, torch.ones(8), group)  # connections are there
    if worker.rank == 1:
        dist.destroy_process_group()
        return ""
    try:
        with pytest.raises(WanmaError) as lost:
            run_schedule(ring_all_reduce, torch.ones(1 << 20), group)
    finally:
        dist.destroy_process_group()
    assert lost.value.__cause__ is not None, "by which a supervisor knows an echo from a cause"
    return str(lost.value)


def test_a_peer_that_has_gone_is_named() -> None:
    told, _ = run_ranks(one_leaves, 2, (), is_reused=True)
    assert told.startswith("rank 1 ")
    assert " rank 0: " in told
    assert "read the end of logs/rank-1.log" in told


def wrong_buffers(worker: WorkerContext) -> None:
    group = joined(worker)
    try:
        for buffer in (torch.ones(2, 2), torch.ones(4)[::2]):
            with pytest.raises(ValueError, match="one dim, contiguous"):
                run_schedule(ring_all_reduce, buffer, group)
    finally:
        dist.destroy_process_group()


def test_a_buffer_that_cannot_be_cut_in_place_is_refused() -> None:
    run_ranks(wrong_buffers, 1, (), is_reused=True)


def test_messages_of_an_accelerator_start_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL runs messages between two ranks in their order: both would receive first, for ever."""
    started: list[list[str]] = []

    def start(operations: list[dist.P2POp]) -> list[dist.Work]:
        started.append([f"{one.op.__name__} {one.group_peer}" for one in operations])
        return []

    monkeypatch.setattr(dist, "batch_isend_irecv", start)
    dist.init_process_group(FAKE_BACKEND, rank=0, world_size=4, store=FakeStore())
    try:
        group = dist.group.WORLD
        assert group is not None
        buffer = torch.empty(8, device="meta")
        hierarchical_all_reduce(buffer, group, [[0, 1], [2, 3]])
        run_schedule(ring_all_reduce, buffer, group)
    finally:
        dist.destroy_process_group()
    hierarchical, ring = started[:3], started[3:]
    assert hierarchical == [["irecv 1", "isend 1"], ["irecv 2", "isend 2"], ["irecv 1", "isend 1"]]
    assert ring == [["irecv 3", "isend 1"]] * 6
