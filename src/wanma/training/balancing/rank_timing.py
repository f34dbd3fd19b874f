"""What a rank takes for itself in each step, told to the supervisor, who compares it with its peers'."""

from __future__ import annotations

from collections.abc import Mapping

from wanma.job.plan.plan import Plan
from wanma.job.plan.rank_timing import why_not_timed
from wanma.job.run.worker import Control
from wanma.parallel.mesh.parallel_mesh import Grid


class OwnWork:
    """Tells it after every step, on the page that the supervisor reads anyway: no collective, no system call.

    Of forward and backward it tells what `WorkClock` does: on CPUs without all that is waited for in them,
    under every axis. On GPUs where nobody waits in a forward; elsewhere a rank is judged by its waiting for
    data alone.
    """

    def __init__(self, plan: Plan, grid: Grid, control: Control) -> None:
        self._plan, self._data_rank, self._tell = plan, grid.data_rank, control.worked
        self._group = grid.at("pp")
        alone = plan.tp == plan.cp == 1 and why_not_timed(plan) is None
        self._computes_apart = plan.device == "cpu" or alone
        self._global_batch, self._share = 0, 1.0

    def step(self, phases: Mapping[str, float], seconds: float, global_batch: int, plan: Plan) -> None:
        """A step has ended.

        Args:
            phases: seconds, as in its record.
            seconds: of forward and backward, of `WorkClock`.
            plan: whose shares it had.
        """
        if plan is not self._plan:
            self._plan, self._global_batch = plan, 0
        if global_batch != self._global_batch:
            self._global_batch, self._share = global_batch, self._share_of(global_batch)
        compute = seconds / self._share if self._computes_apart else 0.0
        self._tell(self._group, phases["data"], compute)

    def _share_of(self, global_batch: int) -> float:
        """How many times the mean number of samples this rank has by chance, since a batch may not divide.

        Shares that the plan made unequal are to take equally long, on unequal devices.
        """
        plan = self._plan
        if plan.batch_shares or plan.placement:
            return 1.0
        mine = len(plan.rows(global_batch, self._data_rank))
        return mine * plan.data_ranks / global_batch if mine else float("inf")
