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

from wanma.planner.pipeline.operation import Interval, Kind, Operation, StageCost

_KINDS: tuple[Kind, ...] = ("backward", "forward", "weights")
"""In the order in which a rank prefers them."""
_BACKWARD, _FORWARD, _WEIGHTS = range(3)


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
    """Operations are told apart by a slot: kind × stages + stage."""

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
            *(cost.backward for cost in costs),
            *(cost.forward for cost in costs),
            *(cost.weights for cost in costs),
        ]
        self.rank_of = [0] * self.stages
        for rank, mine in enumerate(held):
            for stage in mine:
                self.rank_of[stage] = rank
        endless = 3 * self.stages * micro_batches
        self.slots: list[list[tuple[int, int]]] = []
        """Of every rank, what it may run, in the order in which it prefers it; each with the activations
        below which it does."""
        for mine in held:
            deepest_first = sorted(mine, reverse=True)
            self.slots.append(
                [
                    (
                        kind * self.stages + stage,
                        in_flight - (sum(stage < other for other in mine) if keeps_room else 0)
                        if kind == _FORWARD
                        else endless,
                    )
                    for kind in (_BACKWARD, _FORWARD, _WEIGHTS)
                    for stage in deepest_first
                ]
            )
        self.arrivals: list[list[float]] = [[] for _ in self.seconds]
        """When each micro-batch's input was there. They come in their order."""
        self.next = [inf] * len(self.seconds)
        """When that of the first micro-batch was there that was not run yet."""
        ranks = range(len(held))
        self.clocks, self.busy, self.holds = [0.0 for _ in ranks], [0.0 for _ in ranks], [0 for _ in ranks]

    def run(self, wants_intervals: bool) -> Played | None:
        stages, micro_batches, rank_of, send = self.stages, self.micro_batches, self.rank_of, self.send
        clocks, busy, holds, slots = self.clocks, self.busy, self.holds, self.slots
        seconds_of, arrivals, upcoming = self.seconds, self.arrivals, self.next
        first, last, weights = stages, 2 * stages - 1, 2 * stages
        intervals: list[Interval] = []
        done = [0] * len(seconds_of)
        arrivals[first] = [0.0] * micro_batches
        upcoming[first] = 0.0
        chosen = [0] * len(clocks)  # by every rank
        chosen[rank_of[0]] = first
        starts = [inf] * len(clocks)  # of what it has chosen; endless where there is nothing
        starts[rank_of[0]] = 0.0
        for _ in range(3 * stages * micro_batches):
            start = min(starts)
            if start == inf:
                return None
            rank = starts.index(start)
            slot = chosen[rank]
            seconds = seconds_of[slot]
            index = done[slot]
            done[slot] = later = index + 1
            waiting = arrivals[slot]
            upcoming[slot] = waiting[later] if later < len(waiting) else inf
            clocks[rank] = end = start + seconds
            busy[rank] += seconds
            if wants_intervals:
                kind, stage = divmod(slot, stages)
                intervals.append(Interval(rank, Operation(_KINDS[kind], stage, index), start, seconds))
            # What this is the input of, and on which rank.
            target = rank
            if slot >= weights:
                holds[rank] -= 1
            else:
                arrives = end
                if slot >= first:
                    holds[rank] += 1
                    fed = slot + 1 if slot < last else stages - 1
                    if slot < last:
                        target = rank_of[slot + 1 - stages]
                else:
                    gradients = slot + weights
                    arrivals[gradients].append(end)
                    if upcoming[gradients] == inf:
                        upcoming[gradients] = end
                    fed = slot - 1
                    if slot:
                        target = rank_of[fed]
                if fed >= 0:
                    if target != rank:
                        arrives += send
                    arrivals[fed].append(arrives)
                    if upcoming[fed] == inf:
                        upcoming[fed] = arrives
            while True:  # both choose anew
                clock, held, best = clocks[rank], holds[rank], inf
                for slot, room in slots[rank]:
                    at = upcoming[slot]
                    if at < best and held < room:
                        chosen[rank] = slot
                        if at <= clock:
                            best = clock
                            break
                        best = at
                starts[rank] = best
                if rank == target:
                    break
                rank = target
        return Played(clocks, busy, intervals)
