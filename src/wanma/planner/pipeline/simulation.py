"""Time of a pipeline: simulation of its schedule, operation by operation, with the cost of each stage.

Stages may cost differently and sending takes time; the published bubbles (`schedules.bubble_share`) are the
special case of equal stages and free links. Pure functions, without torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from wanma.job.sections.parallel import Schedule
from wanma.planner.pipeline.greedy_schedule import play_greedily
from wanma.planner.pipeline.operation import Interval, Operation, StageCost
from wanma.planner.pipeline.schedules import SPLIT_BACKWARD
from wanma.planner.pipeline.static_schedule import Size, orders_of, play_in_order

__all__ = [
    "Interval",
    "Operation",
    "Pipelined",
    "Play",
    "StageCost",
    "pipeline_intervals",
    "pipeline_seconds",
]


class Pipelined(NamedTuple):
    """Result of simulating the pipelined part of a step."""

    seconds: float
    busy: tuple[float, ...]
    """Seconds in which each rank computes."""

    @property
    def bubble_seconds(self) -> float:
        """Return the seconds in which the busiest rank waits."""
        return self.seconds - max(self.busy)


Play = Callable[[Schedule, Sequence[StageCost], int, int, float, int | None], Pipelined]
"""Type of `pipeline_seconds`, and of functions that cache its results."""


def pipeline_seconds(
    schedule: Schedule,
    costs: Sequence[StageCost],
    pp: int,
    micro_batches: int,
    send_seconds: float = 0.0,
    in_flight: int | None = None,
) -> Pipelined:
    """Return the simulated time of `schedule`.

    After a few rounds of micro-batches a schedule repeats itself; further rounds are not simulated but added.

    Args:
        costs: costs of every stage in the order of the model; `pp` ranks hold them as `Plan.stages_of` says.
        send_seconds: seconds from the end of a stage to the start of the next one on another rank.
        in_flight: largest number of stages' activations on a rank, for a schedule with split backward.

    Raises:
        ValueError: the stages are not a multiple of the ranks, or there is no micro-batch.
    """
    if micro_batches < 1 or pp < 1 or len(costs) % pp:
        raise ValueError(f"{len(costs)} stages on {pp} ranks with {micro_batches} micro-batches")
    played = micro_batches
    if micro_batches > _ROUNDS * pp + 2 * pp:
        played -= (micro_batches - _ROUNDS * pp) // pp * pp
    result = _play(schedule, costs, pp, played, send_seconds, in_flight)
    rest = (micro_batches - played) // pp
    if rest == 0:
        return result
    more = _play(schedule, costs, pp, played + pp, send_seconds, in_flight)
    rounds = [later - sooner for later, sooner in zip(more.busy, result.busy, strict=True)]
    # With nearly equal stages, more rounds may pass before the slowest one sets the pace.
    grown = max(more.seconds - result.seconds, *rounds)
    busy = tuple(sooner + rest * each for sooner, each in zip(result.busy, rounds, strict=True))
    return Pipelined(result.seconds + rest * grown, busy)


def pipeline_intervals(
    schedule: Schedule,
    costs: Sequence[StageCost],
    pp: int,
    micro_batches: int,
    send_seconds: float = 0.0,
    in_flight: int | None = None,
) -> list[Interval]:
    """Return every operation of `pipeline_seconds`, with all micro-batches simulated; each rank's in order.

    Raises:
        ValueError: as `pipeline_seconds`.
    """
    if micro_batches < 1 or pp < 1 or len(costs) % pp:
        raise ValueError(f"{len(costs)} stages on {pp} ranks with {micro_batches} micro-batches")
    found: list[Interval] = []
    _play(schedule, costs, pp, micro_batches, send_seconds, in_flight, found)
    return found


_ROUNDS = 4
"""Rounds of `pp` micro-batches that are simulated before further ones are added."""


def stages_on(schedule: Schedule, pp: int, rank: int, stages: int) -> list[int]:
    """Return the stages of a pipeline rank, as `Plan.stages_of` does."""
    if schedule in ("zbv", "dualpipev"):
        return [rank, 2 * pp - 1 - rank]
    return list(range(rank, stages, pp))


def _play(
    schedule: Schedule,
    costs: Sequence[StageCost],
    pp: int,
    micro_batches: int,
    send_seconds: float,
    in_flight: int | None,
    intervals: list[Interval] | None = None,
) -> Pipelined:
    """Simulate a schedule; append every operation to `intervals`, if it is given."""
    if schedule in SPLIT_BACKWARD:
        limit = in_flight or usual_in_flight(schedule, pp, len(costs) // pp)
        held = [stages_on(schedule, pp, rank, len(costs)) for rank in range(pp)]
        for keeps_room in (False, True):
            played = play_greedily(
                costs, held, micro_batches, send_seconds, limit, keeps_room, intervals is not None
            )
            if played is not None:
                if intervals is not None:
                    intervals += played.intervals
                return Pipelined(max(played.ends), tuple(played.busy))
        raise ValueError(f"with {limit} stages in flight on a rank, the schedule waits for itself")
    size = Size(pp, len(costs), micro_batches)
    ends, busy = play_in_order(orders_of(schedule, size), costs, size, send_seconds, intervals)
    return Pipelined(max(ends), tuple(busy))


def usual_in_flight(schedule: Schedule, pp: int, virtual: int) -> int:
    """Return the default number of stages' activations that a rank may hold: ZB-H1's or more."""
    return {"zbv": 2 * pp, "dualpipev": 2 * pp + 1}.get(schedule, (virtual - 1) * pp + pp)
