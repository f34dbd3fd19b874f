"""Notices for the user of one node of several, as text; pure."""

from __future__ import annotations

from collections.abc import Sequence

from wanma.elastic.failure import Failure
from wanma.elastic.launch_config import Launch
from wanma.elastic.protocol.messages import Abort, Over, Recovery, Slow, Start
from wanma.job.run.run_directory import RunDirectory
from wanma.observe.units import duration_text

STOPPED = {130: "Ctrl-C", 143: "SIGTERM"}
"""Cause of an orderly stop by the run's exit code, if nothing else names it."""


def joined_text(launch: Launch, start: Start, place: str, way: str) -> str:
    """Return the notice that this node has joined: endpoint, node rank, ranks, logs and interface (`way`)."""
    nodes = len(start.ranks_by_node) or launch.nodes
    first, last = start.first_rank, start.first_rank + launch.ranks_per_node - 1
    ranks = f"rank {first}" if first == last else f"ranks {first}-{last}"
    run = RunDirectory(launch.run_directory)
    logs = str(run.log(first)) if first == last else f"{run.log(first)} to {run.log(last).name}"
    return (
        f"joined the run at {place}: this is node {start.node_rank} of {nodes}, "
        f"with {ranks} of {start.world_size} (both counted from 0)\n  logs of this node: {logs}"
        f"\n  collectives go over {way}"
        + (f"\n  its place in the network: {launch.position}" if launch.position else "")
    )


RESTARTED = "restarted"
"""Kind of the event of a script's ranks that are started again; `failure` is the reason."""


def started_again_text(recovery: Recovery) -> str:
    """Return the notice that the ranks here are started again; rank 0 reports the rest when they have."""
    if recovery.failure:
        return f"{recovery.failure}\n  the ranks of all nodes are started again"
    return "the run takes more machines: the ranks of all nodes are started again"


def stopping_text(
    exit_code: int, here: bool, what: str = "", seconds: float | None = None, *, in_steps: bool = True
) -> str:
    """Return the notice of a stop after this step, with its origin: this node's user or another's.

    Args:
        exit_code: exit code of the run.
        here: True if the request came from this node.
        what: origin of the request, in words; empty: the exit code names it.
        seconds: time until everything is killed; None: no kill follows.
        in_steps: False for a script without a session, which is interrupted at once.
    """
    what = what or STOPPED.get(exit_code, f"exit code {exit_code}")
    if not here:
        what += " on another node"
    elif what == STOPPED[130]:
        what += " (again: leave at once)"
    if seconds is not None:
        what += f", {duration_text(seconds)} are left (cluster.grace_seconds)"
    return f"stopping in order after this step: {what}" if in_steps else f"stopping the script: {what}"


def slow_text(slow: Slow) -> str:
    """Return the notice of a straggler: rank, phase, ratio to its peers, and its own best."""
    who = f"rank {slow.rank} ({slow.host}, local rank {slow.local_rank})"
    if not slow.is_slow:
        return f"{who} is no longer slow: {slow.ratio:.2f} times its peers for the last {slow.steps} steps"
    return (
        f"{who} is slow: {slow.ratio:.1f} times its peers for the last {slow.steps} steps, most of it in "
        f"{slow.phase}\n  of its own work it takes {duration_text(slow.seconds)} a step, its peers "
        f"{duration_text(slow.peers_seconds)}; its own best was {duration_text(slow.best_seconds)}"
    )


def ended_text(ending: Abort | Over, nodes: int, node: int, shows_the_run: bool) -> str:
    """Return the notice of the run's end for the user of node `node`; empty if another message has it.

    Args:
        ending: last message of the coordinator.
        nodes: number of nodes of the run.
        node: node rank.
        shows_the_run: True if rank 0 is here, whose own record of the end is on this node's console.
    """
    if isinstance(ending, Over):
        if shows_the_run:
            return ""
        if ending.exit_code:
            return f"the run was stopped in order on all {nodes} nodes; the same command on each carries on"
        return f"the run is finished on all {nodes} nodes"
    if ending.note:
        return ""  # it contains everything
    if ending.failure is None:
        return "the run was ended at once, as asked for; the same command on every node carries on"
    failure = ending.failure
    if failure.node is None or failure.node == node:
        return ""
    return f"the run failed on node {failure.node} ({failure.host}), so the ranks here were ended too"


def missing_text(why: Failure, missing: int, seconds: float) -> str:
    """Return the notice to nodes that wait for others."""
    machines = "one machine is" if missing == 1 else f"{missing} machines are"
    return (
        f"{why.headline}\n  {machines} missing: the run waits {seconds:.0f} s "
        "(cluster.start_timeout_seconds) for the same command there, or on others"
    )


def nobody_came(hosts: Sequence[str], nodes: int, place: str, seconds: float) -> Failure:
    """Return the failure of a first meeting to which too few nodes came.

    Args:
        hosts: hosts of the nodes that came.
        nodes: number of nodes of the run.
        place: endpoint of the run.
        seconds: time that was waited.
    """
    cause = (
        f"only {len(hosts)} of {nodes} machines came to {place} "
        f"within {seconds:.0f} s (here: {', '.join(hosts)})"
    )
    return Failure(
        cause, hint="run the same command on every machine, or raise cluster.start_timeout_seconds"
    )
