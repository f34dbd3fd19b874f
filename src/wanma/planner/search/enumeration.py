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
from wanma.planner.cost.model_cost import pieces_key
from wanma.planner.forecast.plan_forecast import unknown_rates
from wanma.planner.memory.vectorized import States
from wanma.planner.pipeline.schedules import runs_micro_batches
from wanma.planner.search.cost_cache import Tables
from wanma.planner.search.recompute_options import Recomputes
from wanma.planner.search.schedule_bounds import without_bubbles
from wanma.planner.search.space import Grid, Share, Space, micro_batches, recomputes, shares, staged, states

_ENDLESS = 1 << 20
"""Samples of a micro-batch so large that costs per micro-batch vanish."""


class Listing:
    """Enumeration of a space's schedules by split, with the parts that many splits share.

    Args:
        space: the search space.
        tables: costs of the problem's plans.
    """

    def __init__(self, space: Space, tables: Tables) -> None:
        self._space, self._tables = space, tables
        self.is_timeless = unknown_rates(tables.problem, space.start) is not None
        """True if no plan has a forecast of time."""
        self._rows: dict[int, Rows] = {}
        self._samples: dict[object, float] = {}
        self._staged: dict[object, list[Scheduled]] = {}

    def of_grid(self, grid: Grid) -> OfGrid:
        """Return the data that all plans of a mesh shape share."""
        if grid.data_ranks not in self._rows:
            self._rows[grid.data_ranks] = Rows(self._space, grid)
        return OfGrid(grid, list(shares(self._space, grid)), self._rows[grid.data_ranks], self._space)

    def least_seconds(self, split: Plan) -> float:
        """Return a lower bound on a step's seconds: no bubbles, and samples of an endless micro-batch."""
        if self.is_timeless:
            return 0.0
        batch = self._tables.problem.global_batch
        return self._sample_seconds(split) * batch / split.data_ranks / split.pp

    def _sample_seconds(self, split: Plan) -> float:
        """Return the seconds of a sample in an endless micro-batch, on a rank that holds the whole model."""
        key = pieces_key(split)
        if key not in self._samples:
            numbers, bare = self._tables.block_numbers(split), self._tables.bare(split, (_ENDLESS,))
            self._samples[key] = float(without_bubbles(numbers, bare, None)[0]) / _ENDLESS
        return self._samples[key]

    def schedules_of(self, split: Plan, of_grid: OfGrid) -> list[Scheduled]:
        """Return all schedules, stages and recomputes with which the split can run."""
        key = (split.pp, split.tp > 1, split.compile)
        if key not in self._staged:
            self._staged[key] = [
                Scheduled(plan.schedule, plan.virtual_stages, plan.stage_cuts, recomputes(self._space, plan))
                for plan in staged(self._space, split, self._tables.problem.workload)
            ]
        return [one._replace(sizes=of_grid.sizes_of(one.schedule)) for one in self._staged[key]]

    def count(self, split: Plan, of_grid: OfGrid) -> int:
        """Return the number of plans of the split."""
        key = (split.tp > 1, split.compile)
        if key not in of_grid.counts:
            of_grid.counts[key] = sum(map(of_grid.count, self.schedules_of(split, of_grid)))
        return of_grid.counts[key]

    def unbeaten(self, split: Plan, of_grid: OfGrid) -> list[Scheduled]:
        """Return `schedules_of` without those that the compiled split beats.

        A fused operator never takes longer, nor saves more memory, and no fixed order of operations ends
        later when some are shorter.
        """
        schedules = self.schedules_of(split, of_grid)
        if split.compile or True not in self._space.compile or split.device == "cpu" or self.is_timeless:
            return schedules
        compiled = replace(split, compile=True)
        if self._sample_seconds(compiled) >= self._sample_seconds(split):
            return schedules
        may_be = {
            (one.schedule, one.virtual_stages): one.recomputes for one in self.schedules_of(compiled, of_grid)
        }
        return [
            one._replace(recomputes=Recomputes(again for again in one.recomputes if again not in also))
            for one in schedules
            for also in (set(may_be.get((one.schedule, one.virtual_stages), ())),)
        ]


class Scheduled(NamedTuple):
    """Pipeline schedule with its stages, recomputes and micro-batch sizes."""

    schedule: Schedule
    virtual_stages: int
    stage_cuts: tuple[int, ...]
    recomputes: Recomputes
    sizes: tuple[int, ...] = ()
    """Micro-batch sizes, in samples, that the schedule can run."""


class OfGrid:
    """Data that all plans of a mesh shape share."""

    def __init__(self, grid: Grid, ways: list[Share], rows: Rows, space: Space) -> None:
        self.grid, self.ways, self.rows, self._space = grid, ways, rows, space
        self.counts: dict[object, int] = {}
        """Number of plans of a split, by the settings it depends on."""

    @cached_property
    def states(self) -> States:
        return States(states(self._space, self.grid))

    def count(self, one: Scheduled) -> int:
        return len(one.recomputes) * len(one.sizes) * len(self.ways)

    def sizes_of(self, schedule: Schedule) -> tuple[int, ...]:
        """Return the micro-batch sizes that `schedule` can run, in samples, as `micro_batches_fit`."""
        return self.rows.sizes if self.grid.pp == 1 else self.rows.sizes_of(schedule, self.grid.pp)


class Rows:
    """Micro-batch sizes of the samples of one rank, shared by mesh shapes with equally many data ranks."""

    def __init__(self, space: Space, grid: Grid) -> None:
        self.sizes = tuple(micro_batches(space, grid))
        rows = [math.ceil(batch / grid.data_ranks) for batch in space.batches]
        self.numbers = {size: tuple(max(math.ceil(row / size), 1) for row in rows) for size in self.sizes}
        """Number of micro-batches by size, for each global batch, as in `Plan.accumulation`."""
        self._sizes: dict[tuple[Schedule, int], tuple[int, ...]] = {}

    def sizes_of(self, schedule: Schedule, pp: int) -> tuple[int, ...]:
        """Return the micro-batch sizes, in samples, that a schedule can run on `pp` ranks."""
        key = (schedule, pp)
        if key not in self._sizes:
            self._sizes[key] = tuple(
                size
                for size in self.sizes
                if all(runs_micro_batches(schedule, pp, number) for number in self.numbers[size])
            )
        return self._sizes[key]


def accumulation(plan: Plan, size: int, batch: int) -> int:
    """Return the micro-batches of a step, as in `Plan.accumulation`, for micro-batches of `size` samples."""
    return max(math.ceil(math.ceil(batch / plan.data_ranks) / size), 1)
