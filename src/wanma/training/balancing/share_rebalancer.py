"""Changes of the batch shares during a run: by a job's own list, or by the ranks' times.

Which samples are in a step, and in which order, never changes: only the ranks that compute them. Times travel
every few steps in the all-reduce that each step has anyway, and all ranks decide alike from the same sums.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from wanma.data.sampling.batch_size_schedule import global_batch_size
from wanma.job.plan.plan import Plan
from wanma.job.plan.rank_timing import rank_timing_obstacle
from wanma.job.sections.job import Job
from wanma.models.layers.batch_norm import GroupedBatchNorm
from wanma.models.layers.router import TopKRouter
from wanma.observe.units import duration_text
from wanma.parallel.mesh.parallel_mesh import ParallelMesh
from wanma.parallel.parallelize import ParallelModel
from wanma.planner.batch_share_rules import invalid_shares_reason
from wanma.planner.pipeline.schedules import accepts_micro_batches
from wanma.training.balancing.share_allocation import (
    LoadBalancer,
    RankSpeed,
    Rebalance,
    ShareGranularity,
    padded_rows,
    recent_step_seconds,
)
from wanma.training.checkpointing.training_state import TrainingState

MIN_WINDOW_STEPS, MIN_WINDOW_SECONDS = 4, 0.5
"""Least length of a window, in steps and in seconds.

A kernel that shares out a processor does it in periods of a tenth of a second. The first steps of a window
hardly count (`recent_step_seconds`): after a start or a move, buffers and kernels are made in them for sizes
that come for the first time.
"""


@dataclass(frozen=True)
class ShareChange:
    """Change of the batch shares from one step on."""

    step: int
    """Number of optimizer steps before the change, as in `parallel.batch_share_schedule`."""
    shares: tuple[int, ...]
    previous_shares: tuple[int, ...]
    reason: str

    @property
    def text(self) -> str:
        return f"batch shares rebalanced after step {self.step}: {_format_shares(self.shares)}; {self.reason}"


class ShareRebalancer:
    """Rebalancer of the batch shares on one rank.

    Args:
        job: job of the run.
        plan: plan at the start.
        parallel_mesh: device meshes of the plan.
        parallel_model: this rank's part of the model.
        state: training state, whose own moves the run continues from.

    Attributes:
        plan: plan of the next step.
        messages: messages for the user that have not been shown.
    """

    def __init__(
        self,
        job: Job,
        plan: Plan,
        parallel_mesh: ParallelMesh,
        parallel_model: ParallelModel,
        state: TrainingState,
    ) -> None:
        self.plan = plan
        self.messages: list[str] = []
        self._job, self._parallel_mesh, self._state = job, parallel_mesh, state
        self._schedule = job.parallel.batch_share_schedule
        if (
            self._schedule and len(self._schedule[0][1]) != plan.data_parallel_size
        ):  # the run has grown or shrunk since
            self._schedule = []
            self.messages.append(
                f"parallel.batch_share_schedule is ignored: the run now has {plan.data_parallel_size} "
                "data ranks"
            )
        self._is_enabled = is_load_balancing(job, plan)
        self._granularity = share_granularity(job, plan, parallel_model)
        if self._schedule:
            self._set_shares(
                next((tuple(shares) for step, shares in reversed(self._schedule) if step <= state.step), None)
            )
        elif state.share_changes:
            self._set_shares(self._restored_shares())
        self._refusal_reported = False
        """True if the user was told of a move that cannot be made."""
        self._load_balancer = LoadBalancer()
        self._window = MIN_WINDOW_STEPS
        self._reset_window()

    def record_compute(self, seconds: float) -> None:
        """Note the compute seconds of this rank in the current step; called before `local_timings`."""
        if self._is_enabled:
            self._work_seconds.append(seconds)

    def record_step(self, phases: Mapping[str, float], seconds: float) -> None:
        """Note the other seconds of a recorded step; they count as independent of its rows."""
        if not self._is_enabled:
            return
        if self._parallel_mesh.device.type == "cpu":  # elsewhere the host has only queued the update
            self._fixed_seconds.append(phases["optimizer"] + phases["data"])
        self._wall_seconds.append(seconds)

    def local_timings(self) -> tuple[float, ...]:
        """Return the numbers that this rank adds to the step's all-reduce; empty between windows."""
        if not self._is_enabled or len(self._work_seconds) < self._window:
            return ()
        world, rank = self.plan.world_size, self._parallel_mesh.rank
        timings = [0.0] * (2 * world + 1)
        timings[rank], timings[world + rank] = (
            recent_step_seconds(self._work_seconds),
            recent_step_seconds(self._fixed_seconds),
        )
        timings[-1] = recent_step_seconds(self._wall_seconds) / world
        return tuple(timings)

    def decide(self, sums: Sequence[float]) -> Rebalance | None:
        """Judge the window by the sums over all ranks; return the decision, alike on each, or None."""
        if not sums:
            return None
        rows = self.plan.rows_per_data_rank(global_batch_size(self._job.train, self._state.step))
        paces = self._rank_speeds(sums, rows)
        self._window = max(MIN_WINDOW_STEPS, math.ceil(MIN_WINDOW_SECONDS / max(sums[-1], 1e-6)))
        if len(self._work_seconds) < self._window:  # steps are shorter than expected: the window continues
            return None
        self._reset_window()
        return self._load_balancer.evaluate_window(paces, rows, self._granularity)

    def apply_change(self, rebalance: Rebalance | None) -> ShareChange | None:
        """Move the shares after a step, if that was decided or listed and the shares are possible."""
        step = self._state.step
        before = tuple(self.plan.rows_per_data_rank(global_batch_size(self._job.train, step - 1)))
        listed = next((tuple(shares) for at, shares in self._schedule if at == step), None)
        if listed is not None:
            self._set_shares(listed)
            return ShareChange(step, listed, before, "parallel.batch_share_schedule")
        if rebalance is None:
            return None
        obstacle = invalid_shares_reason(
            self._job, self.plan, rebalance.shares, self._granularity.row_multiple, step
        )
        if obstacle is not None:
            if not self._refusal_reported:
                self._refusal_reported = True
                self.messages.append(
                    f"batch shares not changed to {_format_shares(rebalance.shares)}: {obstacle}"
                )
            return None
        reason = (
            f"slowest rank {duration_text(rebalance.current_seconds)} per step, predicted "
            f"{duration_text(rebalance.predicted_seconds)} ({rebalance.gain:.0%} less)"
        )
        self._set_shares(rebalance.shares)
        self._state.share_changes.append((step, rebalance.shares))
        return ShareChange(step, rebalance.shares, before, reason)

    # ---------------------------------------------------------------- inside

    def _rank_speeds(self, sums: Sequence[float], rows: Sequence[int]) -> list[RankSpeed]:
        """Return the speed of every data rank: that of the slowest rank that computes its samples."""
        world = self.plan.world_size
        work, fixed = [0.0] * len(rows), [0.0] * len(rows)
        for rank in range(world):
            data_rank = self.plan.data_parallel_rank(rank)
            work[data_rank] = max(work[data_rank], sums[rank])
            fixed[data_rank] = max(fixed[data_rank], sums[world + rank])
        return [
            RankSpeed(seconds / max(padded_rows(rank_rows, self._granularity), 1), fixed_seconds)
            for seconds, fixed_seconds, rank_rows in zip(work, fixed, rows, strict=True)
        ]

    def _restored_shares(self) -> tuple[int, ...] | None:
        """Return the shares that the run had when it was saved; None where it does not keep them."""
        step, shares = self._state.share_changes[-1]
        subject = f"the batch shares {_format_shares(shares)} of step {step}"
        obstacle: str | None
        if not self._is_enabled:
            obstacle = "load balancing is off (parallel.load_balancing)"
        elif len(shares) != self.plan.data_parallel_size:
            obstacle = f"the run now has {self.plan.data_parallel_size} data ranks"
        else:
            obstacle = invalid_shares_reason(
                self._job, self.plan, shares, self._granularity.row_multiple, self._state.step
            )
        if obstacle is not None:
            self._state.share_changes.clear()
            self.messages.append(f"{subject} are not restored: {obstacle}")
            return None
        self.messages.append(f"restored {subject}")
        return shares

    def _set_shares(self, shares: tuple[int, ...] | None) -> None:
        if shares is not None:
            self.plan = self.plan.with_changes(batch_shares=shares)

    def _reset_window(self) -> None:
        self._work_seconds: list[float] = []
        self._fixed_seconds: list[float] = []
        self._wall_seconds: list[float] = []
        """Seconds of each step since the last window."""


