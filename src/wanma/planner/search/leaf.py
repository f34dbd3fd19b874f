"""Search leaf: plans that differ only in recompute and state sharding, evaluated as arrays.

A leaf has the memory of each plan, and a lower bound on its step time; a simulation of the pipeline schedule
then gives the time itself, of all plans with the same recompute.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from wanma.job.plan.plan import Plan
from wanma.job.sections.parallel import Recompute
from wanma.planner.cost.data_parallel import OVERLAP_SLOWDOWN
from wanma.planner.cost.offload import uses_offload
from wanma.planner.forecast.plan_forecast import (
    framework_traits_of,
    memory_inputs,
    step_components,
    time_unavailable_reason,
)
from wanma.planner.forecast.step_overhead import step_overhead
from wanma.planner.memory.vectorized import ShardingOptions, peak_memory_grid
from wanma.planner.pipeline.lower_bounds import pipeline_lower_bound, rank_compute_seconds
from wanma.planner.pipeline.schedules import SPLIT_BACKWARD
from wanma.planner.search.cost_cache import Array, CostCache, Integers, LayerUnitCost, LinearCost
from wanma.planner.search.recompute_options import RecomputeOptions


class SearchLeaf:
    """Plans of one search leaf as arrays of shape (recomputes, state shardings).

    Memory is computed at once, times by `compute_bounds`.

    Args:
        cost_cache: costs of the problem's plans.
        plan: settings that all plans of the leaf share.
        recompute_options: recompute options, one per row.
        sharding_options: state shardings among the plan's data ranks, one per column.
    """

    def __init__(
        self,
        cost_cache: CostCache,
        plan: Plan,
        recompute_options: RecomputeOptions,
        sharding_options: ShardingOptions,
    ) -> None:
        self.plan, self.recompute_options, self.sharding_options = plan, recompute_options, sharding_options
        problem = cost_cache.problem
        setting = memory_inputs(problem, plan)
        self.memory = peak_memory_grid(
            cost_cache.memory_table(plan), plan, recompute_options.options, sharding_options, setting
        )
        """Memory of the largest rank in bytes; (recomputes, state shardings)."""
        self.time_bounds = np.zeros(self.memory.shape)
        """Lower bound on the step time in seconds; 0 where rates are unknown, and before `compute_bounds`."""
        self._step_seconds = np.zeros(self.memory.shape)
        """Lower bound on the step time without wait for data and without saving, in seconds."""
        self._overhead = step_overhead(problem, plan)
        self._tables = cost_cache
        self._variants: list[tuple[list[int], _Variant]] = []

    def compute_bounds(self, wanted_columns: npt.NDArray[np.bool_]) -> None:
        """Fill `least` for the wanted columns, and keep the costs that they share."""
        problem, states = self._tables.problem, self.sharding_options
        if time_unavailable_reason(problem, self.plan) is not None:
            return
        for group in states.equal_cost_groups:
            columns = [column for column in group if wanted_columns[column]]
            if not columns:
                continue
            variant = _Variant(self._tables, states.apply(columns[0], self.plan), self.recompute_options)
            plans = [states.plans[column] for column in columns]
            self._step_seconds[:, columns] = variant.step_seconds(self._tables, plans)
            self.time_bounds[:, columns] = self._overhead.with_stalls(self._step_seconds[:, columns])
            self._variants.append((columns, variant))

    def simulate_row(self, row: int) -> Array:
        """Simulate the recompute of number `row`, and return the step seconds of every state sharding."""
        for columns, variant in self._variants:
            if not variant.is_simulated[row]:
                excess = variant.simulation_excess(self._tables, row, self.plan_of(row, columns[0]))
                self._step_seconds[row, columns] += excess
                self.time_bounds[row, columns] = self._overhead.with_stalls(self._step_seconds[row, columns])
        seconds: Array = self.time_bounds[row]
        return seconds

    def plan_of(self, row: int, column: int) -> Plan:
        recompute, share = self.recompute_options[row]
        return self.sharding_options.apply(
            column, self.plan.with_changes(recompute=recompute, recompute_share=share)
        )


class _Variant:
    """Stage costs of state shardings whose blocks cost the same, under every recompute."""

    def __init__(self, cost_cache: CostCache, plan: Plan, recompute_options: RecomputeOptions) -> None:
        self._plan = plan
        self._micro_batches = plan.gradient_accumulation_steps(cost_cache.problem.global_batch)
        kinds = {
            kind: cost_cache.block_costs(plan, kind, self._micro_batches)
            for kind in {kind for kind, _ in recompute_options}
        }
        ends = cost_cache.end_layer_costs(plan, self._micro_batches)
        sizes, counts = cost_cache.stage_counts(plan)
        block_costs = kinds[recompute_options[0][0]]
        zeros = [0.0] * len(block_costs)
        if not uses_offload(plan):
            forward = _sum_by_stage(
                [block.forward_without_recompute for block in block_costs],
                counts,
                ends,
                "forward_without_recompute",
            )
        else:
            forward = _sum_by_stage(zeros, counts, ends, "forward_without_recompute")
            lines = {kind: [block.forward for block in kinds[kind]] for kind in kinds}
            forward = forward + self._of_blocks(recompute_options, lines, counts, sizes)
        backward = _sum_by_stage(zeros, counts, ends, "backward_without_recompute")
        lines = {kind: [block.backward for block in kinds[kind]] for kind in kinds}
        backward = backward + self._of_blocks(recompute_options, lines, counts, sizes)
        send = cost_cache.stage_send_seconds(plan) if plan.pp > 1 else 0.0
        if framework_traits_of(cost_cache.problem, plan).blocking_sends and plan.virtual_stages > 1:
            forward, backward, send = forward + send, backward + send, 0.0
        forward_costs: Array = np.broadcast_to(forward, backward.shape)
        costs: tuple[Array, Array, Array | None] = (forward_costs, backward, None)
        if plan.pp > 1 and plan.schedule in SPLIT_BACKWARD:
            weights = _sum_by_stage(
                [block.backward_weight for block in block_costs], counts, ends, "backward_weight"
            )
            weight_seconds = np.broadcast_to(weights, backward.shape)
            costs = (forward_costs, backward - weight_seconds, weight_seconds)
        busy = rank_compute_seconds(plan.schedule, forward + backward, plan.pp, self._micro_batches)
        self._mean_busy_seconds = busy.mean(axis=1)
        self._threads_per_core = cost_cache.problem.hardware.shared
        bounds = pipeline_lower_bound(plan.schedule, *costs, plan.pp, self._micro_batches, send)
        self._pipeline_bounds = bounds
        if self._threads_per_core > 1:
            self._pipeline_bounds = np.array(
                [self._on_shared_cores(*numbered_bound) for numbered_bound in enumerate(bounds)]
            )
        self.is_simulated = np.full(len(recompute_options), plan.pp == 1)
        """Mask of the recomputes whose lower bound is already their time."""
        rows, busiest = np.arange(len(recompute_options)), busy.argmax(axis=1)
        self._busiest_forward = rank_compute_seconds(plan.schedule, forward_costs, plan.pp, 1)[rows, busiest]
        self._busiest_backward = busy[rows, busiest] / self._micro_batches - self._busiest_forward
        parameters = _sum_by_stage([block.parameters for block in block_costs], counts, ends, "parameters")
        self._parameters = float(rank_compute_seconds(plan.schedule, parameters[None], plan.pp, 1).max())

    @staticmethod
    def _of_blocks(
        recompute_options: RecomputeOptions,
        lines_of: dict[Recompute, list[tuple[LinearCost, LinearCost]]],
        counts: Integers,
        sizes: tuple[int, ...],
    ) -> Array:
        """Return the seconds of one pass through every stage's blocks; (recomputes, stages).

        Args:
            recompute_options: recompute options.
            lines_of: lines of each kind of block by its recomputed share.
            counts: blocks of each kind; (stages, kinds).
            sizes: blocks of every stage.
        """
        share = recompute_options.stage_shares(sizes)
        total = np.zeros(share.shape)
        for number in range(counts.shape[1]):
            lines = np.array([lines_of[kind][number] for kind, _ in recompute_options])
            first, second = (lines[:, line, :1] + lines[:, line, 1:] * share for line in (0, 1))
            total += counts[:, number] * np.maximum(first, second)
        return total

    def step_seconds(self, cost_cache: CostCache, plans: Sequence[Plan]) -> Array:
        """Return lower bounds on the step time in seconds; (recomputes, state shardings)."""
        exchanges = np.array([cost_cache.step_exchange_cost(state, self._parameters) for state in plans])
        reduce, gather, optimizer = exchanges.T
        hidden = np.array([cost_cache.is_overlapped(state) for state in plans])
        if hidden.any():
            reduce = np.where(hidden, _exposed(reduce, self._busiest_backward[:, None]), reduce)
            gather = np.where(hidden, _exposed(gather, self._busiest_forward[:, None]), gather)
        seconds: Array = self._pipeline_bounds[:, None] + reduce + gather + optimizer
        return seconds

    def simulation_excess(self, cost_cache: CostCache, row: int, plan: Plan) -> float:
        """Return the seconds that the simulated pipeline takes beyond its lower bound, to be added once.

        Args:
            cost_cache: costs of the problem's plans.
            row: number of the recompute.
            plan: plan under that recompute, with the state sharding of one of the variant's plans.
        """
        self.is_simulated[row] = True
        # The same costs as the forecast's to the last bit, so that it reuses this simulation.
        parts = step_components(cost_cache.problem, plan)
        simulated = cost_cache.simulate_pipeline(*parts.pipeline)
        return self._on_shared_cores(row, simulated.seconds) - float(self._pipeline_bounds[row])

    def _on_shared_cores(self, row: int, seconds: float) -> float:
        """Return the seconds on ranks that share cores, as in `assemble_step_time`."""
        return (
            seconds
            if self._threads_per_core <= 1
            else max(seconds / self._threads_per_core, float(self._mean_busy_seconds[row]))
        )


def _sum_by_stage(
    blocks: Sequence[float],
    counts: Integers,
    ends: tuple[tuple[LayerUnitCost, ...], tuple[LayerUnitCost, ...]],
    attribute: str,
) -> Array:
    """Return the sum of `attribute` over each stage's blocks and end layers; (stages,)."""
    total: Array = np.asarray(counts @ np.array(blocks), dtype=np.float64)
    for stage, stage_ends in ((0, ends[0]), (-1, ends[1])):
        total[stage] += sum(getattr(end, attribute) for end in stage_ends)
    return total


def _exposed(communication: Array, compute: Array) -> Array:
    """Return the exposed part of communication beside computing, as `data_parallel.exposed`."""
    exposed: Array = np.maximum(0.0, communication - compute) + OVERLAP_SLOWDOWN * np.minimum(
        communication, compute
    )
    return exposed
