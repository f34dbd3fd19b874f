"""What snapshots for recovery take of the machines' own memory."""

from __future__ import annotations

from wanma.job.forecast import Workload
from wanma.job.plan import Plan
from wanma.job.sections import Job
from wanma.planner.memory.state import state_elements

_IMAGES = 2
"""Written in turn, so that one of them is always whole."""


def snapshot_bytes(job: Job, workload: Workload, plan: Plan) -> int:
    """Of one rank; ranks of one machine that hold the same share it. As much again on several machines, for
    each also keeps another's (`checkpoint.partner`). 0 where the job wants none, or `plan`
    keeps state on disk, which then has no copy in memory."""
    if job.checkpoint.snapshots == "off" or "disk" in (plan.offload_parameters, plan.offload_optimizer):
        return 0
    elements = workload.parameters + state_elements(workload, job.train)
    if job.train.weight_average > 0:
        elements += workload.parameters
    element_bytes = 8 if plan.precision == "fp64" else 4
    copies = 2 if job.cluster.nodes > 1 and job.checkpoint.partner is not False else 1
    parts = max(plan.world_size // plan.replicas, plan.world_size // job.cluster.nodes, 1)
    return int(copies * _IMAGES * element_bytes * elements / parts)