def is_load_balancing(job: Job, plan: Plan) -> bool:
    """Return whether shares follow the ranks' times.

    By default they do only where the planner gave unlike devices unlike shares: elsewhere a slow rank is a
    fault that is reported, and runs of one layout are equal bit for bit.
    """
    setting = job.parallel.load_balancing
    if plan.data_parallel_size == 1 or setting == "off" or job.parallel.batch_share_schedule:
        return False
    if setting == "on":
        return True
    is_planned = bool(plan.batch_shares) and not job.parallel.batch_shares
    return is_planned and not job.train.deterministic and rank_timing_obstacle(plan) is None


def share_granularity(job: Job, plan: Plan, parallel_model: ParallelModel) -> ShareGranularity:
    """Return the granularity of this model's batch shares under this plan; the same on every rank."""
    groups = [1]
    for module in parallel_model.statistics_modules.values():
        if isinstance(module, TopKRouter):
            groups.append(module.config.balance_group)
        elif isinstance(module, GroupedBatchNorm):
            groups.append(module.group_size)
    if plan.pp == 1:
        return ShareGranularity(row_multiple=math.lcm(*groups))
    max_rows = plan.max_rows_per_data_rank(job.train.global_batch)
    counts = range(1, max(max_rows, plan.pp * 2) + 1)
    min_count = next(count for count in counts if accepts_micro_batches(plan.schedule, plan.pp, count))
    return ShareGranularity(math.lcm(*groups), (min_count - 1) * plan.micro_batch + 1, plan.micro_batch)


def _format_shares(shares: Sequence[int]) -> str:
    shown = ", ".join(map(str, shares[:16]))
    return f"[{shown}{', ...' if len(shares) > 16 else ''}]"
