"""Costs that many plans share, each computed once: what a search is fast by.

All numbers are those of `step`, `cost.decoder` and `memory.ranks`, the only places that know them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from wanma.job.plan.plan import Plan
from wanma.job.sections.parallel import Recompute, Schedule
from wanma.planner.cost.data_parallel import DataParallel, block_key, hides_sums
from wanma.planner.cost.decoder_layers import PartTime
from wanma.planner.cost.model_cost import Blocks, Pieces, pieces_key
from wanma.planner.cost.step import Stage, optimizer_seconds, stage_cost
from wanma.planner.forecast.plan_forecast import blocks_of, memory_setting, pieces_of, software, trained_share
from wanma.planner.forecast.plan_forecast import boundary_seconds as seconds_between
from wanma.planner.forecast.problem import Problem
from wanma.planner.memory.memory_table import MemoryTable, table_key, tabulate
from wanma.planner.memory.peak import Setting
from wanma.planner.pipeline.simulation import Pipelined, StageCost, pipeline_seconds

Array = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
Made = TypeVar("Made")


class Line(NamedTuple):
    at_none: float
    slope: float


class UnitCost(NamedTuple):
    """Of one block or end and micro-batch, on one rank."""

    forward: tuple[Line, Line]
    """As `backward`: activations that are offloaded are fewer where more runs again; else it is always the
    same."""
    weights: float
    """Of backward, the weights' gradients where a schedule computes them on their own."""
    backward: tuple[Line, Line]
    """By the share that runs again: the larger of two lines. Backward hides what is exchanged beside it up to
    the point from which there is nothing left to hide."""
    parameters: float
    """That are gathered and reduced."""

    @property
    def forward_alone(self) -> float:
        """Where nothing runs again."""
        return max(line.at_none for line in self.forward)

    @property
    def backward_alone(self) -> float:
        """Where nothing runs again."""
        return max(line.at_none for line in self.backward)


class Bare(NamedTuple):
    """What computing takes and waits for, without what data ranks add: casts, sums and exchanges of weights
    and gradients. Of micro-batches of several sizes; (micro-batches, kinds of blocks)."""

    forward: Array
    backward: Array
    weights: Array
    """Of backward, the weights' gradients."""
    selective: Array
    """What selective recompute of a whole block adds to its backward."""
    full: Array
    """Likewise full recompute."""
    before: Array
    """Forward, backward and of it weights' gradients of what is before the blocks; (micro-batches, 3)."""
    after: Array
    """Of what is after them, likewise."""


class Adding(NamedTuple):
    """What adding each micro-batch's gradients to those before takes, where a rank adds whole ones."""

    blocks: Array
    """(micro-batches, kinds of blocks)."""
    before: Array
    after: Array


class Exchange(NamedTuple):
    """Once a step, of the fullest rank's parameters."""

    reduce: float
    gather: float
    optimizer: float


_AGAIN: tuple[Recompute, ...] = ("selective", "full")
_STEP = 1e-3
"""Share by which a line's slope is told; no stage recomputes less of its blocks, but for nothing."""


