"""Torch's constructions on process groups, over shared memory as over Gloo."""

from __future__ import annotations

import copy
import threading
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from support.ranks import run_ranks
from support.shared import shared_world
from wanma.collectives.fsdp.point_to_point_collectives import CommunicationTimer
from wanma.collectives.fsdp.shared_memory_collectives import SharedMemoryAllGather, SharedMemoryReduceScatter
from wanma.collectives.shared_memory.backend import as_shared_memory_group
from wanma.job.run.worker import WorkerContext


def in_the_background(worker: WorkerContext) -> list[float]:
    with shared_world(worker):
        tensors = [torch.full((50_000,), float(turn + worker.rank)) for turn in range(20)]
        works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
        for work in reversed(works):
            work.wait()
            assert work.is_completed()
        future = dist.all_reduce(torch.ones(3), async_op=True).get_future()  # type: ignore[union-attr]
        assert future.wait()[0].tolist() == [2.0] * 3
        # Nobody waits for this one, nor holds its tensor: it is done all the same.
        dist.all_reduce(torch.ones(100_000), async_op=True)
        dist.barrier()
        return [float(tensor.unique()) for tensor in tensors]


def test_several_collectives_under_way_end_in_their_order() -> None:
    assert run_ranks(in_the_background, 2, (), is_reused=True) == [[2.0 * turn + 1 for turn in range(20)]] * 2


def crosswise(worker: WorkerContext) -> list[float]:
    """Each of two ranks begins with the other's second group: each group has its own order."""
    with shared_world(worker):
        groups = [dist.new_group([0, 1]) for _ in range(2)]
        assert all(as_shared_memory_group(group) is not None for group in groups)
        order = groups if worker.rank == 0 else groups[::-1]
        tensors = {id(group): torch.full((30_000,), float(turn + 1)) for turn, group in enumerate(groups)}
        works = [dist.all_reduce(tensors[id(group)], group=group, async_op=True) for group in order]
        for work in works:
            work.wait()
        return [float(tensors[id(group)][-1]) for group in groups]


def test_groups_of_the_same_ranks_do_not_wait_for_each_other() -> None:
    assert run_ranks(crosswise, 2, (), is_reused=True) == [[2.0, 4.0]] * 2


def from_threads(worker: WorkerContext) -> list[float]:
    """Each thread has a group."""
    with shared_world(worker):
        groups = [dist.new_group([0, 1]) for _ in range(3)]
        sums = [torch.full((20_000,), float(turn)) for turn in range(3)]

        def work(turn: int) -> None:
            for _ in range(50):
                dist.all_reduce(sums[turn], dist.ReduceOp.AVG, group=groups[turn])

        threads = [threading.Thread(target=work, args=(turn,)) for turn in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [float(total.unique()) for total in sums]


def test_threads_use_groups_of_their_own_at_once() -> None:
    assert run_ranks(from_threads, 2, (), is_reused=True) == [[0.0, 1.0, 2.0]] * 2


def in_part(worker: WorkerContext) -> dict[str, Any]:
    with shared_world(worker):
        pairs = [dist.new_group([0, 2]), dist.new_group([3, 1])]
        mine = pairs[worker.rank % 2]
        group = as_shared_memory_group(mine)
        assert group is not None
        total = torch.tensor([float(worker.rank)])
        dist.all_reduce(total, group=mine)
        sent = torch.tensor([float(worker.rank)])
        dist.broadcast(sent, src=2 if worker.rank % 2 == 0 else 3, group=mine)
        objects: list[Any] = [None, None]
        dist.all_gather_object(objects, {"rank": worker.rank}, group=mine)
        return {"sum": total.item(), "sent": sent.item(), "objects": [one["rank"] for one in objects]}


def test_a_group_of_some_ranks_has_its_own_memory_and_order() -> None:
    even = {"sum": 2.0, "sent": 2.0, "objects": [0, 2]}
    odd = {"sum": 4.0, "sent": 3.0, "objects": [1, 3]}
    assert run_ranks(in_part, 4, (), is_reused=True) == [even, odd, even, odd]


def by_gloo(worker: WorkerContext) -> dict[str, Any]:
    """Messages and what has one root are Gloo's, in the same group."""
    with shared_world(worker):
        me, ranks = worker.rank, worker.world_size
        received = torch.zeros(4)
        works = [dist.isend(torch.full((4,), float(me)), (me + 1) % ranks)]
        works.append(dist.irecv(received, (me - 1) % ranks))
        for work in works:
            work.wait()
        total = torch.tensor([float(me)])
        dist.reduce(total, 0)
        parts = [torch.zeros(1) for _ in range(ranks)] if me == 0 else None
        dist.gather(torch.tensor([float(me)]), parts)
        part = torch.zeros(2)
        dist.scatter(part, [torch.full((2,), float(rank)) for rank in range(ranks)] if me == 0 else None)
        strided = torch.arange(6.0).view(2, 3).t()
        dist.all_reduce(strided)
        return {
            "received": received[0].item(),
            "sum": total.item() if me == 0 else None,
            "gathered": None if parts is None else torch.cat(parts).tolist(),
            "part": part.tolist(),
            "strided": strided.flatten().tolist(),
        }


def test_messages_and_collectives_with_a_root_go_through_gloo() -> None:
    zero, one, two = run_ranks(by_gloo, 3, (), is_reused=True)
    assert zero["gathered"] == [0.0, 1.0, 2.0]
    assert zero["sum"] == 3.0
    assert [found["received"] for found in (zero, one, two)] == [2.0, 0.0, 1.0]
    assert [found["part"] for found in (zero, one, two)] == [[0.0] * 2, [1.0] * 2, [2.0] * 2]
    tripled = [0.0, 9.0, 3.0, 12.0, 6.0, 15.0]
    assert [found["strided"] for found in (zero, one, two)] == [tripled] * 3


# ---------------------------------------------------------------- what is built on groups


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 10)).double()


