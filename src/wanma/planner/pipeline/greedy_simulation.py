"""Greedy pipeline schedule: ranks choose their next operation during simulation, to fill bubbles.

Weight gradients fill the bubbles of schedules with split backward (Qi et al. 2023, section 3). A free rank
runs a backward whose input is there; else a forward while memory allows; else it computes weight gradients,
which free memory. Deeper stages come first, because other ranks wait for their results. Searches simulate
often, so that the code is written for speed: numbers in lists, and a rank chooses again only where its
candidates changed. Pure functions, without torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import NamedTuple

from wanma.planner.pipeline.operation import Interval, Operation, OperationKind, StageCost

_KINDS: tuple[OperationKind, ...] = ("backward", "forward", "weight gradient")
"""Kinds of operations in the order in which a rank prefers them."""
_BACKWARD, _FORWARD, _WEIGHTS = range(3)


class SimulatedPipeline(NamedTuple):
    """Result of one simulated schedule."""

    end_seconds: list[float]
    """Time at which each rank is done, in seconds."""
    compute_seconds: list[float]
    """Seconds in which each rank computes."""
    intervals: list[Interval]


def simulate_greedy_schedule(
    costs: Sequence[StageCost],
    stages_by_rank: Sequence[Sequence[int]],
    micro_batches: int,
    send_seconds: float,
    in_flight: int,
    reserves_memory: bool,
    records_intervals: bool = False,
) -> SimulatedPipeline | None:
    """Simulate a greedy schedule.

    Args:
        stages_by_rank: stages of every rank.
        in_flight: largest number of stages' activations that a rank may hold.
        reserves_memory: a rank's first stages leave memory for a forward of each of its later ones, whose
            backward frees the activations of the others.
        records_intervals: collect every operation as an interval.

    Returns:
        None where ranks wait for each other: links were so slow that first stages filled the memory.
    """
    return _GreedySimulation(
        costs, stages_by_rank, micro_batches, send_seconds, in_flight, reserves_memory
    ).run(records_intervals)


class _GreedySimulation:
    """Simulation of one greedy schedule, with operations numbered by slot: kind × stages + stage."""

    def __init__(
        self,
        costs: Sequence[StageCost],
        stages_by_rank: Sequence[Sequence[int]],
        micro_batches: int,
        send_seconds: float,
        in_flight: int,
        reserves_memory: bool,
    ) -> None:
        self.stages, self.micro_batches, self.send = len(costs), micro_batches, send_seconds
        self.seconds = [
            *(cost.backward for cost in costs),
            *(cost.forward for cost in costs),
            *(cost.backward_weight for cost in costs),
        ]
        self.rank_of = [0] * self.stages
        for rank, rank_stages in enumerate(stages_by_rank):
            for stage in rank_stages:
                self.rank_of[stage] = rank
        unlimited = 3 * self.stages * micro_batches
        self.slots: list[list[tuple[int, int]]] = []
        """(slot, room) of every rank, in the order of preference; a slot runs while activations are fewer
        than its room."""
        for rank_stages in stages_by_rank:
            deepest_first = sorted(rank_stages, reverse=True)
            self.slots.append(
                [
                    (
                        kind * self.stages + stage,
                        in_flight
                        - (sum(stage < later_stage for later_stage in rank_stages) if reserves_memory else 0)
                        if kind == _FORWARD
                        else unlimited,
                    )
                    for kind in (_BACKWARD, _FORWARD, _WEIGHTS)
                    for stage in deepest_first
                ]
            )
        self.arrivals: list[list[float]] = [[] for _ in self.seconds]
        """Arrival times of each slot's inputs, by micro-batch; they come in this order."""
        self.next_arrivals = [inf] * len(self.seconds)
        """Arrival time of each slot's first input that was not used yet, in seconds; infinite if there is
        none."""
        ranks = range(len(stages_by_rank))
        self.clocks = [0.0 for _ in ranks]
        self.busy = [0.0 for _ in ranks]
        self.held_activations = [0 for _ in ranks]

    def run(self, records_intervals: bool) -> SimulatedPipeline | None:  # noqa: PLR0915  # one hot loop
        """Simulate the schedule; return None where ranks wait for each other."""
        stages, micro_batches, rank_of, send = self.stages, self.micro_batches, self.rank_of, self.send
        clocks, busy, held_counts, slots = self.clocks, self.busy, self.held_activations, self.slots
        seconds_of, arrivals, upcoming = self.seconds, self.arrivals, self.next_arrivals
        first, last, weights = stages, 2 * stages - 1, 2 * stages
        intervals: list[Interval] = []
        done = [0] * len(seconds_of)
        arrivals[first] = [0.0] * micro_batches
        upcoming[first] = 0.0
        chosen = [0] * len(clocks)  # by every rank
        chosen[rank_of[0]] = first
        starts = [inf] * len(clocks)  # of the chosen slot; infinite without one
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
            slot_arrivals = arrivals[slot]
            upcoming[slot] = slot_arrivals[later] if later < len(slot_arrivals) else inf
            clocks[rank] = end = start + seconds
            busy[rank] += seconds
            if records_intervals:
                kind, stage = divmod(slot, stages)
                intervals.append(Interval(rank, Operation(_KINDS[kind], stage, index), start, seconds))
            # The slot that takes this output as its input, and its rank.
            target = rank
            if slot >= weights:
                held_counts[rank] -= 1
            else:
                arrival = end
                if slot >= first:
                    held_counts[rank] += 1
                    target_slot = slot + 1 if slot < last else stages - 1
                    if slot < last:
                        target = rank_of[slot + 1 - stages]
                else:
                    gradients = slot + weights
                    arrivals[gradients].append(end)
                    if upcoming[gradients] == inf:
                        upcoming[gradients] = end
                    target_slot = slot - 1
                    if slot:
                        target = rank_of[target_slot]
                if target_slot >= 0:
                    if target != rank:
                        arrival += send
                    arrivals[target_slot].append(arrival)
                    if upcoming[target_slot] == inf:
                        upcoming[target_slot] = arrival
            while True:  # both ranks choose again
                clock, in_flight, best = clocks[rank], held_counts[rank], inf
                for slot, room in slots[rank]:
                    at = upcoming[slot]
                    if at < best and in_flight < room:
                        chosen[rank] = slot
                        if at <= clock:
                            best = clock
                            break
                        best = at
                starts[rank] = best
                if rank == target:
                    break
                rank = target
        return SimulatedPipeline(clocks, busy, intervals)
