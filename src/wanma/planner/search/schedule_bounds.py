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
from wanma.planner.forecast.plan_forecast import software
from wanma.planner.memory.peak import (
    Setting,
    boundary_bytes,
    kept_of_stages,
    parameters_of,
    stage_counts,
    unused_shares,
)
from wanma.planner.memory.vectorized import States
from wanma.planner.pipeline.lower_bounds import busy_seconds, least_seconds
from wanma.planner.pipeline.schedules import SPLIT_BACKWARD
from wanma.planner.search.cost_cache import Adding, Bare, Tables
from wanma.planner.search.recompute_options import Recomputes

Array = npt.NDArray[np.float64]


class Sketch:
    """Bounds on the plans of a schedule with its stages, for any micro-batch size.

    Args:
        tables: costs of the problem's plans.
        plan: settings of the schedule, with micro-batches of one sample.
        recomputes: recompute options.
        states: state shardings among the plan's data ranks.
    """

    def __init__(
        self,
        tables: Tables,
        plan: Plan,
        recomputes: Recomputes,
        states: States,
    ) -> None:
        self.plan, self.recomputes, self.states = plan, recomputes, states
        self._tables = tables
        self._table = tables.memory(plan)
        stages = stage_counts(self._table, plan)
        self._numbers = plan.stages_of(0) if plan.pp > 1 else (0,)
        self._mine = parameters_of(0, self._table, plan, stages)
        self._kept = self._kept_bytes([stages[number] for number in self._numbers])

    def _kept_bytes(self, mine: list[tuple[int, ...]]) -> Array:
        """Return the saved bytes of one sample in each stage of the first rank; (stages, recomputes)."""
        shares = self.recomputes.of_stages(tuple(sum(counts) for counts in mine)).T
        parts = [kind.bytes for kind in self._table.kinds]
        costly = shares * self.recomputes.is_selective
        stays = self.plan.offload_activations == "none"
        kept = np.zeros(shares.shape)
        for kind, part in enumerate(parts):
            blocks = np.array([[counts[kind]] for counts in mine])
            plain = (1 - shares) * part.kept + shares * part.inputs
            kept += blocks * (plain * stays + costly * part.costly)
        return kept

    def least_seconds(self, bare: Bare, adding: Adding | None, micro_batches: Array) -> Array:
        """Return lower bounds on the step time in seconds; (micro-batches, recomputes).

        Args:
            bare: costs of one micro-batch of each size.
            adding: gradient accumulation for each size; None with one stage (ranks may add shards).
            micro_batches: micro-batches of a step; (micro-batches, 1).
        """
        plan = self.plan
        numbers = self._tables.block_numbers(plan)
        whole = without_bubbles(numbers, bare, adding)[:, None] + self._again(bare, np.array(numbers))
        average = micro_batches * whole / plan.pp
        if plan.pp == 1:
            return average
        _, counts = self._tables.stage_counts(plan)
        last = list(plan.stages_of(plan.pp - 1))
        before_last, on_last = counts[: plan.pp - 1].sum(axis=0), counts[last].sum(axis=0)
        ends = bare.after[:, :2].sum(axis=1) if plan.stages - 1 in last else np.zeros(len(bare.after))
        busy = micro_batches * self._with_again(bare, ends, on_last)
        if plan.schedule in SPLIT_BACKWARD:
            late: Array = (bare.forward @ before_last + bare.before[:, 0])[:, None]
        else:
            late = self._with_again(bare, bare.before[:, :2].sum(axis=1), before_last)
        # Ranks that share cores get more of them while others wait.
        return np.maximum(average, (busy + late) / max(self._tables.problem.machine.shared, 1.0))

    def pipelined_seconds(self, bare: Bare, adding: Adding, micro_batches: Array, sends: Array) -> Array:
        """Return tighter lower bounds on the step time, from the pipeline's critical path, in seconds.

        Args:
            bare: costs of one micro-batch of each size.
            adding: gradient accumulation for each size.
            micro_batches: micro-batches of a step; (micro-batches, 1).
            sends: seconds from one stage to the next; (micro-batches, 1).
        """
        plan = self.plan
        sizes, of_kinds = self._tables.stage_counts(plan)
        counts = of_kinds.T.astype(np.float64)  # (kinds, stages)
        forward = bare.forward @ counts
        backward = (bare.backward + adding.blocks) @ counts
        weights = (bare.weights + adding.blocks) @ counts
        for stage, ends, added in ((0, bare.before, adding.before), (-1, bare.after, adding.after)):
            forward[:, stage] += ends[:, 0]
            backward[:, stage] += ends[:, 1] + added
            weights[:, stage] += ends[:, 2] + added
        habits = software(self._tables.problem, plan)
        if habits.waits_for_sends and plan.virtual_stages > 1:
            forward, backward, sends = forward + sends, backward + sends, np.zeros_like(sends)
        again = self.recomputes.of_stages(sizes)  # (recomputes, stages)
        selective = (bare.selective @ counts)[:, None] * (again * self.recomputes.is_selective[:, None])
        full = (bare.full @ counts)[:, None] * (again * self.recomputes.is_full[:, None])
        backward = backward[:, None] + selective + full
        shape, rows = backward.shape, len(self.recomputes)

        def flat(array: Array) -> Array:
            """Return a row per variant; (micro-batches × recomputes, …)."""
            return np.repeat(array, rows, axis=0)

        both = flat(forward), backward.reshape(-1, shape[2])
        number, send = flat(micro_batches), flat(sends)
        if plan.schedule in SPLIT_BACKWARD:
            apart = flat(weights)
            costs: tuple[Array, Array, Array | None] = (both[0], both[1] - apart, apart)
        else:
            costs = (*both, None)
        least = least_seconds(plan.schedule, *costs, plan.pp, number, send)
        shared = self._tables.problem.machine.shared
        if shared > 1:  # as in `cost.step.step_of`
            busy = busy_seconds(plan.schedule, both[0] + both[1], plan.pp, number).mean(axis=1)
            least = np.maximum(least / shared, busy)
        return least.reshape(shape[:2])

    def _with_again(self, bare: Bare, ends: Array, counts: npt.NDArray[np.int64]) -> Array:
        """Return the seconds of `counts` blocks of each kind and of `ends`; (micro-batches, recomputes)."""
        blocks = (bare.forward + bare.backward) @ counts + ends
        total: Array = blocks[:, None] + self._again(bare, counts)
        return total

    def _again(self, bare: Bare, counts: npt.NDArray[np.int64]) -> Array:
        """Return the seconds that recompute adds; (micro-batches, recomputes)."""
        again = (bare.selective @ counts)[:, None] * self.recomputes.is_selective
        again += (bare.full @ counts)[:, None] * self.recomputes.is_full
        total: Array = self.recomputes.shares * again
        return total

    def least_bytes(self, sizes: Sequence[int], settings: Sequence[Setting]) -> Array:
        """Return lower bounds on the bytes of the largest rank; (micro-batches, recomputes).

        Args:
            sizes: micro-batch sizes, in samples.
            settings: inputs of the memory forecast of each size, which differ in the number of micro-batches.
        """
        plan, more = self.plan, 1 + unused_shares(self.plan, settings[0].software).passing
        flights = np.array([kept_of_stages(0, plan, setting) for setting in settings], dtype=np.float64)
        one = boundary_bytes(self._table, plan, settings[0]._replace(micro_batches=1), self._numbers)
        counts = np.array([setting.micro_batches for setting in settings])
        boundary = one * counts if settings[0].software.boundary_buffers else np.full(len(counts), one)
        passing = (flights @ self._kept + boundary[:, None]) * np.array(sizes)[:, None]
        accumulating = {setting.micro_batches > 1: setting for setting in settings}
        by_kind = {accumulates: self._always(setting) for accumulates, setting in accumulating.items()}
        always = np.where(counts > 1, by_kind.get(True, 0.0), by_kind.get(False, 0.0))
        least: Array = always[:, None] + more * passing
        return least

    def _always(self, setting: Setting) -> float:
        unused = unused_shares(self.plan, setting.software)
        held = self.states.held(self._mine, setting)
        state = held["parameters"] + held["optimizer"] + held["buffers"] + held["runtime"]
        passing = held["accumulated"] * (1 + unused.passing)
        return float((state + passing + held["gathered"] * unused.gathered).min())


def without_bubbles(numbers: Sequence[int], bare: Bare, adding: Adding | None) -> Array:
    """Return the seconds of a micro-batch of each size in the whole model, without recompute.

    Args:
        numbers: number of blocks of each kind in the model.
        bare: costs of a micro-batch of each size.
        adding: gradient accumulation for each size; None where it may be negligible.
    """
    counts = np.array(numbers)
    whole: Array = (bare.forward + bare.backward) @ counts + (bare.before + bare.after)[:, :2].sum(axis=1)
    if adding is not None:
        whole = whole + adding.blocks @ counts + adding.before + adding.after
    return whole
