"""Smallest cluster of the same nodes on which a job fits.

Only memory decides, by the leanest plans: those that shard and recompute as much as the job leaves open. Pure
functions, without torch.
"""

from __future__ import annotations

from dataclasses import replace

from wanma.hardware.cluster_file.node_builder import MAX_NODES
from wanma.job.cluster import Cluster
from wanma.job.forecast.forecast import Workload
from wanma.job.plan.plan import Plan
from wanma.job.sections.job import Job
from wanma.models.config.dimensions import DecoderConfig
from wanma.planner.forecast.plan_forecast import forecast_plan_memory
from wanma.planner.forecast.problem import PlanningProblem, build_problem, homogeneous_cluster
from wanma.planner.search.space import SearchSpace, enumerate_plans


def minimum_cluster(
    job: Job, cluster: Cluster, workload: Workload, dimensions: DecoderConfig | None = None
) -> Cluster | None:
    """Return the smallest larger cluster of the same nodes on which the job fits.

    Node counts are those that many sizes divide: powers of two, or three or five times such.

    Returns:
        the cluster; None where no number of nodes would do, because one rank's share cannot be cut further.
    """
    (node,) = homogeneous_cluster(job, cluster).nodes
    problem = build_problem(job, cluster, workload, dimensions)
    larger = (Cluster((replace(node, count=count),)) for count in node_counts(node.count + 1, MAX_NODES))
    return next((machines for machines in larger if minimum_memory_plan(problem, machines) is not None), None)


def minimum_memory_plan(problem: PlanningProblem, cluster: Cluster) -> Plan | None:
    """Return a plan on all of the cluster's devices that fits; None where even the leanest does not."""
    (node,) = cluster.nodes
    world = node.count * max(len(node.devices), 1)
    space = minimum_memory_space(
        SearchSpace.from_job(
            problem.job, cluster, problem.dimensions, world_sizes=[world], workload=problem.workload
        ),
        problem.job,
    )
    fitting = (
        plan
        for plan in enumerate_plans(space, problem.workload)
        if forecast_plan_memory(problem, plan).memory_bytes <= problem.memory_limit_bytes
    )
    return next(fitting, None)


def minimum_memory_space(space: SearchSpace, job: Job) -> SearchSpace:
    """Restrict a search space to the plans that need the least memory."""
    set_fields = job.parallel.model_fields_set
    full = tuple(option for option in space.recompute if option[0] == "full") or space.recompute
    return replace(
        space,
        micro_batch=space.micro_batch or (space.sample_group_size,),
        recompute=tuple((kind, share or 1.0) for kind, share in full),
        schedules=space.schedules if "schedule" in set_fields else (("1f1b", 1),),
        shard=space.shard if job.parallel.shard else ("none", "parameters"),
    )


def node_counts(least: int, most: int) -> list[int]:
    """List the node counts from `least` to `most` that many sizes divide, in rising order."""
    powers = [2**exponent for exponent in range(most.bit_length())]
    return sorted(
        {size for power in powers for size in (power, 3 * power, 5 * power) if least <= size <= most}
    )
