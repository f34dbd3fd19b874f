"""Environments of launchers, reduced to what they say about the launch.

Recorded from the real thing: Open MPI 4.1.4 (also on two nodes, and inside sbatch), Slurm 22.05 (srun,
sbatch, salloc), MPICH 4.0.2 (mpiexec.hydra), torchrun of torch 2.13. From the documentation, or the source
where that says more: deepspeed, jsrun, Flux, Cray PALS, pbsdsh, LSF's hosts, Slurm's interactive step.
"""

from __future__ import annotations

import json

Environment = dict[str, str]


def open_mpi(rank: int = 0, *, size: int = 4, local_size: int = 4, **more: str) -> Environment:
    """Process of `mpirun -n SIZE`, with blocks of ranks on each node."""
    return {
        "OMPI_COMM_WORLD_RANK": f"{rank}",
        "OMPI_COMM_WORLD_SIZE": f"{size}",
        "OMPI_COMM_WORLD_LOCAL_RANK": f"{rank % local_size}",
        "OMPI_COMM_WORLD_LOCAL_SIZE": f"{local_size}",
        "OMPI_COMM_WORLD_NODE_RANK": f"{rank % local_size}",
        "OMPI_MCA_ess_base_jobid": "1154023425",
        "OMPI_MCA_orte_bound_at_launch": "1",
        "OMPI_MCA_orte_num_nodes": f"{size // local_size}",
        "OMPI_UNIVERSE_SIZE": f"{size}",
        "PMIX_HOSTNAME": "vm",
        "PMIX_ID": f"1154023425.{rank}",
        "PMIX_NAMESPACE": "1154023425",
        "PMIX_RANK": f"{rank}",
        **more,
    }


def srun(rank: int = 0, *, size: int = 4, nodes: int = 2, tasks: str = "2(x2)", **more: str) -> Environment:
    """Task of `srun -N NODES`, with blocks of ranks on each node."""
    local_size = size // nodes
    return {
        "SLURM_GTIDS": "0,1",
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "n[1-2]",
        "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1",
        "SLURM_LOCALID": f"{rank % local_size}",
        "SLURM_NNODES": f"{nodes}",
        "SLURM_NODEID": f"{rank // local_size}",
        "SLURM_NPROCS": f"{size}",
        "SLURM_NTASKS": f"{size}",
        "SLURM_PROCID": f"{rank}",
        "SLURM_STEPID": "0",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": "n[1-2]",
        "SLURM_STEP_NUM_NODES": f"{nodes}",
        "SLURM_STEP_NUM_TASKS": f"{size}",
        "SLURM_STEP_TASKS_PER_NODE": tasks,
        "SLURM_TASKS_PER_NODE": tasks,
        "SLURM_TOPOLOGY_ADDR": f"n{rank // local_size + 1}",
        "SLURM_TOPOLOGY_ADDR_PATTERN": "node",
        **more,
    }


SALLOC = {
    "SLURM_JOB_ID": "5",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_NNODES": "2",
    "SLURM_NPROCS": "2",
    "SLURM_NTASKS": "2",
    "SLURM_TASKS_PER_NODE": "1(x2)",
}
"""Shell of `salloc -N2 -n2`."""
SBATCH = {
    **SALLOC,
    "SLURM_GTIDS": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_PROCID": "0",
    "SLURM_TASK_PID": "13124",
    "SLURM_TOPOLOGY_ADDR": "n1",
}
"""Script of `sbatch -N2 -n2`: rank 0, but of no step."""
SRUN_SHELL = {
    **SALLOC,
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_PROCID": "0",
    "SLURM_STEP_ID": "4294967290",
    "SLURM_STEP_NODELIST": "n1",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_STEP_TASKS_PER_NODE": "1",
}
"""Shell of salloc with `LaunchParameters=use_interactive_step`, as of `srun --pty bash`."""


def mpich(rank: int = 0, *, size: int = 4, local_size: int = 2, **more: str) -> Environment:
    """Process of MPICH's or Intel MPI's `mpiexec -n SIZE`."""
    return {
        "HYDI_CONTROL_FD": "7",
        "MPI_LOCALNRANKS": f"{local_size}",
        "MPI_LOCALRANKID": f"{rank % local_size}",
        "PMI_FD": "8",
        "PMI_RANK": f"{rank}",
        "PMI_SIZE": f"{size}",
        **more,
    }


def torchrun(rank: int = 0, *, size: int = 4, local_size: int = 2, **more: str) -> Environment:
    """Process of `torchrun --nnodes=NODES --nproc-per-node=LOCAL_SIZE`."""
    return {
        "GROUP_RANK": f"{rank // local_size}",
        "GROUP_WORLD_SIZE": f"{size // local_size}",
        "LOCAL_RANK": f"{rank % local_size}",
        "LOCAL_WORLD_SIZE": f"{local_size}",
        "MASTER_ADDR": "n1",
        "MASTER_PORT": "29400",
        "RANK": f"{rank}",
        "ROLE_RANK": f"{rank}",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "WORLD_SIZE": f"{size}",
        **more,
    }


def deepspeed(rank: int = 0, *, size: int = 4, local_size: int = 2, **more: str) -> Environment:
    """Process of `deepspeed --hostfile FILE`."""
    return {
        "CROSS_RANK": f"{rank // local_size}",
        "CROSS_SIZE": f"{size // local_size}",
        "LOCAL_RANK": f"{rank % local_size}",
        "LOCAL_SIZE": f"{local_size}",
        "MASTER_ADDR": "worker-1",
        "MASTER_PORT": "29500",
        "RANK": f"{rank}",
        "WORLD_SIZE": f"{size}",
        **more,
    }


def jsrun(rank: int = 0, *, size: int = 4, local_size: int = 2, **more: str) -> Environment:
    """Process of `jsrun` in an LSF job, whose first host is the launch node."""
    return {
        **open_mpi(rank, size=size, local_size=local_size),
        "JSM_NAMESPACE_LOCAL_RANK": f"{rank % local_size}",
        "JSM_NAMESPACE_LOCAL_SIZE": f"{local_size}",
        "JSM_NAMESPACE_RANK": f"{rank}",
        "JSM_NAMESPACE_SIZE": f"{size}",
        "LSB_JOBID": "4711",
        "LSB_MCPU_HOSTS": "batch4 1 h36n03 42 h36n04 42",
        "OMPI_MCA_orte_num_nodes": "",
        **more,
    }


def tensorflow(role: str, index: int, **cluster: str) -> Environment:
    """Task of a launcher of TensorFlow; `cluster`: by role the addresses of its tasks."""
    addresses = {role: text.split() for role, text in cluster.items()}
    return {"TF_CONFIG": json.dumps({"cluster": addresses, "task": {"type": role, "index": index}})}


def flux(rank: int = 0, *, size: int = 4, nodes: int = 2, **more: str) -> Environment:
    """Task of `flux run -N NODES -n SIZE`."""
    return {
        "FLUX_JOB_ID": "ƒ3ETxsR9H",
        "FLUX_JOB_NNODES": f"{nodes}",
        "FLUX_JOB_SIZE": f"{size}",
        "FLUX_TASK_LOCAL_ID": f"{rank % (size // nodes)}",
        "FLUX_TASK_RANK": f"{rank}",
        "PMI_RANK": f"{rank}",
        "PMI_SIZE": f"{size}",
        **more,
    }
