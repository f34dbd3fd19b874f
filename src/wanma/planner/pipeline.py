"""How long a pipeline takes: its schedule played through, stage by stage, with what each stage costs.

Stages may cost differently and sending takes time; the published bubbles (`stages.bubble_share`) are the
special case of equal stages and free links. Pure functions, without torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from wanma.job.sections import Schedule
from wanma.planner.stages import SPLIT_BACKWARD

Kind = Literal["forward", "backward", "weights"]


class Operation(NamedTuple):
    kind: Kind
    stage: int
    micro_batch: int


class Interval(NamedTuple):
    """One operation as it is played."""

    rank: int
    operation: Operation
    start: float
    """Seconds from the pipeline's begin."""
    seconds: float


@dataclass(frozen=True)
class StageCost:
    """Seconds of one micro-batch in one stage."""

    forward: float
    backward: float
    """With what runs again; of a schedule that takes backward apart, for the inputs' gradients alone."""
    weights: float = 0.0
    """For the weights' gradients, where a schedule computes them on their own."""

    @property
    def seconds(self) -> float:
        return self.forward + self.backward + self.weights


class Pipelined(NamedTuple):
    """Of the step's pipelined part."""

    seconds: float
    busy: tuple[float, ...]
    """Seconds in which each rank computes."""

    @property
    def bubble_seconds(self) -> float:
        """In which the busiest rank waits."""
        return self.seconds - max(self.busy)


