"""Re-planning of a run whose number of nodes may change, for its supervisors (`elastic.launch_config`).

All decisions follow one rule of the planner (`planner.replan`): keys of the job are fixed, a plan that can
continue does so unless a change gains twice its cost, and if it must change, the best plan for the remaining
nodes is taken.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from wanma.elastic.launch_config import Launch
from wanma.elastic.recovery.replan import Decision, Situation
from wanma.elastic.workers.environment import worker_environment
from wanma.job.cluster import Cluster
from wanma.job.errors import EXIT_USAGE, JobError
from wanma.job.forecast.forecast import Workload
from wanma.job.plan.plan import Plan
from wanma.job.sections.job import Job
from wanma.planner.forecast.problem import equal_machines, problem_of
from wanma.planner.hardware_model.calibration import load_calibration
from wanma.planner.preparation.job_planning import Prepared, job_dimensions, peak_flops_per_second
from wanma.planner.replan import Replanned, replan
from wanma.planner.rules.capabilities import check_runnable


def is_elastic(job: Job) -> bool:
    """Return True if the number of nodes may change."""
    return job.cluster.min_nodes is not None and job.cluster.min_nodes < job.cluster.nodes


def refuse_elastic(job: Job, what: str) -> None:
    """Refuse a job with a variable number of nodes, for callers whose plan is fixed.

    Raises:
        JobError: the job's number of nodes may change.
    """
    if is_elastic(job):
        raise JobError(
            f"cluster.nodes = '{job.cluster.min_nodes}..{job.cluster.nodes}': {what} runs on a fixed number "
            "of machines",
            f"set cluster.nodes = {job.cluster.nodes} without cluster.min_nodes, or use `wanma train`",
        )


@dataclass(frozen=True)
class ElasticPlans:
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

    def decide(self, situation: Situation) -> Decision:
        """Decide on a plan, as `Replanner.decide`: for all present nodes if there is one, else for fewer."""
        most = self.job.cluster.nodes
        running, used = situation.running or self.plan, situation.nodes or most
        here = situation.machines
        if here == used or (here > used and situation.step_seconds is None):
            return Decision(running, used, "the plan is as it was")
        reasons = []
        for machines in range(here, self._fewest(here, used) - 1, -1):
            try:
                found = self._replanned(running, used, machines, situation)
            except JobError as error:
                reasons.append(f"{machines} machines: {error.message}")
                continue
            if found.changes:
                return Decision(found.plan, machines, found.reason, found.forecast.to_json())
            reasons.append(f"{machines} machines: {found.reason}")
        why = "\n  ".join(reasons)
        return Decision(running, used, why) if here > used else Decision(None, 0, why)

    def launch(self, before: Launch, plan: Plan, nodes: int) -> Launch:
        """Return the launch under another plan, as `Replanner.launch`."""
        job = self._job_on(nodes)
        here = plan.world_size // nodes
        threads = job.cluster.threads_per_rank or max(self.cluster.nodes[0].cores // here, 1)
        plan = replace(plan, threads_per_rank=threads)  # each machine's own affair
        return replace(
            before,
            payload=self.payload(job, plan, peak_flops_per_second(plan, self.cluster)),
            ranks_per_node=here,
            threads_per_rank=threads,
            environment=worker_environment(job.cluster, plan),
        )

    def _fewest(self, here: int, used: int) -> int:
        """Return the minimum number of nodes for which a change is an improvement, or possible."""
        return used + 1 if here > used else self.job.cluster.min_nodes or 1

    def _replanned(self, running: Plan, used: int, machines: int, situation: Situation) -> Replanned:
        calibration, dimensions = load_calibration(), job_dimensions(self.job)
        before = problem_of(
            self._job_on(used),
            self._cluster_of(used),
            self.workload,
            dimensions,
            calibration,
            ranks=max(running.world_size // used, 1),
        )
        there = self._cluster_of(machines)
        found = replan(
            before,
            running,
            there,
            max(self.job.train.steps - situation.step, 1),
            calibration=calibration,
            restart_seconds=situation.start_seconds,
            step_seconds=situation.step_seconds,
        )
        check_runnable(self._job_on(machines), found.plan, there)
        return found

    def _job_on(self, machines: int) -> Job:
        section = self.job.cluster.model_copy(
            update={"nodes": machines, "min_nodes": None, "node_rank": None}
        )
        return self.job.model_copy(update={"cluster": section})

    def _cluster_of(self, machines: int) -> Cluster:
        """Return a cluster of so many nodes; unlike ones all count as the weakest, as any may be lost."""
        kinds = self.cluster if len(self.cluster.nodes) == 1 else equal_machines(self.job, self.cluster)
        (node,) = kinds.nodes
        return replace(kinds, nodes=(replace(node, count=machines),))


def elastic_plans(
    job: Job, prepared: Prepared, payload: Callable[[Job, Plan, float | None], bytes]
) -> ElasticPlans | None:
    """Return the replanner of a job; None if the number of nodes is fixed.

    Raises:
        JobError: other numbers of nodes cannot be planned, because the model cannot be analysed.
    """
    if not is_elastic(job):
        return None
    if prepared.workload is None:
        raise JobError(
            f"cluster.nodes = '{job.cluster.min_nodes}..{job.cluster.nodes}' needs a plan for each number of "
            f"machines, and so a model that the planner can read: {prepared.unknown or 'not this one'}",
            f"set cluster.nodes = {job.cluster.nodes} without cluster.min_nodes",
            exit_code=EXIT_USAGE,
        )
    return ElasticPlans(job, prepared.cluster, prepared.plan, prepared.workload, payload)
