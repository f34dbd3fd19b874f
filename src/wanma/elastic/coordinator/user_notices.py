"""Notices for the user of one node of several, as text; pure."""

from __future__ import annotations

from collections.abc import Sequence

from wanma.elastic.failure import Failure
from wanma.elastic.launch_config import LaunchConfig
from wanma.elastic.protocol.messages import (
    AbortCommand,
    CompletionNotice,
    DrainRequest,
    Recovery,
    ReleaseCommand,
    StartCommand,
    StragglerReport,
)
from wanma.job.run.run_directory import RunDirectory
from wanma.observe.units import count_text, duration_text

SIGNAL_BY_EXIT_CODE = {130: "Ctrl-C", 143: "SIGTERM"}
"""Cause of an orderly stop by the run's exit code, if nothing else names it."""


def node_joined_text(launch: LaunchConfig, start: StartCommand, endpoint: str, route: str) -> str:
    """Return the notice that this node has joined: endpoint, node rank, ranks, logs, interface (`route`)."""
    nodes = len(start.local_world_sizes) or launch.nodes
    first, last = start.first_rank, start.first_rank + launch.ranks_per_node - 1
    ranks = f"rank {first}" if first == last else f"ranks {first}-{last}"
    run = RunDirectory(launch.run_directory)
    logs = (
        str(run.rank_log(first)) if first == last else f"{run.rank_log(first)} to {run.rank_log(last).name}"
    )
    return (
        f"joined the run at {endpoint} as node rank {start.node_rank} of {nodes}, "
        f"with {ranks} of {start.world_size} (numbered from 0)\n  logs of this node: {logs}"
        f"\n  network interface of collectives: {route}"
        + (f"\n  topology address: {launch.topology_address}" if launch.topology_address else "")
    )


def claim_unseen_text(hostname: str, location: str, upload_url: str | None) -> str:
    """Return the notice that a node does not see the claims of the run in the folder `location`."""
    place = upload_url if upload_url is not None and "://" in upload_url else "s3://BUCKET/RUN"
    return (
        f"node {hostname} does not see the claims of this run in {location}: without a folder that all nodes "
        "share, the run ends if the coordinator's node is lost\n  "
        f"share the run directory; or set cluster.claims to a shared folder or an object store ('{place}')"
    )


RESTARTED_EVENT = "restarted"
"""Kind of the event of a script's ranks that are started again; `failure` is the reason."""


def restart_text(recovery: Recovery) -> str:
    """Return the notice that this node's ranks restart; rank 0 reports the rest once they have."""
    if recovery.failure:
        return f"{recovery.failure}\n  the ranks of all nodes restart"
    return "resize: the ranks of all nodes restart on another number of nodes"


def drain_text(
    exit_code: int,
    is_local: bool,
    reason: str = "",
    grace_seconds: float | None = None,
    *,
    has_steps: bool = True,
) -> str:
    """Return the notice of a stop after this step, with its origin: this node's user or another's.

    Args:
        exit_code: exit code of the run.
        is_local: True if the request came from this node.
        reason: origin of the request, in words; empty: the exit code names it.
        grace_seconds: time until everything is killed; None: no kill follows.
        has_steps: False for a script without a session, which is interrupted at once.
    """
    reason = reason or SIGNAL_BY_EXIT_CODE.get(exit_code, f"exit code {exit_code}")
    if not is_local:
        reason += " on another node"
    elif reason == SIGNAL_BY_EXIT_CODE[130]:
        reason += " (press again to abort at once)"
    if grace_seconds is not None:
        reason += f", {duration_text(grace_seconds)} until SIGKILL (cluster.grace_seconds)"
    return f"stopping after this step: {reason}" if has_steps else f"stopping the script: {reason}"


def departure_text(labels: Sequence[str], requests: Sequence[DrainRequest], nodes: int) -> str:
    """Return the notice that nodes leave in order, and the run continues without them.

    Args:
        labels: leaving nodes, in words.
        requests: request of each.
        nodes: number of nodes that the run continues on.
    """
    reasons = ", ".join(dict.fromkeys(request.reason for request in requests))
    graces = [request.grace_seconds for request in requests if request.grace_seconds is not None]
    if graces:
        reasons += f", {duration_text(min(graces))} until SIGKILL"
    verb = "leaves" if len(labels) == 1 else "leave"
    rest = count_text(nodes, "node")
    return f"{' and '.join(labels)} {verb}: {reasons}; the run continues on {rest}"


