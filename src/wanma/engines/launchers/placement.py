"""Placement of this process by the launcher that started it, from the environment variables of all launchers.

    placement = read_placement(os.environ)     # None: no launcher, or a single process

Several launchers may have left their variables. They agree, as srun and PMI do; or one is nested in the
other, as torchrun in a task of srun, and the inner one counts; or they contradict each other: refused.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from wanma.engines.engine import PLACED_BY_VARIABLE
from wanma.engines.launchers.batch_launchers import (
    batch_job_host,
    batch_job_id,
    read_flux,
    read_pbsdsh,
    read_srun,
)
from wanma.engines.launchers.launcher_placement import LauncherPlacement, read_integer
from wanma.engines.launchers.mpi_launchers import read_jsrun, read_open_mpi, read_pmi
from wanma.engines.launchers.tensorflow_launchers import read_tensorflow
from wanma.engines.launchers.torch_launchers import read_deepspeed, read_torchrun
from wanma.job.errors import JobError

READERS: tuple[Callable[[Mapping[str, str]], LauncherPlacement | None], ...] = (
    read_torchrun,
    read_deepspeed,
    read_tensorflow,
    read_jsrun,
    read_open_mpi,
    read_pmi,
    read_srun,
    read_flux,
    read_pbsdsh,
)
"""Readers of all launchers: those that others start come before those that start them."""
PORTS = range(20_000, 30_000)
"""Ports for the rendezvous of a launch: above those of services, below those of outgoing connections."""


def read_placement(environment: Mapping[str, str] = os.environ) -> LauncherPlacement | None:
    """Return the placement of this process; None: no launcher has started it with others.

    An engine of wanma that starts supervisors by a launcher, as by srun, says their place itself.

    Raises:
        JobError: launchers contradict each other, a variable is not a number, or nodes have unequal numbers
            of processes.
    """
    if PLACED_BY_VARIABLE in environment:
        return None
    found = [placement for reader in READERS if (placement := reader(environment)) is not None]
    found = [placement for placement in found if placement.world_size > 1]
    if not found:
        return None
    merged = found[0]
    for other in found[1:]:
        merged = _merge(merged, other, environment)
    if merged.local_world_size * merged.nodes != merged.world_size:
        raise JobError(
            f"{merged.launcher} started {merged.ranks_text}, {merged.local_world_size} of them on this one "
            f"({_variables_text(merged, environment)}): each node needs equally many",
            "start a multiple of the number of nodes, e.g. `srun --ntasks-per-node=4 ...` or "
            "`mpirun --map-by ppr:4:node ...`",
        )
    return _with_rendezvous(merged, environment)


def launcher_process(variable: str) -> int:
    """Return the process id of the launcher on this node: the nearest ancestor without `variable`."""
    pid = os.getppid()
    while pid > 1:
        try:
            names = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            status = Path(f"/proc/{pid}/stat").read_text()
        except OSError:  # of another user, as Slurm's is
            return pid
        if not any(name.startswith(f"{variable}=".encode()) for name in names):
            return pid
        pid = int(status.rpartition(")")[2].split()[1])
    return pid


def _merge(
    first: LauncherPlacement, second: LauncherPlacement, environment: Mapping[str, str]
) -> LauncherPlacement:
    """Return the placement by two launchers, of which the first is the inner one if either can be.

    Raises:
        JobError: they contradict each other.
    """
    if _places(first) == _places(second):
        return replace(
            first,
            node_rank=second.node_rank if first.node_rank is None else first.node_rank,
            launch_id=first.launch_id or second.launch_id,
            host=first.host or second.host,
            is_named=first.is_named or second.is_named,
            forwards_output=first.forwards_output or second.forwards_output,
            launcher=first.launcher if first.is_named else second.launcher,
            process_variables=(*first.process_variables, *second.process_variables),
        )
    for inner, outer in ((first, second), (second, first)):
        if _is_nested(inner, outer):
            return replace(inner, forwards_output=inner.forwards_output or outer.forwards_output)
    raise JobError(
        "the environment variables of two launchers contradict each other: "
        f"{_variables_text(first, environment)} of {first.launcher}, and "
        f"{_variables_text(second, environment)} of {second.launcher}",
        "unset those of the launcher that did not start this process: "
        + " or ".join(
            "`env " + " ".join(f"-u {name}" for name in one.variables if name in environment) + " wanma ...`"
            for one in (first, second)
        ),
    )


def _places(placement: LauncherPlacement) -> tuple[int, ...]:
    return (
        placement.rank,
        placement.world_size,
        placement.local_rank,
        placement.local_world_size,
        placement.nodes,
    )


def _is_nested(inner: LauncherPlacement, outer: LauncherPlacement) -> bool:
    """Return whether one process per node of `outer` may have started those of `inner` there.

    `inner` then spans the nodes of `outer`, or one node, for trainings that are independent of each other.
    """
    spans_all = inner.nodes == outer.nodes and inner.world_size == outer.world_size * inner.local_world_size
    return inner.is_named and outer.local_world_size == 1 and (spans_all or inner.nodes == 1)


def _variables_text(placement: LauncherPlacement, environment: Mapping[str, str]) -> str:
    return ", ".join(f"{name}={environment[name]}" for name in placement.variables if name in environment)


def _with_rendezvous(placement: LauncherPlacement, environment: Mapping[str, str]) -> LauncherPlacement:
    """Return the placement with host and port of its rendezvous: MASTER_ADDR and MASTER_PORT count first."""
    host = environment.get("MASTER_ADDR") or placement.host or batch_job_host(environment)
    if placement.nodes == 1:
        host = environment.get("MASTER_ADDR") or "127.0.0.1"
    port = read_integer(environment, "MASTER_PORT")
    if port is None or port == placement.store_port:
        launch_id = placement.launch_id or batch_job_id(environment)
        if not launch_id and placement.nodes == 1:
            launch_id = str(launcher_process(placement.variables[0]))
        name = f"{launch_id or host}/{os.getuid()}"
        port = PORTS[int.from_bytes(hashlib.sha256(name.encode()).digest()[:8]) % len(PORTS)]
    return replace(placement, host=host, port=port)
