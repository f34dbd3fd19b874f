"""Interface of every engine: discover, submit, status, logs, records, cancel, resize, explain.

An engine keeps no state of its own and runs no server: what it must remember is its handle, a JSON value in
the run directory (`engine_record`); the rest is asked of the scheduler. Each question has a deadline.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from wanma.job.cluster import Cluster
from wanma.job.sections.cluster import ClusterSection

QUERY_SECONDS = 10.0
"""Deadline of one question to a scheduler, in seconds."""
CODE_ARCHIVE_VARIABLE = "WANMA_CODE_ARCHIVE"
"""Environment variable of the archive of the run's code snapshot, which each node unpacks once."""
PLACED_BY_VARIABLE = "WANMA_PLACED_BY"
"""Environment variable of the supervisors that an engine starts: its name."""

RunState = Literal["pending", "running", "finished", "failed", "cancelled", "unknown"]
"""State of a submitted run.

pending: it waits for nodes, for the first time or after a requeue; unknown: the scheduler has forgotten it,
or its nodes do not answer.
"""
Handle = dict[str, Any]
"""JSON-able value by which an engine finds a run again, such as {"jobs": ["4711"]}."""
NOTES_KEY = "notes"
"""Key of a handle: sentences for the user who submits the run."""
WANTED_NODES_KEY = "wanted_nodes"
"""Key of a handle: number of nodes that the user has asked for since the submission."""


@dataclass(frozen=True)
class Submission:
    """Supervisors of a run to be placed: one for each node, all with the same command."""

    name: str
    """Name of the run, for people."""
    run_directory: Path
    """Absolute path of the run directory."""
    folder: Path
    """Absolute path of the working directory, where relative paths of the job start."""
    command: tuple[str, ...]
    """Arguments of `python -m wanma`, the same on every node, without nodes and rendezvous."""
    nodes: int
    min_nodes: int
    """Nodes that the run needs at least; as many as `nodes` if their number is fixed."""
    ranks_per_node: int
    gpus_per_node: int
    cores_per_node: int
    """CPU cores that one node's ranks use."""
    settings: ClusterSection
    secret: str = field(repr=False)
    """Shared secret of the supervisors; never written to a file of the run."""
    code: Path | None = None
    """Archive of the code snapshot; None: the run's code is that of the working directory."""
    interpreter: str = ""
    """Interpreter of the run's environment, in a folder that all nodes see; empty: that of this process."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the supervisors beside those of the caller; nothing secret."""
    forecast_seconds: float | None = None
    """Forecast of the whole run, in seconds; None when unknown."""
    hosts: tuple[str, ...] = ()
    """Hosts that the plan is made for, in the order of node ranks; empty: the engine chooses."""
    preferred_hosts: tuple[str, ...] = ()
    """Hosts that have read the job's data before, the best first."""
    job_text: str = field(default="", repr=False)
    """Text of the job file in the folder of the submission; empty: a script, or a record of a run."""
    is_held: bool = False
    """True if the run ends with the command that submits it; see `Engine.ends_with_caller`."""

    @property
    def is_elastic(self) -> bool:
        return self.min_nodes < self.nodes


@dataclass(frozen=True)
class RunStatus:
    """State of a submitted run, as its engine knows it."""

    state: RunState
    exit_code: int | None = None
    """Exit code of the run; None while it waits or runs, or when unknown."""
    reason: str = ""
    """Reason for waiting, of the failure, or why the state is unknown; empty otherwise."""
    nodes: tuple[str, ...] = ()
    """Host names of the run's nodes; empty while it waits, after its end, and if it is forgotten."""
    job_ids: tuple[str, ...] = ()
    """Names by which the scheduler knows the run."""

    @property
    def is_over(self) -> bool:
        return self.state in ("finished", "failed", "cancelled")


@dataclass(frozen=True)
class Explanation:
    """Explanation of a run that waits: the constraint that blocks it, and sizes that would start at once."""

    summary: str
    """Sentence with the constraint that blocks the run."""
    advice: tuple[str, ...] = ()
    """Ways out, each a sentence."""