class Tables:
    """Costs of a problem's plans, which are told apart only by what a cost depends on."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._made: dict[Hashable, object] = {}

    def _once(self, key: Hashable, make: Callable[[], Made]) -> Made:
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]  # type: ignore[return-value]  # what this key's maker made

    def pieces(self, plan: Plan) -> Pieces:
        """With what full recompute would run again, whatever the plan's."""
        key = ("pieces", pieces_key(plan))
        return self._once(key, lambda: pieces_of(self.problem, plan.but(recompute="full")))

    def _blocks(self, plan: Plan, recompute: Recompute) -> tuple[Blocks, ...]:
        if recompute != "selective":
            return self.pieces(plan).blocks
        key = ("selective", pieces_key(plan))
        return self._once(key, lambda: blocks_of(self.problem, plan.but(recompute="selective")))

    def blocks(self, plan: Plan, recompute: Recompute, micro_batches: int) -> tuple[UnitCost, ...]:
        """One block of each kind."""
        key = ("blocks", pieces_key(plan), recompute, block_key(plan), micro_batches)

        def make() -> tuple[UnitCost, ...]:
            runs_again = recompute != "none"
            return tuple(
                self._unit(kind.part, kind.parameters, plan, micro_batches, runs_again)
                for kind in self._blocks(plan, recompute)
            )

        return self._once(key, make)

    def block_numbers(self, plan: Plan) -> tuple[int, ...]:
        """Blocks of each kind in the model."""
        return tuple(kind.number for kind in self.pieces(plan).blocks)

    def ends(self, plan: Plan, micro_batches: int) -> tuple[tuple[UnitCost, ...], tuple[UnitCost, ...]]:
        """What is before the blocks, and what is after them."""
        key = ("ends", pieces_key(plan), block_key(plan), micro_batches)

        def make() -> tuple[tuple[UnitCost, ...], tuple[UnitCost, ...]]:
            pieces = self.pieces(plan)
            before, after = (
                tuple(self._unit(end.part, end.parameters, plan, micro_batches, None) for end in ends)
                for ends in (pieces.before, pieces.after)
            )
            return before, after

        return self._once(key, make)

    def _unit(
        self, part: PartTime, parameters: float, plan: Plan, micro_batches: int, runs_again: bool | None
    ) -> UnitCost:
        """Of a block, or of an end, for which there is nothing to say of `runs_again`."""
        machine, habits = self.problem.machine, software(self.problem, plan)
        data = DataParallel(plan, machine, habits, trained_share(self.problem))
        apart = plan.but(schedule="zbv")

        def cost(share: float) -> tuple[float, float, float]:
            blocks = ((part, 1, parameters),) if runs_again is not None else ()
            ends = () if blocks else ((part, parameters),)
            alone = Stage(blocks, share, ends, parameters)
            found = stage_cost(alone, apart, machine, habits, data, micro_batches)[0]
            return found.forward, found.backward + found.weights, found.weights

        none = cost(0.0)
        if not runs_again:
            ahead, flat = (Line(seconds, 0.0) for seconds in none[:2])
            return UnitCost((ahead, ahead), none[2], (flat, flat), parameters)
        some, most, every = cost(_STEP), cost(1 - _STEP), cost(1.0)
        forward, backward = (_lines(none[way], some[way], most[way], every[way]) for way in (0, 1))
        return UnitCost(forward, none[2], backward, parameters)

    def bare(self, plan: Plan, sizes: Sequence[int]) -> Bare:
        """Of micro-batches of these sizes."""
        key = pieces_key(plan)
        found = [self._once(("bare", key, size), partial(self._bare, plan, size)) for size in sizes]
        return Bare(*(np.array(numbers) for numbers in zip(*found, strict=True)))

    def _bare(self, plan: Plan, size: int) -> tuple[list[float] | tuple[float, float], ...]:
        # Nothing that is trained: there is nothing to add up, to reduce or to cast. And nothing is offloaded:
        # what waits for that does not grow in a straight line with what recomputes.
        plain = plan.but(
            micro_batch=size,
            shard="optimizer",
            offload_parameters="nothing",
            offload_optimizer="nothing",
            offload_activations="nothing",
        )
        machine, habits = self.problem.machine, software(self.problem, plan)
        data = DataParallel(plain, machine, habits, 0.0)
        apart = plain.but(schedule="zbv")

        def cost(part: PartTime, share: float) -> tuple[float, float, float]:
            alone = Stage(((part, 1, 0.0),), share, (), 0.0)
            found = stage_cost(alone, apart, machine, habits, data)[0]
            return found.forward, found.backward + found.weights, found.weights

        pieces = self.pieces(plain)
        blocks = [cost(kind.part, 0.0) for kind in pieces.blocks]
        forward, backward, weights = ([one[part] for one in blocks] for part in range(3))
        selective, full = (
            [
                cost(kind.part, 1.0)[1] - alone
                for kind, alone in zip(self._blocks(plain, again), backward, strict=True)
            ]
            for again in _AGAIN
        )
        before, after = (
            [sum(column) for column in zip(*(cost(end.part, 0.0) for end in ends), strict=True)] or [0.0] * 3
            for ends in (pieces.before, pieces.after)
        )
        return forward, backward, weights, selective, full, before, after

    def adding(self, plan: Plan, micro_batches: Sequence[int]) -> Adding:
        """Of so many micro-batches a step."""
        key = ("adding", plan.tp, plan.ep, plan.pp > 1, plan.precision, plan.compile)
        found = [self._once((*key, number), partial(self._adding, plan, number)) for number in micro_batches]
        return Adding(*(np.array(numbers) for numbers in zip(*found, strict=True)))

    def _adding(self, plan: Plan, micro_batches: int) -> tuple[list[float], float, float]:
        problem, pieces = self.problem, self.pieces(plan)
        whole = plan.but(shard="optimizer")
        data = DataParallel(whole, problem.machine, software(problem, plan), trained_share(problem))

        def seconds(parameters: float) -> float:
            return data.adding_seconds(parameters, micro_batches)

        before, after = (
            sum(seconds(end.parameters) for end in ends) for ends in (pieces.before, pieces.after)
        )
        return [seconds(kind.parameters) for kind in pieces.blocks], before, after

    def exchange(self, plan: Plan, parameters: float) -> Exchange:
        """Of a rank that holds so many `parameters`, counted before `tp` and sharding."""
        split = (plan.pp > 1, plan.tp, plan.shard_ranks, plan.replicas, plan.shard)
        away = (plan.offload_parameters, plan.offload_optimizer)
        key = ("exchange", *split, plan.precision, plan.compile, *away, parameters)
        return self._once(key, lambda: self._exchange(plan, parameters))

    def _exchange(self, plan: Plan, parameters: float) -> Exchange:
        machine, habits, trained = (
            self.problem.machine,
            software(self.problem, plan),
            trained_share(self.problem),
        )
        reduce, gather = DataParallel(plan, machine, habits, trained).once_a_step(parameters)
        return Exchange(reduce, gather, optimizer_seconds(parameters, plan, machine, habits, trained))

    def is_overlapped(self, plan: Plan) -> bool:
        """Whether reducing and gathering run beside the last backward and the first forward."""
        return software(self.problem, plan).data_overlap and hides_sums(plan, self.problem.machine)

    def boundary(self, plan: Plan) -> float:
        """What a stage's output takes to the next rank."""
        split = (plan.tp, plan.cp, plan.sequence, plan.world_size // plan.pp, plan.micro_batch)
        return self._once(("boundary", *split, plan.precision), lambda: seconds_between(self.problem, plan))

    def setting(self, plan: Plan, micro_batches: int) -> Setting:
        """As `memory_setting`, of so many micro-batches a step."""
        key = ("setting", plan.compile, micro_batches)
        return self._once(
            key, lambda: memory_setting(self.problem, plan)._replace(micro_batches=micro_batches)
        )

    def play(
        self,
        schedule: Schedule,
        costs: Sequence[StageCost],
        pp: int,
        micro_batches: int,
        send_seconds: float,
        in_flight: int | None,
    ) -> Pipelined:
        """As `pipeline_seconds`: what a search has played, the forecasts of what it keeps need not."""
        asked = (schedule, tuple(costs), pp, micro_batches, send_seconds, in_flight)
        return self._once(("play", *asked), lambda: pipeline_seconds(*asked))

    def memory(self, plan: Plan) -> MemoryTable:
        """As `forecast_memory` takes it."""
        problem = self.problem
        return self._once(
            ("memory", table_key(plan)),
            lambda: tabulate(problem.workload, plan, problem.dimensions, software(problem, plan)),
        )


def _lines(none: float, some: float, most: float, every: float) -> tuple[Line, Line]:
    """Through what a block takes where a share of it recomputes: none of it, a `_STEP`, all but that, all."""
    slope = (every - most) / _STEP
    return Line(none, (some - none) / _STEP), Line(every - slope, slope)


def counts_of(sizes: Integers, numbers: Sequence[int]) -> Integers:
    """Blocks of each kind in every stage; (stages, kinds).

    Args:
        sizes: blocks of every stage.
        numbers: blocks of each kind, in the model's order.
    """
    ends = np.cumsum(numbers)
    starts = ends - np.array(numbers)
    bounds = np.concatenate([[0], np.cumsum(sizes)])[:, None]
    before = np.clip(bounds - starts, 0, ends - starts)
    counts: Integers = before[1:] - before[:-1]
    return counts
