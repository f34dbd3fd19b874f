"""Time that a process waits for others within functional collectives, without its own computing."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from support.ranks import run_ranks
from wanma.collectives.timing.communication_timer import CommunicationTimer, use_timer
from wanma.collectives.timing.functional_wait_time import get_functional_wait_time
from wanma.job.run.worker import WorkerContext

LATE_SECONDS = 0.4


def _wait(worker: WorkerContext) -> dict[str, float]:
    """Rank 1 comes late to each kind of collective; what each rank has waited in it."""
    store = dist.TCPStore(worker.store_host, worker.store_port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=worker.rank, world_size=2)
    group: Any = dist.group.WORLD
    watch, waited = get_functional_wait_time(), {}
    x = torch.ones(8, requires_grad=True)

    def taken(name: str, call: Any) -> Any:
        dist.barrier()
        if worker.rank == 1:
            time.sleep(LATE_SECONDS)
        before = watch.seconds
        result = call()
        waited[name] = watch.seconds - before
        return result

    total = taken("all_reduce", lambda: functional.all_reduce(x.detach(), "sum", group) + 0)
    assert total.tolist() == [2.0] * 8
    moved = taken("all_to_all", lambda: functional.all_to_all_single_autograd(x, None, None, group) * 3)
    taken("backward", moved.sum().backward)
    assert x.grad is not None
    assert x.grad.tolist() == [3.0] * 8
    compiled = torch.compile(lambda y: functional.all_reduce(y, "sum", group) * 2, backend="aot_eager")
    compiled(x.detach())
    assert taken("compiled", lambda: compiled(x.detach())).tolist() == [4.0] * 8
    dist.destroy_process_group()
    return waited


def _wait_by_kind(worker: WorkerContext) -> dict[str, float]:
    """Exposed communication of each rank, by kind, if rank 1 comes late to one collective of each."""
    store = dist.TCPStore(worker.store_host, worker.store_port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=worker.rank, world_size=2)
    get_functional_wait_time()
    experts: Any = dist.new_group([0, 1])
    timer = CommunicationTimer()
    timer.functional_kind, timer.expert_group = "tensor", experts.group_name

    def late() -> None:
        dist.barrier()
        if worker.rank == 1:
            time.sleep(LATE_SECONDS)

    group: Any = dist.group.WORLD
    x = torch.ones(8, requires_grad=True)
    with use_timer(timer):
        late()
        moved = functional.all_to_all_single_autograd(x, None, None, experts) * 3
        late()
        moved.sum().backward()
        late()
        assert (functional.all_reduce(x.detach(), "sum", group) + 0).tolist() == [2.0] * 8
        late()
        assert (functional.all_to_all_single(x.detach(), None, None, group) + 0).tolist() == [1.0] * 8
        late()
        with timer.time_blocking_transfer("context"):
            functional.wait_tensor(functional.all_reduce(x.detach(), "sum", group))
    assert x.grad is not None
    assert x.grad.tolist() == [3.0] * 8
    before = get_functional_wait_time().seconds
    dist.destroy_process_group()
    assert before == 0.0
    return dict(timer.take_totals().exposed_seconds)


def test_waits_go_to_the_axis_of_their_group() -> None:
    first, late = run_ranks(_wait_by_kind, 2, ())
    for kind, collectives in {"expert": 2, "tensor": 2, "context": 1}.items():
        assert first[kind] > (collectives - 0.5) * LATE_SECONDS, kind
        assert late[kind] < LATE_SECONDS / 2, kind


def test_the_rank_that_is_there_first_waits_in_every_kind() -> None:
    first, late = run_ranks(_wait, 2, ())
    for name in ("all_reduce", "all_to_all", "backward", "compiled"):
        assert first[name] > LATE_SECONDS / 2, name
        assert late[name] < LATE_SECONDS / 2, name
