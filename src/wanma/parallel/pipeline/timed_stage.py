"""Pipeline stage of torch with timers: its own work, apart from its waits for other stages."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from wanma.collectives.timing.communication_timer import CommunicationTimer
from wanma.job.errors import JobError, WanmaError
from wanma.parallel.profiling.compute_timer import ComputeTimer
from wanma.planner.pipeline.operation import Operation, OperationKind
from wanma.planner.pipeline.replay import TimedOperation
from wanma.torch_internals.pipelining import NeighborPipelineStage

_CHANGED = "a leaf Variable that requires grad is being used in an in-place operation"
"""Part of torch's message about a stage that writes to its input."""


class BubbleTimer:
    """Timer of a rank's operations within a schedule; all other time it waits for other stages.

    On a GPU that is the time in which its stream has none of them: other stages' work, messages, and a host
    that is late with the next operation. Its times are there after `read`.
    """

    def __init__(self, communication_timer: CommunicationTimer) -> None:
        self._communication_timer, self._clock = communication_timer, communication_timer.clock
        self._now: Callable[[], Any] = time.perf_counter if self._clock is None else self._clock.now
        self.operations: list[TimedOperation] = []
        """Operations of the last schedule, in their order; the loss is part of the last stage's forward."""
        self._unread: list[tuple[Operation | None, Any, Any]] = []
        """Operations with their start and end; None: a loss, which belongs to the operation before it."""
        self._schedule: tuple[Any, Any] | None = None

    @contextmanager
    def time_operation(self, kind: OperationKind, stage: int, micro_batch: int) -> Iterator[None]:
        """Time one operation of a stage."""
        start = self._now()
        yield
        self._unread.append((Operation(kind, stage, micro_batch), start, self._now()))

    @contextmanager
    def time_loss(self) -> Iterator[None]:
        """Time a loss, which belongs to the forward that has just ended."""
        start = self._now()
        yield
        self._unread.append((None, start, self._now()))

    @contextmanager
    def measure_bubble(self) -> Iterator[None]:
        """Record the wait for other stages, around a complete schedule."""
        self.operations.clear()
        self._unread.clear()
        start = self._now()
        yield
        self._schedule = start, self._now()
        if self._clock is None:
            self.read()

    def read(self) -> None:
        """Read the times of the last schedule; the host of a GPU has just waited for the stream."""
        if self._schedule is None:
            return
        for operation, start, end in self._unread:
            seconds = self._seconds(start, end)
            if operation is None:
                operation, before = self.operations.pop()
                seconds += before
            self.operations.append(TimedOperation(operation, seconds))
        wait = self._seconds(*self._schedule) - sum(operation.seconds for operation in self.operations)
        self._communication_timer.add_blocking_transfer("pipeline", max(wait, 0.0))
        self._unread.clear()
        self._schedule = None

    def _seconds(self, start: Any, end: Any) -> float:
        seconds: float = end - start if self._clock is None else self._clock.seconds(start, end)
        return seconds


class TimedPipelineStage(NeighborPipelineStage):
    """Pipeline stage of torch that measures its own work.

    Args:
        bubble_timer: timer of the rank's operations within a schedule.
        compute_timer: timer of the rank's compute.
        arguments: positional arguments of torch's stage.
        keywords: keyword arguments of torch's stage.
    """

    def __init__(
        self, bubble_timer: BubbleTimer, compute_timer: ComputeTimer, *arguments: Any, **keywords: Any
    ) -> None:
        super().__init__(*arguments, **keywords)
        self._bubble_timer, self._compute_timer = bubble_timer, compute_timer

    def forward_one_chunk(self, fwd_chunk_id: int, *arguments: Any, **keywords: Any) -> Any:
        with self._bubble_timer.time_operation("forward", self.stage_index, fwd_chunk_id):
            self._compute_timer.start()
            try:
                output = super().forward_one_chunk(fwd_chunk_id, *arguments, **keywords)
            except RuntimeError as error:
                if isinstance(error.__cause__, WanmaError):
                    raise error.__cause__ from error
                if _CHANGED in f"{error} {error.__cause__}":
                    raise JobError(
                        f"pipeline stage {self.stage_index} changes its received input in place",
                        "build the first module of the stage with inplace=False, or move the stage cuts "
                        "(parallel.stage_cuts)",
                    ) from error
                raise
            self._compute_timer.stop(is_forward=True)
            return output

    def backward_one_chunk(self, bwd_chunk_id: int, *arguments: Any, **keywords: Any) -> Any:
        with self._bubble_timer.time_operation("backward", self.stage_index, bwd_chunk_id):
            self._compute_timer.start()
            try:
                output = super().backward_one_chunk(bwd_chunk_id, *arguments, **keywords)
            except RuntimeError as error:  # torch's own, around the cause
                if isinstance(error.__cause__, WanmaError):
                    raise error.__cause__ from error
                raise
            self._compute_timer.stop(is_forward=False)
            return output

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *arguments: Any, **keywords: Any) -> Any:
        with self._bubble_timer.time_operation("weight gradient", self.stage_index, bwd_chunk_id):
            self._compute_timer.start()
            output = super().backward_weight_one_chunk(bwd_chunk_id, *arguments, **keywords)
            self._compute_timer.stop(is_forward=False)
            return output
