"""Environment variables by which processes of TensorFlow, JAX and Horovod find each other.

torch's are those of `elastic.workers.torchrun_variables`.
"""

from __future__ import annotations

import json
from collections.abc import MutableMapping, Sequence

from wanma.api.launch.tasks import Task
from wanma.job.run.worker import WorkerContext


def set_framework_variables(
    environment: MutableMapping[str, str],
    framework: str,
    worker: WorkerContext,
    tasks: Sequence[Task],
    local_devices: int,
) -> None:
    """Set the variables of `framework` for one rank.

    Args:
        environment: variables to write to; those of the network interface are set already.
        framework: 'tensorflow', 'jax' or 'horovod'.
        worker: rank that runs the script.
        tasks: task of each rank, for TensorFlow.
        local_devices: number of GPUs of this node.
    """
    match framework:
        case "tensorflow":
            environment["TF_CONFIG"] = tensorflow_config(worker.rank, tasks, worker.rank_addresses)
        case "jax":
            environment.update(jax_variables(worker))
            if device_ids := share_devices(worker.local_rank, worker.local_world_size, local_devices):
                environment.setdefault("JAX_LOCAL_DEVICE_IDS", ",".join(map(str, device_ids)))
        case "horovod":
            environment.update(horovod_variables(worker))
            if interface := environment.get("GLOO_SOCKET_IFNAME"):
                environment["HOROVOD_GLOO_IFACE"] = interface
        case _:
            raise ValueError(f"unknown framework {framework!r}")


def tensorflow_config(rank: int, tasks: Sequence[Task], addresses: Sequence[str]) -> str:
    """Return TF_CONFIG of a rank: the cluster, and its task in it.

    An evaluator is no part of the others' cluster: TensorFlow would wait for it to serve them.
    """
    own = tasks[rank]
    cluster: dict[str, list[str]] = {}
    for task, address in zip(tasks, addresses, strict=True):
        if task.role != "evaluator" or own.role == "evaluator":
            cluster.setdefault(task.role, []).append(address)
    return json.dumps({"cluster": cluster, "task": {"type": own.role, "index": own.index}})


def jax_variables(worker: WorkerContext) -> dict[str, str]:
    """Return the variables for `jax.distributed.initialize`, with and without arguments.

    JAX itself reads the addresses only, and looks for the number of processes and the own one in variables of
    Open MPI or Slurm. So those that it reads of Open MPI's are among them.
    """
    size, rank, address = str(worker.world_size), str(worker.rank), worker.rank_addresses[0]
    return {
        "JAX_COORDINATOR_ADDRESS": address,
        "JAX_COORDINATOR_BIND_ADDRESS": address,
        "JAX_NUM_PROCESSES": size,
        "JAX_PROCESS_ID": rank,
        "OMPI_MCA_orte_hnp_uri": f"0.0;tcp://{address}",
        "OMPI_COMM_WORLD_SIZE": size,
        "OMPI_COMM_WORLD_RANK": rank,
        "OMPI_COMM_WORLD_LOCAL_RANK": str(worker.local_rank),
    }


def share_devices(local_rank: int, local_world_size: int, local_devices: int) -> range:
    """Return the GPUs of a rank; empty if there are none, or the ranks cannot have equally many."""
    share, rest = divmod(local_devices, local_world_size)
    return range(0) if rest else range(local_rank * share, (local_rank + 1) * share)


def horovod_variables(worker: WorkerContext) -> dict[str, str]:
    """Return the variables that `horovodrun --gloo` sets, for the store that is served beside the ranks."""
    sizes = worker.local_world_sizes or (worker.local_world_size,)
    # Nodes with a rank of this local rank.
    peers = [node for node, size in enumerate(sizes) if size > worker.local_rank]
    return {
        "HOROVOD_RANK": str(worker.rank),
        "HOROVOD_SIZE": str(worker.world_size),
        "HOROVOD_LOCAL_RANK": str(worker.local_rank),
        "HOROVOD_LOCAL_SIZE": str(worker.local_world_size),
        "HOROVOD_CROSS_RANK": str(peers.index(worker.node_rank)),
        "HOROVOD_CROSS_SIZE": str(len(peers)),
        # Gloo's groups of one node have its name; two nodes on one host must not share it.
        "HOROVOD_HOSTNAME": f"node-{worker.node_rank}",
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": worker.store_host,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(worker.store_port),
    }
