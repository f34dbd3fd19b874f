"""The environment of the worker processes: what must be set before a process starts."""

from __future__ import annotations

from wanma.job.plan import Plan
from wanma.job.sections import ClusterSection

TUNED_ALLOCATOR = {
    "MALLOC_MMAP_THRESHOLD_": "8589934592",
    "MALLOC_TRIM_THRESHOLD_": "17179869184",
    "THP_MEM_ALLOC_ENABLE": "1",
}
"""glibc keeps freed tensors instead of returning their pages; torch backs large ones by huge pages."""


def worker_environment(cluster: ClusterSection, plan: Plan) -> dict[str, str]:
    """Variables for the fork server and its workers.

    The allocator settings are for ranks that compute on the CPU: on a GPU host memory is staging
    space, and keeping it would only make the process larger.
    """
    threads = {"OMP_NUM_THREADS": str(plan.threads_per_rank)}
    tuned = cluster.allocator == "tuned" and plan.device == "cpu"
    return {**TUNED_ALLOCATOR, **threads} if tuned else threads
