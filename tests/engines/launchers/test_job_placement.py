"""Jobs with the nodes and ranks of a launcher."""

from __future__ import annotations

from typing import Any

import pytest

from support import launcher_environments as of
from wanma.engines.launchers.job_placement import launched_world_size, place_cluster, place_job, reject_detach
from wanma.engines.launchers.launcher_placement import LauncherPlacement
from wanma.engines.launchers.placement import read_placement
from wanma.job.errors import JobError
from wanma.job.file.loading import to_job
from wanma.job.sections.job import Job


def placement(environment: of.Environment) -> LauncherPlacement:
    found = read_placement(environment)
    assert found is not None
    return found


MPIRUN = placement(of.open_mpi())
SRUN = placement(of.srun(2))
SUPERVISORS = placement(of.srun(1, size=2, tasks="1(x2)"))
"""Placement with one task on each of two nodes."""


def job(parallel: Any = None, **cluster: Any) -> Job:
    sections = {"model": {"preset": "gpt-1m"}, "cluster": cluster}
    return to_job({**sections, "parallel": parallel} if parallel else sections)


@pytest.fixture(autouse=True)
def _no_topology(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_TOPOLOGY_ADDR", raising=False)


def test_without_sizes_all_ranks_are_replicas() -> None:
    assert place_job(job(), MPIRUN).parallel.dp_replicate == 4
    assert place_job(job({"shard": "optimizer"}), SRUN).parallel.dp_replicate == 4


def test_sizes_that_fit_are_kept() -> None:
    placed = place_job(job({"dp_shard": 2, "tp": 2}), SRUN)
    assert (placed.parallel.dp_replicate, placed.parallel.dp_shard, placed.cluster.nodes) == (1, 2, 2)


@pytest.mark.parametrize(
    ("parallel", "told"),
    [
        ({"tp": 2}, r"mpirun started 4 processes on 1 node, and \[parallel\] of the job needs 2 \(tp 2\)"),
        ({"pp": 2, "dp_shard": 4}, r"needs 8 \(pp 2 × dp_shard 4\)"),
        ({"dp_replicate": 1}, r"needs 1 \(all sizes 1\)"),
        ({"ep": 2}, r"needs 1 \(all sizes 1\)"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_with_both_ways_out(parallel: Any, told: str) -> None:
    with pytest.raises(JobError, match=told) as refused:
        place_job(job(parallel), MPIRUN)
    assert "start " in refused.value.hint
    assert "whose product is 4" in refused.value.hint


def test_an_open_layout_gets_the_number_of_ranks() -> None:
    placed = place_job(job("auto"), SRUN)
    assert (placed.parallel.dp_replicate, launched_world_size(placed.cluster, SRUN)) == (1, 4)


def test_with_one_process_per_node_the_plan_decides_on_the_ranks() -> None:
    placed = place_job(job({"tp": 8}), SUPERVISORS)
    assert (placed.parallel.dp_replicate, placed.parallel.tp, placed.cluster.nodes) == (1, 8, 2)
    assert launched_world_size(placed.cluster, SUPERVISORS) is None


def test_nodes_rendezvous_and_node_rank_are_the_launcher_s() -> None:
    section = place_cluster(job().cluster, SRUN, {})
    assert (section.nodes, section.rendezvous, section.node_rank) == (2, f"n1:{SRUN.port}", 1)
    section = place_cluster(job().cluster, placement(of.srun(MASTER_ADDR="fd00::1", MASTER_PORT="7")), {})
    assert section.rendezvous == "[fd00::1]:7"
    section = place_cluster(job().cluster, MPIRUN, {})
    assert (section.nodes, section.rendezvous, section.node_rank) == (1, None, None)


def test_keys_of_the_job_come_first() -> None:
    section = place_cluster(job(rendezvous="10.0.0.9:1", node_rank=0, nodes=2).cluster, SRUN, {})
    assert (section.nodes, section.rendezvous, section.node_rank) == (2, "10.0.0.9:1", 0)
    section = place_cluster(job(nodes="2..8").cluster, SRUN, {})
    assert (section.min_nodes, section.nodes, section.node_rank) == (2, 8, None)
    section = place_cluster(job(nodes=2, rendezvous="10.0.0.9:1").cluster, SRUN, {})
    assert section.node_rank is None, "other launches may join"


def test_a_topology_of_switches_decides_on_node_ranks() -> None:
    section = place_cluster(job().cluster, SRUN, {"SLURM_TOPOLOGY_ADDR": "s0.s4.n1"})
    assert section.node_rank is None
    assert place_cluster(job(topology_address="rack-3/a").cluster, SRUN, {}).node_rank is None
    assert place_cluster(job().cluster, SRUN, {"SLURM_TOPOLOGY_ADDR": "n1"}).node_rank == 1


def test_other_nodes_than_the_launcher_s_are_refused_unless_a_rendezvous_joins_them() -> None:
    for nodes in (1, 3, "3..4"):
        with pytest.raises(
            JobError, match=rf"cluster.nodes = {nodes}, and srun started 4 processes on 2 nodes"
        ):
            place_cluster(job(nodes=nodes).cluster, SRUN, {})
    section = place_cluster(job(nodes=2, rendezvous="10.0.0.9:1", node_rank=1).cluster, MPIRUN, {})
    assert (section.nodes, section.node_rank, launched_world_size(section, MPIRUN)) == (2, 1, 8)


def test_several_nodes_without_a_host_need_master_addr() -> None:
    nowhere = placement(of.mpich())
    with pytest.raises(JobError, match="no variable names the first node"):
        place_cluster(job().cluster, nowhere, {})
    assert place_cluster(job(rendezvous="10.0.0.9:1").cluster, nowhere, {}).rendezvous == "10.0.0.9:1"


def test_a_run_under_a_launcher_is_not_detached() -> None:
    reject_detach(True, None)
    reject_detach(False, MPIRUN)
    with pytest.raises(JobError, match="--detach"):
        reject_detach(True, MPIRUN)
