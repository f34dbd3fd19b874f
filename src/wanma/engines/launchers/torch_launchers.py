"""Readers of launchers that set PyTorch's variables: torchrun, deepspeed, and any that sets RANK.

Sources: `torch/distributed/elastic/agent/server/local_elastic_agent.py`, `deepspeed/launcher/launch.py`.
"""

from __future__ import annotations

from collections.abc import Mapping

from wanma.engines.launchers.launcher_placement import LauncherPlacement, read_integer, read_integers

_COMMON = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")
_AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
_PROCESS_VARIABLES = (*_COMMON, "MASTER_ADDR", "LOCAL_WORLD_SIZE")


def read_torchrun(environment: Mapping[str, str]) -> LauncherPlacement | None:
    """Read a process of torchrun, or of another launcher that sets its variables RANK, WORLD_SIZE, ..."""
    values = read_integers(environment, *_COMMON)
    if values is None or not environment.get("MASTER_ADDR") or "CROSS_SIZE" in environment:
        return None
    rank, world_size, local_rank, port = values
    local_world_size = read_integer(environment, "LOCAL_WORLD_SIZE") or world_size
    restart_count = read_integer(environment, "TORCHELASTIC_RESTART_COUNT") or 0
    run_id = environment.get("TORCHELASTIC_RUN_ID")
    address = f"{environment['MASTER_ADDR']}:{port}"
    return LauncherPlacement(
        launcher="torchrun" if run_id is not None else "the launcher that set RANK",
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        nodes=-(-world_size // local_world_size),
        node_rank=read_integer(environment, "GROUP_RANK"),
        launch_id=f"{address}/{run_id}/{restart_count}" if run_id is not None else "",
        host=environment["MASTER_ADDR"],
        port=port,
        store_port=port if environment.get(_AGENT_STORE) == "True" else None,
        restart_count=restart_count,
        is_named=run_id is not None,
        forwards_output=False,
        variables=("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
        process_variables=(*_PROCESS_VARIABLES, "GROUP_*", "ROLE_*", "TORCHELASTIC_*"),
    )


def read_deepspeed(environment: Mapping[str, str]) -> LauncherPlacement | None:
    """Read a process of the command `deepspeed`, which gives nodes as CROSS_RANK and CROSS_SIZE."""
    values = read_integers(environment, *_COMMON, "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
    if values is None or not environment.get("MASTER_ADDR"):
        return None
    rank, world_size, local_rank, port, local_world_size, node_rank, nodes = values
    return LauncherPlacement(
        launcher="deepspeed",
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        nodes=nodes,
        node_rank=node_rank,
        host=environment["MASTER_ADDR"],
        port=port,
        forwards_output=False,
        variables=("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE"),
        process_variables=(*_PROCESS_VARIABLES, "LOCAL_SIZE", "CROSS_*"),
    )
