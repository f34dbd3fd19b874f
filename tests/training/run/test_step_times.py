"""Times of a step on a GPU: compute, exposed communication by axis, and bubble, by events of its stream."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from support.fake_stream import FakeStream
from wanma.collectives.timing.communication_timer import CommunicationTime, CommunicationTimer
from wanma.job.plan.plan import Plan
from wanma.parallel.pipeline.timed_stage import BubbleTimer
from wanma.parallel.profiling.compute_timer import ComputeTimer
from wanma.planner.pipeline.operation import Operation
from wanma.planner.pipeline.replay import TimedOperation
from wanma.training.run.step_times import PhaseTimer, StepTimes
from wanma.training.run.trainer import Trainer


class Rank:
    """Rank of a GPU, with the timers of its part of the model.

    Attributes:
        times: times of its steps.
    """

    def __init__(self, *, is_pipelined: bool = False) -> None:
        self.stream = FakeStream()
        self.timer = timer = CommunicationTimer(self.stream.clock)
        self.compute = ComputeTimer(timer.clock, lambda: timer.position, per_micro_batch=is_pipelined)
        self.bubble = BubbleTimer(timer)
        pipeline = SimpleNamespace(read_times=self.bubble.read, operations=self.bubble.operations)
        model: Any = SimpleNamespace(
            compute_timer=self.compute,
            communication_timer=timer,
            pipeline=pipeline if is_pipelined else None,
        )
        self.phases = PhaseTimer()
        self.times = StepTimes(self.phases, model)

    def work(self, seconds: float, *, is_forward: bool, **waits: float) -> None:
        """Queue a forward or a backward, and its waits by kind."""
        self.compute.start()
        self.stream.work(seconds)
        for kind, wait in waits.items():
            with self.timer.time_blocking_transfer(kind):  # type: ignore[arg-type]  # one of the kinds
                self.stream.work(wait)
        self.compute.stop(is_forward=is_forward)

    def end_step(self) -> CommunicationTime:
        """Wait for the stream, as a step does once, and take its times."""
        self.stream.synchronize()
        self.times.end_forward_backward()
        return self.times.take_phases()[1]


def test_compute_is_apart_from_waits_by_kind() -> None:
    rank = Rank()
    for _ in range(2):  # micro-batches
        rank.work(1.0, is_forward=True, tensor=0.25)
        rank.work(2.0, is_forward=False, tensor=0.5, data=0.125)
    with rank.timer.time_blocking_transfer("data"):  # after the last backward
        rank.stream.work(4.0)
    waits = rank.end_step()
    assert waits == CommunicationTime({"tensor": 1.5, "data": 4.25}, {})
    assert rank.times.metrics() == {"compute_seconds": pytest.approx(6.0)}
    assert rank.times.compute.pace == pytest.approx(3 * 2 * 1.25), "ranks are compared by the forward"


def test_waits_for_data_ranks_are_a_phase() -> None:
    rank = Rank()
    with rank.phases.phase("forward_backward"):
        rank.work(1.0, is_forward=True, data=1e-9)
        rank.stream.synchronize()
    rank.times.end_forward_backward()
    phases, _ = rank.times.take_phases()
    assert phases["communication"] == pytest.approx(1e-9)
    assert phases["forward_backward"] > 0


def test_the_next_step_uses_the_same_events_and_has_its_own_times() -> None:
    rank = Rank()
    for seconds in (1.0, 2.0, 3.0):
        rank.work(seconds, is_forward=True, context=seconds)
        assert rank.end_step().exposed_seconds == {"context": seconds}
        assert rank.times.metrics() == {"compute_seconds": seconds}
        with rank.timer.time_blocking_transfer("context"):  # of a validation: it is in no step
            rank.stream.work(100.0)
        rank.times.take_phases()
    assert len(rank.stream.events) == 4


def test_a_pipeline_has_its_operations_and_the_wait_between_them() -> None:
    rank = Rank(is_pipelined=True)
    with rank.bubble.measure_bubble():
        for micro_batch in range(2):
            rank.stream.work(0.5)  # another stage's work
            with rank.bubble.time_operation("forward", 0, micro_batch):
                rank.work(1.0, is_forward=True)
            with rank.bubble.time_loss():
                rank.stream.work(0.25)
    assert rank.bubble.operations == [], "nothing is read while work is queued"
    waits = rank.end_step()
    forwards = [TimedOperation(Operation("forward", 0, number), 1.25) for number in range(2)]
    assert rank.bubble.operations == forwards
    assert waits == CommunicationTime({"pipeline": pytest.approx(1.0)}, {})
    plan = Plan(pp=2, micro_batch=1, device="cuda")
    terms = rank.times.exchanged_terms(plan, rank=0, global_batch=2)
    assert [seconds for seconds in terms[1::2] if seconds] == [1.25, 1.25], "all ranks get them"


def test_a_step_without_pieces_has_no_compute_and_no_waits_in_it() -> None:
    rank = Rank()
    with rank.timer.time_blocking_transfer("tensor"):
        rank.stream.work(1.0)
    assert rank.end_step() == CommunicationTime({}, {})
    assert rank.times.metrics() == {}


def test_the_times_of_a_step_are_read_after_its_one_wait_for_the_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rank, waits = Rank(), list[float]()

    def synchronize() -> None:
        waits.append(rank.stream.seconds)
        rank.stream.synchronize()

    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(synchronize=synchronize))
    trainer: Any = SimpleNamespace(
        parallel_mesh=SimpleNamespace(device=torch.device("cuda")),
        phases=rank.phases,
        plan=None,
        _times=rank.times,
        _share_rebalancer=SimpleNamespace(record_compute=lambda _: None),
        _in_memory_checkpoints=SimpleNamespace(finish_pending=lambda: None),
    )
    rank.work(1.0, is_forward=True, tensor=0.25)
    Trainer._end_forward_backward(trainer)
    assert waits == [1.25], "events that are not reached yet cannot be read"
    assert rank.times.metrics() == {"compute_seconds": pytest.approx(1.0)}
