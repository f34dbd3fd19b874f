"""Lower bounds on time and memory of all plans of one schedule, before any is forecast.

Time counts computing and exposed communication: a cheap bound first, on average over the ranks and on the
last rank, which begins late; then, for plans that it does not rule out, a bound over all ranks of the
pipeline. Memory counts the first rank's, which has most micro-batches in flight. Arrays are (micro-batches,
recomputes).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from wanma.job.plan.plan import Plan
from wanma.planner.forecast.plan_forecast import framework_traits_of
from wanma.planner.memory.model_states import MemoryInputs
from wanma.planner.memory.peak import (
    block_counts_of_stages,
    fragmentation_shares,
    in_flight_of_rank,
    rank_parameters_of,
    stage_buffer_bytes,
)
from wanma.planner.memory.vectorized import ShardingOptions
from wanma.planner.pipeline.lower_bounds import pipeline_lower_bound, rank_compute_seconds
from wanma.planner.pipeline.schedules import SPLIT_BACKWARD
from wanma.planner.search.cost_cache import AccumulationCosts, ComputeCosts, CostCache
from wanma.planner.search.recompute_options import RecomputeOptions

Array = npt.NDArray[np.float64]


class ScheduleBounds:
    """Bounds on the plans of a schedule with its stages, for any micro-batch size.

    Args:
        cost_cache: costs of the problem's plans.
        plan: settings of the schedule, with micro-batches of one sample.
        recompute_options: recompute options.
        sharding_options: state shardings among the plan's data ranks.
    """

    def __init__(
        self,
        cost_cache: CostCache,
        plan: Plan,
        recompute_options: RecomputeOptions,
        sharding_options: ShardingOptions,
    ) -> None:
        self.plan, self.recompute_options, self.sharding_options = plan, recompute_options, sharding_options
        self._tables = cost_cache
        self._table = cost_cache.memory_table(plan)
        stages = block_counts_of_stages(self._table, plan)
        self._numbers = plan.stages_of_pipeline_rank(0) if plan.pp > 1 else (0,)
        self._rank_parameters = rank_parameters_of(0, self._table, plan, stages)
        self._saved_bytes = self._saved_bytes_by_stage([stages[number] for number in self._numbers])

    def _saved_bytes_by_stage(self, stage_counts: list[tuple[int, ...]]) -> Array:
        """Return the saved bytes of one sample in each stage of the first rank; (stages, recomputes)."""
        shares = self.recompute_options.stage_shares(tuple(sum(counts) for counts in stage_counts)).T
        parts = [kind.activations for kind in self._table.kinds]
        costly = shares * self.recompute_options.is_selective
        stays_on_device = self.plan.offload_activations == "none"
        saved = np.zeros(shares.shape)
        for kind, part in enumerate(parts):
            blocks = np.array([[counts[kind]] for counts in stage_counts])
            plain = (1 - shares) * part.saved + shares * part.inputs
            saved += blocks * (plain * stays_on_device + costly * part.selective_saved)
        return saved

    def time_bound(
        self, compute_costs: ComputeCosts, accumulation_costs: AccumulationCosts | None, micro_batches: Array
    ) -> Array:
        """Return lower bounds on the step time in seconds; (micro-batches, recomputes).

        Args:
            compute_costs: costs of one micro-batch of each size.
            accumulation_costs: gradient accumulation for each size; None with one stage (ranks may add
                shards).
            micro_batches: micro-batches of a step; (micro-batches, 1).
        """
        plan = self.plan
        numbers = self._tables.block_counts(plan)
        sample_seconds = bubble_free_seconds(numbers, compute_costs, accumulation_costs)[
            :, None
        ] + self._recompute_seconds(compute_costs, np.array(numbers))
        average = micro_batches * sample_seconds / plan.pp
        if plan.pp == 1:
            return average
        _, counts = self._tables.stage_counts(plan)
        last = list(plan.stages_of_pipeline_rank(plan.pp - 1))
        before_last, on_last = counts[: plan.pp - 1].sum(axis=0), counts[last].sum(axis=0)
        ends = (
            compute_costs.post_block[:, :2].sum(axis=1)
            if plan.stage_count - 1 in last
            else np.zeros(len(compute_costs.post_block))
        )
        busy = micro_batches * self._with_recompute(compute_costs, ends, on_last)
        if plan.schedule in SPLIT_BACKWARD:
            last_forward: Array = (compute_costs.forward @ before_last + compute_costs.pre_block[:, 0])[
                :, None
            ]
        else:
            last_forward = self._with_recompute(
                compute_costs, compute_costs.pre_block[:, :2].sum(axis=1), before_last
            )
        # Ranks that share cores get more of them while others wait.
        return np.maximum(average, (busy + last_forward) / max(self._tables.problem.hardware.shared, 1.0))

    def pipeline_time_bound(
        self,
        compute_costs: ComputeCosts,
        accumulation_costs: AccumulationCosts,
        micro_batches: Array,
        send_seconds: Array,
    ) -> Array:
        """Return tighter lower bounds on the step time, from the pipeline's critical path, in seconds.

        Args:
            compute_costs: costs of one micro-batch of each size.
            accumulation_costs: gradient accumulation for each size.
            micro_batches: micro-batches of a step; (micro-batches, 1).
            send_seconds: seconds from one stage to the next; (micro-batches, 1).
        """
        plan = self.plan
        sizes, kind_counts = self._tables.stage_counts(plan)
        counts = kind_counts.T.astype(np.float64)  # (kinds, stages)
        forward = compute_costs.forward @ counts
        backward = (compute_costs.backward + accumulation_costs.blocks) @ counts
        weights = (compute_costs.backward_weight + accumulation_costs.blocks) @ counts
        for stage, ends, added in (
            (0, compute_costs.pre_block, accumulation_costs.pre_block),
            (-1, compute_costs.post_block, accumulation_costs.post_block),
        ):
            forward[:, stage] += ends[:, 0]
            backward[:, stage] += ends[:, 1] + added
            weights[:, stage] += ends[:, 2] + added
        traits = framework_traits_of(self._tables.problem, plan)
        if traits.blocking_sends and plan.virtual_stages > 1:
            forward = forward + send_seconds
            backward = backward + send_seconds
            send_seconds = np.zeros_like(send_seconds)
        recomputed = self.recompute_options.stage_shares(sizes)  # (recomputes, stages)
        selective = (compute_costs.selective_recompute @ counts)[:, None] * (
            recomputed * self.recompute_options.is_selective[:, None]
        )
        full = (compute_costs.full_recompute @ counts)[:, None] * (
            recomputed * self.recompute_options.is_full[:, None]
        )
        backward = backward[:, None] + selective + full
        shape, rows = backward.shape, len(self.recompute_options)

        def flat(array: Array) -> Array:
            """Return a row per variant; (micro-batches × recomputes, …)."""
            return np.repeat(array, rows, axis=0)

        flat_costs = flat(forward), backward.reshape(-1, shape[2])
        number, send = flat(micro_batches), flat(send_seconds)
        if plan.schedule in SPLIT_BACKWARD:
            weight_costs = flat(weights)
            costs: tuple[Array, Array, Array | None] = (
                flat_costs[0],
                flat_costs[1] - weight_costs,
                weight_costs,
            )
        else:
            costs = (*flat_costs, None)
        bound = pipeline_lower_bound(plan.schedule, *costs, plan.pp, number, send)
        shared = self._tables.problem.hardware.shared
        if shared > 1:  # as in `cost.step.assemble_step_time`
            busy = rank_compute_seconds(plan.schedule, flat_costs[0] + flat_costs[1], plan.pp, number).mean(
                axis=1
            )
            bound = np.maximum(bound / shared, busy)
        return bound.reshape(shape[:2])

    def _with_recompute(
        self, compute_costs: ComputeCosts, ends: Array, counts: npt.NDArray[np.int64]
    ) -> Array:
        """Return the seconds of `counts` blocks of each kind and of `ends`; (micro-batches, recomputes)."""
        blocks = (compute_costs.forward + compute_costs.backward) @ counts + ends
        total: Array = blocks[:, None] + self._recompute_seconds(compute_costs, counts)
        return total

    def _recompute_seconds(self, compute_costs: ComputeCosts, counts: npt.NDArray[np.int64]) -> Array:
        """Return the seconds that recompute adds; (micro-batches, recomputes)."""
        block_seconds = (compute_costs.selective_recompute @ counts)[
            :, None
        ] * self.recompute_options.is_selective
        block_seconds += (compute_costs.full_recompute @ counts)[:, None] * self.recompute_options.is_full
        total: Array = self.recompute_options.shares * block_seconds
        return total

    def memory_bound(self, sizes: Sequence[int], memory_inputs: Sequence[MemoryInputs]) -> Array:
        """Return lower bounds on the bytes of the largest rank; (micro-batches, recomputes).

        Args:
            sizes: micro-batch sizes, in samples.
            memory_inputs: inputs of the memory forecast of each size, which differ in the number of
                micro-batches.
        """
        plan = self.plan
        workspace_factor = 1 + fragmentation_shares(self.plan, memory_inputs[0].framework).transient
        flights = np.array(
            [in_flight_of_rank(0, plan, setting) for setting in memory_inputs], dtype=np.float64
        )
        buffer_bytes = stage_buffer_bytes(
            self._table, plan, memory_inputs[0]._replace(micro_batches=1), self._numbers
        )
        counts = np.array([setting.micro_batches for setting in memory_inputs])
        boundary = (
            buffer_bytes * counts
            if memory_inputs[0].framework.stage_buffer_per_micro_batch
            else np.full(len(counts), buffer_bytes)
        )
        transient = (flights @ self._saved_bytes + boundary[:, None]) * np.array(sizes)[:, None]
        accumulating = {setting.micro_batches > 1: setting for setting in memory_inputs}
        by_kind = {
            accumulates: self._constant_bytes(setting) for accumulates, setting in accumulating.items()
        }
        constant = np.where(counts > 1, by_kind.get(True, 0.0), by_kind.get(False, 0.0))
        bound: Array = constant[:, None] + workspace_factor * transient
        return bound

    def _constant_bytes(self, memory_inputs: MemoryInputs) -> float:
        unused = fragmentation_shares(self.plan, memory_inputs.framework)
        state_bytes = self.sharding_options.state_bytes(self._rank_parameters, memory_inputs)
        state = (
            state_bytes["parameters"]
            + state_bytes["optimizer"]
            + state_bytes["buffers"]
            + state_bytes["runtime"]
        )
        transient = state_bytes["accumulated_gradients"] * (1 + unused.transient)
        return float(
            (state + transient + state_bytes["gathered_parameters"] * unused.gathered_parameters).min()
        )


def bubble_free_seconds(
    block_counts: Sequence[int], compute_costs: ComputeCosts, accumulation_costs: AccumulationCosts | None
) -> Array:
    """Return the seconds of a micro-batch of each size in the whole model, without recompute.

    Args:
        block_counts: number of blocks of each kind in the model.
        compute_costs: costs of a micro-batch of each size.
        accumulation_costs: gradient accumulation for each size; None where it may be negligible.
    """
    counts = np.array(block_counts)
    total: Array = (compute_costs.forward + compute_costs.backward) @ counts + (
        compute_costs.pre_block + compute_costs.post_block
    )[:, :2].sum(axis=1)
    if accumulation_costs is not None:
        total = (
            total
            + accumulation_costs.blocks @ counts
            + accumulation_costs.pre_block
            + accumulation_costs.post_block
        )
    return total
