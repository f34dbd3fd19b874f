"""Time of a pipeline: simulation of its schedule, operation by operation, with the cost of each stage.

Stages may cost differently and sending takes time; the published bubbles are the special case of equal stages
and free links. Pure functions, without torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from wanma.job.plan.stage_order import stages_of_pipeline_rank
from wanma.job.sections.parallel import Schedule
from wanma.planner.pipeline.greedy_simulation import simulate_greedy_schedule
from wanma.planner.pipeline.operation import Interval, Operation, StageCost
from wanma.planner.pipeline.schedules import SPLIT_BACKWARD
from wanma.planner.pipeline.static_simulation import PipelineShape, operation_orders, simulate_static_schedule

__all__ = [
    "Interval",
    "Operation",
    "PipelineSimulator",
    "PipelineTime",
    "StageCost",
    "simulate_pipeline",
    "simulate_pipeline_intervals",
]


class PipelineTime(NamedTuple):
    """Result of simulating the pipelined part of a step."""

    seconds: float
    compute_seconds: tuple[float, ...]
    """Seconds in which each rank computes."""

    @property
    def bubble_seconds(self) -> float:
        """Return the seconds in which the busiest rank waits."""
        return self.seconds - max(self.compute_seconds)


PipelineSimulator = Callable[[Schedule, Sequence[StageCost], int, int, float, int | None], PipelineTime]
"""Type of `simulate_pipeline`, and of functions that cache its results."""


def simulate_pipeline(
    schedule: Schedule,
    costs: Sequence[StageCost],
    pp: int,
    micro_batches: int,
    send_seconds: float = 0.0,
    in_flight: int | None = None,
) -> PipelineTime:
    """Return the simulated time of `schedule`.

    After a few rounds of micro-batches a schedule repeats itself; further rounds are not simulated but added.

    Args:
        costs: costs of every stage in the order of the model; `pp` ranks hold them as
            `Plan.stages_of_pipeline_rank` says.
        send_seconds: seconds from the end of a stage to the start of the next one on another rank.
        in_flight: largest number of stages' activations on a rank, for a schedule with split backward.

    Raises:
        ValueError: the stages are not a multiple of the ranks, or there is no micro-batch.
    """
    if micro_batches < 1 or pp < 1 or len(costs) % pp:
        raise ValueError(f"{len(costs)} stages on {pp} ranks with {micro_batches} micro-batches")
    simulated_count = micro_batches
    if micro_batches > _SIMULATED_ROUNDS * pp + 2 * pp:
        simulated_count -= (micro_batches - _SIMULATED_ROUNDS * pp) // pp * pp
    result = _simulate(schedule, costs, pp, simulated_count, send_seconds, in_flight)
    skipped_rounds = (micro_batches - simulated_count) // pp
    if skipped_rounds == 0:
        return result
    longer = _simulate(schedule, costs, pp, simulated_count + pp, send_seconds, in_flight)
    rounds = [
        longer_seconds - shorter_seconds
        for longer_seconds, shorter_seconds in zip(
            longer.compute_seconds, result.compute_seconds, strict=True
        )
    ]
    # With nearly equal stages, more rounds may pass before the slowest one sets the pace.
    grown = max(longer.seconds - result.seconds, *rounds)
    busy = tuple(
        shorter_seconds + skipped_rounds * round_seconds
        for shorter_seconds, round_seconds in zip(result.compute_seconds, rounds, strict=True)
    )
    return PipelineTime(result.seconds + skipped_rounds * grown, busy)


def simulate_pipeline_intervals(
    schedule: Schedule,
    costs: Sequence[StageCost],
    pp: int,
    micro_batches: int,
    send_seconds: float = 0.0,
    in_flight: int | None = None,
) -> list[Interval]:
    """Return every operation of `simulate_pipeline`, with all micro-batches simulated; each rank's in order.

    Raises:
        ValueError: as `simulate_pipeline`.
    """
    if micro_batches < 1 or pp < 1 or len(costs) % pp:
        raise ValueError(f"{len(costs)} stages on {pp} ranks with {micro_batches} micro-batches")
    intervals: list[Interval] = []
    _simulate(schedule, costs, pp, micro_batches, send_seconds, in_flight, intervals)
    return intervals


_SIMULATED_ROUNDS = 4
"""Rounds of `pp` micro-batches that are simulated before further ones are added."""


def _simulate(
    schedule: Schedule,
    costs: Sequence[StageCost],
    pp: int,
    micro_batches: int,
    send_seconds: float,
    in_flight: int | None,
    intervals: list[Interval] | None = None,
) -> PipelineTime:
    """Simulate a schedule; append every operation to `intervals`, if it is given."""
    if schedule in SPLIT_BACKWARD:
        limit = in_flight or default_in_flight(schedule, pp, len(costs) // pp)
        stages_by_rank = [stages_of_pipeline_rank(schedule, pp, rank, len(costs)) for rank in range(pp)]
        for keeps_room in (False, True):
            greedy = simulate_greedy_schedule(
                costs, stages_by_rank, micro_batches, send_seconds, limit, keeps_room, intervals is not None
            )
            if greedy is not None:
                if intervals is not None:
                    intervals += greedy.intervals
                return PipelineTime(max(greedy.end_seconds), tuple(greedy.compute_seconds))
        raise ValueError(f"with {limit} stages in flight on a rank, the schedule waits for itself")
    size = PipelineShape(pp, len(costs), micro_batches)
    ends, busy = simulate_static_schedule(
        operation_orders(schedule, size), costs, size, send_seconds, intervals
    )
    return PipelineTime(max(ends), tuple(busy))


def default_in_flight(schedule: Schedule, pp: int, virtual_stages: int) -> int:
    """Return the default number of stages' activations that a rank may hold: ZB-H1's or more."""
    return {"zbv": 2 * pp, "dualpipev": 2 * pp + 1}.get(schedule, (virtual_stages - 1) * pp + pp)
