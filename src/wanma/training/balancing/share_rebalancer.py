"""Changes of the batch shares during a run: by a job's own list, or by the ranks' times.

Which samples are in a step, and in which order, never changes: only the ranks that compute them. Times travel
every few steps in the all-reduce that each step has anyway, and all ranks decide alike from the same sums.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from wanma.data.sampling.batch_size_schedule import global_batch
from wanma.job.plan.plan import Plan
from wanma.job.plan.rank_timing import why_not_timed
from wanma.job.sections.job import Job
from wanma.models.layers.batch_norm import GroupedBatchNorm
from wanma.models.layers.router import Routing
from wanma.observe.units import duration_text
from wanma.parallel.mesh.parallel_mesh import Grid
from wanma.parallel.parallelize import Parallel
from wanma.planner.batch_share_rules import wrong_shares
from wanma.planner.pipeline.schedules import runs_micro_batches
from wanma.training.balancing.share_allocation import Balancer, Decision, Pace, Unit, computed_rows, lately
from wanma.training.checkpointing.training_state import TrainingState

WINDOW_STEPS, WINDOW_SECONDS = 4, 0.5
"""Least length of a window, in steps and in seconds.

A kernel that shares out a processor does it in periods of a tenth of a second. The first steps of a window
hardly count (`lately`): after a start or a move, buffers and kernels are made in them for sizes that come for
the first time.
"""


@dataclass(frozen=True)
class Moved:
    """Change of the batch shares from one step on."""

    step: int
    """Number of optimizer steps before the change, as in `parallel.batch_share_schedule`."""
    shares: tuple[int, ...]
    before: tuple[int, ...]
    reason: str

    @property
    def text(self) -> str:
        return f"shares of the batch move after step {self.step}: {_listed(self.shares)}; {self.reason}"


class ShareMoves:
    """Rebalancer of the batch shares on one rank.

    Args:
        job: job of the run.
        plan: plan at the start.
        grid: device meshes of the plan.
        parallel: this rank's part of the model.
        state: training state, whose own moves the run continues from.

    Attributes:
        plan: plan of the next step.
        notes: messages for the user that have not been shown.
    """

    def __init__(self, job: Job, plan: Plan, grid: Grid, parallel: Parallel, state: TrainingState) -> None:
        self.plan = plan
        self.notes: list[str] = []
        self._job, self._grid, self._state = job, grid, state
        self._moves = job.parallel.batch_share_schedule
        if self._moves and len(self._moves[0][1]) != plan.data_ranks:  # the run has grown or shrunk since
            self._moves = []
            self.notes.append(
                f"parallel.batch_share_schedule is left: there are {plan.data_ranks} data ranks now"
            )
        self._is_on = balances(job, plan)
        self._unit = unit_of(job, plan, parallel)
        if self._moves:
            self._take_up(next((tuple(to) for at, to in reversed(self._moves) if at <= state.step), None))
        elif state.share_moves:
            self._take_up(self._of_checkpoint())
        self._is_refused = False
        """True if the user was told of a move that cannot be made."""
        self._balancer = Balancer()
        self._window = WINDOW_STEPS
        self._forget()

    def worked(self, seconds: float) -> None:
        """Note the compute seconds of this rank in the current step; called before `shared`."""
        if self._is_on:
            self._work.append(seconds)

    def step_ended(self, phases: Mapping[str, float], seconds: float) -> None:
        """Note the other seconds of a recorded step; they count as independent of its rows."""
        if not self._is_on:
            return
        if self._grid.device.type == "cpu":  # elsewhere the host has only queued the update
            self._fixed.append(phases["optimizer"] + phases["data"])
        self._wall.append(seconds)

    def shared(self) -> tuple[float, ...]:
        """Return the numbers that this rank adds to the step's all-reduce; empty between windows."""
        if not self._is_on or len(self._work) < self._window:
            return ()
        world, rank = self.plan.world_size, self._grid.rank
        told = [0.0] * (2 * world + 1)
        told[rank], told[world + rank] = lately(self._work), lately(self._fixed)
        told[-1] = lately(self._wall) / world
        return tuple(told)

    def agreed(self, sums: Sequence[float]) -> Decision | None:
        """Judge the window by the sums over all ranks; return the decision, alike on each, or None."""
        if not sums:
            return None
        rows = self.plan.sizes(global_batch(self._job.train, self._state.step))
        paces = self._paces(sums, rows)
        self._window = max(WINDOW_STEPS, math.ceil(WINDOW_SECONDS / max(sums[-1], 1e-6)))
        if len(self._work) < self._window:  # steps are shorter than was thought: it goes on
            return None
        self._forget()
        return self._balancer.hear(paces, rows, self._unit)

    def move(self, decision: Decision | None) -> Moved | None:
        """Move the shares after a step, if that was decided or listed and the shares are possible."""
        step = self._state.step
        before = tuple(self.plan.sizes(global_batch(self._job.train, step - 1)))
        listed = next((tuple(shares) for at, shares in self._moves if at == step), None)
        if listed is not None:
            self._take_up(listed)
            return Moved(step, listed, before, "parallel.batch_share_schedule")
        if decision is None:
            return None
        wrong = wrong_shares(self._job, self.plan, decision.shares, self._unit.rows, step)
        if wrong is not None:
            if not self._is_refused:
                self._is_refused = True
                self.notes.append(
                    f"shares of the batch stay, though {_listed(decision.shares)} would fit: {wrong}"
                )
            return None
        reason = (
            f"the slowest rank computes {duration_text(decision.before_seconds)} a step, and would "
            f"{duration_text(decision.after_seconds)} ({decision.gain:.0%} less)"
        )
        self._take_up(decision.shares)
        self._state.share_moves.append((step, decision.shares))
        return Moved(step, decision.shares, before, reason)

    # ---------------------------------------------------------------- inside

    def _paces(self, sums: Sequence[float], rows: Sequence[int]) -> list[Pace]:
        """Return the speed of every data rank: that of the slowest rank that computes its samples."""
        world = self.plan.world_size
        work, fixed = [0.0] * len(rows), [0.0] * len(rows)
        for rank in range(world):
            mine = self.plan.data_rank(rank)
            work[mine] = max(work[mine], sums[rank])
            fixed[mine] = max(fixed[mine], sums[world + rank])
        return [
            Pace(seconds / max(computed_rows(own, self._unit), 1), rest)
            for seconds, rest, own in zip(work, fixed, rows, strict=True)
        ]

    def _of_checkpoint(self) -> tuple[int, ...] | None:
        """Return the shares that the run had when it was saved; None where it does not keep them."""
        step, shares = self._state.share_moves[-1]
        told = f"the shares of the batch that the run had moved to at step {step} ({_listed(shares)})"
        why: str | None
        if not self._is_on:
            why = "nothing moves shares now (parallel.load_balancing)"
        elif len(shares) != self.plan.data_ranks:
            why = f"there are {self.plan.data_ranks} data ranks now"
        else:
            why = wrong_shares(self._job, self.plan, shares, self._unit.rows, self._state.step)
        if why is not None:
            self._state.share_moves.clear()
            self.notes.append(f"{told} are left: {why}")
            return None
        self.notes.append(f"going on with {told}")
        return shares

    def _take_up(self, shares: tuple[int, ...] | None) -> None:
        if shares is not None:
            self.plan = self.plan.but(batch_shares=shares)

    def _forget(self) -> None:
        self._work: list[float] = []
        self._fixed: list[float] = []
        self._wall: list[float] = []
        """Seconds of each step since the last window."""


