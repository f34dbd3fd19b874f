"""Worker context of one rank, and its interface to the supervisor.

`wanma.training` takes a `WorkerContext`; `wanma.elastic` makes one for a supervised process, and
`WorkerContext.single_process` makes one for a plain Python process. So training never imports its supervisor.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from wanma.job.run.generation_claims import GenerationFence

OUTSIDE_SESSION_PHASE = "the script's own code"
"""Phase of a rank whose script has no session open: its silence has no known limit."""
Event = dict[str, Any]
"""Record of one event, JSON-able, with a `kind`: start, recovery, step, validation, checkpoint, message,
finish."""


@dataclass(frozen=True)
class StepWork:
    """Own work of a rank in one step, without waits for other ranks."""

    peer_group: int
    """Number of the rank's peer group: ranks of the same group have equal work."""
    data_seconds: float
    """Time of waiting for data."""
    compute_seconds: float
    """Time of forward and backward; 0 if it cannot be separated from waiting."""
    cached_bytes: int
    """Memory of its GPU that PyTorch's allocator holds beyond the peak of its tensors."""
    allocation_retries: int
    """Allocations so far for which the GPU had no room until this memory was freed."""


class SupervisorClient(Protocol):
    """Supervisor interface, as the training loop uses it."""

    def report_progress(self, step: int, phase: str) -> None:
        """Report the step and phase of this rank, for the hang report. Cheap: called a few times per step."""

    def report_finished_step(self, step: int) -> None:
        """Report that optimizer step `step` is finished: only new steps count as progress after a failure."""

    def report_work(self, work: StepWork) -> None:
        """Report this rank's own work in the step just finished."""

    def send_event(self, event: Event) -> None:
        """Pass an event to the supervisor's console; rank 0 only."""

    def is_drain_requested(self) -> bool:
        """Return True if the user or the engine asked for a drain: an orderly stop after this step."""

    def is_suspend_requested(self) -> bool:
        """Return True if ranks should suspend: leave after this step, for others that load their state."""

    def profile_request(self) -> int:
        """Return the number of the newest request for a profile, see `profile_request`; 0: there was none."""

    def report_suspend(self) -> None:
        """Report that this rank leaves to suspend, and not because its work is done."""

    def kill_deadline(self) -> float | None:
        """Return the monotonic time in seconds at which the process will be killed; None: unknown."""

    def report_drain(self, step: int) -> None:
        """Report that all ranks have agreed to stop after `step`: this one saves, and exits."""


class NullSupervisorClient:
    """Supervisor client of a process without a supervisor."""

    def __init__(self, on_event: Callable[[Event], None] | None = None) -> None:
        self._on_event = on_event

    def report_progress(self, step: int, phase: str) -> None:
        pass

    def report_finished_step(self, step: int) -> None:
        pass

    def report_work(self, work: StepWork) -> None:
        pass

    def send_event(self, event: Event) -> None:
        if self._on_event is not None:
            self._on_event(event)

    def is_drain_requested(self) -> bool:
        return False

    def is_suspend_requested(self) -> bool:
        return False

    def profile_request(self) -> int:
        return 0

    def report_suspend(self) -> None:
        pass

    def kill_deadline(self) -> float | None:
        return None

    def report_drain(self, step: int) -> None:
        pass


@dataclass(frozen=True)
class MemoryFilePaths:
    """Files of a rank's in-memory checkpoints, held by its supervisor, so that they outlive the rank.

    Attributes:
        own_paths: two paths, written in turn; the files are empty at first.
        restore_paths: for each rank of the previous generation, its in-memory checkpoints on this node.
        restore_step: step of the in-memory checkpoints that all ranks load; None: start from disk.
        backup_paths: for ranks of the partner node whose checkpoints this rank receives: two paths each,
            written in turn.
    """

    own_paths: tuple[str, str]
    restore_paths: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    restore_step: int | None = None
    backup_paths: Mapping[int, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Resize:
    """Resize: change of the number of nodes, or of the plan, between two generations.

    Attributes:
        machines: nodes that the run uses now.
        machines_before: nodes that it used before.
        most_machines: maximum nodes that it may use.
        plan_before, plan: old and new plan, as text.
        reason: reason for this plan, with the forecast cost of the change.
    """

    machines: int
    machines_before: int
    most_machines: int
    plan_before: str
    plan: str
    reason: str


@dataclass(frozen=True)
class Restart:
    """Restart of the ranks in the middle of a run, with its cause.

    Attributes:
        failure: the failure as text; empty if the run grows.
        failed_at: time of its report to this node's supervisor, on the monotonic clock, in seconds.
        last_finished_step: newest step finished before it.
        attempt: recoveries since the last new step, counted from 1.
        retried_steps: optimizer steps, counted from 1, that went wrong before and are to be repeated.
        resize: change of nodes or plan; None: unchanged.
        retained_step: step of in-memory checkpoints that are not loaded, but kept until that step has been
            repeated; None: there are none.
    """

    failure: str
    failed_at: float
    last_finished_step: int
    attempt: int
    retried_steps: tuple[int, ...] = ()
    resize: Resize | None = None
    retained_step: int | None = None


@dataclass(frozen=True)
class WorkerContext:
    """Worker context: rank, world size, node, run directory and supervisor of one rank.

    `store_host` and `store_port` are the endpoint of this generation's rendezvous store.
    """

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    node_rank: int
    generation: int
    run_directory: Path
    store_host: str = "127.0.0.1"
    store_port: int = 0
    store: Any = None
    """Rendezvous store, if this process already holds it (rank 0 serves it)."""
    supervisor_client: SupervisorClient = field(default_factory=NullSupervisorClient)
    memory_files: MemoryFilePaths | None = None
    """Files of in-memory checkpoints; None: no supervisor would keep them, or the job disables them."""
    restart: Restart | None = None
    """Cause of the restart; None for the first ranks of the command."""
    local_world_sizes: tuple[int, ...] = ()
    """Number of ranks of each node; empty if unknown, on one node."""
    rank_addresses: tuple[str, ...] = ()
    """HOST:PORT reserved for each rank; empty: the ranks need none."""
    fence: GenerationFence | None = None
    """Generation fence, checked before each commit, upload and record; None: no other could follow."""

    def check_fence(self) -> None:
        """Raise `WanmaError` if ranks of a newer generation have taken over the run."""
        if self.fence is not None:
            self.fence.check()

    def check_record_fence(self) -> None:
        """Check as `check_fence`, before a record; raise `OSError` if no recent answer is known."""
        if self.fence is not None:
            self.fence.check_record()

    @property
    def node_ranks(self) -> range:
        """Ranks on this node."""
        first = self.rank - self.local_rank
        return range(first, first + self.local_world_size)

    @classmethod
    def single_process(
        cls, run_directory: Path, supervisor_client: SupervisorClient | None = None
    ) -> WorkerContext:
        """Return the context of a run with a single rank, in the current process."""
        return cls(
            0,
            0,
            1,
            1,
            0,
            os.getpid(),
            run_directory,
            supervisor_client=supervisor_client or NullSupervisorClient(),
        )


current_worker_context: ContextVar[WorkerContext | None] = ContextVar("current_worker_context", default=None)
"""Worker context in processes that `wanma launch` started, for the script that runs in them."""
launch_cluster_section: ContextVar[Mapping[str, Any] | None] = ContextVar(
    "launch_cluster_section", default=None
)
"""Keys of `[cluster]` given to `wanma launch`, in the processes that it started."""
in_session: ContextVar[bool] = ContextVar("in_session", default=False)
"""True if this process has a session open, or has left one by an uncaught exception."""