def grace_end_text(is_departure: bool, has_steps: bool = True) -> str:
    """Return the notice that the grace period ends.

    Args:
        is_departure: True if the run may continue on other nodes.
        has_steps: False for a script without a session, which has no steps and no checkpoints of wanma.
    """
    if is_departure:
        return (
            "the grace period (cluster.grace_seconds) ended before the run could continue without this node: "
            "it leaves now\n  the other nodes resume from in-memory checkpoints, or from the newest on disk"
        )
    if not has_steps:
        return (
            "the grace period (cluster.grace_seconds) ended before the script did: all its ranks are killed\n"
            "  a script that saves on SIGTERM needs more time: raise cluster.grace_seconds"
        )
    return (
        "the grace period (cluster.grace_seconds) ended before the step or its checkpoint completed: "
        "all ranks are killed\n  rerun the same command to resume from the newest checkpoint"
    )


def straggler_text(report: StragglerReport) -> str:
    """Return the notice of a straggler: rank, phase, ratio to its peers, and its own minimum."""
    rank = f"rank {report.rank} ({report.host}, local rank {report.local_rank})"
    if not report.is_slow:
        return (
            f"{rank} is no longer a straggler: {report.ratio:.2f} times its peers' work time over the last "
            f"{report.steps} steps"
        )
    return (
        f"{rank} is a straggler: {report.ratio:.1f} times its peers' work time over the last {report.steps} "
        f"steps, mainly in {report.phase}\n  work time per step: {duration_text(report.seconds)}; median of "
        f"its peers: {duration_text(report.peers_seconds)}; its own minimum: "
        f"{duration_text(report.best_seconds)}"
    )


def run_end_text(
    ending: AbortCommand | CompletionNotice | ReleaseCommand, nodes: int, node_rank: int, has_rank_0: bool
) -> str:
    """Return the notice of the run's end for the user of node `node_rank`; empty if another message has it.

    Args:
        ending: last message of the coordinator.
        nodes: number of nodes of the run.
        node_rank: node rank.
        has_rank_0: True if rank 0 is here, whose own record of the end is on this node's console.
    """
    if isinstance(ending, ReleaseCommand):
        rest = f" on {count_text(ending.nodes, 'node')}" if ending.nodes else ""
        return f"this node has left the run, which continues{rest}; the same command joins it again"
    if isinstance(ending, CompletionNotice):
        if has_rank_0:
            return ""
        if ending.exit_code:
            return (
                f"the run stopped on request on all {nodes} nodes; rerun the same command on each to resume"
            )
        return f"the run finished on all {nodes} nodes"
    if ending.flush_summary:
        return ""  # it contains everything
    if ending.failure is None:
        return "the run was aborted on request; rerun the same command on every node to resume"
    failure = ending.failure
    if failure.node_rank is None or failure.node_rank == node_rank:
        return ""
    return (
        f"the run failed on node {failure.node_rank} ({failure.hostname}); "
        "the ranks on this node were ended as well"
    )


def missing_nodes_text(failure: Failure, missing: int, timeout_seconds: float) -> str:
    """Return the notice to nodes that wait for others."""
    nodes, target = (
        ("node", "it or on a replacement") if missing == 1 else ("nodes", "them or on replacements")
    )
    return (
        f"{failure.summary}\n  {missing} {nodes} missing: waiting up to {timeout_seconds:.0f} s "
        f"(cluster.start_timeout_seconds); run the same command on {target}"
    )


def make_rendezvous_timeout(
    hostnames: Sequence[str], nodes: int, endpoint: str, timeout_seconds: float
) -> Failure:
    """Return the failure of a first rendezvous that too few nodes joined.

    Args:
        hostnames: hosts of the nodes that joined.
        nodes: number of nodes of the run.
        endpoint: endpoint of the run.
        timeout_seconds: time that was waited.
    """
    cause = (
        f"only {len(hostnames)} of {nodes} nodes joined at {endpoint} "
        f"within {timeout_seconds:.0f} s (joined: {', '.join(hostnames)})"
    )
    return Failure(cause, hint="run the same command on every node, or raise cluster.start_timeout_seconds")
