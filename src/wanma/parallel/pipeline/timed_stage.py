"""Pipeline stage of torch with timers: its own work, apart from its waits for other stages."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage

from wanma.collectives.timing.communication_timer import CommunicationTimer
from wanma.job.errors import JobError, WanmaError
from wanma.parallel.profiling.compute_timer import ComputeTimer

_CHANGED = "a leaf Variable that requires grad is being used in an in-place operation"
"""Part of torch's message about a stage that writes to its input."""


class BubbleTimer:
    """Timer of a rank's own work within a schedule; all other time it waits for other stages."""

    def __init__(self, communication_timer: CommunicationTimer) -> None:
        self._communication_timer = communication_timer
        self._seconds = 0.0
        self._depth, self._start = 0, 0.0

    def __enter__(self) -> None:
        if self._depth == 0:
            self._start = time.perf_counter()
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._seconds += time.perf_counter() - self._start

    @contextmanager
    def measure_bubble(self) -> Iterator[None]:
        """Record the wait for other stages, around a complete schedule."""
        self._seconds, self._depth = 0.0, 0
        start = time.perf_counter()
        yield
        self._communication_timer.add_blocking_transfer(
            "pipeline", max(time.perf_counter() - start - self._seconds, 0.0)
        )


class TimedPipelineStage(PipelineStage):
    """Pipeline stage of torch that does not greet its own rank before the first step.

    torch greets all neighbours; torch 2.11 does so even where a rank holds neighbouring stages, and Gloo
    refuses it.

    Args:
        bubble_timer: timer of the rank's own work within a schedule.
        compute_timer: timer of the rank's compute.
        arguments: positional arguments of torch's stage.
        keywords: keyword arguments of torch's stage.
    """

    def __init__(
        self, bubble_timer: BubbleTimer, compute_timer: ComputeTimer, *arguments: Any, **keywords: Any
    ) -> None:
        super().__init__(*arguments, **keywords)
        self._bubble_timer, self._compute_timer = bubble_timer, compute_timer

    def forward_one_chunk(self, *arguments: Any, **keywords: Any) -> Any:
        with self._bubble_timer:
            self._compute_timer.start()
            try:
                output = super().forward_one_chunk(*arguments, **keywords)
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

    def backward_one_chunk(self, *arguments: Any, **keywords: Any) -> Any:
        with self._bubble_timer:
            self._compute_timer.start()
            try:
                output = super().backward_one_chunk(*arguments, **keywords)
            except RuntimeError as error:  # torch's own, around the cause
                if isinstance(error.__cause__, WanmaError):
                    raise error.__cause__ from error
                raise
            self._compute_timer.stop(is_forward=False)
            return output

    def backward_weight_one_chunk(self, *arguments: Any, **keywords: Any) -> Any:
        with self._bubble_timer:
            self._compute_timer.start()
            output = super().backward_weight_one_chunk(*arguments, **keywords)
            self._compute_timer.stop(is_forward=False)
            return output

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.peer != dist.get_rank()]
