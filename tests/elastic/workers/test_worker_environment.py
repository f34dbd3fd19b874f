"""The environment of worker processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from wanma.elastic.workers import environment
from wanma.elastic.workers.environment import (
    OPENMP_SPIN_ENVIRONMENT,
    early_worker_environment,
    is_environment_for,
    make_worker_environment,
)
from wanma.job.plan.plan import Plan
from wanma.job.sections.cluster import ClusterSection


def test_several_threads_of_a_rank_do_not_spin_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    several, one = Plan(threads_per_rank=2), Plan(threads_per_rank=1)
    assert make_worker_environment(ClusterSection(), several).items() >= OPENMP_SPIN_ENVIRONMENT.items()
    assert not make_worker_environment(ClusterSection(), one).keys() & OPENMP_SPIN_ENVIRONMENT.keys()


def test_a_wait_policy_of_the_users_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    assert (
        not make_worker_environment(ClusterSection(), Plan(threads_per_rank=2)).keys()
        & OPENMP_SPIN_ENVIRONMENT.keys()
    )


def test_the_allocator_is_tuned_on_cpu_only_and_only_when_wanted() -> None:
    plan = Plan(threads_per_rank=1)
    tuned = make_worker_environment(ClusterSection(), plan)
    assert tuned == {
        "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=8589934592"
        ":glibc.malloc.trim_threshold=17179869184:glibc.malloc.tcache_count=0:glibc.malloc.mxfast=0",
        "MKL_DISABLE_FAST_MM": "1",
        "OMP_NUM_THREADS": "1",
    }
    assert make_worker_environment(ClusterSection(host_allocator="system"), plan) == {"OMP_NUM_THREADS": "1"}
    assert make_worker_environment(ClusterSection(), Plan(device="cuda")) == {"OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize("threads", [1, 2])
def test_an_early_fork_server_serves_ranks_on_cpus_whatever_their_threads(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, threads: int
) -> None:
    monkeypatch.setattr(environment, "_GPU_DRIVER", tmp_path / "none")
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    plan, early = Plan(threads_per_rank=threads), early_worker_environment()
    assert is_environment_for(early, make_worker_environment(ClusterSection(), plan))
    system = make_worker_environment(ClusterSection(host_allocator="system"), plan)
    assert not is_environment_for(early, system)
    (tmp_path / "none").touch()
    assert is_environment_for(early_worker_environment(), system)
