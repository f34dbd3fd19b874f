"""What one node of several tells its user of the run that it is a part of. Pure: facts in, text out."""

from __future__ import annotations

from collections.abc import Sequence

from wanma.elastic.failure import Failure
from wanma.elastic.launch_config import Launch
from wanma.elastic.protocol.messages import Abort, Over, Recovery, Slow, Start
from wanma.job.run.run_directory import RunDirectory
from wanma.observe.units import duration_text

STOPPED = {130: "Ctrl-C", 143: "SIGTERM"}
"""Exit code of a run that was asked to stop → by what, where nothing else tells it."""


def joined_text(launch: Launch, start: Start, place: str, way: str) -> str:
    """Where this node met the others, which one it is, which ranks run here, where their logs are, and by
    which interface they reach the others (`way`)."""
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
"""Kind of the event of a script's ranks that are started again: `failure` is why."""


def started_again_text(recovery: Recovery) -> str:
    """Why the ranks here begin again; rank 0 tells the rest when they have."""
    if recovery.failure:
        return f"{recovery.failure}\n  the ranks of all nodes are started again"
    return "the run takes more machines: the ranks of all nodes are started again"


def stopping_text(
    exit_code: int, here: bool, what: str = "", seconds: float | None = None, *, in_steps: bool = True
) -> str:
    """That the run stops after this step, and who asked for it: this node's user or another's.

    Args:
        what: asked for it, in words; empty: the exit code tells.
        seconds: until everything is killed.
        in_steps: else it is a script without a session, which is interrupted where it stands.
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
    """Which rank is slow, in what, by how much, and whether it has ever been better."""
    who = f"rank {slow.rank} ({slow.host}, local rank {slow.local_rank})"
    if not slow.is_slow:
        return f"{who} is no longer slow: {slow.ratio:.2f} times its peers for the last {slow.steps} steps"
    return (
        f"{who} is slow: {slow.ratio:.1f} times its peers for the last {slow.steps} steps, most of it in "
        f"{slow.phase}\n  of its own work it takes {duration_text(slow.seconds)} a step, its peers "
        f"{duration_text(slow.peers_seconds)}; its own best was {duration_text(slow.best_seconds)}"
    )


def ended_text(ending: Abort | Over, nodes: int, node: int, shows_the_run: bool) -> str:
    """How the run ended, as far as nothing else tells the user of node `node`; empty when all is told.

    Args:
        shows_the_run: rank 0 is here, whose own record of the end is on this node's console.
    """
    if isinstance(ending, Over):
        if shows_the_run:
            return ""
        if ending.exit_code:
            return f"the run was stopped in order on all {nodes} nodes; the same command on each carries on"
        return f"the run is finished on all {nodes} nodes"
    if ending.note:
        return ""  # it tells all
    if ending.failure is None:
        return "the run was ended at once, as asked for; the same command on every node carries on"
    failure = ending.failure
    if failure.node is None or failure.node == node:
        return ""
    return f"the run failed on node {failure.node} ({failure.host}), so the ranks here were ended too"


def missing_text(why: Failure, missing: int, seconds: float) -> str:
    """What machines that wait for others are told."""
    machines = "one machine is" if missing == 1 else f"{missing} machines are"
    return (
        f"{why.headline}\n  {machines} missing: the run waits {seconds:.0f} s "
        "(cluster.start_seconds) for the same command there, or on others"
    )


def nobody_came(hosts: Sequence[str], nodes: int, place: str, seconds: float) -> Failure:
    """The first meeting came to nothing.

    Args:
        hosts: that came.
        nodes: of the run.
    """
    cause = (
        f"only {len(hosts)} of {nodes} machines came to {place} "
        f"within {seconds:.0f} s (here: {', '.join(hosts)})"
    )
    return Failure(cause, hint="run the same command on every machine, or raise cluster.start_seconds")
