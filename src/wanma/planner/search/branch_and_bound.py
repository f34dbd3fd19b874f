"""Best-first branch and bound over a search space.

Every plan is evaluated, or left out by a lower bound that exceeds the best plans' time. Groups of plans wait
in the order of their lower bounds. The first group is divided, down to a search leaf (`SearchLeaf`), whose
plans are forecast. Once the fastest plans are known, all that still waits is left out together. Pure
functions, without torch.
"""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from wanma.job.plan.plan import MESH_DIMS, Plan
from wanma.planner.forecast.plan_forecast import forecast_plan
from wanma.planner.forecast.problem import PlanningProblem
from wanma.planner.memory.vectorized import ShardingOptions
from wanma.planner.search.cost_cache import Array, CostCache
from wanma.planner.search.enumeration import MeshOptions, PlanEnumeration, ScheduleOption, accumulation
from wanma.planner.search.leaf import SearchLeaf
from wanma.planner.search.pareto_front import ParetoFront
from wanma.planner.search.recompute_options import RecomputeOptions
from wanma.planner.search.result import Candidate, SearchResult, build_pareto_front
from wanma.planner.search.schedule_bounds import ScheduleBounds
from wanma.planner.search.space import (
    SHARD_LEVELS,
    MeshShape,
    SearchSpace,
    compute_splits,
    enumerate_mesh_shapes,
)

Mask = npt.NDArray[np.bool_]

MAX_SLOWDOWN = 1.5
"""Largest step time on the Pareto front, as a multiple of the fastest plan's."""
FRONT_TOLERANCE = 0.01
"""Share by which a plan must be smaller or faster than each of the Pareto front to join it."""
EQUAL_TIME_FACTOR = 1 + 1e-9
"""Ratio of two step times below which they count as equal."""


def search(
    problem: PlanningProblem,
    space: SearchSpace,
    *,
    keep: int = 10,
    tolerance: float = FRONT_TOLERANCE,
    max_slowdown: float = MAX_SLOWDOWN,
) -> SearchResult:
    """Search a space for the fastest plans that fit, and the Pareto front of memory and step time.

    In a space with several numbers of devices, plans on fewer of them count where they are faster than every
    plan on more.

    Args:
        problem: the planning problem.
        space: plans to search.
        keep: largest number of candidates, each of another mesh shape (pp, data ranks, cp, tp, ep).
        tolerance: for every plan there is one on the front that is at most this share slower and larger.
        max_slowdown: largest step time on the front, as a multiple of the fastest plan's.

    Returns:
        the fastest plan of each mesh shape; of plans with equal times, the simplest, then the smallest.
    """
    began = time.perf_counter()
    searching = _BranchAndBound(problem, space, keep, tolerance, max_slowdown)
    for devices in sorted(space.world_sizes, reverse=True):
        searching.expand_world_size(devices)
    return replace(searching.result(), seconds=time.perf_counter() - began)


def candidate_order(candidate: Candidate) -> tuple[object, ...]:
    """Return the sort key of candidates: faster first, then simpler, then smaller, then exact."""
    return _candidate_order(candidate.seconds, candidate.plan, candidate.memory_bytes)


def _candidate_order(seconds: float, plan: Plan, memory_bytes: float) -> tuple[object, ...]:
    size, changed = float(f"{memory_bytes:.6g}"), len(plan.approximate)
    return (float(f"{seconds:.9g}"), *complexity(plan), size, changed, str(plan.to_json()))


def complexity(plan: Plan) -> tuple[int, ...]:
    """Return a plan's complexity as a sort key: ranks, split dimensions, optional features, shard level."""
    split = sum(getattr(plan, axis) > 1 for axis in (*MESH_DIMS, "ep"))
    extras = (plan.recompute != "none") + plan.sequence_parallel + plan.compile + (plan.virtual_stages > 1)
    return plan.world_size, split, extras, SHARD_LEVELS.index(plan.shard)


@dataclass(frozen=True)
class _OpenGroup:
    """Group of plans of one mesh shape that waits to be divided."""

    grid: MeshShape
    count: int
    divide: Callable[[], None]


class _BoundedGroup(NamedTuple):
    """Lower bounds on the plans of one schedule; arrays are (micro-batches, recomputes)."""

    sketch: ScheduleBounds
    sizes: list[int]
    """Micro-batch sizes, in samples."""
    seconds: Array
    memory: Array

    def select(self, rows: Mask) -> _BoundedGroup:
        sizes = [size for size, is_kept in zip(self.sizes, rows, strict=True) if is_kept]
        return _BoundedGroup(self.sketch, sizes, self.seconds[rows], self.memory[rows])


