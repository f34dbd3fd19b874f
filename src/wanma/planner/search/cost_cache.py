"""Memoized costs that many plans share, which make a search fast.

All figures are those of `cost.step`, `cost.decoder` and `memory.peak`, which alone compute them.
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
from wanma.planner.pipeline.schedules import blocks_of_stages
from wanma.planner.pipeline.simulation import Pipelined, StageCost, pipeline_seconds

Array = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
Made = TypeVar("Made")


class Line(NamedTuple):
    """Seconds as a linear function of the recomputed share of a block."""

    at_none: float
    slope: float


class UnitCost(NamedTuple):
    """Cost of one block or end layer and one micro-batch on one rank, in seconds."""

    forward: tuple[Line, Line]
    """Forward seconds by the recomputed share of a block: the larger of two lines.

    It varies only with activation offload: the more is recomputed, the less is offloaded.
    """
    weights: float
    """Seconds of the weight gradients within backward, where a schedule computes them separately."""
    backward: tuple[Line, Line]
    """Backward seconds by the recomputed share of a block: the larger of two lines.

    Backward hides communication beside it up to the share from which nothing is left to hide.
    """
    parameters: float
    """Parameters that are gathered and reduced."""

    @property
    def forward_alone(self) -> float:
        """Return the forward seconds without recompute."""
        return max(line.at_none for line in self.forward)

    @property
    def backward_alone(self) -> float:
        """Return the backward seconds without recompute."""
        return max(line.at_none for line in self.backward)


class Bare(NamedTuple):
    """Seconds of computing and exposed communication without the work of data parallelism.

    Casts, sums and exchanges of weights and gradients are left out. Arrays are (micro-batch sizes, kinds of
    blocks).
    """

    forward: Array
    backward: Array
    weights: Array
    """Seconds of the weight gradients within backward."""
    selective: Array
    """Seconds that selective recompute of a whole block adds to its backward."""
    full: Array
    """Seconds that full recompute of a whole block adds to its backward."""
    before: Array
    """Seconds of the layers before the blocks: forward, backward, weight gradients; (sizes, 3)."""
    after: Array
    """Seconds of the layers after the blocks, likewise."""


class Adding(NamedTuple):
    """Seconds to accumulate a micro-batch's gradients, where a rank accumulates unsharded ones."""

    blocks: Array
    """Seconds by kind of block; (numbers of micro-batches, kinds of blocks)."""
    before: Array
    after: Array


class Exchange(NamedTuple):
    """Seconds of data-parallel communication and optimizer once a step, for the largest rank's parameters."""

    reduce: float
    gather: float
    optimizer: float


_AGAIN: tuple[Recompute, ...] = ("selective", "full")
_STEP = 1e-3
"""Share by which a line's slope is measured; no stage recomputes less of its blocks, except none."""


