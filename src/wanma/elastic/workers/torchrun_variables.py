"""Environment variables of torchrun: rank and endpoint of a process, for scripts.

The names and values are those of `torch.distributed.elastic` (`local_elastic_agent.py` in torch).
`wanma.engines.launchers` reads them.
"""

from __future__ import annotations

from collections.abc import MutableMapping

from wanma.job.run.worker import WorkerContext


def set_torchrun_variables(
    environment: MutableMapping[str, str], worker: WorkerContext, run_id: str, max_restarts: int
) -> None:
    """Set the variables of a worker for its script, as torchrun does.

    The store at MASTER_ADDR:MASTER_PORT is served by a process beside the ranks, anew for each start of them,
    so every rank is its client.

    Args:
        environment: variables to write to.
        worker: rank that runs the script.
        run_id: the same for all ranks and all their starts.
        max_restarts: most restarts of the ranks.
    """
    rank, world_size = str(worker.rank), str(worker.world_size)
    restarts = worker.restart.attempt if worker.restart is not None else 0
    environment.update(
        RANK=rank,
        LOCAL_RANK=str(worker.local_rank),
        GROUP_RANK=str(worker.node_rank),
        ROLE_RANK=rank,
        ROLE_NAME="default",
        WORLD_SIZE=world_size,
        LOCAL_WORLD_SIZE=str(worker.local_world_size),
        GROUP_WORLD_SIZE=str(len(worker.local_world_sizes) or 1),
        ROLE_WORLD_SIZE=world_size,
        MASTER_ADDR=worker.store_host,
        MASTER_PORT=str(worker.store_port),
        TORCHELASTIC_RESTART_COUNT=str(restarts),
        TORCHELASTIC_MAX_RESTARTS=str(max_restarts),
        TORCHELASTIC_RUN_ID=run_id,
        TORCHELASTIC_USE_AGENT_STORE="True",
    )
    environment.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