@dataclass(frozen=True)
class _LeafPlan:
    """One plan of a search leaf, by its row (recompute) and column (state sharding)."""

    core: SearchLeaf
    row: int
    column: int

    @property
    def plan(self) -> Plan:
        return self.core.plan_of(self.row, self.column)


class _BranchAndBound:
    def __init__(
        self, problem: PlanningProblem, space: SearchSpace, keep: int, tolerance: float, max_slowdown: float
    ) -> None:
        self.problem, self.space, self.keep, self.max_slowdown = problem, space, keep, max_slowdown
        self.cost_cache = CostCache(problem)
        self.enumeration = PlanEnumeration(space, self.cost_cache)
        self.front = ParetoFront[_LeafPlan](tolerance)
        self.best: dict[MeshShape, tuple[float, tuple[object, ...], Plan]] = {}
        """Fastest plan that fits by mesh shape: its seconds, sort key and plan."""
        self.too_large: list[tuple[float, int, Callable[[], SearchLeaf]]] = []
        """Lower bounds on the bytes of search leaves, kept while no plan fits."""
        self.plan_count = 0
        self.pruned = Counter[str]()
        self._heap: list[tuple[float, int, _OpenGroup]] = []
        self._order = itertools.count()
        self._slowest_kept_seconds = math.inf
        """Step time of the slowest candidate that is kept, in seconds."""
        self._fastest = math.inf
        self._fastest_on_more_devices = math.inf
        """Step time of the fastest plan on more devices, in seconds."""

    # ------------------------------------------------------------ groups of plans, largest first

    def expand_world_size(self, world_size: int) -> None:
        """Search all plans on `world_size` devices."""
        self._fastest_on_more_devices = self._fastest
        for grid in enumerate_mesh_shapes(replace(self.space, world_sizes=(world_size,))):
            mesh_options = self.enumeration.mesh_options(grid)
            if not mesh_options.state_shardings or not mesh_options.micro_batch_options.sizes:
                continue
            for split in compute_splits(self.space, grid):
                self._expand_split(mesh_options, split)
        while self._heap:
            bound, _, group = heapq.heappop(self._heap)
            if self._is_relevant(group.grid, bound):
                group.divide()
            else:
                self.pruned["time"] += group.count

    def _expand_split(self, mesh_options: MeshOptions, split: Plan) -> None:
        count = self.enumeration.count(split, mesh_options)
        self.plan_count += count
        bound = self.enumeration.time_bound(split)
        if self._is_relevant(mesh_options.mesh_shape, bound):
            schedules = self.enumeration.undominated_schedules(split, mesh_options)
            remaining = sum(map(mesh_options.count, schedules))
            self.pruned["beaten"] += count - remaining
            divide = partial(self._divide_split, mesh_options, split, schedules)
            self._push(bound, _OpenGroup(mesh_options.mesh_shape, remaining, divide))
        else:
            self.pruned["time"] += count

    def _push(self, bound: float, group: _OpenGroup) -> None:
        heapq.heappush(self._heap, (bound, next(self._order), group))

    def _is_relevant(self, mesh_shape: MeshShape, seconds: float) -> bool:
        """Return whether a plan with this step time could be a candidate or on the Pareto front."""
        return seconds <= self._candidate_limit(mesh_shape) or seconds <= self._front_limit

    def _candidate_limit(self, mesh_shape: MeshShape) -> float:
        """Return the step time, in seconds, beyond which a plan of `mesh_shape` is no candidate."""
        shape_best = self.best[mesh_shape][0] if mesh_shape in self.best else math.inf
        return min(shape_best, self._slowest_kept_seconds, self._fastest_on_more_devices) * EQUAL_TIME_FACTOR

    @property
    def _front_limit(self) -> float:
        return min(self._fastest * self.max_slowdown, self._fastest_on_more_devices)

    def _divide_split(self, mesh_options: MeshOptions, split: Plan, schedules: list[ScheduleOption]) -> None:
        for option in schedules:
            if not option.sizes or not option.recompute_options:
                continue
            plan = split.with_changes(
                schedule=option.schedule, virtual_stages=option.virtual_stages, stage_cuts=option.stage_cuts
            )
            self._divide_schedule(mesh_options, plan, option)

    def _divide_schedule(self, mesh_options: MeshOptions, plan: Plan, option: ScheduleOption) -> None:
        grid, shared = mesh_options.mesh_shape, mesh_options.sharding_options
        sketch = ScheduleBounds(self.cost_cache, plan, option.recompute_options, shared)
        memory = sketch.memory_bound(
            option.sizes,
            [
                self.cost_cache.memory_inputs(
                    plan, max(mesh_options.micro_batch_options.micro_batch_counts[size])
                )
                for size in option.sizes
            ],
        )
        plans_per_size = len(option.recompute_options) * len(shared.plans)
        possible = memory.min(axis=1) <= self.problem.memory_limit_bytes
        self.pruned["memory"] += plans_per_size * int((~possible).sum())
        if not self.best:
            for number in np.flatnonzero(~possible):
                make = partial(self._leaf, plan, option.sizes[number], option.recompute_options, shared)
                self.too_large.append((float(memory[number].min()), next(self._order), make))
        sizes = [size for size, is_possible in zip(option.sizes, possible, strict=True) if is_possible]
        if not sizes:
            return
        sketched = _BoundedGroup(sketch, sizes, self._time_bounds(sketch, sizes), memory[possible])
        sketched.seconds[sketched.memory > self.problem.memory_limit_bytes] = np.inf
        divide = (
            self._divide_bounds
            if plan.pp > 1 and not self.enumeration.is_time_unknown
            else self._divide_sizes
        )
        self._push(
            float(sketched.seconds.min()),
            _OpenGroup(grid, plans_per_size * len(sizes), partial(divide, grid, sketched, shared)),
        )

    def _time_bounds(self, sketch: ScheduleBounds, sizes: list[int]) -> Array:
        if self.enumeration.is_time_unknown:
            return np.zeros((len(sizes), len(sketch.recompute_options)))
        plan, tables = sketch.plan, self.cost_cache
        counts = [accumulation(plan, size, self.problem.global_batch) for size in sizes]
        adding = tables.accumulation_costs(plan, counts) if plan.pp > 1 else None
        return sketch.time_bound(tables.compute_costs(plan, sizes), adding, np.array(counts)[:, None])

    def _divide_bounds(
        self, mesh_shape: MeshShape, sketched: _BoundedGroup, sharding_options: ShardingOptions
    ) -> None:
        """Tighten the bounds of micro-batch sizes that are not ruled out, and divide the group by size."""
        sketch = sketched.sketch
        open_ = np.atleast_1d(self._is_undecided(mesh_shape, sketched.seconds, sketched.memory).any(axis=1))
        self.pruned["time"] += (
            int((~open_).sum()) * len(sketch.recompute_options) * len(sharding_options.plans)
        )
        if not open_.any():
            return
        sketched = sketched.select(open_)
        plan, tables = sketch.plan, self.cost_cache
        counts = [accumulation(plan, size, self.problem.global_batch) for size in sketched.sizes]
        sends = [tables.stage_send_seconds(plan.with_changes(micro_batch=size)) for size in sketched.sizes]
        closer = sketch.pipeline_time_bound(
            tables.compute_costs(plan, sketched.sizes),
            tables.accumulation_costs(plan, counts),
            np.array(counts)[:, None],
            np.array(sends)[:, None],
        )
        np.maximum(sketched.seconds, closer, out=sketched.seconds)
        self._divide_sizes(mesh_shape, sketched, sharding_options)

    def _divide_sizes(
        self, mesh_shape: MeshShape, sketched: _BoundedGroup, sharding_options: ShardingOptions
    ) -> None:
        sketch = sketched.sketch
        plan_count = len(sketch.recompute_options) * len(sharding_options.plans)
        for size, seconds, memory in zip(sketched.sizes, sketched.seconds, sketched.memory, strict=True):
            divide = partial(
                self._divide_leaf,
                mesh_shape,
                sketch.plan,
                size,
                sketch.recompute_options,
                sharding_options,
                seconds,
                memory,
            )
            self._push(float(seconds.min()), _OpenGroup(mesh_shape, plan_count, divide))

    def _leaf(
        self, plan: Plan, size: int, recompute_options: RecomputeOptions, sharding_options: ShardingOptions
    ) -> SearchLeaf:
        return SearchLeaf(
            self.cost_cache, plan.with_changes(micro_batch=size), recompute_options, sharding_options
        )

    def _divide_leaf(
        self,
        mesh_shape: MeshShape,
        plan: Plan,
        size: int,
        recompute_options: RecomputeOptions,
        sharding_options: ShardingOptions,
        seconds: Array,
        memory: Array,
    ) -> None:
        """Evaluate a search leaf if its bounds do not rule out all of its plans."""
        count = len(recompute_options) * len(sharding_options.plans)
        if not self._is_undecided(mesh_shape, seconds, memory).any():
            self.pruned["time"] += count
            return
        core = self._leaf(plan, size, recompute_options, sharding_options)
        fits = core.memory <= self.problem.memory_limit_bytes
        self.pruned["memory"] += int((~fits).sum())
        if not self.best and not fits.any():
            self.too_large.append((float(core.memory.min()), next(self._order), lambda: core))
        fits &= self._is_undecided(mesh_shape, np.broadcast_to(seconds[:, None], fits.shape), core.memory)
        core.compute_bounds(np.atleast_1d(fits.any(axis=0)))
        self._evaluate_rows(mesh_shape, core, fits)

    def _is_undecided(self, mesh_shape: MeshShape, seconds: Array, memory: Array) -> Mask:
        on_front = (seconds <= self._front_limit) & self.front.undominated(seconds, memory)
        interesting: Mask = on_front | (seconds <= self._candidate_limit(mesh_shape))
        return interesting

    # ------------------------------------------------------------ plans

    def _evaluate_rows(self, mesh_shape: MeshShape, core: SearchLeaf, open_plans: Mask) -> None:
        """Simulate the most promising rows of a search leaf while no waiting group is more promising."""
        while True:
            open_plans = open_plans & self._is_undecided(mesh_shape, core.time_bounds, core.memory)
            row_bounds = np.where(open_plans, core.time_bounds, np.inf).min(axis=1)
            row = int(row_bounds.argmin())
            bound = float(row_bounds[row])
            if not open_plans[row].any():
                return
            if self._heap and bound > self._heap[0][0]:
                self._push(
                    bound,
                    _OpenGroup(mesh_shape, 0, partial(self._evaluate_rows, mesh_shape, core, open_plans)),
                )
                return
            seconds = core.simulate_row(row)
            self._record_row(mesh_shape, core, row, np.where(open_plans[row], seconds, np.inf))
            open_plans[row] = False

    def _record_row(self, mesh_shape: MeshShape, core: SearchLeaf, row: int, seconds: Array) -> None:
        """Record the candidates and Pareto points among a row's plans."""
        seconds = np.where(seconds < self._fastest_on_more_devices, seconds, np.inf)
        shortest = float(seconds.min())
        if shortest <= self._candidate_limit(mesh_shape):
            for column in np.flatnonzero(seconds <= shortest * EQUAL_TIME_FACTOR):
                self._record_candidate(mesh_shape, _LeafPlan(core, row, int(column)))
        for column in np.flatnonzero(self._is_undecided(mesh_shape, seconds, core.memory[row])):
            if seconds[column] <= self._front_limit:
                memory = float(core.memory[row, column])
                self.front.add(float(seconds[column]), memory, _LeafPlan(core, row, int(column)))

    def _record_candidate(self, mesh_shape: MeshShape, point: _LeafPlan) -> None:
        seconds = float(point.core.time_bounds[point.row, point.column])
        plan = point.plan
        rank = _candidate_order(seconds, plan, float(point.core.memory[point.row, point.column]))
        if mesh_shape in self.best and self.best[mesh_shape][1] <= rank:
            return
        self.best[mesh_shape] = seconds, rank, plan
        self._fastest = min(self._fastest, seconds)
        if len(self.best) >= self.keep:
            self._slowest_kept_seconds = heapq.nsmallest(
                self.keep, (entry[0] for entry in self.best.values())
            )[-1]

    # ------------------------------------------------------------ the outcome

    def result(self) -> SearchResult:
        best = sorted(self.best.values(), key=lambda entry: entry[1])[: self.keep]
        front = [
            point.plan
            for point in self.front.plans
            if point.core.time_bounds[point.row, point.column] <= self._fastest * self.max_slowdown
        ]
        known = {
            plan: Candidate(plan, forecast_plan(self.problem, plan, self.cost_cache.simulate_pipeline))
            for plan in {entry[2] for entry in best} | set(front)
        }
        return SearchResult(
            tuple(known[entry[2]] for entry in best),
            build_pareto_front([known[plan] for plan in front]),
            None if best else self._smallest(),
            self.plan_count,
            dict(self.pruned),
        )

    def _smallest(self) -> Candidate | None:
        """Return the plan that needs the least memory; None where the space has no plan."""
        heapq.heapify(self.too_large)
        smallest = math.inf
        nearest: Plan | None = None
        while self.too_large and self.too_large[0][0] < smallest:
            core = heapq.heappop(self.too_large)[2]()
            at = int(core.memory.argmin())
            if core.memory.flat[at] < smallest:
                smallest = float(core.memory.flat[at])
                nearest = core.plan_of(*divmod(at, core.memory.shape[1]))
        return None if nearest is None else Candidate(nearest, forecast_plan(self.problem, nearest))
