"""Messages between supervisor, fork server and workers of one node."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from wanma.elastic.protocol.messages import Message, RunMessage
from wanma.job.run.worker import Restart

# Supervisor and worker -----------------------------------------------------------------------------


@dataclass(frozen=True)
class EventReport(Message):
    """Event of rank 0 for the console, sent by a worker."""

    event: dict[str, Any]


@dataclass(frozen=True)
class CollectiveStateReport(Message):
    """Collectives of a worker, its answer to `RankStatusRequest`: the current one or empty, and the last."""

    current_collective: str
    recent_collectives: tuple[str, ...] = ()


# Supervisor and fork server ------------------------------------------------------------------------


@dataclass(frozen=True)
class PreloadCommand(RunMessage):
    """Command to the fork server: import these modules, found on this `sys.path`."""

    modules: tuple[str, ...]
    """Names of modules; "module:function" names a function that is called, too."""
    sys_path: tuple[str, ...]
    is_last: bool = True
    """False if another command to import follows, before the first rank."""


@dataclass(frozen=True)
class PreloadReport(RunMessage):
    """Report of the fork server that it has imported; `import_errors` name the modules that failed."""

    import_errors: tuple[str, ...]


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
    threads_per_rank: int
    store_host: str
    store_port: int
    environment: dict[str, str]
    memory_file_paths: tuple[str, ...] = ()
    """Two files in memory for in-memory checkpoints, written in turn; empty: no in-memory checkpoints."""
    restore_paths: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Rank of an earlier generation → its in-memory checkpoints on this node to restore from."""
    restore_step: int | None = None
    backup_paths: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Rank of another node whose in-memory checkpoints this one keeps → two files, written in turn."""
    local_world_sizes: tuple[int, ...] = ()
    rank_addresses: tuple[str, ...] = ()
    """HOST:PORT reserved for each rank of all nodes, as in `StartCommand`."""
    restart: Restart | None = None
    claims: str | None = None
    """Folder or URL of the claims of generations; None: this one has no claim."""


@dataclass(frozen=True)
class ForkCommand(RunMessage):
    """Command to the fork server: start a worker.

    Descriptors come with it: channel, board, payload, stacks and, for rank 0, the store's listener.
    """

    spec: WorkerSpec


@dataclass(frozen=True)
class ServeStoreCommand(RunMessage):
    """Command to the fork server: serve a new generation's rendezvous store in a process of its own.

    It replaces the store before. Its listening socket comes with the message.
    """

    host: str
    port: int
    store_kind: str = "torch"
    """Protocol of the store, as in `launch_config.StoreKind`."""


@dataclass(frozen=True)
class ExecArguments(RunMessage):
    """Configuration that a worker started by exec reads first."""

    spec: WorkerSpec
    descriptors: tuple[int, ...]
    sys_path: tuple[str, ...]


@dataclass(frozen=True)
class WorkerStartReport(RunMessage):
    """Report of the fork server that a worker exists; `fork_hazard`: reason for exec instead of fork."""

    rank: int
    pid: int
    fork_hazard: str


@dataclass(frozen=True)
class SignalCommand(RunMessage):
    """Command to the fork server: send a signal to a worker, or to its whole process group."""

    rank: int
    signal_number: int
    to_process_group: bool


@dataclass(frozen=True)
class WorkerExitReport(RunMessage):
    """Report of the fork server that a worker process ended; `exit_code` is negative for a signal."""

    rank: int
    exit_code: int
