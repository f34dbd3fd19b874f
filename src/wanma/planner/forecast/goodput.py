"""Goodput of a plan's run under the cluster's failure rates and the job's checkpoints.

    useful_time(problem, plan, step).share       # of the run's time, that of work that counts

The intervals are the job's own: in-memory checkpoints every `checkpoint.in_memory_every_steps` steps, on disk
every `checkpoint.every_steps`. Nodes fail as often as their cluster file says (`days_between_failures`), else
as Llama 3's did; those without accelerators as often as one GPU with its share of a node. A lost node is
replaced by the time its checkpoints are restored. Pure functions, without torch.
"""

from __future__ import annotations

import math

from wanma.job.cluster import Node
from wanma.job.forecast.forecast import StepTime, UsefulTime
from wanma.job.plan.plan import Plan
from wanma.planner.forecast.failure_model import LLAMA3, Copy, Failures, Recovery, useful_share
from wanma.planner.forecast.problem import Problem
from wanma.planner.forecast.step_overhead import SNAPSHOT_BYTES_PER_SECOND, around
from wanma.planner.memory.in_memory_checkpoints import has_partner, image_bytes, steps_between

MEMORY_SECONDS, PARTNER_SECONDS, DISK_SECONDS = 10.0, 30.0, 120.0
"""Seconds from a failure until training continues, by checkpoint tier, without reading the checkpoint.

Detection, new processes and their connections; for the own node's memory, a partner's, and the disk. Assumed
for thousands of devices, on which nobody measured it; small runs on two cores take 0.5, 5 and 1 s
(docs/reliability.md).
"""


def useful_time(problem: Problem, plan: Plan, step: StepTime) -> UsefulTime:
    """Forecast the goodput of a long run of steps such as `step`."""
    node = problem.cluster.nodes[0]
    failures, devices = failures_of(node), plan.world_size if node.devices else machines_used(problem, plan)
    recovery, intervals = places(problem, plan, step)
    share = useful_share(failures, recovery, intervals, devices)
    undisturbed = useful_share(Failures(0.0, 0.0, 0.0), recovery, intervals, devices)
    between = failures.seconds_between(devices)
    return UsefulTime(share, 1 - undisturbed, between, (undisturbed - share) * between)


def machines_used(problem: Problem, plan: Plan) -> int:
    """Return the number of nodes that the plan uses; a partly used node counts."""
    here = max(problem.machine.devices // problem.cluster.node_count, 1)
    return math.ceil(plan.world_size / here)


def failures_of(node: Node) -> Failures:
    """Return the failure rates of one of the node's devices, or of the whole node where it has none."""
    if node.days_between_failures is None:
        return LLAMA3
    return LLAMA3.as_often_as(node.days_between_failures, max(len(node.devices), 1))


def places(problem: Problem, plan: Plan, step: StepTime) -> tuple[Recovery, tuple[float, ...]]:
    """Return the checkpoint tiers of the job, and the seconds of work between checkpoints of each.

    Nearest tier first. The cost of saving to disk is a part of `step`, and not counted again.
    """
    job, saving = problem.job, around(problem, plan)
    steps = saving.every or max(job.train.steps, 1)
    disk = Copy(0.0, DISK_SECONDS + saving.write_seconds, saving.write_seconds)
    disk_seconds = max(steps * step.seconds, disk.lag_seconds)
    size = image_bytes(job, problem.workload, plan)
    if not size:
        return Recovery(disk), (disk_seconds,)
    stall, copied = _copying(problem, plan, step, size)
    sent = size / problem.machine.links[-1].bandwidth_bytes_per_second if has_partner(job) else 0.0
    wanted = job.checkpoint.in_memory_every_steps
    every = wanted if isinstance(wanted, int) else steps_between(stall, step.seconds)
    every = max(every, math.ceil((copied + sent) / step.seconds))  # each waits for the one before
    if every >= steps:  # rarer than on disk: they restore nothing, and still stall
        return Recovery(Copy(stall * steps / every, disk.restore_seconds, disk.lag_seconds)), (disk_seconds,)
    seconds = every * step.seconds
    memory = Copy(stall, MEMORY_SECONDS + copied, copied)
    if not has_partner(job):
        return Recovery(disk, memory=memory), (seconds, disk_seconds)
    partner = Copy(0.0, PARTNER_SECONDS + sent + copied, copied + sent)
    return Recovery(disk, partner, memory), (seconds, seconds, disk_seconds)


def _copying(problem: Problem, plan: Plan, step: StepTime, size: float) -> tuple[float, float]:
    """Return (stall, total) seconds to copy a rank's part of an in-memory checkpoint.

    CPUs compute nothing else meanwhile; a GPU copies beside the next step until its update.
    """
    if plan.device == "cpu":
        seconds = size / SNAPSHOT_BYTES_PER_SECOND
        return seconds, seconds
    seconds = size / problem.machine.host.link_bytes_per_second
    return max(seconds - (step.seconds - step.optimizer), 0.0), seconds
