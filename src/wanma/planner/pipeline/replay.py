"""Replay of the operations of a pipelined step: measured durations and order, messages that take no time.

The idle time that is left is the bubble of the schedule and of uneven stages. Pure functions, without torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from wanma.planner.pipeline.operation import Operation


class TimedOperation(NamedTuple):
    """Operation that has run, with its duration."""

    operation: Operation
    seconds: float


class RankTime(NamedTuple):
    """Time of one rank in a replay."""

    end: float
    """End of its last operation, in seconds since the start of the pipeline."""
    busy: float
    """Seconds of its operations."""

    @property
    def idle(self) -> float:
        """Return the seconds before its last operation has ended in which it waits for others."""
        return max(self.end - self.busy, 0.0)


def replay_operations(ranks: Sequence[Sequence[TimedOperation]], stages: int) -> list[RankTime]:
    """Return the time of each rank if messages took no time.

    A stage's forward waits for that of the stage before, its backward for that of the stage behind, and the
    last stage's for its own forward.

    Args:
        ranks: operations of each rank, in its order; those of a backward are of its input's gradient.
        stages: number of stages.

    Raises:
        ValueError: the operations wait for each other.
    """
    ends: dict[Operation, float] = {}
    positions, clocks, busy = [0] * len(ranks), [0.0] * len(ranks), [0.0] * len(ranks)
    is_progressing = True
    while is_progressing:
        is_progressing = False
        for rank, operations in enumerate(ranks):
            position, clock = positions[rank], clocks[rank]
            while position < len(operations):
                operation, seconds = operations[position]
                needed = _input_of(operation, stages)
                if needed is not None:
                    ready = ends.get(needed)
                    if ready is None:
                        break
                    clock = max(clock, ready)
                clock += seconds
                busy[rank] += seconds
                ends[operation] = clock
                position += 1
            if position > positions[rank]:
                positions[rank], clocks[rank], is_progressing = position, clock, True
    if any(position < len(operations) for position, operations in zip(positions, ranks, strict=True)):
        raise ValueError("the operations wait for each other")
    return [RankTime(end, own) for end, own in zip(clocks, busy, strict=True)]


def _input_of(operation: Operation, stages: int) -> Operation | None:
    """Return the operation whose result an operation needs; None: that of a first stage needs none."""
    kind, stage, micro_batch = operation
    if kind == "forward":
        return Operation("forward", stage - 1, micro_batch) if stage else None
    if kind == "weight gradient":
        return Operation("backward", stage, micro_batch)
    if stage == stages - 1:
        return Operation("forward", stage, micro_batch)
    return Operation("backward", stage + 1, micro_batch)
