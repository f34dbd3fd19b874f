"""Readers of MPI launchers: Open MPI's mpirun, jsrun, and all that set PMI's variables.

Sources: mpirun(1) of Open MPI 4.1, "Exported Environment Variables"; jsrun(1); Intel MPI's developer
reference; MPICH's `src/pm/hydra`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from wanma.engines.launchers.launcher_placement import LauncherPlacement, read_integer, read_integers
from wanma.hardware.cluster_file.host_list import expand_host_lists

_NODE_REGEX = "OMPI_MCA_orte_node_regex"


def read_open_mpi(environment: Mapping[str, str]) -> LauncherPlacement | None:
    """Read a process of Open MPI's mpirun or of a derived one, such as Spectrum MPI's."""
    names = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK")
    sizes = ("OMPI_COMM_WORLD_LOCAL_SIZE",)
    values = read_integers(environment, *names, *sizes)
    if values is None:
        return None
    rank, world_size, local_rank, local_world_size = values
    nodes = read_integer(environment, "OMPI_MCA_orte_num_nodes") or -(-world_size // local_world_size)
    return LauncherPlacement(
        launcher="mpirun",
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        nodes=nodes,
        launch_id=environment.get("PMIX_NAMESPACE") or environment.get("OMPI_MCA_ess_base_jobid", ""),
        host=_open_mpi_host(environment, nodes),
        has_default_binding=(
            "OMPI_MCA_orte_bound_at_launch" in environment
            and "OMPI_MCA_hwloc_base_binding_policy" not in environment
        ),
        variables=(*names, *sizes),
        process_variables=("OMPI_*", "PMIX_*"),
    )


def _open_mpi_host(environment: Mapping[str, str], nodes: int) -> str | None:
    """Return the first node that has processes.

    Open MPI 4 lists the nodes of its daemons, mpirun's first: 'vm,n[3:1-3]@0(4)' is vm, n001, n002, n003. On
    mpirun's own node the processes have no list.
    """
    listed = environment.get(_NODE_REGEX)
    if listed is None:
        is_mpirun_node = bool(environment.get("OMPI_MCA_orte_num_nodes"))
        return environment.get("PMIX_HOSTNAME") if is_mpirun_node else None
    try:
        hosts = list(expand_host_lists(re.sub(r"\[(\d+):([^\]]*)\]", _pad_numbers, listed.partition("@")[0])))
    except ValueError:
        return None
    return hosts[1] if len(hosts) > nodes else hosts[0]


def _pad_numbers(match: re.Match[str]) -> str:
    """Return brackets in Slurm's notation: '[3:1-2,7]' → '[001-002,007]'."""
    return "[" + re.sub(r"\d+", lambda number: number[0].zfill(int(match[1])), match[2]) + "]"


def read_jsrun(environment: Mapping[str, str]) -> LauncherPlacement | None:
    """Read a process of jsrun, LSF's launcher on machines with IBM's Job Step Manager."""
    names = (
        "JSM_NAMESPACE_RANK",
        "JSM_NAMESPACE_SIZE",
        "JSM_NAMESPACE_LOCAL_RANK",
        "JSM_NAMESPACE_LOCAL_SIZE",
    )
    values = read_integers(environment, *names)
    if values is None:
        return None
    rank, world_size, local_rank, local_world_size = values
    return LauncherPlacement(
        launcher="jsrun",
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        nodes=-(-world_size // local_world_size),
        launch_id=environment.get("PMIX_NAMESPACE", ""),
        variables=names,
        process_variables=("JSM_*", "OMPI_*", "PMIX_*"),
    )


def read_pmi(environment: Mapping[str, str]) -> LauncherPlacement | None:
    """Read a process of mpiexec of MPICH, Intel MPI or Cray PALS; None if PMI tells no local rank."""
    values = read_integers(environment, "PMI_RANK", "PMI_SIZE")
    locals_ = [
        found
        for names in (("MPI_LOCALRANKID", "MPI_LOCALNRANKS"), ("PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"))
        if (found := read_integers(environment, *names)) is not None
    ]
    if values is None or not locals_:
        return None
    (rank, world_size), (local_rank, local_world_size) = values, locals_[0]
    return LauncherPlacement(
        launcher="mpiexec",
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        nodes=-(-world_size // local_world_size),
        launch_id=environment.get("PMI_JOBID", ""),
        variables=("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "PMI_LOCAL_RANK"),
        process_variables=("PMI_*", "MPI_LOCAL*", "HYDI_*", "PALS_*"),
    )
