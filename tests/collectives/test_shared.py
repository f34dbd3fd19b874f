"""Collectives over shared memory, on real processes, beside a plain computation on one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import reduce

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from support.ranks import run_ranks
from support.shared import CHUNK_BYTES, shared_world
from wanma.collectives.shared_memory.process_group import SharedMemoryProcessGroup
from wanma.job.run.worker import WorkerContext

RANKS = (2, 3, pytest.param(4, marks=pytest.mark.full))
DTYPES = (
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16),
    *(torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool),
)
Binary = Callable[[Tensor, Tensor], Tensor]
REDUCTIONS: dict[dist.ReduceOp.RedOpType, Binary] = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.PRODUCT: torch.mul,
    dist.ReduceOp.MIN: torch.minimum,
    dist.ReduceOp.MAX: torch.maximum,
    dist.ReduceOp.AVG: torch.add,
}


def counts(dtype: torch.dtype) -> Iterator[int]:
    """Elements: none, one, odd, around a chunk, several chunks."""
    chunk = CHUNK_BYTES // dtype.itemsize
    yield from (0, 1, 7, chunk - 1, chunk, chunk + 1, 5 * chunk + 13)


def values(rank: int, count: int, dtype: torch.dtype) -> Tensor:
    """Input of `rank`, a function of its number that every rank knows."""
    generator = torch.Generator().manual_seed(1000 * rank + count)
    if dtype.is_floating_point:
        return torch.randn(count, generator=generator, dtype=torch.float64).to(dtype)
    return torch.randint(-3, 4, (count,), generator=generator).to(dtype)


def reduced(tensors: list[Tensor], operation: dist.ReduceOp.RedOpType) -> Tensor:
    """In rank order, in fp32 where there are 16 bits, rounded once; of booleans: any of them, or all."""
    dtype = tensors[0].dtype
    if dtype == torch.bool:
        any_of = operation in (dist.ReduceOp.SUM, dist.ReduceOp.MAX)
        return reduce(torch.logical_or if any_of else torch.logical_and, tensors)
    wide = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
    total = reduce(REDUCTIONS[operation], [tensor.to(wide) for tensor in tensors])
    return (total / len(tensors) if operation == dist.ReduceOp.AVG else total).to(dtype)


def grid_of(dtype: torch.dtype) -> Iterator[tuple[int, dist.ReduceOp.RedOpType]]:
    for count in counts(dtype):
        for operation in REDUCTIONS:
            if operation != dist.ReduceOp.AVG or dtype.is_floating_point:
                yield count, operation


def check(found: Tensor, expected: Tensor, *told: object) -> None:
    assert torch.equal(found, expected), told


# ---------------------------------------------------------------- reductions


def reduce_all(worker: WorkerContext) -> str:
    ranks = worker.world_size
    with shared_world(worker) as (group, _):
        for dtype in DTYPES:
            for count, operation in grid_of(dtype):
                expected = reduced([values(rank, count, dtype) for rank in range(ranks)], operation)
                mine = values(worker.rank, count, dtype)
                dist.all_reduce(mine, operation)
                check(mine, expected, "staged", dtype, count, operation)
                place = group.allocate_tensor(count, dtype)
                place.copy_(values(worker.rank, count, dtype))
                dist.all_reduce(place, operation)
                check(place, expected, "in place", dtype, count, operation)
    return "equal"


def scatter_sums(worker: WorkerContext) -> str:
    ranks, me = worker.world_size, worker.rank
    with shared_world(worker) as (group, _):
        for dtype in DTYPES:
            for count, operation in grid_of(dtype):
                everyones = [values(rank, count * ranks, dtype) for rank in range(ranks)]
                parts = [whole[me * count : (me + 1) * count] for whole in everyones]
                expected = reduced(parts, operation)
                for place in (everyones[me].clone(), group.allocate_tensor(count * ranks, dtype)):
                    place.copy_(everyones[me])
                    found = torch.empty(count, dtype=dtype)
                    dist.reduce_scatter_tensor(found, place, operation)
                    check(found, expected, dtype, count, operation)
                    check(place, everyones[me], "the input stays as it is")
                found = torch.empty(count, dtype=dtype)
                slices = list(everyones[me].view(ranks, count).unbind())
                dist.reduce_scatter(found, slices, operation)
                check(found, expected, "list", dtype, count, operation)
    return "equal"


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("function", [reduce_all, scatter_sums])
def test_sums_and_their_like_are_those_of_one_process(function: object, ranks: int) -> None:
    assert run_ranks(function, ranks, (), is_reused=True) == ["equal"] * ranks


def not_a_number(worker: WorkerContext) -> list[list[bool]]:
    with shared_world(worker):
        found = []
        for operation in (dist.ReduceOp.MIN, dist.ReduceOp.MAX, dist.ReduceOp.SUM):
            mine = torch.tensor([1.0, float("nan"), 2.0] if worker.rank else [float("nan"), 0.0, 3.0])
            dist.all_reduce(mine, operation)
            found.append(mine.isnan().tolist())
        low = torch.tensor([float("nan"), 3e38, float("inf")]).to(torch.bfloat16)
        dist.all_reduce(low)
        return [*found, [bool(low[0].isnan()), bool(low[1].isinf()), bool(low[2].isinf())]]


def test_what_is_not_a_number_stays_visible() -> None:
    expected = [[True, True, False]] * 3 + [[True, True, True]]
    assert run_ranks(not_a_number, 2, (), is_reused=True) == [expected] * 2


# ---------------------------------------------------------------- copies


def gather_all(worker: WorkerContext) -> str:
    ranks, me = worker.world_size, worker.rank
    with shared_world(worker) as (group, _):
        for dtype in (*DTYPES, torch.complex64, torch.int16):
            for count in counts(dtype):
                parts = [values(rank, count, dtype) for rank in range(ranks)]
                whole = torch.empty(count * ranks, dtype=dtype)
                dist.all_gather_into_tensor(whole, parts[me])
                check(whole, torch.cat(parts), dtype, count)
                listed = [torch.empty(count, dtype=dtype) for _ in range(ranks)]
                dist.all_gather(listed, parts[me])
                check(torch.cat(listed), torch.cat(parts), "list", dtype, count)
                place = group.allocate_tensor(count * ranks, dtype)
                own = place[me * count : (me + 1) * count]
                own.copy_(parts[me])
                dist.all_gather_into_tensor(place, own)
                check(place, torch.cat(parts), "in place", dtype, count)
    return "equal"


def send_to_all(worker: WorkerContext) -> str:
    ranks, me = worker.world_size, worker.rank
    with shared_world(worker):
        for dtype in (torch.float32, torch.int8, torch.complex64):
            for count in counts(dtype):
                for root in range(ranks):
                    mine = values(me, count, dtype)
                    dist.broadcast(mine, root)
                    check(mine, values(root, count, dtype), "broadcast", dtype, count)
                # Rows of two: rank r has 3 r + c times something for rank c, and nothing for some.
                rows = [[(3 * one + other) * (count // 16) for other in range(ranks)] for one in range(ranks)]
                everyones = [values(rank, 2 * sum(rows[rank]), dtype).view(-1, 2) for rank in range(ranks)]
                received = [rows[rank][me] for rank in range(ranks)]
                found = torch.empty(sum(received), 2, dtype=dtype)
                dist.all_to_all_single(found, everyones[me], received, rows[me])
                expected = [everyones[rank].split(rows[rank])[me] for rank in range(ranks)]
                check(found, torch.cat(expected), "uneven", dtype, count)
                even = [values(rank, count * ranks, dtype) for rank in range(ranks)]
                found = torch.empty_like(even[me])
                dist.all_to_all_single(found, even[me])
                check(found, torch.cat([whole.view(ranks, -1)[me] for whole in even]), "even", dtype, count)
        dist.barrier()
    return "equal"


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("function", [gather_all, send_to_all])
def test_what_is_copied_comes_as_it_was(function: object, ranks: int) -> None:
    assert run_ranks(function, ranks, (), is_reused=True) == ["equal"] * ranks


# ---------------------------------------------------------------- order and repeats


def repeat(worker: WorkerContext) -> list[bytes]:
    with shared_world(worker) as (group, _):
        found = []
        for again in range(20):
            staged = values(worker.rank, 30_011, torch.float32)
            dist.all_reduce(staged)
            place = group.allocate_tensor(30_011, torch.float32)
            place.copy_(values(worker.rank, 30_011, torch.float32))
            dist.all_reduce(place)
            dist.barrier() if again % 2 else None
            found += [staged.numpy().tobytes(), place.numpy().tobytes()]
        return found


def test_every_rank_gets_the_same_bits_every_time_in_place_or_not() -> None:
    assert len({bits for found in run_ranks(repeat, 4, (), is_reused=True) for bits in found}) == 1


def many_small(worker: WorkerContext) -> float:
    """Thousands in a row, of all kinds and sizes: no one's data is written over before it was read."""
    with shared_world(worker) as (group, _):
        return sum(one_round(group, worker, turn) for turn in range(1500))


def one_round(group: SharedMemoryProcessGroup, worker: WorkerContext, turn: int) -> float:
    ranks, me = worker.world_size, worker.rank
    summed = torch.full((1 + turn % 5 * 2000,), float(turn + me))
    dist.all_reduce(summed)
    assert summed.unique().tolist() == [ranks * turn + ranks * (ranks - 1) / 2]
    gathered = torch.empty(ranks * (1 + turn % 3))
    dist.all_gather_into_tensor(gathered, torch.full((1 + turn % 3,), float(turn * me)))
    assert gathered.view(ranks, -1)[:, 0].tolist() == [float(turn * rank) for rank in range(ranks)]
    sent = torch.full((3,), float(turn))
    dist.broadcast(sent, turn % ranks)
    return float(sent[0])


def test_thousands_of_collectives_in_a_row_do_not_run_into_each_other() -> None:
    assert run_ranks(many_small, 3, (), is_reused=True) == [sum(range(1500))] * 3
