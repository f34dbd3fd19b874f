"""Environment variables of torchrun: rank and endpoint of a process, for scripts and from launchers.

The names and values are those of `torch.distributed.elastic` (`local_elastic_agent.py` in torch).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

from wanma.job.run.worker import WorkerContext

AGENT_STORE_VARIABLE = "TORCHELASTIC_USE_AGENT_STORE"
_REQUIRED_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


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


@dataclass(frozen=True)
class TorchrunProcess:
    """Rank of a process among those that another launcher has started, and their store."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    store_host: str
    store_port: int
    serves_store: bool
    """True if rank 0 serves the store, because the launcher does not."""
    restart_count: int

    @property
    def local_world_sizes(self) -> tuple[int, ...]:
        """Number of ranks of each node; torchrun starts equally many on all."""
        return (self.local_world_size,) * (self.world_size // self.local_world_size)

    @property
    def wanma_command(self) -> str:
        """Command of wanma that starts as many ranks on as many nodes."""
        nodes = len(self.local_world_sizes)
        return f"wanma launch --ranks {self.local_world_size}" + (f" --nodes {nodes}" if nodes > 1 else "")


def read_torchrun_variables(environment: Mapping[str, str] = os.environ) -> TorchrunProcess | None:
    """Read this process's rank from torchrun's variables; None: no such launcher, or a single process."""
    if any(not environment.get(name) for name in _REQUIRED_VARIABLES):
        return None
    rank, world_size, local_rank = (int(environment[name]) for name in _REQUIRED_VARIABLES[:3])
    if world_size == 1:
        return None
    return TorchrunProcess(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=int(environment.get("LOCAL_WORLD_SIZE") or world_size),
        node_rank=int(environment.get("GROUP_RANK") or 0),
        store_host=environment["MASTER_ADDR"],
        store_port=int(environment["MASTER_PORT"]),
        serves_store=rank == 0 and environment.get(AGENT_STORE_VARIABLE) != "True",
        restart_count=int(environment.get("TORCHELASTIC_RESTART_COUNT") or 0),
    )
