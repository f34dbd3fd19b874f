"""Plans by the thousand before any is looked at: a grid's splits, with the schedules that each can run.

How many plans there are is known without listing them. Pure functions, without torch.
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
"""Samples of a micro-batch, of which what is paid once does not count."""


class Listing:
    """Of a space, what many of its splits share.

    Args:
        tables: of the problem.
    """

    def __init__(self, space: Space, tables: Tables) -> None:
        self._space, self._tables = space, tables
        self.is_timeless = unknown_rates(tables.problem, space.start) is not None
        """Whether no plan has a forecast of time."""
        self._rows: dict[int, Rows] = {}
        self._samples: dict[object, float] = {}
        self._staged: dict[object, list[Scheduled]] = {}

    def of_grid(self, grid: Grid) -> OfGrid:
        """What all plans of a grid share."""
        if grid.data_ranks not in self._rows:
            self._rows[grid.data_ranks] = Rows(self._space, grid)
        return OfGrid(grid, list(shares(self._space, grid)), self._rows[grid.data_ranks], self._space)

    def least_seconds(self, split: Plan) -> float:
        """Of a step without bubbles: no micro-batch computes a sample faster than an endless one."""
        if self.is_timeless:
            return 0.0
        batch = self._tables.problem.global_batch
        return self._sample_seconds(split) * batch / split.data_ranks / split.pp

    def _sample_seconds(self, split: Plan) -> float:
        """Of a sample in an endless micro-batch, by a rank that holds the whole model."""
        key = pieces_key(split)
        if key not in self._samples:
            numbers, bare = self._tables.block_numbers(split), self._tables.bare(split, (_ENDLESS,))
            self._samples[key] = float(without_bubbles(numbers, bare, None)[0]) / _ENDLESS
        return self._samples[key]

    def schedules_of(self, split: Plan, of_grid: OfGrid) -> list[Scheduled]:
        """All that the split can run with."""
        key = (split.pp, split.tp > 1, split.compile)
        if key not in self._staged:
            self._staged[key] = [
                Scheduled(plan.schedule, plan.virtual_stages, plan.stage_cuts, recomputes(self._space, plan))
                for plan in staged(self._space, split, self._tables.problem.workload)
            ]
        return [one._replace(sizes=of_grid.sizes_of(one.schedule)) for one in self._staged[key]]

    def count(self, split: Plan, of_grid: OfGrid) -> int:
        """Plans of the split."""
        key = (split.tp > 1, split.compile)
        if key not in of_grid.counts:
            of_grid.counts[key] = sum(map(of_grid.count, self.schedules_of(split, of_grid)))
        return of_grid.counts[key]

    def unbeaten(self, split: Plan, of_grid: OfGrid) -> list[Scheduled]:
        """`schedules_of`, without what may be compiled and is faster so: a fused operator never takes longer,
        nor keeps more, and no fixed order of operations ends later when some are shorter."""
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
    """A pipeline's schedule and stages, whatever else a plan is."""

    schedule: Schedule
    virtual_stages: int
    stage_cuts: tuple[int, ...]
    recomputes: Recomputes
    sizes: tuple[int, ...] = ()
    """Micro-batches that it can run."""


class OfGrid:
    """What all plans of a grid share."""

    def __init__(self, grid: Grid, ways: list[Share], rows: Rows, space: Space) -> None:
        self.grid, self.ways, self.rows, self._space = grid, ways, rows, space
        self.counts: dict[object, int] = {}
        """Plans of a split, by what they depend on."""

    @cached_property
    def states(self) -> States:
        return States(states(self._space, self.grid))

    def count(self, one: Scheduled) -> int:
        return len(one.recomputes) * len(one.sizes) * len(self.ways)

    def sizes_of(self, schedule: Schedule) -> tuple[int, ...]:
        """Micro-batches that it can run, as `admits.micro_batches_fit`."""
        return self.rows.sizes if self.grid.pp == 1 else self.rows.sizes_of(schedule, self.grid.pp)


class Rows:
    """What all grids with as many data ranks share: micro-batches of the samples that a rank gets."""

    def __init__(self, space: Space, grid: Grid) -> None:
        self.sizes = tuple(micro_batches(space, grid))
        rows = [math.ceil(batch / grid.data_ranks) for batch in space.batches]
        self.numbers = {size: tuple(max(math.ceil(row / size), 1) for row in rows) for size in self.sizes}
        """Of micro-batches of each size in a step of each batch, as `Plan.accumulation`."""
        self._sizes: dict[tuple[Schedule, int], tuple[int, ...]] = {}

    def sizes_of(self, schedule: Schedule, pp: int) -> tuple[int, ...]:
        """Of micro-batches that a schedule can run on `pp` ranks."""
        key = (schedule, pp)
        if key not in self._sizes:
            self._sizes[key] = tuple(
                size
                for size in self.sizes
                if all(runs_micro_batches(schedule, pp, number) for number in self.numbers[size])
            )
        return self._sizes[key]


def accumulation(plan: Plan, size: int, batch: int) -> int:
    """As `Plan.accumulation`, with micro-batches of `size`."""
    return max(math.ceil(math.ceil(batch / plan.data_ranks) / size), 1)
