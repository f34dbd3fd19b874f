"""Time that a process waits for others within functional collectives, without its own computing."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from support.ranks import run_ranks
from wanma.collectives.timing import communication_timer, functional_wait_time
from wanma.collectives.timing.communication_timer import CommunicationTimer, use_timer
from wanma.collectives.timing.functional_wait_time import get_functional_wait_time
from wanma.job.run.worker import WorkerContext

LATE_SECONDS = 100.0


class Clock:
    """Clock of both ranks, on which nothing but lateness takes time.

    Attributes:
        store: store of the ranks, which holds the time and the number of times that rank 0 has looked at it.
    """

    def __init__(self, store: Any, rank: int) -> None:
        self.store, self.rank = store, rank

    def perf_counter(self) -> float:
        now = LATE_SECONDS * int(self.store.add("time", 0))
        self.store.add(f"looks of rank {self.rank}", 1)
        return now

    def let_rank_1_be_late(self) -> None:
        """Return on rank 1 when rank 0 waits, and has done so for `LATE_SECONDS`."""
        dist.barrier()
        looks = self.store.add("looks of rank 0", 0)
        dist.barrier()
        if self.rank == 1:
            deadline = time.monotonic() + 60
            while self.store.add("looks of rank 0", 0) == looks:
                assert time.monotonic() < deadline, "rank 0 waits without a look at the clock"
                time.sleep(0.001)
            self.store.add("time", 1)


@contextmanager
def _clock(worker: WorkerContext) -> Iterator[Clock]:
    """Process group of the ranks, which time their waits by a clock of theirs."""
    store = dist.TCPStore(worker.store_host, worker.store_port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=worker.rank, world_size=2)
    clock = Clock(store, worker.rank)
    with (
        mock.patch.object(functional_wait_time, "time", clock),
        mock.patch.object(communication_timer, "time", clock),
    ):
        yield clock
    dist.destroy_process_group()


def _wait(worker: WorkerContext) -> dict[str, float]:
    """Rank 1 comes late to each kind of collective; what each rank has waited in it."""
    with _clock(worker) as clock:
        return _waits(clock)


def _waits(clock: Clock) -> dict[str, float]:
    group: Any = dist.group.WORLD
    watch, waited = get_functional_wait_time(), {}
    x = torch.ones(8, requires_grad=True)

    def taken(name: str, call: Any) -> Any:
        clock.let_rank_1_be_late()
        before = watch.seconds
        result = call()
        waited[name] = watch.seconds - before
        return result

    total = taken("all_reduce", lambda: functional.all_reduce(x.detach(), "sum", group) + 0)
    assert total.tolist() == [2.0] * 8
    moved = taken("all_to_all", lambda: functional.all_to_all_single_autograd(x, None, None, group) * 3)
    taken("backward", moved.sum().backward)
    assert x.grad.tolist() == [3.0] * 8
    compiled = torch.compile(lambda y: functional.all_reduce(y, "sum", group) * 2, backend="aot_eager")
    compiled(x.detach())
    assert taken("compiled", lambda: compiled(x.detach())).tolist() == [4.0] * 8
    return waited


def _wait_by_kind(worker: WorkerContext) -> dict[str, float]:
    """Exposed communication of each rank, by kind, if rank 1 comes late to one collective of each."""
    with _clock(worker) as clock:
        return _waits_by_kind(clock)


def _waits_by_kind(clock: Clock) -> dict[str, float]:
    without_timer = get_functional_wait_time().seconds
    experts: Any = dist.new_group([0, 1])
    timer = CommunicationTimer()
    timer.functional_kind, timer.expert_group = "tensor", experts.group_name

    group: Any = dist.group.WORLD
    x = torch.ones(8, requires_grad=True)
    with use_timer(timer):
        clock.let_rank_1_be_late()
        moved = functional.all_to_all_single_autograd(x, None, None, experts) * 3
        clock.let_rank_1_be_late()
        moved.sum().backward()
        clock.let_rank_1_be_late()
        assert (functional.all_reduce(x.detach(), "sum", group) + 0).tolist() == [2.0] * 8
        clock.let_rank_1_be_late()
        assert (functional.all_to_all_single(x.detach(), None, None, group) + 0).tolist() == [1.0] * 8
        clock.let_rank_1_be_late()
        with timer.time_blocking_transfer("context"):
            functional.wait_tensor(functional.all_reduce(x.detach(), "sum", group))
    assert x.grad.tolist() == [3.0] * 8
    assert get_functional_wait_time().seconds == without_timer
    return dict(timer.take_totals().exposed_seconds)


def test_waits_go_to_the_axis_of_their_group() -> None:
    first, late = run_ranks(_wait_by_kind, 2, ())
    for kind, collectives in {"expert": 2, "tensor": 2, "context": 1}.items():
        assert (first[kind], late[kind]) == (collectives * LATE_SECONDS, 0.0), kind


def test_the_rank_that_is_there_first_waits_in_every_kind() -> None:
    first, late = run_ranks(_wait, 2, ())
    for name in ("all_reduce", "all_to_all", "backward", "compiled"):
        assert (first[name], late[name]) == (LATE_SECONDS, 0.0), name
