"""Launch configuration of a run for one supervisor, and the outcome of the run."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from wanma.elastic.failure import Failure
from wanma.elastic.recovery.replan import ReplanDecision, ReplanRequest
from wanma.job.plan.plan import Plan
from wanma.job.run.worker import Event

NODE_NAME_VARIABLE = "WANMA_NODE_NAME"
"""Environment variable with the name of the node, from an engine whose nodes do not call themselves by it."""
OnEvent = Callable[[Event], str | None]
"""Function that gets a run's events; a text that it returns requests an orderly end."""


class Replanner(Protocol):
    """Planner interface of a run whose number of nodes may change; it can be pickled."""

    def replan(self, request: ReplanRequest) -> ReplanDecision:
        """Return the plan to continue with; it runs in a thread beside the supervisor's loop.

        It is the plan of `current` on as many nodes if nothing is to change.
        """

    def make_launch_config(self, current: LaunchConfig, plan: Plan, nodes: int) -> LaunchConfig:
        """Return the launch configuration of this node for its part of `plan` on `nodes` nodes."""


StoreKind = Literal["torch", "http", "none"]
"""Rendezvous store served for a script: that of torch, Horovod's over HTTP, or none."""


@dataclass(frozen=True)
class ScriptSettings:
    """Settings of a run whose ranks are a user's script, which may never report to the supervisor.

    Hangs are then not judged by steps; the script finds its peers by variables of its framework, and its
    output is shown.
    """

    store: StoreKind = "torch"
    has_ports: bool = False
    """True if each rank gets a port of its own, whose address all ranks know before they start."""
    tasks: tuple[str, ...] = ()
    """Task of each rank in its framework, such as 'worker 0'; empty: ranks have no other names."""
    service_ranks: frozenset[int] = frozenset()
    """Ranks that serve the others and never end by themselves: they are ended when all others are done."""
    is_executed: bool = False
    """True if ranks replace themselves by another program, whose end is known by its exit code only."""

    def get_task(self, rank: int) -> str:
        """Return the task of a rank; empty if it has none."""
        return self.tasks[rank] if rank < len(self.tasks) else ""


@dataclass(frozen=True)
class LaunchConfig:
    """Launch configuration of a run, as one node's supervisor gets it.

    It is the same on every node, but for `node_rank`, `network_interface` and `topology_address`.
    """

    run_directory: Path
    entry: str
    """Entry function 'package.module:function', called in every rank as `function(worker, payload)`."""
    payload: bytes = b""
    """Argument of the entry function, passed to every local rank in inherited memory; never in a file."""
    preload_modules: tuple[str, ...] = ("torch",)
    """Modules that the fork server imports once, before it forks the ranks."""
    ranks_per_node: int = 1
    threads_per_rank: int = 1
    nodes: int = 1
    node_rank: int | None = None
    rendezvous: str | None = None
    """Endpoint HOST:PORT where the supervisors meet; needed if `nodes` > 1."""
    network_interface: str | None = None
    """Network interface of the collectives; None: loopback on one node, else by route to the rendezvous."""
    topology_address: str = ""
    """Topology address of this node, e.g. `rack-3/switch-1`; empty if unknown."""
    worker_environment: Mapping[str, str] = field(default_factory=dict)
    """Additions to the environment of the fork server and the ranks; see `environment.worker_environment`."""
    start_timeout_seconds: float = 300.0
    """Longest silence of all ranks, in seconds, before the first step; nodes also wait so long."""
    hang_timeout_seconds: float = 300.0
    """Longest silence, in seconds, after the first step."""
    heartbeat_timeout_seconds: float = 20.0
    """Time, in seconds, without a heartbeat after which a node counts as lost."""
    job_hash: str = ""
    """Hash of the job; nodes whose jobs differ refuse to work together."""
    max_restarts: int = 0
    """Most restarts of the ranks after failures without a new step between; 0: none."""
    script: ScriptSettings | None = None
    """Settings of a user's script; None: the ranks run wanma's training."""
    max_restarts_before_first_step: int | None = None
    """Most restarts of ranks that have never finished a step, at most `max_restarts`, of a script that may
    report none; None: only a lost node counts as later."""
    replanner: Replanner | None = None
    """Planner for the nodes present, from `min_nodes` to `nodes`; None: the run always has `nodes`."""
    min_nodes: int = 0
    last_call_seconds: float = 30.0
    """Last call: time, in seconds, that the first start waits for more than `min_nodes` nodes."""
    grace_seconds: float = 30.0
    """Grace period, in seconds, from a SIGTERM to the SIGKILL that follows it."""
    requeue_exit_code: int = 143
    """Exit code of a run that SIGTERM, SIGUSR1 or SIGHUP stopped."""
    straggler_factor: float = 1.5
    """Ratio to its peers' work time from which a rank counts as a straggler."""
    claims: str | None = None
    """Folder or URL of the claims of generations; None: the run directory."""
    checkpoint_upload_url: str | None = None
    """URL that a copy of each checkpoint is uploaded to; None: no upload."""

    @property
    def is_script(self) -> bool:
        """True if the ranks run a user's script."""
        return self.script is not None

    def __post_init__(self) -> None:
        if self.ranks_per_node < 1 or self.nodes < 1 or self.threads_per_rank < 1:
            raise ValueError("ranks_per_node, nodes and threads_per_rank are at least 1")
        if self.max_restarts < 0:
            raise ValueError(f"max_restarts is at least 0 (given: {self.max_restarts})")
        if ":" not in self.entry:
            raise ValueError(f"entry is 'package.module:function' (given: {self.entry!r})")


@dataclass(frozen=True)
class RunOutcome:
    """End of the run on this node."""

    exit_code: int
    """Exit code of the run.

    0: every rank of every node finished; 130: stopped by SIGINT; `requeue_exit_code`: by SIGTERM, SIGUSR1 or
    SIGHUP; else a failure's.
    """
    failure: Failure | None = None
    """Cause, the same on every node; None if nothing failed."""
    has_left: bool = False
    """True if this node has left a run that continues on others."""

    @property
    def failure_text(self) -> str:
        """Message for the user; empty if nothing failed."""
        return self.failure.text() if self.failure is not None else ""


def get_hostname() -> str:
    """Return this node's name as messages show it."""
    return socket.gethostname()


def get_node_name() -> str:
    """Return the name by which an engine knows this node; in a pod that is not its own host name."""
    return os.environ.get(NODE_NAME_VARIABLE) or get_hostname()
