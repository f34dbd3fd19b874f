"""Run of one node's supervisor in this process, which every engine's command ends in."""

from __future__ import annotations

from wanma.elastic.launch_config import LaunchConfig, OnEvent, RunOutcome
from wanma.elastic.supervisor.supervisor import run_supervisor
from wanma.elastic.workers.fork_server_handle import ForkServerHandle


def run_local(
    launch: LaunchConfig, on_event: OnEvent, fork_server: ForkServerHandle | None = None
) -> RunOutcome:
    """Run in the foreground and return when the run has ended and none of its processes is left.

    Args:
        on_event: receives the run's events, in this thread.
        fork_server: fork server started early by `Node.start`, so that its imports overlap other work.
    """
    return run_supervisor(launch, on_event, fork_server)
