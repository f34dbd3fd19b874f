"""What one rank knows about itself and how it talks to whoever supervises it.

The training room takes a `Worker`; the elastic room makes one for a supervised process, and
`Worker.alone` makes one for a plain Python process. So training never imports its supervisor.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from wanma.job.run.generation_claims import Fence

OUTSIDE = "the script's own code"
"""Phase of a rank whose script has no session open: nobody can tell how long it may be silent."""
Event = dict[str, Any]
"""One JSON-able record with a `kind`: start, recovery, step, validation, checkpoint, message, finish."""


class Control(Protocol):
    """The supervisor, as seen by the loop."""

    def progress(self, step: int, phase: str) -> None:
        """Note where this rank stands; feeds the hang report. Cheap: called a few times per step."""

    def step_done(self, step: int) -> None:
        """Note that optimizer step `step` is finished: only new ones count as progress after a failure."""

    def worked(self, group: int, data_seconds: float, compute_seconds: float) -> None:
        """Note what this rank took for itself in the step just finished, whatever it waited for others.

        Args:
            group: ranks of the same number have the same to do.
            data_seconds: waiting for data.
            compute_seconds: forward and backward; 0 where waiting cannot be told from it.
        """

    def event(self, event: Event) -> None:
        """Pass an event to the supervisor's console; rank 0 only."""

    def stop_requested(self) -> bool:
        """The user or the engine asked for an orderly end at the next step boundary."""

    def pause_requested(self) -> bool:
        """The ranks are to leave at the next step boundary, for others take up their state at once."""

    def pausing(self) -> None:
        """Note that this rank leaves for that reason, and not because its work is done."""

    def stop_until(self) -> float | None:
        """When, on the monotonic clock, the process will be killed by who asked for that; None: unknown."""

    def leaving(self, step: int) -> None:
        """Note that all ranks have agreed to stop after `step`: this one saves, and ends."""


class Unsupervised:
    """A `Control` for a process that nobody watches."""

    def __init__(self, on_event: Callable[[Event], None] | None = None) -> None:
        self._on_event = on_event

    def progress(self, step: int, phase: str) -> None:
        pass

    def step_done(self, step: int) -> None:
        pass

    def worked(self, group: int, data_seconds: float, compute_seconds: float) -> None:
        pass

    def event(self, event: Event) -> None:
        if self._on_event is not None:
            self._on_event(event)

    def stop_requested(self) -> bool:
        return False

    def pause_requested(self) -> bool:
        return False

    def pausing(self) -> None:
        pass

    def stop_until(self) -> float | None:
        return None

    def leaving(self, step: int) -> None:
        pass


@dataclass(frozen=True)
class Images:
    """Where a rank leaves copies of its state: files in memory that its supervisor holds, and so outlive it.

    Attributes:
        mine: two paths, written in turn; the files are empty at first.
        found: of each rank of the generation before, the images of it that are on this node.
        restore_step: step of the images that all ranks are to take up; None: start from disk.
        guests: of ranks of another node whose images this rank takes: two paths each, written in turn.
    """

    mine: tuple[str, str]
    found: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    restore_step: int | None = None
    guests: Mapping[int, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Change:
    """That a run goes on with other machines, or under another plan.

    Attributes:
        machines: that it uses now.
        machines_before: that it used before.
        most_machines: that it may use.
        plan_before, plan: in words.
        reason: why this plan, with what the change was forecast to cost.
    """

    machines: int
    machines_before: int
    most_machines: int
    plan_before: str
    plan: str
    reason: str


@dataclass(frozen=True)
class Restart:
    """Why ranks were started again in the middle of a run.

    Attributes:
        failure: what failed, in words; nothing, where the run grows.
        failed_at: when this node's supervisor heard of it, on the machine's monotonic clock.
        reached_step: newest step that was finished before it.
        attempt: counts from 1 the recoveries since the last new step.
        retried_steps: optimizer steps, counted from 1, that went wrong before and are to be made again.
        change: of machines or plan; None: all is as it was.
        kept_step: step of copies in memory that are not taken up, but stay as they are until that step has
            been made again; None: there are none.
    """

    failure: str
    failed_at: float
    reached_step: int
    attempt: int
    retried_steps: tuple[int, ...] = ()
    change: Change | None = None
    kept_step: int | None = None


@dataclass(frozen=True)
class Worker:
    """One rank's place in the run. `store` is the address of the rendezvous store of this generation."""

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
    """The rendezvous store itself, where this process already holds it (rank 0 serves it)."""
    control: Control = field(default_factory=Unsupervised)
    images: Images | None = None
    """None: nobody would keep them, or the job wants none."""
    restart: Restart | None = None
    """None: these are the first ranks of the command."""
    ranks_by_node: tuple[int, ...] = ()
    """How many ranks each node has; empty where nobody has said so, on one node."""
    fence: Fence | None = None
    """Looked at before anything is written into the run directory; None: nobody else could follow."""

    def still_mine(self) -> None:
        """Raises `WanmaError` when other ranks have taken the run over."""
        if self.fence is not None:
            self.fence.check()

    @property
    def node_ranks(self) -> range:
        """Ranks on this node."""
        first = self.rank - self.local_rank
        return range(first, first + self.local_world_size)

    @classmethod
    def alone(cls, run_directory: Path, control: Control | None = None) -> Worker:
        """The only rank of a run in the current process."""
        return cls(0, 0, 1, 1, 0, os.getpid(), run_directory, control=control or Unsupervised())


current_worker: ContextVar[Worker | None] = ContextVar("current_worker", default=None)
"""Set in processes that `wanma launch` started, for the script that runs in them."""
launched_cluster: ContextVar[Mapping[str, Any] | None] = ContextVar("launched_cluster", default=None)
"""Set in processes that `wanma launch` started: the keys of `[cluster]` that the command was given."""
in_session: ContextVar[bool] = ContextVar("in_session", default=False)
"""True if this process has a session open, or has left one by an exception that nobody caught."""
