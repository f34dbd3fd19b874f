"""Re-planning of a run whose number of nodes may change, for its supervisors (`elastic.launch_config`).

All decisions follow one rule of the planner (`planner.replan`): keys of the job are fixed, a plan that can
continue does so unless a change gains twice its cost, and if it must change, the best plan for the remaining
nodes is taken.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from wanma.elastic.launch_config import LaunchConfig
from wanma.elastic.recovery.replan import ReplanDecision, ReplanRequest
from wanma.elastic.workers.environment import make_worker_environment
from wanma.job.cluster import Cluster
from wanma.job.errors import EXIT_USAGE, JobError
from wanma.job.forecast.forecast import Workload
from wanma.job.node_range import is_elastic
from wanma.job.plan.plan import Plan
from wanma.job.sections.job import Job
from wanma.observe.units import count_text
from wanma.planner.forecast.problem import build_problem, homogeneous_cluster
from wanma.planner.hardware_model.calibration import load_calibration
from wanma.planner.preparation.job_planning import PreparedJob, job_dimensions, peak_flops_per_second
from wanma.planner.replan import ReplanResult, replan
from wanma.planner.rules.capabilities import check_supported


@dataclass(frozen=True)
class JobReplanner:
    """Replanner of a run for any number of nodes.

    Attributes:
        job: job whose cluster.nodes is the maximum number of nodes.
        cluster, plan, workload: the run as planned for that many.
        payload: returns the request for the ranks, for a job, a plan, and the peak FLOP/s.
    """

    job: Job
    cluster: Cluster
    plan: Plan
    workload: Workload
    payload: Callable[[Job, Plan, float | None], bytes]

    def replan(self, request: ReplanRequest) -> ReplanDecision:
        """Decide on a plan, as `Replanner.replan`: for all present nodes if there is one, else for fewer."""
        max_nodes = self.job.cluster.nodes
        running, current_nodes = request.current_plan or self.plan, request.current_nodes or max_nodes
        available = request.available_nodes
        if available == current_nodes or (available > current_nodes and request.step_seconds is None):
            return ReplanDecision(running, current_nodes, "the plan is unchanged")
        reasons = []
        for machines in range(available, self._min_nodes(available, current_nodes) - 1, -1):
            try:
                result = self._replan_for(running, current_nodes, machines, request)
            except JobError as error:
                reasons.append(f"{count_text(machines, 'node')}: {error.message}")
                continue
            if result.is_change:
                return ReplanDecision(result.plan, machines, result.reason, result.forecast.to_json())
            reasons.append(f"{count_text(machines, 'node')}: {result.reason}")
        reason = "\n  ".join(reasons)
        return (
            ReplanDecision(running, current_nodes, reason)
            if available > current_nodes
            else ReplanDecision(None, 0, reason)
        )

    def make_launch_config(self, current: LaunchConfig, plan: Plan, nodes: int) -> LaunchConfig:
        """Return the launch under another plan, as `Replanner.make_launch_config`."""
        job = self._job_with_nodes(nodes)
        ranks_per_node = plan.world_size // nodes
        threads = job.cluster.threads_per_rank or max(self.cluster.nodes[0].cores // ranks_per_node, 1)
        plan = replace(plan, threads_per_rank=threads)  # each machine's own affair
        return replace(
            current,
            payload=self.payload(job, plan, peak_flops_per_second(plan, self.cluster)),
            ranks_per_node=ranks_per_node,
            threads_per_rank=threads,
            worker_environment=make_worker_environment(job.cluster, plan),
        )

    def _min_nodes(self, present_nodes: int, current_nodes: int) -> int:
        """Return the minimum number of nodes for which a change is an improvement, or possible."""
        return current_nodes + 1 if present_nodes > current_nodes else self.job.cluster.min_nodes or 1

    def _replan_for(
        self, current_plan: Plan, current_nodes: int, nodes: int, situation: ReplanRequest
    ) -> ReplanResult:
        calibration, dimensions = load_calibration(), job_dimensions(self.job)
        before = build_problem(
            self._job_with_nodes(current_nodes),
            self._cluster_with_nodes(current_nodes),
            self.workload,
            dimensions,
            calibration,
            ranks=max(current_plan.world_size // current_nodes, 1),
        )
        target_cluster = self._cluster_with_nodes(nodes)
        result = replan(
            before,
            current_plan,
            target_cluster,
            max(self.job.train.steps - situation.last_finished_step, 1),
            calibration=calibration,
            restart_seconds=situation.startup_seconds,
            step_seconds=situation.step_seconds,
        )
        check_supported(self._job_with_nodes(nodes), result.plan, target_cluster)
        return result

    def _job_with_nodes(self, nodes: int) -> Job:
        section = self.job.cluster.model_copy(update={"nodes": nodes, "min_nodes": None, "node_rank": None})
        return self.job.model_copy(update={"cluster": section})

    def _cluster_with_nodes(self, nodes: int) -> Cluster:
        """Return a cluster of so many nodes; unlike ones all count as the weakest, as any may be lost."""
        kinds = self.cluster if len(self.cluster.nodes) == 1 else homogeneous_cluster(self.job, self.cluster)
        (node,) = kinds.nodes
        return replace(kinds, nodes=(replace(node, count=nodes),))


def make_replanner(
    job: Job, prepared: PreparedJob, payload: Callable[[Job, Plan, float | None], bytes]
) -> JobReplanner | None:
    """Return the replanner of a job; None if the number of nodes is fixed.

    Raises:
        JobError: other numbers of nodes cannot be planned, because the model cannot be analyzed.
    """
    if not is_elastic(job):
        return None
    if prepared.workload is None:
        raise JobError(
            f"cluster.nodes = '{job.cluster.min_nodes}..{job.cluster.nodes}' needs a plan for each number of "
            "nodes, and the planner cannot analyze this model: "
            f"{prepared.workload_unavailable_reason or 'reason unknown'}",
            f"set cluster.nodes = {job.cluster.nodes} without cluster.min_nodes",
            exit_code=EXIT_USAGE,
        )
    return JobReplanner(job, prepared.cluster, prepared.plan, prepared.workload, payload)
