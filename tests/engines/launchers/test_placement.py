"""Placement of a process by the variables of its launcher."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support import launcher_environments as of
from wanma.engines.launchers.launcher_placement import LauncherPlacement
from wanma.engines.launchers.placement import PORTS, read_placement
from wanma.job.errors import JobError

TASKS = {"worker": "h1:2 h2:1 h2:2", "chief": "h1:1", "ps": "h3:1 h3:2"}
EXPORTED = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "n", "MASTER_PORT": "1"}
"""Variables that a user has exported in the shell."""


def read(environment: of.Environment) -> LauncherPlacement:
    placement = read_placement(environment)
    assert placement is not None
    return placement


def place(placement: LauncherPlacement) -> tuple[int, int, int, int, int]:
    return (
        placement.rank,
        placement.world_size,
        placement.local_rank,
        placement.local_world_size,
        placement.nodes,
    )


@pytest.mark.parametrize(
    ("launcher", "environment", "host"),
    [
        ("mpirun", of.open_mpi(3, local_size=2, OMPI_MCA_orte_node_regex="vm,node-a,node-b@0(3)"), "node-a"),
        ("srun", of.srun(3), "n1"),
        ("mpiexec", of.mpich(3, MASTER_ADDR="10.0.0.1"), "10.0.0.1"),
        ("torchrun", of.torchrun(3), "n1"),
        ("deepspeed", of.deepspeed(3), "worker-1"),
        ("jsrun", of.jsrun(3), "h36n03"),
        ("flux run", of.flux(3, MASTER_ADDR="f1"), "f1"),
        ("the launcher that set TF_CONFIG", of.tensorflow("worker", 2, **TASKS), "h1"),
    ],
)
def test_rank_node_and_host_are_those_of_the_launcher(
    launcher: str, environment: of.Environment, host: str
) -> None:
    placement = read(environment)
    assert (placement.launcher, place(placement)) == (launcher, (3, 4, 1, 2, 2))
    assert (placement.host, placement.has_consecutive_ranks) == (host, True)
    assert placement.supervisor_node_rank == 1


@pytest.mark.parametrize(
    "environment",
    [
        {},
        of.SALLOC,
        of.SBATCH,
        of.SRUN_SHELL,
        of.open_mpi(size=1, local_size=1),
        of.srun(size=1, nodes=1, tasks="1"),
        {"MASTER_ADDR": "n1", "MASTER_PORT": "29500"},
        {"RANK": "1", "WORLD_SIZE": "2"},
        {"PBS_NODENUM": "0", "PBS_TASKNUM": "1", "PBS_JOBID": "7.server"},
        of.tensorflow("worker", 0),
        of.tensorflow("worker", 0, worker="h1:1", ps="h2:1"),
    ],
)
def test_a_shell_and_a_single_process_are_no_launch(environment: of.Environment) -> None:
    assert read_placement(environment) is None


def test_all_processes_of_a_launch_find_one_rendezvous_and_other_launches_another() -> None:
    places = {(one.host, one.port) for one in (read(of.srun(rank)) for rank in range(4))}
    assert len(places) == 1
    (host, port), *_ = places
    assert (host, port in PORTS) == ("n1", True)
    ports = {
        read(of.srun(SLURM_JOB_ID=f"{job}", SLURM_STEP_ID=f"{step}")).port
        for job in range(9)
        for step in (0, 1)
    }
    assert len(ports) > 15


def test_the_user_s_master_address_and_port_come_first() -> None:
    placement = read(of.srun(MASTER_ADDR="10.0.0.1", MASTER_PORT="1234"))
    assert (placement.host, placement.port, placement.store_port) == ("10.0.0.1", 1234, None)


def test_the_port_of_torchrun_s_own_store_is_not_the_rendezvous() -> None:
    placement = read(of.torchrun())
    assert (placement.store_port, placement.port in PORTS) == (29400, True)
    placement = read(of.torchrun(TORCHELASTIC_USE_AGENT_STORE="False"))
    assert (placement.store_port, placement.port) == (None, 29400)


@pytest.mark.parametrize(
    ("listed", "nodes", "host"),
    [
        ("vm,n[3:1-3],gpu-[2:1-2]-ib@0(6)", "6", "vm"),
        ("login,n[3:1-3],gpu-[2:1-2]-ib@0(6)", "5", "n001"),
        ("vm,node[1:1-3],node[2:10]@0(5)", "4", "node1"),
        ("h[2:7,9-11]@0(4)", "4", "h07"),
    ],
)
def test_mpirun_s_own_node_counts_only_if_it_has_ranks(listed: str, nodes: str, host: str) -> None:
    count = int(nodes)
    environment = of.open_mpi(1, size=2 * count, local_size=2, OMPI_MCA_orte_node_regex=listed)
    assert read(environment).host == host


def test_on_mpirun_s_own_node_the_host_is_this_one() -> None:
    assert read(of.open_mpi(local_size=2)).host == "vm"


def test_an_mpi_without_host_names_takes_them_from_the_batch_system(tmp_path: Path) -> None:
    nodes = tmp_path / "nodes"
    nodes.write_text("p7\np7\np8\np8\n")
    assert read(of.mpich(PBS_NODEFILE=str(nodes))).host == "p7"
    assert read(of.mpich(LSB_MCPU_HOSTS="a 16 b 16")).host == "a"
    assert read(of.mpich(**of.SALLOC)).host == "n1"
    with pytest.raises(
        JobError, match=r"mpiexec started 4 processes on 2 nodes.*names the first node"
    ) as told:
        read(of.mpich()).require_host()
    assert "mpirun -x MASTER_ADDR=node1" in told.value.hint


def test_pbsdsh_is_read_where_each_node_has_one_slot(tmp_path: Path) -> None:
    nodes = tmp_path / "nodes"
    nodes.write_text("p7\np8\n")
    pbs = {"PBS_NODEFILE": str(nodes), "PBS_JOBID": "7.server", "PBS_NODENUM": "1", "PBS_TASKNUM": "2"}
    placement = read(pbs)
    assert (placement.launcher, place(placement), placement.host) == ("pbsdsh", (1, 2, 0, 1, 2), "p7")
    assert read_placement({**pbs, "PBS_NODENUM": "0", "PBS_TASKNUM": "1"}) is None, "the job script"
    nodes.write_text("p7\np7\np8\np8\n")
    assert read_placement(pbs) is None


def test_launchers_that_agree_are_one() -> None:
    placement = read(of.srun(3, PMI_RANK="3", PMI_SIZE="4", PMI_LOCAL_RANK="1", PMI_LOCAL_SIZE="2"))
    assert (place(placement), placement.host, placement.node_rank) == ((3, 4, 1, 2, 2), "n1", 1)
    exported = of.srun(3, RANK="3", WORLD_SIZE="4", LOCAL_RANK="1", LOCAL_WORLD_SIZE="2")
    placement = read({**exported, "MASTER_ADDR": "n1", "MASTER_PORT": "29500"})
    assert (placement.launcher, place(placement), placement.port) == ("srun", (3, 4, 1, 2, 2), 29500)


@pytest.mark.parametrize(
    ("launcher", "environment"),
    [
        # Recorded: Open MPI starts its daemons by srun, whose variables their processes inherit.
        (
            "mpirun",
            {
                **of.srun(1, size=2, tasks="1(x2)"),
                **of.open_mpi(3, local_size=2, OMPI_MCA_orte_node_regex="vm,n[1:1-2]@0(3)"),
            },
        ),
        ("mpirun", {**of.SBATCH, **of.open_mpi(3, local_size=2)}),
        ("torchrun", {**of.srun(1, size=2, tasks="1(x2)"), **of.torchrun(3)}),
        # torchrun deals out the numbers of nodes in its own order.
        ("torchrun", {**of.srun(0, size=2, tasks="1(x2)"), **of.torchrun(3)}),
        ("torchrun", {**of.SRUN_SHELL, **of.torchrun(3)}),
    ],
)
def test_the_inner_of_two_launchers_counts(launcher: str, environment: of.Environment) -> None:
    placement = read(environment)
    assert (placement.launcher, place(placement)) == (launcher, (3, 4, 1, 2, 2))
    assert placement.host in ("n1", "vm")


def test_a_launch_within_one_node_of_another_is_a_training_of_its_own() -> None:
    outer = of.srun(1, size=2, tasks="1(x2)")
    placement = read({**outer, **of.torchrun(1, size=2, MASTER_ADDR="localhost")})
    assert (place(placement), placement.host) == ((1, 2, 1, 2, 1), "localhost")


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        (
            {**of.open_mpi(2), **of.torchrun(1, size=2)},
            "RANK=1, WORLD_SIZE=2, LOCAL_RANK=1, LOCAL_WORLD_SIZE=2 of torchrun, and OMPI_COMM_WORLD_RANK=2, "
            "OMPI_COMM_WORLD_SIZE=4",
        ),
        (
            {**of.srun(1, size=2, tasks="1(x2)"), **EXPORTED},
            "RANK=0, WORLD_SIZE=2, LOCAL_RANK=0 of the launcher that set RANK, and SLURM_PROCID=1",
        ),
        ({**of.srun(1), **of.open_mpi(2, local_size=2)}, "OMPI_COMM_WORLD_RANK=2, .* SLURM_PROCID=1"),
    ],
)
def test_launchers_that_contradict_each_other_are_named_with_their_values(
    environment: of.Environment, told: str
) -> None:
    with pytest.raises(JobError, match=told) as refused:
        read_placement(environment)
    assert "unset those of the launcher that did not start this process: `env -u " in refused.value.hint


def test_nodes_with_unequal_numbers_of_processes_are_refused() -> None:
    uneven = of.srun(0, size=3, nodes=2, tasks="2,1")
    with pytest.raises(
        JobError, match=r"srun started 3 processes on 2 nodes, 2 of them on this one.*equally"
    ):
        read_placement(uneven)
    with pytest.raises(JobError, match=r"mpirun started 3 processes on 2 nodes, 1 of them on this one"):
        read_placement(of.open_mpi(2, size=3, local_size=1, OMPI_MCA_orte_num_nodes="2"))
    with pytest.raises(JobError, match="flux run started 3 processes on 2 nodes"):
        read_placement(of.flux(0, size=3))


def test_a_variable_that_is_no_number_is_named() -> None:
    with pytest.raises(JobError, match="SLURM_PROCID = 'first' is not a number") as refused:
        read_placement(of.srun(SLURM_PROCID="first"))
    assert "env -u SLURM_PROCID" in refused.value.hint


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        (of.tensorflow("ps", 1, **TASKS), "servers.count = 2"),
        (of.tensorflow("evaluator", 0, worker="h1:1 h2:1"), "evaluator"),
        (of.tensorflow("worker", 3, **TASKS), "worker"),
        ({"TF_CONFIG": "{"}, "env -u TF_CONFIG"),
        ({"TF_CONFIG": '{"cluster": {"worker": ["h1:1"]}}'}, "env -u TF_CONFIG"),
        ({"TF_CONFIG": "[]"}, "env -u TF_CONFIG"),
    ],
)
def test_a_task_of_tensorflow_that_does_not_train_is_refused(environment: of.Environment, told: str) -> None:
    with pytest.raises(JobError, match="TF_CONFIG") as refused:
        read_placement(environment)
    assert told in refused.value.hint


def test_ranks_that_are_dealt_out_in_turn_are_not_consecutive() -> None:
    placement = read(of.srun(2, SLURM_LOCALID="1", SLURM_NODEID="0"))
    assert (placement.has_consecutive_ranks, placement.supervisor_node_rank) == (False, 0)


def test_mpirun_s_own_binding_is_told_from_one_that_was_asked_for() -> None:
    assert read(of.open_mpi()).has_default_binding
    assert not read(of.open_mpi(OMPI_MCA_hwloc_base_binding_policy="socket")).has_default_binding
    assert not read(of.srun()).has_default_binding


def test_the_launcher_s_process_is_the_nearest_ancestor_without_its_variable() -> None:
    program = (
        "from wanma.engines.launchers.placement import launcher_process; print(launcher_process('PMI_RANK'))"
    )
    nested = ["bash", "-c", f'"{sys.executable}" -c "{program}"; true']
    ran = subprocess.run(
        nested, env={**os.environ, "PMI_RANK": "0"}, capture_output=True, text=True, check=True
    )
    assert int(ran.stdout) == os.getpid()