def pipeline_seconds(
    schedule: Schedule,
    costs: Sequence[StageCost],
    pp: int,
    micro_batches: int,
    send_seconds: float = 0.0,
    in_flight: int | None = None,
) -> Pipelined:
    """Play `schedule` through.

    From a few rounds of micro-batches on it repeats itself, so that more of them are not played but added.

    Args:
        costs: of every stage in the model's order; `pp` ranks hold them as `Plan.stages_of` says.
        send_seconds: from the end of a stage to the start of the next one on another rank.
        in_flight: of a schedule that takes backward apart: most stages' activations that a rank may hold.

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
    # Where stages cost nearly the same, those that wait for the slowest may take longer to show it.
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
    """Every operation of `pipeline_seconds`, with all micro-batches played; of each rank in order.

    Raises:
        ValueError: as `pipeline_seconds`.
    """
    if micro_batches < 1 or pp < 1 or len(costs) % pp:
        raise ValueError(f"{len(costs)} stages on {pp} ranks with {micro_batches} micro-batches")
    found: list[Interval] = []
    _play(schedule, costs, pp, micro_batches, send_seconds, in_flight, found)
    return found


_ROUNDS = 4
"""Rounds of `pp` micro-batches that are played before the rest is added."""


def stages_on(schedule: Schedule, pp: int, rank: int, stages: int) -> list[int]:
    """As `Plan.stages_of`."""
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
    """Where `intervals` is given, it gains every operation."""
    if schedule in SPLIT_BACKWARD:
        limit = in_flight or usual_in_flight(schedule, pp, len(costs) // pp)
        for keeps_room in (False, True):
            played = _greedy(schedule, costs, pp, micro_batches, send_seconds, limit, keeps_room)
            if played is not None:
                if intervals is not None:
                    intervals += played[1]
                return played[0]
        raise ValueError(f"with {limit} stages in flight on a rank, the schedule waits for itself")
    order = {"gpipe": _gpipe, "1f1b": _one_forward_one_backward, "interleaved_1f1b": _interleaved}[schedule]
    orders = [order(rank, pp, len(costs), micro_batches) for rank in range(pp)]
    return _ordered(orders, costs, pp, send_seconds, intervals)


def _gpipe(rank: int, pp: int, stages: int, micro_batches: int) -> list[Operation]:
    own = range(rank, stages, pp)
    forwards = [Operation("forward", stage, index) for stage in own for index in range(micro_batches)]
    return forwards + [operation._replace(kind="backward") for operation in reversed(forwards)]


def _one_forward_one_backward(rank: int, pp: int, _stages: int, micro_batches: int) -> list[Operation]:
    """Narayanan et al. 2021, section 2.2.1."""
    return _alternating(
        [Operation("forward", rank, index) for index in range(micro_batches)],
        [Operation("backward", rank, index) for index in range(micro_batches)],
        pp - 1 - rank,
    )


def _interleaved(rank: int, pp: int, stages: int, micro_batches: int) -> list[Operation]:
    """Narayanan et al. 2021, section 2.2.2: rounds of micro-batches pass one of a rank's stages each.

    As in torch, there are as many rounds as have at least `pp` each. Where they cannot be equal, which torch
    refuses, the first ones are longer.
    """
    virtual = stages // pp
    rounds = max(micro_batches // pp, 1)
    forwards, backwards = [], []
    for number in range(rounds):
        group = range(-(-number * micro_batches // rounds), -(-(number + 1) * micro_batches // rounds))
        for turn in range(virtual):
            forwards += [Operation("forward", turn * pp + rank, index) for index in group]
            backwards += [Operation("backward", (virtual - 1 - turn) * pp + rank, index) for index in group]
    warm_up = 2 * (pp - 1 - rank) + (virtual - 1) * math.ceil(micro_batches / rounds)
    return _alternating(forwards, backwards, warm_up)


def _alternating(forwards: list[Operation], backwards: list[Operation], warm_up: int) -> list[Operation]:
    warm_up = min(warm_up, len(forwards))
    order = forwards[:warm_up]
    for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
        order += [forward, backward]
    return order + backwards[len(forwards) - warm_up :]


def _ordered(
    orders: Sequence[Sequence[Operation]],
    costs: Sequence[StageCost],
    pp: int,
    send_seconds: float,
    intervals: list[Interval] | None = None,
) -> Pipelined:
    """Every rank runs its operations in the given order, each as soon as its input is there."""
    ends: dict[Operation, float] = {}
    positions, clocks, busy = [0] * pp, [0.0] * pp, [0.0] * pp
    waiting = True
    while waiting:
        waiting = False
        for rank, order in enumerate(orders):
            while positions[rank] < len(order):
                operation = order[positions[rank]]
                ready = _ready(operation, ends, len(costs), pp, send_seconds)
                if ready is None:
                    break
                seconds = _seconds(operation, costs)
                clocks[rank] = max(clocks[rank], ready) + seconds
                busy[rank] += seconds
                ends[operation] = clocks[rank]
                if intervals is not None:
                    intervals.append(Interval(rank, operation, clocks[rank] - seconds, seconds))
                positions[rank] += 1
                waiting = True
    if any(position < len(order) for position, order in zip(positions, orders, strict=True)):
        raise ValueError("the schedule waits for itself")
    return Pipelined(max(clocks), tuple(busy))


def _ready(
    operation: Operation, ends: dict[Operation, float], stages: int, pp: int, send_seconds: float
) -> float | None:
    """When the input of `operation` arrives; None when what makes it has not run yet."""
    kind, stage, index = operation
    if kind == "weights" or (kind == "backward" and stage == stages - 1):
        return ends.get(Operation("backward" if kind == "weights" else "forward", stage, index))
    if kind == "forward" and stage == 0:
        return 0.0
    source = stage - 1 if kind == "forward" else stage + 1
    end = ends.get(Operation(kind, source, index))
    if end is None:
        return None
    return end if pp == 1 else end + send_seconds


def _seconds(operation: Operation, costs: Sequence[StageCost]) -> float:
    cost: StageCost = costs[operation.stage]
    return {"forward": cost.forward, "backward": cost.backward, "weights": cost.weights}[operation.kind]


def usual_in_flight(schedule: Schedule, pp: int, virtual: int) -> int:
    """Stages' activations that a rank holds: of a whole pipeline where each has one stage (ZB-H1)."""
    return {"zbv": 2 * pp, "dualpipev": 2 * pp + 1}.get(schedule, (virtual - 1) * pp + pp)


