"""Schedules and plan counts of a split, before any plan is evaluated.

Plans are counted without listing them. Pure functions, without torch.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

from wanma.job.plan.plan import Plan
from wanma.job.sections.parallel import Schedule
from wanma.planner.cost.model_cost import model_cost_key
from wanma.planner.forecast.plan_forecast import time_unavailable_reason
from wanma.planner.memory.vectorized import ShardingOptions
from wanma.planner.pipeline.schedules import accepts_micro_batches
from wanma.planner.search.cost_cache import CostCache
from wanma.planner.search.recompute_options import RecomputeOptions
from wanma.planner.search.schedule_bounds import bubble_free_seconds
from wanma.planner.search.space import (
    MeshShape,
    SearchSpace,
    StateSharding,
    mesh_micro_batch_sizes,
    recompute_options,
    sharding_plans,
    state_shardings,
    with_schedules,
)

_ASYMPTOTIC_MICRO_BATCH = 1 << 20
"""Samples of a micro-batch so large that costs per micro-batch vanish."""


class PlanEnumeration:
    """Enumeration of a space's schedules by split, with the parts that many splits share.

    Args:
        space: the search space.
        cost_cache: costs of the problem's plans.
    """

    def __init__(self, space: SearchSpace, cost_cache: CostCache) -> None:
        self._space, self._tables = space, cost_cache
        self.is_time_unknown = time_unavailable_reason(cost_cache.problem, space.base_plan) is not None
        """True if no plan has a forecast of time."""
        self._rows: dict[int, MicroBatchOptions] = {}
        self._samples: dict[object, float] = {}
        self._options_by_key: dict[object, list[ScheduleOption]] = {}

    def mesh_options(self, mesh_shape: MeshShape) -> MeshOptions:
        """Return the data that all plans of a mesh shape share."""
        if mesh_shape.data_ranks not in self._rows:
            self._rows[mesh_shape.data_ranks] = MicroBatchOptions(self._space, mesh_shape)
        return MeshOptions(
            mesh_shape,
            list(state_shardings(self._space, mesh_shape)),
            self._rows[mesh_shape.data_ranks],
            self._space,
        )

    def time_bound(self, split: Plan) -> float:
        """Return a lower bound on a step's seconds: no bubbles, and samples of an endless micro-batch."""
        if self.is_time_unknown:
            return 0.0
        batch = self._tables.problem.global_batch
        return self._seconds_per_sample(split) * batch / split.data_parallel_size / split.pp

    def _seconds_per_sample(self, split: Plan) -> float:
        """Return the seconds of a sample in an endless micro-batch, on a rank that holds the whole model."""
        key = model_cost_key(split)
        if key not in self._samples:
            numbers = self._tables.block_counts(split)
            bare = self._tables.compute_costs(split, (_ASYMPTOTIC_MICRO_BATCH,))
            self._samples[key] = float(bubble_free_seconds(numbers, bare, None)[0]) / _ASYMPTOTIC_MICRO_BATCH
        return self._samples[key]

    def schedules_of(self, split: Plan, mesh_options: MeshOptions) -> list[ScheduleOption]:
        """Return all schedules, stages and recomputes with which the split can run."""
        key = (split.pp, split.tp > 1, split.compile)
        if key not in self._options_by_key:
            self._options_by_key[key] = [
                ScheduleOption(
                    plan.schedule, plan.virtual_stages, plan.stage_cuts, recompute_options(self._space, plan)
                )
                for plan in with_schedules(self._space, split, self._tables.problem.workload)
            ]
        return [
            option._replace(sizes=mesh_options.sizes_of(option.schedule))
            for option in self._options_by_key[key]
        ]

    def count(self, split: Plan, mesh_options: MeshOptions) -> int:
        """Return the number of plans of the split."""
        key = (split.tp > 1, split.compile)
        if key not in mesh_options.counts:
            mesh_options.counts[key] = sum(map(mesh_options.count, self.schedules_of(split, mesh_options)))
        return mesh_options.counts[key]

    def undominated_schedules(self, split: Plan, mesh_options: MeshOptions) -> list[ScheduleOption]:
        """Return `schedules_of` without those that the compiled split beats.

        A fused operator never takes longer, nor saves more memory, and no fixed order of operations ends
        later when some are shorter.
        """
        schedules = self.schedules_of(split, mesh_options)
        if split.compile or True not in self._space.compile or split.device == "cpu" or self.is_time_unknown:
            return schedules
        compiled = replace(split, compile=True)
        if self._seconds_per_sample(compiled) >= self._seconds_per_sample(split):
            return schedules
        may_be = {
            (schedule.schedule, schedule.virtual_stages): schedule.recompute_options
            for schedule in self.schedules_of(compiled, mesh_options)
        }
        return [
            schedule._replace(
                recompute_options=RecomputeOptions(
                    option for option in schedule.recompute_options if option not in dominated
                )
            )
            for schedule in schedules
            for dominated in (set(may_be.get((schedule.schedule, schedule.virtual_stages), ())),)
        ]


