"""Placement of a process among those that another launcher has started, and readers of the environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from wanma.job.errors import JobError

_LAUNCHER_PREFIXES = (
    *("CROSS_", "FLUX_", "GROUP_RANK", "JSM_", "LOCAL_", "LSB_", "MPI_", "OMPI_", "PBS_", "PMI", "RANK"),
    *("SLURM_", "TF_CONFIG", "TORCHELASTIC_", "WANMA_CODE_ARCHIVE", "WANMA_PLACED_BY", "WORLD_SIZE"),
)
"""Beginnings of the names of variables that launchers and engines set."""


@dataclass(frozen=True)
class LauncherPlacement:
    """Place of this process among those that another launcher has started."""

    launcher: str
    """Name of the launcher, as messages show it: 'srun'."""
    rank: int
    world_size: int
    local_rank: int
    """Number of this process among those of its node, from 0."""
    local_world_size: int
    """Processes on this node."""
    nodes: int
    node_rank: int | None = None
    """Number of this node; None: the launcher does not say."""
    launch_id: str = ""
    """Name of this launch, the same on all nodes and another for each launch; empty: unknown."""
    host: str | None = None
    """Name or address of the first node; None: unknown."""
    port: int = 0
    """Port for the rendezvous on `host`, the same on all nodes."""
    store_port: int | None = None
    """Port on `host` of a rendezvous store that the launcher serves; None: it serves none."""
    restart_count: int = 0
    has_default_binding: bool = False
    """True if the launcher has bound each process to a part of the cores, unasked."""
    forwards_output: bool = True
    """True if the launcher passes on what its processes print, to a place of its choice."""
    is_named: bool = True
    """False if only variables that anyone sets tell of the launch, such as RANK and WORLD_SIZE."""
    variables: tuple[str, ...] = ()
    """Environment variables that hold ranks and sizes."""
    process_variables: tuple[str, ...] = ()
    """Patterns (fnmatch) of the environment variables that hold for this one process only."""

    @property
    def leads_node(self) -> bool:
        """True if this process supervises the ranks of its node."""
        return self.local_rank == 0

    @property
    def has_consecutive_ranks(self) -> bool:
        """True if the ranks of this node may be consecutive, as far as this process can tell."""
        return self.rank % self.local_world_size == self.local_rank

    @property
    def supervisor_node_rank(self) -> int | None:
        """Node rank of a process that leads its node, by its rank if the launcher does not say."""
        if self.node_rank is None and self.has_consecutive_ranks:
            return self.rank // self.local_world_size
        return self.node_rank

    @property
    def ranks_text(self) -> str:
        """Processes and nodes in words: '4 processes on 2 nodes'."""
        processes = "1 process" if self.world_size == 1 else f"{self.world_size} processes"
        return f"{processes} on {'1 node' if self.nodes == 1 else f'{self.nodes} nodes'}"

    def require_host(self) -> str:
        """Return the host of the rendezvous.

        Raises:
            JobError: nothing in the environment names the first node.
        """
        if self.host is None:
            raise JobError(
                f"{self.launcher} started {self.ranks_text}, and no variable names the first node",
                "set MASTER_ADDR to the name or address of one of the nodes, for all processes; e.g. "
                "`mpirun -x MASTER_ADDR=node1 ...`",
            )
        return self.host


def may_be_launched(environment: Mapping[str, str]) -> bool:
    """Return whether a launcher, or an engine of wanma, may have started this process, by cheap signs."""
    return any(name.startswith(_LAUNCHER_PREFIXES) for name in environment)


def read_integer(environment: Mapping[str, str], *names: str) -> int | None:
    """Return the number in the first of the variables that is set; None: none is.

    Raises:
        JobError: the value is not a number.
    """
    for name in names:
        if text := environment.get(name):
            try:
                return int(text)
            except ValueError:
                raise JobError(
                    f"the environment variable {name} = {text!r} is not a number",
                    f"unset it if no launcher has set it: `env -u {name} wanma ...`",
                ) from None
    return None


def read_integers(environment: Mapping[str, str], *names: str) -> tuple[int, ...] | None:
    """Return the numbers in all of the variables; None: one of them is not set.

    Raises:
        JobError: a value is not a number.
    """
    values = [read_integer(environment, name) for name in names]
    found = tuple(value for value in values if value is not None)
    return found if len(found) == len(names) else None