def _greedy(
    schedule: Schedule,
    costs: Sequence[StageCost],
    pp: int,
    micro_batches: int,
    send_seconds: float,
    in_flight: int,
    keeps_room: bool,
) -> tuple[Pipelined, list[Interval]] | None:
    """Weights' gradients fill what would be bubbles (Qi et al. 2023, section 3).

    A rank that is free runs the backward that is there; else a forward while memory allows; else it
    computes weights' gradients, which is what gives memory back.

    Args:
        keeps_room: a rank's first stages leave room in memory for a forward of each of its later ones, whose
            backward is what gives that of the others back.

    Returns:
        None where ranks wait for each other: links were so slow that first stages filled the memory.
    """
    stages = len(costs)
    rank_of = {stage: number for number in range(pp) for stage in stages_on(schedule, pp, number, stages)}
    held = [stages_on(schedule, pp, number, stages) for number in range(pp)]
    ranks = [_Rank(tuple(mine) if keeps_room else ()) for mine in held]
    intervals: list[Interval] = []
    ranks[rank_of[0]].arrivals[Operation("forward", 0, 0)] = 0.0
    # What each rank would run next, and when; only what it ran itself or was sent changes that.
    choices = [rank.choose(in_flight) for rank in ranks]
    for _ in range(3 * stages * micro_batches):
        possible = [(choice, number) for number, choice in enumerate(choices) if choice]
        if not possible:
            return None
        (start, operation), number = min(possible, key=lambda choice: (choice[0][0], choice[1]))
        rank = ranks[number]
        seconds = _seconds(operation, costs)
        end = rank.run(operation, start, seconds)
        intervals.append(Interval(number, operation, start, seconds))
        target = number
        kind, stage, index = operation
        following = stage + (1 if kind == "forward" else -1)
        if kind == "backward":
            rank.arrivals[Operation("weights", stage, index)] = end
        elif kind == "forward" and following == stages:
            rank.arrivals[Operation("backward", stage, index)] = end
        if kind == "forward" and stage == 0 and index + 1 < micro_batches:
            rank.arrivals[Operation("forward", 0, index + 1)] = 0.0
        if kind != "weights" and 0 <= following < stages:
            target = rank_of[following]
            delay = send_seconds if target != number else 0.0
            ranks[target].arrivals[Operation(kind, following, index)] = end + delay
        for changed in {number, target}:
            choices[changed] = ranks[changed].choose(in_flight)
    return Pipelined(max(rank.clock for rank in ranks), tuple(rank.busy for rank in ranks)), intervals


_PREFERENCE: dict[Kind, int] = {"backward": 0, "forward": 1, "weights": 2}


@dataclass
class _Rank:
    """One rank of a schedule that is made up as it goes."""

    keeps_room_for: tuple[int, ...] = ()
    """Stages for which earlier ones leave room."""
    clock: float = 0.0
    busy: float = 0.0
    held: int = 0
    """Stages' activations."""
    arrivals: dict[Operation, float] = field(default_factory=dict)
    """What it can run, and from when on."""

    def choose(self, in_flight: int) -> tuple[float, Operation] | None:
        """When it would run what; None when there is nothing."""
        possible = [
            # Deeper stages first: their results are what the others wait for.
            (max(self.clock, arrival), _PREFERENCE[kind], -stage, index, Operation(kind, stage, index))
            for (kind, stage, index), arrival in self.arrivals.items()
            if kind != "forward"
            or self.held < in_flight - sum(stage < later for later in self.keeps_room_for)
        ]
        if not possible:
            return None
        start, *_, operation = min(possible)
        return start, operation

    def run(self, operation: Operation, start: float, seconds: float) -> float:
        """Returns when it is done."""
        del self.arrivals[operation]
        self.clock = start + seconds
        self.busy += seconds
        self.held += {"forward": 1, "backward": 0, "weights": -1}[operation.kind]
        return self.clock
