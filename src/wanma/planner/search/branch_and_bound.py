"""Best-first branch and bound over a search space.

Every plan is evaluated, or left out by a lower bound that exceeds the best plans' time. Groups of plans wait
in the order of their lower bounds. The first group is divided, down to a search leaf (`Core`), whose plans
are forecast. Once the fastest plans are known, all that still waits is left out together. Pure functions,
without torch.
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

from wanma.job.plan.plan import AXES, Plan
from wanma.planner.forecast.plan_forecast import forecast
from wanma.planner.forecast.problem import Problem
from wanma.planner.memory.vectorized import States
from wanma.planner.search.cost_cache import Array, Tables
from wanma.planner.search.enumeration import Listing, OfGrid, Scheduled, accumulation
from wanma.planner.search.leaf import Core
from wanma.planner.search.pareto_front import Front
from wanma.planner.search.recompute_options import Recomputes
from wanma.planner.search.result import Candidate, Found, pareto_front
from wanma.planner.search.schedule_bounds import Sketch
from wanma.planner.search.space import SHARDS, Grid, Space, grids, splits

Mask = npt.NDArray[np.bool_]

SLOWEST = 1.5
"""Largest step time on the Pareto front, as a multiple of the fastest plan's."""
TOLERANCE = 0.01
"""Share by which a plan must be smaller or faster than each of the Pareto front to join it."""
EQUAL = 1 + 1e-9
"""Ratio of two step times below which they count as equal."""


def search(
    problem: Problem,
    space: Space,
    *,
    keep: int = 10,
    tolerance: float = TOLERANCE,
    slowest: float = SLOWEST,
) -> Found:
    """Search a space for the fastest plans that fit, and the Pareto front of memory and step time.

    In a space with several numbers of devices, plans on fewer of them count where they are faster than every
    plan on more.

    Args:
        problem: the planning problem.
        space: plans to search.
        keep: largest number of candidates, each of another mesh shape (`layout_of`).
        tolerance: for every plan there is one on the front that is at most this share slower and larger.
        slowest: largest step time on the front, as a multiple of the fastest plan's.

    Returns:
        the fastest plan of each mesh shape; of plans with equal times, the simplest, then the smallest.
    """
    began = time.perf_counter()
    searching = _Search(problem, space, keep, tolerance, slowest)
    for devices in sorted(space.devices, reverse=True):
        searching.look_at(devices)
    return replace(searching.found(), seconds=time.perf_counter() - began)


def layout_of(plan: Plan) -> tuple[int, ...]:
    """Return the mesh shape of a plan, by which candidates differ: (pp, data ranks, cp, tp, ep)."""
    return plan.pp, plan.data_ranks, plan.cp, plan.tp, plan.ep


def rank_of(one: Candidate) -> tuple[object, ...]:
    """Return the sort key of candidates: faster first, then simpler, then smaller, then exact."""
    return _rank(one.seconds, one.plan, one.memory_bytes)


def _rank(seconds: float, plan: Plan, memory_bytes: float) -> tuple[object, ...]:
    size, changed = float(f"{memory_bytes:.6g}"), len(plan.approximate)
    return (float(f"{seconds:.9g}"), *complexity(plan), size, changed, str(plan.to_json()))


def complexity(plan: Plan) -> tuple[int, ...]:
    """Return a plan's complexity as a sort key: ranks, split dimensions, optional features, shard level."""
    split = sum(getattr(plan, axis) > 1 for axis in (*AXES, "ep"))
    extras = (plan.recompute != "none") + plan.sequence_parallel + plan.compile + (plan.virtual_stages > 1)
    return plan.world_size, split, extras, SHARDS.index(plan.shard)


@dataclass(frozen=True)
class _Waiting:
    """Group of plans of one mesh shape that waits to be divided."""

    grid: Grid
    count: int
    divide: Callable[[], None]


