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
from wanma.planner.cost.data_parallel import DataParallelCost, data_parallel_key, overlaps_gradient_reduction
from wanma.planner.cost.layer_cost import LayerCost
from wanma.planner.cost.model_cost import BlockGroup, ModelCost, model_cost_key
from wanma.planner.cost.step import StageLayers, optimizer_seconds, stage_cost
from wanma.planner.forecast.plan_forecast import (
    block_groups_of,
    framework_traits_of,
    memory_inputs,
    model_cost_of,
    stage_send_seconds,
)
from wanma.planner.forecast.problem import PlanningProblem
from wanma.planner.memory.memory_table import MemoryTable, build_memory_table, memory_table_key
from wanma.planner.memory.model_states import MemoryInputs
from wanma.planner.pipeline.schedules import blocks_of_stages
from wanma.planner.pipeline.simulation import PipelineTime, StageCost, simulate_pipeline

Array = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
Value = TypeVar("Value")


class LinearCost(NamedTuple):
    """Seconds as a linear function of the recomputed share of a block."""

    intercept: float
    slope: float


class LayerUnitCost(NamedTuple):
    """Cost of one block or end layer and one micro-batch on one rank, in seconds."""

    forward: tuple[LinearCost, LinearCost]
    """Forward seconds by the recomputed share of a block: the larger of two lines.

    It varies only with activation offload: the more is recomputed, the less is offloaded.
    """
    backward_weight: float
    """Seconds of the weight gradients within backward, where a schedule computes them separately."""
    backward: tuple[LinearCost, LinearCost]
    """Backward seconds by the recomputed share of a block: the larger of two lines.

    Backward hides communication beside it up to the share from which nothing is left to hide.
    """
    parameters: float
    """Parameters that are gathered and reduced."""

    @property
    def forward_without_recompute(self) -> float:
        """Return the forward seconds without recompute."""
        return max(line.intercept for line in self.forward)

    @property
    def backward_without_recompute(self) -> float:
        """Return the backward seconds without recompute."""
        return max(line.intercept for line in self.backward)


class ComputeCosts(NamedTuple):
    """Seconds of computing and exposed communication without the work of data parallelism.

    Casts, sums and exchanges of weights and gradients are left out. Arrays are (micro-batch sizes, kinds of
    blocks).
    """

    forward: Array
    backward: Array
    backward_weight: Array
    """Seconds of the weight gradients within backward."""
    selective_recompute: Array
    """Seconds that selective recompute of a whole block adds to its backward."""
    full_recompute: Array
    """Seconds that full recompute of a whole block adds to its backward."""
    pre_block: Array
    """Seconds of the layers before the blocks: forward, backward, weight gradients; (sizes, 3)."""
    post_block: Array
    """Seconds of the layers after the blocks, likewise."""


class AccumulationCosts(NamedTuple):
    """Seconds to accumulate a micro-batch's gradients, where a rank accumulates unsharded ones."""

    blocks: Array
    """Seconds by kind of block; (numbers of micro-batches, kinds of blocks)."""
    pre_block: Array
    post_block: Array


class StepExchangeCost(NamedTuple):
    """Seconds of data-parallel communication and optimizer once a step, for the largest rank's parameters."""

    reduce: float
    gather: float
    optimizer: float


_RECOMPUTE_POLICIES: tuple[Recompute, ...] = ("selective", "full")
_SLOPE_SHARE = 1e-3
"""Share by which a line's slope is measured; no stage recomputes less of its blocks, except none."""


