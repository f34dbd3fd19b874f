"""Explanation of a job that waits, and of a submission that Slurm refuses, in plain words."""

from __future__ import annotations

import re
from collections.abc import Sequence

from wanma.engines.engine import Explanation
from wanma.engines.scheduler_command import SchedulerCommandError, run_scheduler_command
from wanma.engines.slurm.records import NodeFacts, Record, node_facts, parse_records
from wanma.observe.units import count_text

REASONS: tuple[tuple[str, str, str], ...] = (
    (r"Resources", "too few nodes are free", "sizes"),
    (r"Priority", "jobs of higher priority are before it in the queue", "sizes"),
    (r"Dependency", "it waits for another job to end", ""),
    (
        r"DependencyNeverSatisfied",
        "the job that it depends on ended otherwise than it requires, so it never starts",
        "cancel it: `wanma cancel RUN`",
    ),
    (r"BeginTime", "its start time has not come (after a requeue Slurm waits some seconds)", ""),
    (r"JobHeldUser", "you have put it on hold", "release it: `scontrol release {job}`"),
    (r"JobHeldAdmin", "the administrator has put it on hold, or it was requeued too often", "ask them"),
    (
        r"launch failed requeued held|JobLaunchFailure",
        "its start failed on a node",
        "see `scontrol show job {job}`",
    ),
    (
        r"ReqNodeNotAvail.*|Nodes required for job are DOWN.*|NodeDown",
        "nodes that it must have are down, drained or reserved",
        "sizes",
    ),
    (r"PartitionNodeLimit", "it wants more nodes than its partition has, or than are up", "sizes"),
    (r"PartitionTimeLimit", "its time limit is longer than the partition's", "lower cluster.slurm.time"),
    (
        r"PartitionDown|PartitionInactive",
        "its partition accepts no jobs at present",
        "choose another partition",
    ),
    (r"Reservation.*", "it waits for its reservation", ""),
    (r"Licenses", "it waits for a licence", ""),
    (r"BadConstraints", "no node satisfies its constraints", "correct cluster.slurm.constraint"),
    (r"InvalidAccount", "the account does not exist, or you may not use it", "correct cluster.slurm.account"),
    (
        r"InvalidQOS",
        "the quality of service does not exist, or you may not use it",
        "correct cluster.slurm.qos",
    ),
    (
        r"(Assoc|Association|QOS).*(GRES|GRPTRES|TRES|Cpu|Node).*",
        "a limit of your account or QOS on resources is reached",
        "wait for your other runs, or use fewer nodes",
    ),
    (
        r"(Assoc|Association|QOS).*(Job|Submit).*",
        "a limit of your account or QOS on jobs is reached",
        "wait for your other runs",
    ),
    (
        r"(Assoc|Association|QOS).*(Wall|Time).*",
        "a limit of your account or QOS on time is reached",
        "lower cluster.slurm.time",
    ),
    (r"None", "Slurm has not looked at it yet", ""),
)
"""Pattern of Slurm's reason, its meaning, and the way out; 'sizes': the sizes that would start now."""

_NO_ANSWER = r"[Uu]nable to contact slurm controller|Connection refused|[Ss]ocket timed out|RESTORE SLURMCTLD"
REFUSALS: tuple[tuple[str, str, str], ...] = (
    (
        r"establish a configuration source|[Uu]nable to (find|read|process) .*slurm.conf",
        "Slurm's programs find no cluster here",
        "use a login node, or set SLURM_CONF to the cluster's slurm.conf",
    ),
    (
        r"[Ii]nvalid partition",
        "Slurm has no such partition",
        "set cluster.slurm.partition; `sinfo -s` lists them",
    ),
    (
        r"[Ii]nvalid account or account/partition",
        "the account does not exist, or may not use this partition",
        "set cluster.slurm.account; `sacctmgr show assoc user=$USER` lists yours",
    ),
    (
        r"[Ii]nvalid qos",
        "the quality of service does not exist, or you may not use it",
        "set cluster.slurm.qos",
    ),
    (
        r"[Jj]ob violates accounting/QOS policy|MaxSubmit|QOSMaxSubmit",
        "a limit of your account or QOS is reached",
        "wait for your other runs, or use fewer nodes",
    ),
    (
        r"[Rr]equested time limit is invalid|[Tt]ime limit",
        "the time limit is longer than the partition allows",
        "lower cluster.slurm.time: the run goes on in further jobs",
    ),
    (
        r"[Nn]ode count specification invalid|More processors requested|Requested node configuration",
        "the partition has no such nodes, or not so many",
        "lower cluster.nodes, or choose another partition or constraint",
    ),
    (r"[Ii]nvalid feature", "no node has these features", "correct cluster.slurm.constraint or prefer"),
    (
        r"[Ii]nvalid generic resource|[Ii]nvalid Trackable",
        "no node has such GPUs",
        "set cluster.slurm.gres as `sinfo -o %G` shows it",
    ),
    (
        r"[Uu]ser's group not permitted|[Aa]ccess/permission denied|not permitted",
        "you may not use this partition",
        "choose another, or ask the administrator",
    ),
    (
        _NO_ANSWER,
        "the Slurm controller does not answer",
        "try again later; running jobs go on",
    ),
    (
        r"[Dd]isk quota exceeded|No space left|I/O error writing script",
        "a disk or quota of the controller is full",
        "tell the administrator",
    ),
)
"""Pattern of a message of sbatch, its meaning, and the way out."""