def balances(job: Job, plan: Plan) -> bool:
    """Return whether shares follow the ranks' times.

    By default they do only where the planner gave unlike devices unlike shares: elsewhere a slow rank is a
    fault that is reported, and runs of one layout are equal bit for bit.
    """
    asked = job.parallel.load_balancing
    if plan.data_ranks == 1 or asked == "off" or job.parallel.batch_share_schedule:
        return False
    if asked == "on":
        return True
    is_planned = bool(plan.batch_shares) and not job.parallel.batch_shares
    return is_planned and not job.train.deterministic and why_not_timed(plan) is None


def unit_of(job: Job, plan: Plan, parallel: Parallel) -> Unit:
    """Return the granularity of this model's batch shares under this plan; the same on every rank."""
    groups = [1]
    for module in parallel.noting.values():
        if isinstance(module, Routing):
            groups.append(module.dimensions.balance_group)
        elif isinstance(module, GroupedBatchNorm):
            groups.append(module.group)
    if plan.pp == 1:
        return Unit(rows=math.lcm(*groups))
    most = plan.most_rows(job.train.global_batch)
    counts = range(1, max(most, plan.pp * 2) + 1)
    fewest = next(count for count in counts if runs_micro_batches(plan.schedule, plan.pp, count))
    return Unit(math.lcm(*groups), (fewest - 1) * plan.micro_batch + 1, plan.micro_batch)


def _listed(shares: Sequence[int]) -> str:
    shown = ", ".join(map(str, shares[:16]))
    return f"[{shown}{', ...' if len(shares) > 16 else ''}]"
