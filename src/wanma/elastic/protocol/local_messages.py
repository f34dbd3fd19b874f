"""What a supervisor, its fork server and its workers tell each other, on one machine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from wanma.elastic.protocol.messages import Message
from wanma.job.run.worker import Restart

# Supervisor and worker -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Happened(Message):
    """An event of rank 0 for the console."""

    event: dict[str, Any]


@dataclass(frozen=True)
class Whereabouts(Message):
    """A worker's answer to `Inspect`: the collective it is in, or nothing, and the last ones before."""

    collective: str
    recent: tuple[str, ...] = ()


# Supervisor and fork server ------------------------------------------------------------------------


@dataclass(frozen=True)
class Prepare(Message):
    """Import these modules, found on this `sys.path`."""

    scoped: ClassVar[bool] = False
    modules: tuple[str, ...]
    path: tuple[str, ...]


@dataclass(frozen=True)
class Ready(Message):
    """Imported; `notes` tell what could not be."""

    scoped: ClassVar[bool] = False
    notes: tuple[str, ...]


@dataclass(frozen=True)
class WorkerSpec:
    """All that a worker process needs to know; its files travel beside it as descriptors."""

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
    """Two files in memory for copies of the state, to be written in turn; none: nobody would keep them."""
    found: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Rank of an earlier generation → its images on this node that are to be restored from."""
    restore_step: int | None = None
    guests: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Rank of another node whose images this one takes -> two files for them, to be written in turn."""
    ranks_by_node: tuple[int, ...] = ()
    restart: Restart | None = None
    claimed: bool = False
    """The generation has a claim in the run directory."""


@dataclass(frozen=True)
class Fork(Message):
    """Start a worker.

    Descriptors with it: channel, board, payload, stacks and, for rank 0, the store's listener.
    """

    scoped: ClassVar[bool] = False
    spec: WorkerSpec


@dataclass(frozen=True)
class KeepStore(Message):
    """Serve the rendezvous store of a new generation in a process of its own, instead of the one before.

    Its listening socket comes with it.
    """

    scoped: ClassVar[bool] = False
    host: str
    port: int


@dataclass(frozen=True)
class Spawn(Message):
    """What a worker started by exec reads first."""

    scoped: ClassVar[bool] = False
    spec: WorkerSpec
    descriptors: tuple[int, ...]
    path: tuple[str, ...]


@dataclass(frozen=True)
class Started(Message):
    """A worker process exists. `obstacle`: why it had to be spawned instead of forked."""

    scoped: ClassVar[bool] = False
    rank: int
    pid: int
    obstacle: str


@dataclass(frozen=True)
class Signal(Message):
    """Send a signal to a worker, or to its whole process group."""

    scoped: ClassVar[bool] = False
    rank: int
    number: int
    group: bool


@dataclass(frozen=True)
class Exited(Message):
    """A worker process ended and was reaped; `code` is negative for a signal."""

    scoped: ClassVar[bool] = False
    rank: int
    code: int