def samples(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(6, 24, generator=generator, dtype=torch.float64)


def train(model: nn.Module, inputs: list[Tensor]) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for each in inputs:
        loss = model(each).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def in_parallel(worker: WorkerContext, kind: str) -> float:
    """The largest difference from one process, over all parameters after three steps."""
    alone = network()
    model: nn.Module = copy.deepcopy(alone)
    with shared_world(worker) as (group, _):
        if kind == "ddp":
            model = DistributedDataParallel(model)
        else:
            mesh = init_device_mesh("cpu", (worker.world_size,))
            for module in (model[0], model[2], model):  # type: ignore[index]
                fully_shard(module, mesh=mesh)
                if kind == "in place":
                    module.set_custom_all_gather(SharedMemoryAllGather(CommunicationTimer(), group))
                    module.set_custom_reduce_scatter(SharedMemoryReduceScatter(CommunicationTimer(), group))
                    module.set_force_sum_reduction_for_comms(True)
        train(model, [samples(worker.rank, step) for step in range(3)])
        train(
            alone,
            [torch.cat([samples(rank, step) for rank in range(worker.world_size)]) for step in range(3)],
        )
        differences = []
        for one, other in zip(model.parameters(), alone.parameters(), strict=True):
            whole = one.full_tensor() if isinstance(one, DTensor) else one
            differences.append(float((whole - other).detach().abs().max()))
        return max(differences)


def test_ddp_and_fsdp_train_as_one_process_does() -> None:
    for kind in ("ddp", "fsdp", "in place"):
        assert max(run_ranks(in_parallel, 2, (kind,), is_reused=True)) < 1e-9, kind


def as_dtensors(worker: WorkerContext) -> list[bool]:
    with shared_world(worker):
        mesh = init_device_mesh("cpu", (worker.world_size,))
        torch.manual_seed(5)
        left, right = torch.randn(9, 7, dtype=torch.float64), torch.randn(7, 11, dtype=torch.float64)
        product = left @ right
        by_rows = distribute_tensor(left, mesh, [Shard(0)]) @ distribute_tensor(right, mesh, [Replicate()])
        summed = distribute_tensor(left, mesh, [Shard(1)]) @ distribute_tensor(right, mesh, [Shard(0)])
        moved = distribute_tensor(left, mesh, [Shard(0)]).redistribute(placements=[Shard(1)])
        return [
            torch.allclose(by_rows.full_tensor(), product, atol=1e-12),
            torch.allclose(summed.redistribute(placements=[Shard(0)]).full_tensor(), product, atol=1e-12),
            torch.allclose(summed.full_tensor(), product, atol=1e-12),
            torch.equal(moved.full_tensor(), left),
        ]


def test_dtensors_are_what_they_are_in_one_process() -> None:
    assert run_ranks(as_dtensors, 3, (), is_reused=True) == [[True] * 4] * 3
