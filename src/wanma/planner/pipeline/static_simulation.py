"""Static pipeline schedule: simulation of ranks that run their operations in a fixed order.

Each operation starts as soon as its input is there and its rank is free.

Searches simulate often, so that the code is written for speed: an operation is a number, which counts stages'
forwards and then their backwards, micro-batch by micro-batch. Pure functions, without torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from wanma.job.sections.parallel import Schedule
from wanma.planner.pipeline.operation import Interval, Operation, StageCost


class PipelineShape(NamedTuple):
    """Size of a pipeline: ranks, stages and micro-batches."""

    pp: int
    stages: int
    micro_batches: int

    def forwards(self, stage: int, indices: range) -> range:
        """Return the numbers of a stage's forwards of these micro-batches; see also `backwards`."""
        first = stage * self.micro_batches
        return range(first + indices.start, first + indices.stop)

    def backwards(self, stage: int, indices: range) -> range:
        return self.forwards(self.stages + stage, indices)

    def operation(self, number: int) -> Operation:
        """Return the operation of a number."""
        stage, index = divmod(number, self.micro_batches)
        if stage < self.stages:
            return Operation("forward", stage, index)
        return Operation("backward", stage - self.stages, index)


def operation_orders(schedule: Schedule, size: PipelineShape) -> list[list[int]]:
    """Return the operations of each rank, in its order."""
    return [_ORDERS[schedule](rank, size) for rank in range(size.pp)]


def simulate_static_schedule(
    orders: Sequence[Sequence[int]],
    costs: Sequence[StageCost],
    size: PipelineShape,
    send_seconds: float,
    intervals: list[Interval] | None = None,
) -> tuple[list[float], list[float]]:
    """Simulate a static schedule.

    Args:
        orders: numbers of the operations of each rank, in its order.
        intervals: list to which every operation is appended, if it is given.

    Returns:
        Time at which each rank is done, and the seconds in which it computes.
    """
    pp, stages, micro_batches = size
    # By stage, first of forwards, then of backwards: seconds, distance to the number of its input, and
    # seconds until that input arrives.
    seconds = [cost.forward for cost in costs] + [cost.backward for cost in costs]
    offsets = [micro_batches] * stages + [-micro_batches] * stages
    offsets[0], offsets[-1] = 0, stages * micro_batches
    send = [send_seconds if pp > 1 else 0.0] * (2 * stages)
    send[-1] = 0.0
    ends = [-1.0] * (2 * stages * micro_batches)
    positions, clocks, busy = [0] * pp, [0.0] * pp, [0.0] * pp
    is_progressing = True
    while is_progressing:
        is_progressing = False
        for rank, order in enumerate(orders):
            position, clock, busy_seconds = positions[rank], clocks[rank], busy[rank]
            while position < len(order):
                number = order[position]
                kind = number // micro_batches
                if offsets[kind]:
                    ready = ends[number - offsets[kind]]
                    if ready < 0:
                        break
                    ready += send[kind]
                    if ready > clock:
                        clock = ready
                duration = seconds[kind]
                if intervals is not None:
                    intervals.append(Interval(rank, size.operation(number), clock, duration))
                clock += duration
                busy_seconds += duration
                ends[number] = clock
                position += 1
            if position > positions[rank]:
                positions[rank], clocks[rank], busy[rank] = position, clock, busy_seconds
                is_progressing = True
    if any(position < len(order) for position, order in zip(positions, orders, strict=True)):
        raise ValueError("the schedule waits for itself")
    return clocks, busy


def _gpipe(rank: int, size: PipelineShape) -> list[int]:
    """Return the order of GPipe on one rank (Huang et al. 2019)."""
    micro_batches = range(size.micro_batches)
    forwards = [
        number
        for stage in range(rank, size.stages, size.pp)
        for number in size.forwards(stage, micro_batches)
    ]
    return forwards + [number + size.stages * size.micro_batches for number in reversed(forwards)]


def _one_forward_one_backward(rank: int, size: PipelineShape) -> list[int]:
    """Return the order of 1F1B on one rank (Narayanan et al. 2021, section 2.2.1)."""
    micro_batches = range(size.micro_batches)
    return _alternate_forward_backward(
        list(size.forwards(rank, micro_batches)),
        list(size.backwards(rank, micro_batches)),
        size.pp - 1 - rank,
    )


def _interleaved(rank: int, size: PipelineShape) -> list[int]:
    """Return the order of interleaved 1F1B on one rank (Narayanan et al. 2021, section 2.2.2).

    Rounds of micro-batches pass each of a rank's stages in turn. As in torch, there are as many rounds as
    have at least `pp` each. Where they cannot be equal, which torch refuses, the first ones are longer.
    """
    pp, micro_batches = size.pp, size.micro_batches
    virtual, rounds = size.stages // pp, max(micro_batches // pp, 1)
    forwards: list[int] = []
    backwards: list[int] = []
    for number in range(rounds):
        group = range(-(-number * micro_batches // rounds), -(-(number + 1) * micro_batches // rounds))
        for turn in range(virtual):
            forwards += size.forwards(turn * pp + rank, group)
            backwards += size.backwards((virtual - 1 - turn) * pp + rank, group)
    warm_up = 2 * (pp - 1 - rank) + (virtual - 1) * math.ceil(micro_batches / rounds)
    return _alternate_forward_backward(forwards, backwards, warm_up)


def _alternate_forward_backward(forwards: list[int], backwards: list[int], warm_up: int) -> list[int]:
    """Return `warm_up` forwards, then forwards and backwards in turn, then the other backwards."""
    warm_up = min(warm_up, len(forwards))
    order = [0] * (len(forwards) + len(backwards))
    steady_count = 2 * (len(forwards) - warm_up)
    order[:warm_up] = forwards[:warm_up]
    order[warm_up : warm_up + steady_count : 2] = forwards[warm_up:]
    order[warm_up + 1 : warm_up + steady_count : 2] = backwards[: len(forwards) - warm_up]
    order[warm_up + steady_count :] = backwards[len(forwards) - warm_up :]
    return order


_ORDERS: Mapping[Schedule, Callable[[int, PipelineShape], list[int]]] = {
    "gpipe": _gpipe,
    "1f1b": _one_forward_one_backward,
    "interleaved_1f1b": _interleaved,
}
