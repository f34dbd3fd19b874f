"""Messages between supervisor, fork server and workers of one node."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from wanma.elastic.protocol.messages import Message
from wanma.job.run.worker import Restart

# Supervisor and worker -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Happened(Message):
    """Event of rank 0 for the console, sent by a worker."""

    event: dict[str, Any]


@dataclass(frozen=True)
class Whereabouts(Message):
    """Collectives of a worker, its answer to `Inspect`: the present one or empty, and the last before."""

    collective: str
    recent: tuple[str, ...] = ()


# Supervisor and fork server ------------------------------------------------------------------------


@dataclass(frozen=True)
class Prepare(Message):
    """Command to the fork server: import these modules, found on this `sys.path`."""

    scoped: ClassVar[bool] = False
    modules: tuple[str, ...]
    path: tuple[str, ...]


@dataclass(frozen=True)
class Ready(Message):
    """Report of the fork server that it has imported; `notes` name the modules that failed."""

    scoped: ClassVar[bool] = False
    notes: tuple[str, ...]


@dataclass(frozen=True)
class WorkerSpec:
    """Configuration of a worker process; its files are passed beside it as descriptors."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    node_rank: int
    generation: int
    run_directory: str
    entry: str
    threads: int
    store_host: str
    store_port: int
    environment: dict[str, str]
    images: tuple[str, ...] = ()
    """Two files in memory for in-memory checkpoints, written in turn; empty: no in-memory checkpoints."""
    found: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Rank of an earlier generation → its in-memory checkpoints on this node to restore from."""
    restore_step: int | None = None
    guests: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Rank of another node whose in-memory checkpoints this one keeps → two files, written in turn."""
    ranks_by_node: tuple[int, ...] = ()
    restart: Restart | None = None
    claimed: bool = False
    """True if the generation has a claim in the run directory."""


@dataclass(frozen=True)
class Fork(Message):
    """Command to the fork server: start a worker.

    Descriptors come with it: channel, board, payload, stacks and, for rank 0, the store's listener.
    """

    scoped: ClassVar[bool] = False
    spec: WorkerSpec


@dataclass(frozen=True)
class KeepStore(Message):
    """Command to the fork server: serve a new generation's rendezvous store in a process of its own.

    It replaces the store before. Its listening socket comes with the message.
    """

    scoped: ClassVar[bool] = False
    host: str
    port: int


@dataclass(frozen=True)
class Spawn(Message):
    """Configuration that a worker started by exec reads first."""

    scoped: ClassVar[bool] = False
    spec: WorkerSpec
    descriptors: tuple[int, ...]
    path: tuple[str, ...]


@dataclass(frozen=True)
class Started(Message):
    """Report of the fork server that a worker process exists; `obstacle`: reason for exec instead of fork."""

    scoped: ClassVar[bool] = False
    rank: int
    pid: int
    obstacle: str


@dataclass(frozen=True)
class Signal(Message):
    """Command to the fork server: send a signal to a worker, or to its whole process group."""

    scoped: ClassVar[bool] = False
    rank: int
    number: int
    group: bool


@dataclass(frozen=True)
class Exited(Message):
    """Report of the fork server that a worker process ended; `code` is negative for a signal."""

    scoped: ClassVar[bool] = False
    rank: int
    code: int