class ScheduleOption(NamedTuple):
    """Pipeline schedule with its stages, recomputes and micro-batch sizes."""

    schedule: Schedule
    virtual_stages: int
    stage_cuts: tuple[int, ...]
    recompute_options: RecomputeOptions
    sizes: tuple[int, ...] = ()
    """Micro-batch sizes, in samples, that the schedule can run."""


class MeshOptions:
    """Data that all plans of a mesh shape share."""

    def __init__(
        self,
        mesh_shape: MeshShape,
        state_shardings: list[StateSharding],
        micro_batch_options: MicroBatchOptions,
        space: SearchSpace,
    ) -> None:
        self.mesh_shape = mesh_shape
        self.state_shardings = state_shardings
        self.micro_batch_options = micro_batch_options
        self._space = space
        self.counts: dict[object, int] = {}
        """Number of plans of a split, by the settings it depends on."""

    @cached_property
    def sharding_options(self) -> ShardingOptions:
        return ShardingOptions(sharding_plans(self._space, self.mesh_shape))

    def count(self, schedule_option: ScheduleOption) -> int:
        return len(schedule_option.recompute_options) * len(schedule_option.sizes) * len(self.state_shardings)

    def sizes_of(self, schedule: Schedule) -> tuple[int, ...]:
        """Return the micro-batch sizes that `schedule` can run, in samples, as `schedule_accepts_batches`."""
        return (
            self.micro_batch_options.sizes
            if self.mesh_shape.pp == 1
            else self.micro_batch_options.sizes_of(schedule, self.mesh_shape.pp)
        )


class MicroBatchOptions:
    """Micro-batch sizes of the samples of one rank, shared by mesh shapes with equally many data ranks."""

    def __init__(self, space: SearchSpace, mesh_shape: MeshShape) -> None:
        self.sizes = tuple(mesh_micro_batch_sizes(space, mesh_shape))
        rows = [math.ceil(batch / mesh_shape.data_ranks) for batch in space.global_batches]
        self.micro_batch_counts = {
            size: tuple(max(math.ceil(row / size), 1) for row in rows) for size in self.sizes
        }
        """Numbers of micro-batches by size, for each global batch (`Plan.gradient_accumulation_steps`)."""
        self._sizes: dict[tuple[Schedule, int], tuple[int, ...]] = {}

    def sizes_of(self, schedule: Schedule, pp: int) -> tuple[int, ...]:
        """Return the micro-batch sizes, in samples, that a schedule can run on `pp` ranks."""
        key = (schedule, pp)
        if key not in self._sizes:
            self._sizes[key] = tuple(
                size
                for size in self.sizes
                if all(
                    accepts_micro_batches(schedule, pp, number) for number in self.micro_batch_counts[size]
                )
            )
        return self._sizes[key]


def accumulation(plan: Plan, micro_batch: int, batch: int) -> int:
    """Return `Plan.gradient_accumulation_steps` for micro-batches of `micro_batch` samples."""
    return max(math.ceil(math.ceil(batch / plan.data_parallel_size) / micro_batch), 1)