class Tables:
    """Cache of costs of a problem's plans, keyed by the settings that a cost depends on."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._made: dict[Hashable, object] = {}

    def _once(self, key: Hashable, make: Callable[[], Made]) -> Made:
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]  # type: ignore[return-value]  # `make` of this key made it

    def pieces(self, plan: Plan) -> Pieces:
        """Return the layer costs of the model, with the cost of full recompute whatever the plan's policy."""
        key = ("pieces", pieces_key(plan))
        return self._once(key, lambda: pieces_of(self.problem, plan.but(recompute="full")))

    def _blocks(self, plan: Plan, recompute: Recompute) -> tuple[Blocks, ...]:
        if recompute != "selective":
            return self.pieces(plan).blocks
        key = ("selective", pieces_key(plan))
        return self._once(key, lambda: blocks_of(self.problem, plan.but(recompute="selective")))

    def blocks(self, plan: Plan, recompute: Recompute, micro_batches: int) -> tuple[UnitCost, ...]:
        """Return the cost of one block of each kind."""
        key = ("blocks", pieces_key(plan), recompute, block_key(plan), micro_batches)

        def make() -> tuple[UnitCost, ...]:
            runs_again = recompute != "none"
            return tuple(
                self._unit(kind.part, kind.parameters, plan, micro_batches, runs_again)
                for kind in self._blocks(plan, recompute)
            )

        return self._once(key, make)

    def block_numbers(self, plan: Plan) -> tuple[int, ...]:
        """Return the number of blocks of each kind in the model."""
        return tuple(kind.number for kind in self.pieces(plan).blocks)

    def stage_counts(self, plan: Plan) -> tuple[tuple[int, ...], Integers]:
        """Return the number of blocks of every stage, and of each kind in it, as `counts_of`."""
        numbers = self.block_numbers(plan)
        key = ("stages", numbers, plan.stage_cuts, plan.pp > 1, plan.stages)

        def make() -> tuple[tuple[int, ...], Integers]:
            sizes = blocks_of_stages(sum(numbers), plan) if plan.pp > 1 else [sum(numbers)]
            return tuple(sizes), counts_of(np.array(sizes), numbers)

        return self._once(key, make)

    def ends(self, plan: Plan, micro_batches: int) -> tuple[tuple[UnitCost, ...], tuple[UnitCost, ...]]:
        """Return the costs of the layers before the blocks, and of those after them."""
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
        """Return the cost of a block, or of an end layer.

        Args:
            part: layer cost.
            parameters: parameters of the layer.
            plan: the plan.
            micro_batches: micro-batches of a step.
            runs_again: True for a block that is recomputed; None for an end layer.
        """
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
        """Return the costs without data parallelism for micro-batches of `sizes` samples."""
        key = pieces_key(plan)
        found = [self._once(("bare", key, size), partial(self._bare, plan, size)) for size in sizes]
        return Bare(*(np.array(numbers) for numbers in zip(*found, strict=True)))

    def _bare(self, plan: Plan, size: int) -> tuple[list[float] | tuple[float, float], ...]:
        # No trained parameters: nothing is accumulated, reduced or cast. No offload: its exposed time is not
        # linear in the recomputed share.
        plain = plan.but(
            micro_batch=size,
            shard="optimizer",
            offload_parameters="none",
            offload_optimizer="none",
            offload_activations="none",
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
        """Return the seconds of gradient accumulation for each number of micro-batches in a step."""
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
        """Return the seconds once a step of a rank with `parameters`, counted before `tp` and sharding."""
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
        """Return whether reduction and gather overlap with the last backward and the first forward."""
        return software(self.problem, plan).data_overlap and hides_sums(plan, self.problem.machine)

    def boundary(self, plan: Plan) -> float:
        """Return the seconds to send a stage's output to the next rank."""
        split = (plan.tp, plan.cp, plan.sequence_parallel, plan.world_size // plan.pp, plan.micro_batch)
        return self._once(("boundary", *split, plan.precision), lambda: seconds_between(self.problem, plan))

    def setting(self, plan: Plan, micro_batches: int) -> Setting:
        """Return the inputs of a memory forecast (`memory_setting`) for `micro_batches` a step."""
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
        """Simulate a pipeline schedule (`pipeline_seconds`), memoized for the forecasts of kept plans."""
        asked = (schedule, tuple(costs), pp, micro_batches, send_seconds, in_flight)
        return self._once(("play", *asked), lambda: pipeline_seconds(*asked))

    def memory(self, plan: Plan) -> MemoryTable:
        """Return the memory table of the plan's model, as `forecast_memory` takes it."""
        problem = self.problem
        return self._once(
            ("memory", table_key(plan)),
            lambda: tabulate(problem.workload, plan, problem.dimensions, software(problem, plan)),
        )


def _lines(none: float, some: float, most: float, every: float) -> tuple[Line, Line]:
    """Return two lines through the cost of a block at four recomputed shares: the first and the last two.

    Args:
        none: seconds without recompute.
        some: seconds at share `_STEP`.
        most: seconds at share 1 - `_STEP`.
        every: seconds with all recomputed.
    """
    slope = (every - most) / _STEP
    return Line(none, (some - none) / _STEP), Line(every - slope, slope)


def counts_of(sizes: Integers, numbers: Sequence[int]) -> Integers:
    """Return the number of blocks of each kind in every stage; (stages, kinds).

    Args:
        sizes: number of blocks of every stage.
        numbers: number of blocks of each kind, in the model's order.
    """
    ends = np.cumsum(numbers)
    starts = ends - np.array(numbers)
    bounds = np.concatenate([[0], np.cumsum(sizes)])[:, None]
    before = np.clip(bounds - starts, 0, ends - starts)
    counts: Integers = before[1:] - before[:-1]
    return counts
