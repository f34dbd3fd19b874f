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
from wanma.planner.cost.data_parallel import INTERFERENCE
from wanma.planner.cost.offload import is_moving
from wanma.planner.forecast.plan_forecast import anatomy, memory_setting, software, unknown_rates
from wanma.planner.forecast.step_overhead import around
from wanma.planner.memory.vectorized import States, memory_grid
from wanma.planner.pipeline.lower_bounds import busy_seconds, least_seconds
from wanma.planner.pipeline.schedules import SPLIT_BACKWARD
from wanma.planner.search.cost_cache import Array, Integers, Line, Tables, UnitCost
from wanma.planner.search.recompute_options import Recomputes


class Core:
    """Plans of one search leaf as arrays of shape (recomputes, state shardings).

    Memory is computed at once, times by `bound`.

    Args:
        tables: costs of the problem's plans.
        plan: settings that all plans of the leaf share.
        recomputes: recompute options, one per row.
        states: state shardings among the plan's data ranks, one per column.
    """

    def __init__(self, tables: Tables, plan: Plan, recomputes: Recomputes, states: States) -> None:
        self.plan, self.recomputes, self.states = plan, recomputes, states
        problem = tables.problem
        setting = memory_setting(problem, plan)
        self.memory = memory_grid(tables.memory(plan), plan, recomputes.all, states, setting)
        """Memory of the largest rank in bytes; (recomputes, state shardings)."""
        self.least = np.zeros(self.memory.shape)
        """Lower bound on the step time in seconds; zero where rates are unknown, and before `bound`."""
        self._alone = np.zeros(self.memory.shape)
        """Lower bound on the step time without wait for data and without saving, in seconds."""
        self._around = around(problem, plan)
        self._tables = tables
        self._variants: list[tuple[list[int], _Variant]] = []

    def bound(self, wanted: npt.NDArray[np.bool_]) -> None:
        """Fill `least` for the wanted columns, and keep the costs that they share."""
        problem, states = self._tables.problem, self.states
        if unknown_rates(problem, self.plan) is not None:
            return
        for alike in states.alike:
            columns = [column for column in alike if wanted[column]]
            if not columns:
                continue
            variant = _Variant(self._tables, states.applied(columns[0], self.plan), self.recomputes)
            plans = [states.plans[column] for column in columns]
            self._alone[:, columns] = variant.step_seconds(self._tables, plans)
            self.least[:, columns] = self._around.with_both(self._alone[:, columns])
            self._variants.append((columns, variant))

    def play(self, row: int) -> Array:
        """Simulate the recompute of number `row`, and return the step seconds of every state sharding."""
        for columns, variant in self._variants:
            if not variant.is_played[row]:
                more = variant.more_when_played(self._tables, row, self.plan_of(row, columns[0]))
                self._alone[row, columns] += more
                self.least[row, columns] = self._around.with_both(self._alone[row, columns])
        seconds: Array = self.least[row]
        return seconds

    def plan_of(self, row: int, column: int) -> Plan:
        recompute, share = self.recomputes[row]
        return self.states.applied(column, self.plan.but(recompute=recompute, recompute_share=share))


