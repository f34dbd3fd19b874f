"""What a supervisor is asked to run, and how that ended."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from wanma.elastic.failure import Failure
from wanma.elastic.recovery.replan import Decision, Situation
from wanma.job.plan.plan import Plan
from wanma.job.run.worker import Event

OnEvent = Callable[[Event], str | None]
"""Function that gets a run's events; a text that it returns asks for an orderly end."""


class Replanner(Protocol):
    """What a launch brings with it for a run whose number of machines may change; can be pickled."""

    def decide(self, situation: Situation) -> Decision:
        """The plan to go on with; runs beside the supervisor's loop, in a thread.

        `plan` is that of `running` on as many machines where nothing is to change.
        """

    def launch(self, before: Launch, plan: Plan, nodes: int) -> Launch:
        """What this machine starts for its part of `plan` on so many machines."""


@dataclass(frozen=True)
class Launch:
    """One run as one node's supervisor sees it. The same on every node, but for `node_rank`, `interface` and
    `position`."""

    run_directory: Path
    entry: str
    """'package.module:function', called in every rank as `function(worker, payload)`."""
    payload: bytes = b""
    """Handed to every local rank through inherited memory; never written to a file."""
    preload: tuple[str, ...] = ("torch",)
    """Modules that the fork server imports once, before it forks the ranks."""
    ranks_per_node: int = 1
    threads_per_rank: int = 1
    nodes: int = 1
    node_rank: int | None = None
    rendezvous: str | None = None
    """HOST:PORT where the supervisors meet; needed when `nodes` > 1."""
    interface: str | None = None
    """Network interface of the collectives; None: loopback on one node, else by route to the rendezvous."""
    position: str = ""
    """Where this machine is in the network, as `hardware.position` says it; empty where nobody knows."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Added to the environment of the fork server and the ranks; see `environment.worker_environment`."""
    start_seconds: float = 300.0
    """Longest silence (no rank reports progress) before the first step; also how long machines wait."""
    hang_seconds: float = 300.0
    """Longest silence after the first step."""
    lost_seconds: float = 20.0
    """A machine that sends no heartbeat for so long is given up."""
    job_hash: str = ""
    """Machines whose jobs differ refuse to work together."""
    retries: int = 0
    """How often the ranks are started again after a failure, without a new step between; 0: never."""
    is_script: bool = False
    """The ranks run a user's script, which may never speak to the supervisor: it is then not judged by steps,
    finds its peers by the variables of torchrun, and its output is shown."""
    silent_retries: int = 0
    """Most new starts of ranks that have never finished a step; at most `retries`."""
    replanner: Replanner | None = None
    """Plans for however many machines there are, from `min_nodes` to `nodes`; None: it is always `nodes`."""
    min_nodes: int = 0
    join_seconds: float = 30.0
    """How long the first start waits for more machines than those."""
    grace_seconds: float = 30.0
    """From a SIGTERM to the SIGKILL that follows it."""
    requeue_code: int = 143
    """Exit code of a run that SIGTERM, SIGUSR1 or SIGHUP stopped."""
    slow_factor: float = 1.5
    """A rank that takes so many times its peers' time is told."""
    upload: str | None = None
    """URL where a copy of each checkpoint goes."""

    def __post_init__(self) -> None:
        if self.ranks_per_node < 1 or self.nodes < 1 or self.threads_per_rank < 1:
            raise ValueError("ranks_per_node, nodes and threads_per_rank are at least 1")
        if self.retries < 0:
            raise ValueError(f"retries is at least 0 (given: {self.retries})")
        if ":" not in self.entry:
            raise ValueError(f"entry is 'package.module:function' (given: {self.entry!r})")


@dataclass(frozen=True)
class Outcome:
    """How the run ended on this node."""

    exit_code: int
    """0: every rank of every node finished; 130: stopped by SIGINT; `requeue_code`: by SIGTERM, SIGUSR1 or
    SIGHUP; else a failure's."""
    failure: Failure | None = None
    """The one cause, the same on every node; None when nothing failed."""

    @property
    def message(self) -> str:
        """The one message for the user; empty when nothing failed."""
        return self.failure.text() if self.failure is not None else ""


def host_name() -> str:
    """This machine's name as messages show it."""
    return socket.gethostname()