class _Sketched(NamedTuple):
    """Lower bounds on the plans of one schedule; arrays are (micro-batches, recomputes)."""

    sketch: Sketch
    sizes: list[int]
    """Micro-batch sizes, in samples."""
    seconds: Array
    memory: Array

    def only(self, rows: Mask) -> _Sketched:
        sizes = [size for size, is_kept in zip(self.sizes, rows, strict=True) if is_kept]
        return _Sketched(self.sketch, sizes, self.seconds[rows], self.memory[rows])


@dataclass(frozen=True)
class _Point:
    """One plan of a search leaf, by its row (recompute) and column (state sharding)."""

    core: Core
    row: int
    column: int

    @property
    def plan(self) -> Plan:
        return self.core.plan_of(self.row, self.column)


class _Search:
    def __init__(self, problem: Problem, space: Space, keep: int, tolerance: float, slowest: float) -> None:
        self.problem, self.space, self.keep, self.slowest = problem, space, keep, slowest
        self.tables = Tables(problem)
        self.listing = Listing(space, self.tables)
        self.front = Front[_Point](tolerance)
        self.best: dict[Grid, tuple[float, tuple[object, ...], Plan]] = {}
        """Fastest plan that fits by mesh shape: its seconds, sort key and plan."""
        self.too_large: list[tuple[float, int, Callable[[], Core]]] = []
        """Lower bounds on the bytes of search leaves, kept while no plan fits."""
        self.considered = 0
        self.pruned = Counter[str]()
        self._heap: list[tuple[float, int, _Waiting]] = []
        self._order = itertools.count()
        self._enough = math.inf
        """Step time of the slowest candidate that is kept, in seconds."""
        self._fastest = math.inf
        self._on_more = math.inf
        """Step time of the fastest plan on more devices, in seconds."""

    # ------------------------------------------------------------ groups of plans, largest first

    def look_at(self, devices: int) -> None:
        """Search all plans on `devices` devices."""
        self._on_more = self._fastest
        for grid in grids(replace(self.space, devices=(devices,))):
            of_grid = self.listing.of_grid(grid)
            if not of_grid.ways or not of_grid.rows.sizes:
                continue
            for split in splits(self.space, grid):
                self._look_at_split(of_grid, split)
        while self._heap:
            least, _, waiting = heapq.heappop(self._heap)
            if self._is_relevant(waiting.grid, least):
                waiting.divide()
            else:
                self.pruned["time"] += waiting.count

    def _look_at_split(self, of_grid: OfGrid, split: Plan) -> None:
        count = self.listing.count(split, of_grid)
        self.considered += count
        least = self.listing.least_seconds(split)
        if self._is_relevant(of_grid.grid, least):
            schedules = self.listing.unbeaten(split, of_grid)
            left = sum(map(of_grid.count, schedules))
            self.pruned["beaten"] += count - left
            divide = partial(self._divide_split, of_grid, split, schedules)
            self._push(least, _Waiting(of_grid.grid, left, divide))
        else:
            self.pruned["time"] += count

    def _push(self, least: float, waiting: _Waiting) -> None:
        heapq.heappush(self._heap, (least, next(self._order), waiting))

    def _is_relevant(self, grid: Grid, seconds: float) -> bool:
        """Return whether a plan with this step time could be a candidate or on the Pareto front."""
        return seconds <= self._limit(grid) or seconds <= self._slowest_on_front

    def _limit(self, grid: Grid) -> float:
        """Return the step time, in seconds, beyond which a plan of `grid` is no candidate."""
        own = self.best[grid][0] if grid in self.best else math.inf
        return min(own, self._enough, self._on_more) * EQUAL

    @property
    def _slowest_on_front(self) -> float:
        return min(self._fastest * self.slowest, self._on_more)

    def _divide_split(self, of_grid: OfGrid, split: Plan, schedules: list[Scheduled]) -> None:
        for one in schedules:
            if not one.sizes or not one.recomputes:
                continue
            plan = split.but(
                schedule=one.schedule, virtual_stages=one.virtual_stages, stage_cuts=one.stage_cuts
            )
            self._divide_schedule(of_grid, plan, one)

    def _divide_schedule(self, of_grid: OfGrid, plan: Plan, one: Scheduled) -> None:
        grid, shared = of_grid.grid, of_grid.states
        sketch = Sketch(self.tables, plan, one.recomputes, shared)
        memory = sketch.least_bytes(
            one.sizes, [self.tables.setting(plan, max(of_grid.rows.numbers[size])) for size in one.sizes]
        )
        each = len(one.recomputes) * len(shared.plans)
        possible = memory.min(axis=1) <= self.problem.memory_bytes
        self.pruned["memory"] += each * int((~possible).sum())
        if not self.best:
            for number in np.flatnonzero(~possible):
                make = partial(self._core, plan, one.sizes[number], one.recomputes, shared)
                self.too_large.append((float(memory[number].min()), next(self._order), make))
        sizes = [size for size, is_possible in zip(one.sizes, possible, strict=True) if is_possible]
        if not sizes:
            return
        sketched = _Sketched(sketch, sizes, self._sketched(sketch, sizes), memory[possible])
        sketched.seconds[sketched.memory > self.problem.memory_bytes] = np.inf
        divide = self._divide_sketch if plan.pp > 1 and not self.listing.is_timeless else self._divide_sizes
        self._push(
            float(sketched.seconds.min()),
            _Waiting(grid, each * len(sizes), partial(divide, grid, sketched, shared)),
        )

    def _sketched(self, sketch: Sketch, sizes: list[int]) -> Array:
        if self.listing.is_timeless:
            return np.zeros((len(sizes), len(sketch.recomputes)))
        plan, tables = sketch.plan, self.tables
        counts = [accumulation(plan, size, self.problem.global_batch) for size in sizes]
        adding = tables.adding(plan, counts) if plan.pp > 1 else None
        return sketch.least_seconds(tables.bare(plan, sizes), adding, np.array(counts)[:, None])

    def _divide_sketch(self, grid: Grid, sketched: _Sketched, shared: States) -> None:
        """Tighten the bounds of micro-batch sizes that are not ruled out, and divide the group by size."""
        sketch = sketched.sketch
        open_ = np.atleast_1d(self._interesting(grid, sketched.seconds, sketched.memory).any(axis=1))
        self.pruned["time"] += int((~open_).sum()) * len(sketch.recomputes) * len(shared.plans)
        if not open_.any():
            return
        sketched = sketched.only(open_)
        plan, tables = sketch.plan, self.tables
        counts = [accumulation(plan, size, self.problem.global_batch) for size in sketched.sizes]
        sends = [tables.boundary(plan.but(micro_batch=size)) for size in sketched.sizes]
        closer = sketch.pipelined_seconds(
            tables.bare(plan, sketched.sizes),
            tables.adding(plan, counts),
            np.array(counts)[:, None],
            np.array(sends)[:, None],
        )
        np.maximum(sketched.seconds, closer, out=sketched.seconds)
        self._divide_sizes(grid, sketched, shared)

    def _divide_sizes(self, grid: Grid, sketched: _Sketched, shared: States) -> None:
        sketch = sketched.sketch
        each = len(sketch.recomputes) * len(shared.plans)
        for size, seconds, memory in zip(sketched.sizes, sketched.seconds, sketched.memory, strict=True):
            divide = partial(
                self._divide_core, grid, sketch.plan, size, sketch.recomputes, shared, seconds, memory
            )
            self._push(float(seconds.min()), _Waiting(grid, each, divide))

    def _core(self, plan: Plan, size: int, again: Recomputes, shared: States) -> Core:
        return Core(self.tables, plan.but(micro_batch=size), again, shared)

    def _divide_core(
        self,
        grid: Grid,
        plan: Plan,
        size: int,
        again: Recomputes,
        shared: States,
        seconds: Array,
        memory: Array,
    ) -> None:
        """Evaluate a search leaf if its bounds do not rule out all of its plans."""
        count = len(again) * len(shared.plans)
        if not self._interesting(grid, seconds, memory).any():
            self.pruned["time"] += count
            return
        core = self._core(plan, size, again, shared)
        fits = core.memory <= self.problem.memory_bytes
        self.pruned["memory"] += int((~fits).sum())
        if not self.best and not fits.any():
            self.too_large.append((float(core.memory.min()), next(self._order), lambda: core))
        fits &= self._interesting(grid, np.broadcast_to(seconds[:, None], fits.shape), core.memory)
        core.bound(np.atleast_1d(fits.any(axis=0)))
        self._look_on(grid, core, fits)

    def _interesting(self, grid: Grid, seconds: Array, memory: Array) -> Mask:
        on_front = (seconds <= self._slowest_on_front) & self.front.uncovered(seconds, memory)
        interesting: Mask = on_front | (seconds <= self._limit(grid))
        return interesting

    # ------------------------------------------------------------ plans

    def _look_on(self, grid: Grid, core: Core, waiting: Mask) -> None:
        """Simulate the most promising rows of a search leaf while no waiting group is more promising."""
        while True:
            waiting = waiting & self._interesting(grid, core.least, core.memory)
            promised = np.where(waiting, core.least, np.inf).min(axis=1)
            row = int(promised.argmin())
            least = float(promised[row])
            if not waiting[row].any():
                return
            if self._heap and least > self._heap[0][0]:
                self._push(least, _Waiting(grid, 0, partial(self._look_on, grid, core, waiting)))
                return
            seconds = core.play(row)
            self._note(grid, core, row, np.where(waiting[row], seconds, np.inf))
            waiting[row] = False

    def _note(self, grid: Grid, core: Core, row: int, seconds: Array) -> None:
        """Record the candidates and Pareto points among a row's plans."""
        seconds = np.where(seconds < self._on_more, seconds, np.inf)
        shortest = float(seconds.min())
        if shortest <= self._limit(grid):
            for column in np.flatnonzero(seconds <= shortest * EQUAL):
                self._compare(grid, _Point(core, row, int(column)))
        for column in np.flatnonzero(self._interesting(grid, seconds, core.memory[row])):
            if seconds[column] <= self._slowest_on_front:
                memory = float(core.memory[row, column])
                self.front.add(float(seconds[column]), memory, _Point(core, row, int(column)))

    def _compare(self, grid: Grid, point: _Point) -> None:
        seconds = float(point.core.least[point.row, point.column])
        plan = point.plan
        rank = _rank(seconds, plan, float(point.core.memory[point.row, point.column]))
        if grid in self.best and self.best[grid][1] <= rank:
            return
        self.best[grid] = seconds, rank, plan
        self._fastest = min(self._fastest, seconds)
        if len(self.best) >= self.keep:
            self._enough = heapq.nsmallest(self.keep, (one[0] for one in self.best.values()))[-1]

    # ------------------------------------------------------------ the outcome

    def found(self) -> Found:
        kept = sorted(self.best.values(), key=lambda one: one[1])[: self.keep]
        front = [
            point.plan
            for point in self.front.plans
            if point.core.least[point.row, point.column] <= self._fastest * self.slowest
        ]
        known = {
            plan: Candidate(plan, forecast(self.problem, plan, self.tables.play))
            for plan in {one[2] for one in kept} | set(front)
        }
        return Found(
            tuple(known[one[2]] for one in kept),
            pareto_front([known[plan] for plan in front]),
            None if kept else self._nearest(),
            self.considered,
            dict(self.pruned),
        )

    def _nearest(self) -> Candidate | None:
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
        return None if nearest is None else Candidate(nearest, forecast(self.problem, nearest))