@dataclass(frozen=True)
class EngineCluster:
    """Nodes that an engine can give, and how many of them are free."""

    cluster: Cluster
    """Nodes of the kind that the run would get, as the planner takes them."""
    free_nodes: int
    """Nodes that are free now."""
    max_nodes: int
    """Nodes that a run may have at most, by the limits of the scheduler."""
    notes: tuple[str, ...] = ()
    """Facts for the user, such as nodes that are left out because they are down."""
    time_limit_seconds: float | None = None
    """Longest time of one job of the run; None: there is no limit, or it is unknown."""


class Engine(Protocol):
    """Interface that places the supervisors of a run on nodes; what only some need does nothing here.

    Every method raises `WanmaError` if the scheduler refuses, or does not answer within the deadline.
    """

    name: str
    ends_with_caller: bool
    """True if a run that a command submits and shows ends with this command: nothing else holds it.

    False if the engine holds each run, so that it goes on; so it is with a detached run of any engine.
    """
    gives_way: bool = False
    """True if runs must look themselves for other work that waits for their nodes."""
    preference: str = ""
    """Use that the engine makes of `Submission.preferred_hosts`, as text for the user."""

    def unusable_reason(self) -> str | None:
        """Return the reason why the engine cannot be used from here; None: it can."""

    def discover(
        self, section: ClusterSection, data: Mapping[str, str] | None = None, /
    ) -> EngineCluster | None:
        """Return the nodes of the engine; None: the nodes are this machine, which the planner knows.

        Args:
            section: settings of the cluster.
            data: entries of the job's data, each with the path or glob that a node has which holds it. An
                engine that chooses among nodes one by one takes those first that have most of them.
        """

    def render(self, submission: Submission) -> str:
        """Return the text of what `submit` would submit, for `--dry-run`."""

    def foreground_command(self, _submission: Submission, /) -> list[str] | None:
        """Return the command that runs the run in the allocation which this shell has; None: it has none.

        It takes the secret from the environment.
        """
        return None

    def submit(self, submission: Submission) -> Handle:
        """Start, or queue, the run and return its handle at once."""

    def statuses(self, handles: Sequence[Handle]) -> list[RunStatus]:
        """Return the state of each run, with one question for all of them."""

    def hosts(self, handle: Handle, /) -> tuple[str, ...]:
        """Return the host names of the run's nodes, also after its end; empty where they are unknown."""

    def log_files(self, handle: Handle) -> list[Path]:
        """Return the files of the engine's own output that exist so far, oldest first."""

    def fetch(self, _handle: Handle, /) -> None:
        """Bring the run's small records into the run directory here; nothing to do where it is shared.

        Checkpoints stay where they are: `checkpoint_advice`.
        """
        return

    def checkpoint_advice(self, _handle: Handle, /) -> str | None:
        """Return the command that copies the run's checkpoints here; None: they are here."""
        return None

    def cancel(self, handle: Handle, *, is_immediate: bool) -> None:
        """Request an orderly end of the run, with a checkpoint; or end it at once.

        A run that has ended stays as it is.
        """

    def resize(
        self, handle: Handle, submission: Submission, nodes: int, /, *, may_shrink: bool = True
    ) -> Handle:
        """Bring the run to `nodes` nodes, within its `min_nodes` to `nodes`; return the new handle.

        What was asked for already counts, so that a second call with the same number asks for nothing.
        """

    def failed_requests(self, _handle: Handle, /) -> int:
        """Return how many of the newest nodes that were asked for have failed, one after another."""
        return 0

    def give_way(self, handle: Handle, /) -> Handle:
        """Give back a node beyond the run's minimum if other work waits for it; return the new handle.

        Only an engine with `gives_way` does: the others' schedulers take nodes back themselves.
        """
        return handle

    def discard(self, _handle: Handle, /) -> None:
        """Remove the files of a run that has ended from its hosts; nothing to do where they are shared."""
        return

    def release(self, handle: Handle) -> Handle:
        """Withdraw the nodes that a run still waits for, as it has ended; return the new handle."""
        return handle

    def explain(self, handle: Handle, /) -> Explanation:
        """Explain why the run waits, and what would start at once."""

    def shell_command(self, handle: Handle, node: str | None, minutes: float | None, /) -> list[str]:
        """Return the command that opens a shell on a node of the run; default: on its first one.

        It ends there after `minutes` (`lease.shell_time`); None: it has no limit.
        """
