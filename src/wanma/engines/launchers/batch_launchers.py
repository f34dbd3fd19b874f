"""Readers of the launchers of batch systems: srun, flux run and pbsdsh; and the batch systems' hosts.

Variables that a batch script or an interactive shell has, too, are no launch: srun's tasks alone have
SLURM_STEP_ID with more than one task, and pbsdsh's alone another task number than the job script's.

Sources: srun(1), "OUTPUT ENVIRONMENT VARIABLES", and sbatch(1); flux-environment(7); PBS Professional's
reference guide, "PBS Environment Variables"; LSF's reference, "Environment variables set for job execution".
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from wanma.engines.launchers.launcher_placement import LauncherPlacement, read_integers
from wanma.hardware.cluster_file.host_list import expand_host_lists

JOB_ID_VARIABLES = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "FLUX_JOB_ID")
"""Variables with the name of a batch job, the same on all its nodes."""


def read_srun(environment: Mapping[str, str]) -> LauncherPlacement | None:
    """Read a task of srun; a batch script has SLURM_PROCID without a step."""
    names = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_STEP_NUM_NODES")
    values = read_integers(environment, *names)
    counts = _expand_counts(environment.get("SLURM_STEP_TASKS_PER_NODE", ""))
    if values is None or not environment.get("SLURM_STEP_ID") or len(counts) <= values[3]:
        return None
    rank, world_size, local_rank, node_rank, nodes = values
    return LauncherPlacement(
        launcher="srun",
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=counts[node_rank],
        nodes=nodes,
        node_rank=node_rank,
        launch_id=f"{environment.get('SLURM_JOB_ID', '')}.{environment['SLURM_STEP_ID']}",
        host=_first_host(environment.get("SLURM_STEP_NODELIST", "")),
        variables=(*names[:3], "SLURM_STEP_TASKS_PER_NODE"),
        process_variables=(
            *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_GTIDS", "SLURM_TASK_PID", "SLURM_NTASKS*"),
            *("SLURM_NPROCS", "SLURM_TASKS_PER_NODE", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE"),
            *("PMI_*", "PMIX_*"),
        ),
    )


def read_flux(environment: Mapping[str, str]) -> LauncherPlacement | None:
    """Read a task of flux run or flux submit."""
    names = ("FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID", "FLUX_JOB_NNODES")
    values = read_integers(environment, *names)
    if values is None:
        return None
    rank, world_size, local_rank, nodes = values
    return LauncherPlacement(
        launcher="flux run",
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=max(world_size // nodes, local_rank + 1),
        nodes=nodes,
        launch_id=environment.get("FLUX_JOB_ID", ""),
        variables=names,
        process_variables=("FLUX_TASK_*", "FLUX_JOB_SIZE", "PMI_*"),
    )


def read_pbsdsh(environment: Mapping[str, str]) -> LauncherPlacement | None:
    """Read a process of pbsdsh in a job with one slot per node; with more slots PBS tells no local rank."""
    values = read_integers(environment, "PBS_NODENUM", "PBS_TASKNUM")
    hosts = _read_node_file(environment.get("PBS_NODEFILE", ""))
    if (
        values is None
        or values in ((0, 1), (0, 0))
        or len(set(hosts)) < len(hosts)
        or len(hosts) <= values[0]
    ):
        return None
    return LauncherPlacement(
        launcher="pbsdsh",
        rank=values[0],
        world_size=len(hosts),
        local_rank=0,
        local_world_size=1,
        nodes=len(hosts),
        node_rank=values[0],
        launch_id=environment.get("PBS_JOBID", ""),
        host=hosts[0],
        variables=("PBS_NODENUM", "PBS_TASKNUM"),
    )


def batch_job_host(environment: Mapping[str, str]) -> str | None:
    """Return the first host of the batch job around a launch; None: there is none, or it does not say."""
    if nodes := environment.get("SLURM_JOB_NODELIST"):
        return _first_host(nodes)
    if hosts := _read_node_file(environment.get("PBS_NODEFILE", "")):
        return hosts[0]
    words = environment.get("LSB_MCPU_HOSTS", "").split()  # HOST SLOTS HOST SLOTS ...
    hosts, slots = words[::2], [int(word) if word.isdecimal() else 0 for word in words[1::2]]
    if not hosts:
        return None
    # With jsrun the first host is the launch node, of one slot, which runs no process.
    is_launch_node = "JSM_NAMESPACE_SIZE" in environment and slots[:1] == [1] and max(slots) > 1
    return hosts[1] if is_launch_node else hosts[0]


def batch_job_id(environment: Mapping[str, str]) -> str:
    """Return the name of the batch job around a launch; empty: there is none."""
    return next((environment[name] for name in JOB_ID_VARIABLES if environment.get(name)), "")


def array_task_hint(environment: Mapping[str, str]) -> str:
    """Return the advice for tasks of a job array that share a run by mistake; empty: this is no such task."""
    if "SLURM_ARRAY_TASK_ID" not in environment:
        return ""
    return (
        "each task of a job array needs a run of its own: observe.name=NAME-$SLURM_ARRAY_TASK_ID; tasks that "
        "continue one run come one after another: --array=1-9%1"
    )


def _first_host(hosts: str) -> str | None:
    try:
        return next(expand_host_lists(hosts), None) if hosts else None
    except ValueError:
        return None


def _expand_counts(text: str) -> list[int]:
    """Expand Slurm's tasks per node: '2(x3),1' → [2, 2, 2, 1]."""
    counts: list[int] = []
    for count, repeats in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(count)] * int(repeats or 1)
    return counts


def _read_node_file(path: str) -> list[str]:
    """Return the hosts of PBS's file, one per slot; empty if it cannot be read here."""
    try:
        lines = Path(path).read_text().split() if path else []
    except OSError:
        return []
    return lines