class CostCache:
    """Cache of costs of a problem's plans, keyed by the settings that a cost depends on."""

    def __init__(self, problem: PlanningProblem) -> None:
        self.problem = problem
        self._values: dict[Hashable, object] = {}

    def _memoize(self, key: Hashable, make: Callable[[], Value]) -> Value:
        if key not in self._values:
            self._values[key] = make()
        return self._values[key]  # type: ignore[return-value]  # `make` of this key made it

    def model_cost(self, plan: Plan) -> ModelCost:
        """Return the layer costs of the model, with the cost of full recompute whatever the plan's policy."""
        key = ("pieces", model_cost_key(plan))
        return self._memoize(key, lambda: model_cost_of(self.problem, plan.with_changes(recompute="full")))

    def _blocks(self, plan: Plan, recompute: Recompute) -> tuple[BlockGroup, ...]:
        if recompute != "selective":
            return self.model_cost(plan).blocks
        key = ("selective", model_cost_key(plan))
        return self._memoize(
            key, lambda: block_groups_of(self.problem, plan.with_changes(recompute="selective"))
        )

    def block_costs(self, plan: Plan, recompute: Recompute, micro_batches: int) -> tuple[LayerUnitCost, ...]:
        """Return the cost of one block of each kind."""
        key = ("blocks", model_cost_key(plan), recompute, data_parallel_key(plan), micro_batches)

        def make() -> tuple[LayerUnitCost, ...]:
            runs_again = recompute != "none"
            return tuple(
                self._layer_unit_cost(kind.cost, kind.parameters, plan, micro_batches, runs_again)
                for kind in self._blocks(plan, recompute)
            )

        return self._memoize(key, make)

    def block_counts(self, plan: Plan) -> tuple[int, ...]:
        """Return the number of blocks of each kind in the model."""
        return tuple(kind.block_count for kind in self.model_cost(plan).blocks)

    def stage_counts(self, plan: Plan) -> tuple[tuple[int, ...], Integers]:
        """Return the number of blocks of every stage, and of each kind in it, as `block_counts_by_stage`."""
        numbers = self.block_counts(plan)
        key = ("stages", numbers, plan.stage_cuts, plan.pp > 1, plan.stage_count)

        def make() -> tuple[tuple[int, ...], Integers]:
            sizes = blocks_of_stages(sum(numbers), plan) if plan.pp > 1 else [sum(numbers)]
            return tuple(sizes), block_counts_by_stage(np.array(sizes), numbers)

        return self._memoize(key, make)

    def end_layer_costs(
        self, plan: Plan, micro_batches: int
    ) -> tuple[tuple[LayerUnitCost, ...], tuple[LayerUnitCost, ...]]:
        """Return the costs of the layers before the blocks, and of those after them."""
        key = ("ends", model_cost_key(plan), data_parallel_key(plan), micro_batches)

        def make() -> tuple[tuple[LayerUnitCost, ...], tuple[LayerUnitCost, ...]]:
            pieces = self.model_cost(plan)
            before, after = (
                tuple(
                    self._layer_unit_cost(end.cost, end.parameters, plan, micro_batches, None) for end in ends
                )
                for ends in (pieces.pre_block, pieces.post_block)
            )
            return before, after

        return self._memoize(key, make)

    def _layer_unit_cost(
        self,
        layer_cost: LayerCost,
        parameters: float,
        plan: Plan,
        micro_batches: int,
        is_recomputed: bool | None,
    ) -> LayerUnitCost:
        """Return the cost of a block, or of an end layer.

        Args:
            layer_cost: layer cost.
            parameters: parameters of the layer.
            plan: the plan.
            micro_batches: micro-batches of a step.
            is_recomputed: True for a block that is recomputed; None for an end layer.
        """
        machine, traits = self.problem.hardware, framework_traits_of(self.problem, plan)
        data = DataParallelCost(plan, machine, traits, self.problem.workload.trainable_share)
        split_plan = plan.with_changes(schedule="zbv")

        def cost(share: float) -> tuple[float, float, float]:
            blocks = ((layer_cost, 1, parameters),) if is_recomputed is not None else ()
            ends = () if blocks else ((layer_cost, parameters),)
            layers = StageLayers(blocks, share, ends, parameters)
            stage = stage_cost(layers, split_plan, machine, traits, data, micro_batches)[0]
            return (
                stage.forward,
                stage.backward + stage.backward_weight,
                stage.backward_weight,
            )

        no_recompute = cost(0.0)
        if not is_recomputed:
            forward_cost, flat = (LinearCost(seconds, 0.0) for seconds in no_recompute[:2])
            return LayerUnitCost((forward_cost, forward_cost), no_recompute[2], (flat, flat), parameters)
        low, high, full = cost(_SLOPE_SHARE), cost(1 - _SLOPE_SHARE), cost(1.0)
        forward, backward = (
            _linear_costs(no_recompute[direction], low[direction], high[direction], full[direction])
            for direction in (0, 1)
        )
        return LayerUnitCost(forward, no_recompute[2], backward, parameters)

    def compute_costs(self, plan: Plan, micro_batch_sizes: Sequence[int]) -> ComputeCosts:
        """Return the costs without data parallelism for micro-batches of `micro_batch_sizes` samples."""
        key = model_cost_key(plan)
        costs = [
            self._memoize(("bare", key, size), partial(self._compute_costs, plan, size))
            for size in micro_batch_sizes
        ]
        return ComputeCosts(*(np.array(numbers) for numbers in zip(*costs, strict=True)))

    def _compute_costs(
        self, plan: Plan, micro_batch_size: int
    ) -> tuple[list[float] | tuple[float, float], ...]:
        # No trained parameters: nothing is accumulated, reduced or cast. No offload: its exposed time is not
        # linear in the recomputed share.
        plain = plan.with_changes(
            micro_batch=micro_batch_size,
            shard="optimizer",
            offload_parameters="none",
            offload_optimizer="none",
            offload_activations="none",
        )
        machine, traits = self.problem.hardware, framework_traits_of(self.problem, plan)
        data = DataParallelCost(plain, machine, traits, 0.0)
        split_plan = plain.with_changes(schedule="zbv")

        def cost(part: LayerCost, share: float) -> tuple[float, float, float]:
            layers = StageLayers(((part, 1, 0.0),), share, (), 0.0)
            stage = stage_cost(layers, split_plan, machine, traits, data)[0]
            return (
                stage.forward,
                stage.backward + stage.backward_weight,
                stage.backward_weight,
            )

        pieces = self.model_cost(plain)
        blocks = [cost(kind.cost, 0.0) for kind in pieces.blocks]
        forward, backward, weights = ([block[part] for block in blocks] for part in range(3))
        selective, full = (
            [
                cost(kind.cost, 1.0)[1] - unrecomputed
                for kind, unrecomputed in zip(self._blocks(plain, policy), backward, strict=True)
            ]
            for policy in _RECOMPUTE_POLICIES
        )
        before, after = (
            [sum(column) for column in zip(*(cost(end.cost, 0.0) for end in ends), strict=True)] or [0.0] * 3
            for ends in (pieces.pre_block, pieces.post_block)
        )
        return forward, backward, weights, selective, full, before, after

    def accumulation_costs(self, plan: Plan, micro_batches: Sequence[int]) -> AccumulationCosts:
        """Return the seconds of gradient accumulation for each number of micro-batches in a step."""
        key = ("adding", plan.tp, plan.ep, plan.pp > 1, plan.precision, plan.compile)
        costs = [
            self._memoize((*key, number), partial(self._accumulation_costs, plan, number))
            for number in micro_batches
        ]
        return AccumulationCosts(*(np.array(numbers) for numbers in zip(*costs, strict=True)))

    def _accumulation_costs(self, plan: Plan, micro_batches: int) -> tuple[list[float], float, float]:
        problem, pieces = self.problem, self.model_cost(plan)
        sharded_plan = plan.with_changes(shard="optimizer")
        data = DataParallelCost(
            sharded_plan,
            problem.hardware,
            framework_traits_of(problem, plan),
            problem.workload.trainable_share,
        )

        def seconds(parameters: float) -> float:
            return data.accumulation_seconds(parameters, micro_batches)

        before, after = (
            sum(seconds(end.parameters) for end in ends) for ends in (pieces.pre_block, pieces.post_block)
        )
        return [seconds(kind.parameters) for kind in pieces.blocks], before, after

    def step_exchange_cost(self, plan: Plan, parameters: float) -> StepExchangeCost:
        """Return the seconds once a step of a rank with `parameters`, counted before `tp` and sharding."""
        split = (plan.pp > 1, plan.tp, plan.shard_group_size, plan.replicate_group_size, plan.shard)
        offload = (plan.offload_parameters, plan.offload_optimizer)
        key = ("exchange", *split, plan.precision, plan.compile, *offload, parameters)
        return self._memoize(key, lambda: self._step_exchange_cost(plan, parameters))

    def _step_exchange_cost(self, plan: Plan, parameters: float) -> StepExchangeCost:
        machine = self.problem.hardware
        traits = framework_traits_of(self.problem, plan)
        trained = self.problem.workload.trainable_share
        reduce, gather = DataParallelCost(plan, machine, traits, trained).reduce_gather_per_step(parameters)
        return StepExchangeCost(reduce, gather, optimizer_seconds(parameters, plan, machine, traits, trained))

    def is_overlapped(self, plan: Plan) -> bool:
        """Return whether reduction and gather overlap with the last backward and the first forward."""
        return framework_traits_of(self.problem, plan).data_overlap and overlaps_gradient_reduction(
            plan, self.problem.hardware
        )

    def stage_send_seconds(self, plan: Plan) -> float:
        """Return the seconds to send a stage's output to the next rank."""
        split = (plan.tp, plan.cp, plan.sequence_parallel, plan.world_size // plan.pp, plan.micro_batch)
        return self._memoize(
            ("boundary", *split, plan.precision), lambda: stage_send_seconds(self.problem, plan)
        )

    def memory_inputs(self, plan: Plan, micro_batches: int) -> MemoryInputs:
        """Return the inputs of a memory forecast (`memory_inputs`) for `micro_batches` a step."""
        key = ("setting", plan.compile, micro_batches)
        return self._memoize(
            key, lambda: memory_inputs(self.problem, plan)._replace(micro_batches=micro_batches)
        )

    def simulate_pipeline(
        self,
        schedule: Schedule,
        costs: Sequence[StageCost],
        pp: int,
        micro_batches: int,
        send_seconds: float,
        in_flight: int | None,
    ) -> PipelineTime:
        """Simulate a pipeline schedule (`simulate_pipeline`), memoized for the forecasts of kept plans."""
        arguments = (schedule, tuple(costs), pp, micro_batches, send_seconds, in_flight)
        return self._memoize(("play", *arguments), lambda: simulate_pipeline(*arguments))

    def memory_table(self, plan: Plan) -> MemoryTable:
        """Return the memory table of the plan's model, as `forecast_memory` takes it."""
        problem = self.problem
        return self._memoize(
            ("memory", memory_table_key(plan)),
            lambda: build_memory_table(
                problem.workload, plan, problem.dimensions, framework_traits_of(problem, plan)
            ),
        )


def _linear_costs(no_recompute: float, low: float, high: float, full: float) -> tuple[LinearCost, LinearCost]:
    """Return two lines through the cost of a block at four recomputed shares: the first and the last two.

    Args:
        none: seconds without recompute.
        some: seconds at share `_SLOPE_SHARE`.
        most: seconds at share 1 - `_SLOPE_SHARE`.
        every: seconds with all recomputed.
    """
    slope = (full - high) / _SLOPE_SHARE
    return LinearCost(no_recompute, (low - no_recompute) / _SLOPE_SHARE), LinearCost(full - slope, slope)


def block_counts_by_stage(blocks_per_stage: Integers, block_counts: Sequence[int]) -> Integers:
    """Return the number of blocks of each kind in every stage; (stages, kinds).

    Args:
        blocks_per_stage: number of blocks of every stage.
        block_counts: number of blocks of each kind, in the model's order.
    """
    ends = np.cumsum(block_counts)
    starts = ends - np.array(block_counts)
    bounds = np.concatenate([[0], np.cumsum(blocks_per_stage)])[:, None]
    before = np.clip(bounds - starts, 0, ends - starts)
    counts: Integers = before[1:] - before[:-1]
    return counts
