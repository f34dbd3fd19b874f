"""Environment variables of worker processes, which must be set before a process starts."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from wanma.elastic.workers.malloc_reserve import DISABLE_SMALL_CACHES_TUNABLES

if TYPE_CHECKING:
    from wanma.job.plan.plan import Plan
    from wanma.job.sections.cluster import ClusterSection

TUNED_MALLOC_ENVIRONMENT = {
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=8589934592"
    f":glibc.malloc.trim_threshold=17179869184:{DISABLE_SMALL_CACHES_TUNABLES}",
    "MKL_DISABLE_FAST_MM": "1",
}
"""Allocator settings for ranks on CPUs: glibc (2.35 and later) keeps freed tensors, in huge pages.

It does not return their pages, and puts no small object into the rest of a tensor's block (`malloc_reserve`).

MKL would keep the buffers of its products from one to the next. It takes them between the first step's
tensors, where they stay: with 44 MiB of them in the way, a decoder's logits of 256 MiB no longer fitted where
they had been, and the heap grew by as much. glibc, which returns no pages, gives MKL a buffer as fast.

torch's own THP_MEM_ALLOC_ENABLE gains as much time, but together with the thresholds its aligned blocks leave
holes: a rank grew to twice its memory within a hundred steps.
"""

OPENMP_SPIN_ENVIRONMENT = {"GOMP_SPINCOUNT": "1000"}
"""Rounds that a thread of GNU OpenMP spins for its next work before it sleeps.

It is libgomp's own value for more threads than cores; otherwise that is 300,000. With those, two threads on
two cores that other programs use too took 30 times as long for a small step: each spins where another has
work to do.
"""
_GPU_DRIVER = Path("/dev/nvidiactl")
_WAIT_POLICIES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")


def make_worker_environment(cluster: ClusterSection, plan: Plan) -> dict[str, str]:
    """Return the variables for the fork server and its workers.

    The allocator settings are for ranks that compute on the CPU: on a GPU host memory is staging space, and
    keeping it would only make the process larger.
    """
    threads = {"OMP_NUM_THREADS": str(plan.threads_per_rank)}
    if plan.threads_per_rank > 1 and not any(name in os.environ for name in _WAIT_POLICIES):
        threads |= OPENMP_SPIN_ENVIRONMENT
    tuned = cluster.host_allocator == "tuned" and plan.device == "cpu"
    return {**TUNED_MALLOC_ENVIRONMENT, **threads} if tuned else threads


def early_worker_environment() -> dict[str, str]:
    """Return the variables for a fork server that starts before the job is read: what most jobs need here."""
    threads = {} if any(name in os.environ for name in _WAIT_POLICIES) else OPENMP_SPIN_ENVIRONMENT
    return {**({} if _GPU_DRIVER.exists() else TUNED_MALLOC_ENVIRONMENT), **threads}


def is_environment_for(early: Mapping[str, str], needed: Mapping[str, str]) -> bool:
    """Return whether a fork server that has started with variables `early` can fork ranks that need others.

    Each rank sets its number of threads itself; one thread waits for no other.
    """
    late = {"OMP_NUM_THREADS"}
    if needed["OMP_NUM_THREADS"] == "1":
        late |= OPENMP_SPIN_ENVIRONMENT.keys()
    return {**early, **dict.fromkeys(late)} == {**needed, **dict.fromkeys(late)}