class _Variant:
    """Stage costs of state shardings whose blocks cost the same, under every recompute."""

    def __init__(self, tables: Tables, plan: Plan, recomputes: Recomputes) -> None:
        self._plan = plan
        self._micro_batches = plan.accumulation(tables.problem.global_batch)
        kinds = {
            kind: tables.blocks(plan, kind, self._micro_batches) for kind in {kind for kind, _ in recomputes}
        }
        ends = tables.ends(plan, self._micro_batches)
        sizes, counts = tables.stage_counts(plan)
        some = kinds[recomputes[0][0]]
        nothing = [0.0] * len(some)
        if not is_moving(plan):
            forward = _of_stages([block.forward_alone for block in some], counts, ends, "forward_alone")
        else:
            forward = _of_stages(nothing, counts, ends, "forward_alone")
            lines = {kind: [block.forward for block in kinds[kind]] for kind in kinds}
            forward = forward + self._of_blocks(recomputes, lines, counts, sizes)
        backward = _of_stages(nothing, counts, ends, "backward_alone")
        lines = {kind: [block.backward for block in kinds[kind]] for kind in kinds}
        backward = backward + self._of_blocks(recomputes, lines, counts, sizes)
        send = tables.boundary(plan) if plan.pp > 1 else 0.0
        if software(tables.problem, plan).waits_for_sends and plan.virtual_stages > 1:
            forward, backward, send = forward + send, backward + send, 0.0
        ahead: Array = np.broadcast_to(forward, backward.shape)
        costs: tuple[Array, Array, Array | None] = (ahead, backward, None)
        if plan.pp > 1 and plan.schedule in SPLIT_BACKWARD:
            weights = _of_stages([block.weights for block in some], counts, ends, "weights")
            apart = np.broadcast_to(weights, backward.shape)
            costs = (ahead, backward - apart, apart)
        busy = busy_seconds(plan.schedule, forward + backward, plan.pp, self._micro_batches)
        self._busy = busy.mean(axis=1)
        self._shared = tables.problem.machine.shared
        least = least_seconds(plan.schedule, *costs, plan.pp, self._micro_batches, send)
        self._least = least
        if self._shared > 1:
            self._least = np.array([self._on_shared_cores(*of_one) for of_one in enumerate(least)])
        self.is_played = np.full(len(recomputes), plan.pp == 1)
        """Mask of the recomputes whose lower bound is already their time."""
        every, busiest = np.arange(len(recomputes)), busy.argmax(axis=1)
        self._busiest_forward = busy_seconds(plan.schedule, ahead, plan.pp, 1)[every, busiest]
        self._busiest_backward = busy[every, busiest] / self._micro_batches - self._busiest_forward
        parameters = _of_stages([block.parameters for block in some], counts, ends, "parameters")
        self._parameters = float(busy_seconds(plan.schedule, parameters[None], plan.pp, 1).max())

    @staticmethod
    def _of_blocks(
        recomputes: Recomputes,
        lines_of: dict[Recompute, list[tuple[Line, Line]]],
        counts: Integers,
        sizes: tuple[int, ...],
    ) -> Array:
        """Return the seconds of one pass through every stage's blocks; (recomputes, stages).

        Args:
            recomputes: recompute options.
            lines_of: lines of each kind of block by its recomputed share.
            counts: blocks of each kind; (stages, kinds).
            sizes: blocks of every stage.
        """
        share = recomputes.of_stages(sizes)
        total = np.zeros(share.shape)
        for number in range(counts.shape[1]):
            lines = np.array([lines_of[kind][number] for kind, _ in recomputes])
            first, second = (lines[:, line, :1] + lines[:, line, 1:] * share for line in (0, 1))
            total += counts[:, number] * np.maximum(first, second)
        return total

    def step_seconds(self, tables: Tables, states: Sequence[Plan]) -> Array:
        """Return lower bounds on the step time in seconds; (recomputes, state shardings)."""
        exchanges = np.array([tables.exchange(state, self._parameters) for state in states])
        reduce, gather, optimizer = exchanges.T
        hidden = np.array([tables.is_overlapped(state) for state in states])
        if hidden.any():
            reduce = np.where(hidden, _exposed(reduce, self._busiest_backward[:, None]), reduce)
            gather = np.where(hidden, _exposed(gather, self._busiest_forward[:, None]), gather)
        seconds: Array = self._least[:, None] + reduce + gather + optimizer
        return seconds

    def more_when_played(self, tables: Tables, row: int, plan: Plan) -> float:
        """Return the seconds that the simulated pipeline takes beyond its lower bound, to be added once.

        Args:
            tables: costs of the problem's plans.
            row: number of the recompute.
            plan: plan under that recompute, with the state sharding of one of the variant's plans.
        """
        self.is_played[row] = True
        # The same costs as the forecast's to the last bit, so that it reuses this simulation.
        parts = anatomy(tables.problem, plan)
        played = tables.play(
            plan.schedule, parts.costs, plan.pp, parts.micro_batches, parts.boundary_seconds, parts.in_flight
        )
        return self._on_shared_cores(row, played.seconds) - float(self._least[row])

    def _on_shared_cores(self, row: int, seconds: float) -> float:
        """Return the seconds on ranks that share cores, as in `step_of`: waiting ranks leave theirs."""
        return seconds if self._shared <= 1 else max(seconds / self._shared, float(self._busy[row]))


def _of_stages(
    blocks: Sequence[float],
    counts: Integers,
    ends: tuple[tuple[UnitCost, ...], tuple[UnitCost, ...]],
    name: str,
) -> Array:
    """Return the sum of `name` over each stage's blocks and end layers; (stages,)."""
    total: Array = np.asarray(counts @ np.array(blocks), dtype=np.float64)
    for stage, of_stage in ((0, ends[0]), (-1, ends[1])):
        total[stage] += sum(getattr(end, name) for end in of_stage)
    return total


def _exposed(communication: Array, compute: Array) -> Array:
    """Return the exposed part of communication beside computing, as `data_parallel.exposed`."""
    exposed: Array = np.maximum(0.0, communication - compute) + INTERFERENCE * np.minimum(
        communication, compute
    )
    return exposed
