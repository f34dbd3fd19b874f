"""A pipeline whose ranks decide as they go: schedules that take backward apart fill their bubbles so.

Weights' gradients fill what would be bubbles (Qi et al. 2023, section 3). A rank that is free runs the
backward that is there; else a forward while memory allows; else it computes weights' gradients, which is what
gives memory back. Deeper stages come first: their results are what the others wait for. Searches play this
often, so that it is written for speed: numbers in lists, and a rank's choice is made again only where
something of it changed. Pure functions, without torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import NamedTuple

from wanma.planner.cost.operation import Interval, Kind, Operation, StageCost

_KINDS: tuple[Kind, ...] = ("backward", "forward", "weights")
"""In the order in which a rank prefers them."""


class Played(NamedTuple):
    ends: list[float]
    """When each rank is done."""
    busy: list[float]
    """Seconds in which each rank computes."""
    intervals: list[Interval]


def play_greedily(
    costs: Sequence[StageCost],
    held: Sequence[Sequence[int]],
    micro_batches: int,
    send_seconds: float,
    in_flight: int,
    keeps_room: bool,
    wants_intervals: bool = False,
) -> Played | None:
    """
    Args:
        held: stages of every rank.
        in_flight: most stages' activations that a rank may hold.
        keeps_room: a rank's first stages leave room in memory for a forward of each of its later ones, whose
            backward is what gives that of the others back.

    Returns:
        None where ranks wait for each other: links were so slow that first stages filled the memory.
    """
    return _Play(costs, held, micro_batches, send_seconds, in_flight, keeps_room).run(wants_intervals)


class _Play:
    def __init__(
        self,
        costs: Sequence[StageCost],
        held: Sequence[Sequence[int]],
        micro_batches: int,
        send_seconds: float,
        in_flight: int,
        keeps_room: bool,
    ) -> None:
        self.stages, self.micro_batches, self.send = len(costs), micro_batches, send_seconds
        self.seconds = [
            [cost.backward for cost in costs],
            [cost.forward for cost in costs],
            [cost.weights for cost in costs],
        ]
        """By kind and stage."""
        self.rank_of = [0] * self.stages
        for rank, mine in enumerate(held):
            for stage in mine:
                self.rank_of[stage] = rank
        self.deepest_first = [sorted(mine, reverse=True) for mine in held]
        later = [
            [sum(stage < other for other in mine) if keeps_room else 0 for stage in deep]
            for mine, deep in zip(held, self.deepest_first, strict=True)
        ]
        self.may_hold = [[in_flight - room for room in rooms] for rooms in later]
        """Activations below which a rank runs a forward of each of its stages."""
        self.arrivals: list[list[list[float]]] = [[[] for _ in costs] for _ in _KINDS]
        """By kind and stage: when each micro-batch's input was there. They come in their order."""
        self.done = [[0] * self.stages for _ in _KINDS]
        ranks = range(len(held))
        self.clocks, self.busy, self.holds = [0.0 for _ in ranks], [0.0 for _ in ranks], [0 for _ in ranks]

    def choose(self, rank: int) -> tuple[float, int, int]:
        """When the rank would run an operation of which kind and stage; endless when there is none."""
        clock, stages = self.clocks[rank], self.deepest_first[rank]
        best, best_kind, best_stage = inf, 0, 0
        for kind in (0, 1, 2):
            arrivals, done = self.arrivals[kind], self.done[kind]
            for number, stage in enumerate(stages):
                at = done[stage]
                if at >= len(arrivals[stage]) or (
                    kind == 1 and self.holds[rank] >= self.may_hold[rank][number]
                ):
                    continue
                start = arrivals[stage][at]
                if start <= clock:
                    if best > clock:
                        return clock, kind, stage
                elif start < best:
                    best, best_kind, best_stage = start, kind, stage
        return best, best_kind, best_stage

    def run(self, wants_intervals: bool) -> Played | None:
        last, micro_batches, rank_of, send = self.stages - 1, self.micro_batches, self.rank_of, self.send
        (ready_b, ready_f, ready_w), clocks, busy, holds = self.arrivals, self.clocks, self.busy, self.holds
        intervals: list[Interval] = []
        ready_f[0].append(0.0)
        choices = [self.choose(rank) for rank in range(len(clocks))]
        starts = [choice[0] for choice in choices]
        for _ in range(3 * self.stages * micro_batches):
            start = min(starts)
            if start == inf:
                return None
            rank = starts.index(start)
            _, kind, stage = choices[rank]
            seconds = self.seconds[kind][stage]
            index = self.done[kind][stage]
            self.done[kind][stage] = index + 1
            clocks[rank] = end = start + seconds
            busy[rank] += seconds
            if wants_intervals:
                intervals.append(Interval(rank, Operation(_KINDS[kind], stage, index), start, seconds))
            target = rank
            if kind == 1:
                holds[rank] += 1
                if stage == 0 and index + 1 < micro_batches:
                    ready_f[0].append(0.0)
                if stage == last:
                    ready_b[last].append(end)
                else:
                    target = rank_of[stage + 1]
                    ready_f[stage + 1].append(end + send if target != rank else end)
            elif kind == 0:
                ready_w[stage].append(end)
                if stage:
                    target = rank_of[stage - 1]
                    ready_b[stage - 1].append(end + send if target != rank else end)
            else:
                holds[rank] -= 1
            choices[rank] = choice = self.choose(rank)
            starts[rank] = choice[0]
            if target != rank:
                choices[target] = choice = self.choose(target)
                starts[target] = choice[0]
        return Played(clocks, busy, intervals)
