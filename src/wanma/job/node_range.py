"""Elasticity of a job: whether its number of nodes may change during the run (`cluster.nodes = '2..8'`)."""

from __future__ import annotations

from wanma.job.errors import JobError
from wanma.job.sections.job import Job


def is_elastic(job: Job) -> bool:
    """Return True if the number of nodes may change."""
    return job.cluster.min_nodes is not None and job.cluster.min_nodes < job.cluster.nodes


def require_fixed_nodes(job: Job, feature: str) -> None:
    """Refuse a job with a variable number of nodes, for callers whose plan is fixed.

    Raises:
        JobError: the job's number of nodes may change.
    """
    if is_elastic(job):
        raise JobError(
            f"cluster.nodes = '{job.cluster.min_nodes}..{job.cluster.nodes}': {feature} needs a fixed "
            "number of nodes",
            f"set cluster.nodes = {job.cluster.nodes} without cluster.min_nodes; `wanma train` takes a range",
        )