def explain_job(record: Record, nodes: Sequence[NodeFacts]) -> Explanation:
    """Explain why a job waits.

    Args:
        record: the job, of `scontrol show job`.
        nodes: all nodes.
    """
    reason, job = record.get("Reason", "None"), record.get("JobId", "")
    meaning, way_out = next(
        (
            (meaning, way_out)
            for pattern, meaning, way_out in REASONS
            if re.fullmatch(pattern, reason.replace("_", " ")) or re.fullmatch(pattern, reason)
        ),
        ("Slurm gives a reason that wanma does not know", ""),
    )
    minimum, _, maximum = record.get("NumNodes", "?").partition("-")
    wanted = minimum if maximum in ("", minimum) else f"{minimum} to {maximum}"
    partition = record.get("Partition", "")
    summary = (
        f"job {job} waits for {wanted} nodes of the partition '{partition}': {meaning} (Slurm: {reason})"
    )
    advice = []
    if way_out == "sizes":
        advice += _sizes(record, [node for node in nodes if partition in node.partitions])
    elif way_out:
        advice.append(way_out.format(job=job))
    start = record.get("StartTime", "Unknown")
    if start not in ("Unknown", "N/A", "(null)"):
        advice.append(f"Slurm expects it to start at {start}")
    return Explanation(summary, tuple(advice))


def _sizes(record: Record, nodes: Sequence[NodeFacts]) -> list[str]:
    free = sum(node.is_free for node in nodes)
    up = sum(node.is_up for node in nodes)
    minimum = int(record.get("NumNodes", "1").split("-")[0] or 1)
    advice = [f"{free} of {len(nodes)} nodes there are free, {up} are up"]
    down = [f"{node.name}: {node.reason or '+'.join(node.states)}" for node in nodes if not node.is_up]
    if down:
        advice.append("down: " + "; ".join(down[:4]) + ("; ..." if len(down) > 4 else ""))
    if up < minimum:
        at_most = count_text(up, "node")
        advice.append(f"with {at_most} at most it could start; with {minimum} it does not as things stand")
    if 0 < free < minimum:
        advice.append(
            f"with {count_text(free, 'node')} it could start at once: `wanma resize RUN --nodes {free}`, "
            "if its range of nodes allows it"
        )
    return advice


def show_job(job_id: str) -> Record | None:
    """Return the record of a job; None: Slurm has forgotten it."""
    try:
        text = run_scheduler_command(["scontrol", "show", "job", job_id, "--oneliner"])
    except SchedulerCommandError as error:
        if "Invalid job id" in error.output:
            return None
        raise explain_refusal(error) from error
    return next(parse_records(text), None)


def list_nodes() -> list[NodeFacts]:
    """Return all nodes of the Slurm cluster."""
    text = run_scheduler_command(["scontrol", "show", "node", "--oneliner"])
    return [node_facts(record) for record in parse_records(text)]


def is_unanswered(error: SchedulerCommandError) -> bool:
    """Return True if a command failed as the controller did not answer: later it may."""
    return error.is_timeout or re.search(_NO_ANSWER, error.output) is not None


def explain_refusal(error: SchedulerCommandError) -> SchedulerCommandError:
    """Return the failure of a Slurm command with its meaning and the way out, if the cause is known."""
    for pattern, meaning, way_out in REFUSALS:
        if re.search(pattern, error.output):
            return SchedulerCommandError(f"{meaning}: {error.message}", way_out, error.output)
    return error
