"""Goodput of a plan's run under the cluster's failure rates and the job's checkpoints.

    forecast_goodput(problem, plan, step).share       # of the run's time, that of work that counts

The intervals are the job's own: in-memory checkpoints every `checkpoint.in_memory_every_steps` steps, on disk
every `checkpoint.every_steps`. Nodes fail as often as their cluster file says (`days_between_failures`), else
as Llama 3's did; those without accelerators as often as one GPU with its share of a node. A lost node is
replaced by the time its checkpoints are restored. Pure functions, without torch.
"""

from __future__ import annotations

import math

from wanma.job.cluster import NodeGroup
from wanma.job.forecast.forecast import Goodput, StepTime
from wanma.job.plan.plan import Plan
from wanma.planner.forecast.failure_model import (
    LLAMA3_FAILURE_RATES,
    CheckpointTier,
    CheckpointTiers,
    FailureRates,
    expected_goodput,
)
from wanma.planner.forecast.problem import PlanningProblem
from wanma.planner.forecast.step_overhead import CPU_COPY_BYTES_PER_SECOND, step_overhead
from wanma.planner.memory.in_memory_checkpoints import checkpoint_copy_bytes, has_partner_node, interval_steps

MEMORY_RESTART_SECONDS, PARTNER_RESTART_SECONDS, DISK_RESTART_SECONDS = 10.0, 30.0, 120.0
"""Seconds from a failure until training continues, by checkpoint tier, without reading the checkpoint.

Detection, new processes and their connections; for the own node's memory, a partner's, and the disk. Assumed
for thousands of devices, on which nobody measured it; small runs on two cores take 0.5, 5 and 1 s
(docs/results/recovery.md, docs/results/recovery-faults.md).
"""


def forecast_goodput(problem: PlanningProblem, plan: Plan, step: StepTime) -> Goodput:
    """Forecast the goodput of a long run of steps such as `step`."""
    node = problem.cluster.nodes[0]
    failures, devices = failure_rates_of(node), plan.world_size if node.devices else nodes_used(problem, plan)
    recovery, intervals = checkpoint_tiers(problem, plan, step)
    share = expected_goodput(failures, recovery, intervals, devices)
    undisturbed = expected_goodput(FailureRates(0.0, 0.0, 0.0), recovery, intervals, devices)
    between = failures.mean_seconds_between(devices)
    return Goodput(share, 1 - undisturbed, between, (undisturbed - share) * between)


def nodes_used(problem: PlanningProblem, plan: Plan) -> int:
    """Return the number of nodes that the plan uses; a partly used node counts."""
    devices_per_node = max(problem.hardware.device_count // problem.cluster.node_count, 1)
    return math.ceil(plan.world_size / devices_per_node)


def failure_rates_of(node: NodeGroup) -> FailureRates:
    """Return the failure rates of one of the node's devices, or of the whole node where it has none."""
    if node.days_between_failures is None:
        return LLAMA3_FAILURE_RATES
    return LLAMA3_FAILURE_RATES.scaled_to(node.days_between_failures, max(len(node.devices), 1))


def checkpoint_tiers(
    problem: PlanningProblem, plan: Plan, step: StepTime
) -> tuple[CheckpointTiers, tuple[float, ...]]:
    """Return the checkpoint tiers of the job, and the seconds of work between checkpoints of each.

    Nearest tier first. The cost of saving to disk is a part of `step`, and not counted again.
    """
    job, saving = problem.job, step_overhead(problem, plan)
    steps = saving.checkpoint_every_steps or max(job.train.steps, 1)
    disk = CheckpointTier(
        0.0, DISK_RESTART_SECONDS + saving.checkpoint_write_seconds, saving.checkpoint_write_seconds
    )
    disk_seconds = max(steps * step.seconds, disk.completion_seconds)
    size = checkpoint_copy_bytes(job, problem.workload, plan)
    if not size:
        return CheckpointTiers(disk), (disk_seconds,)
    stall, copied = _in_memory_checkpoint_seconds(problem, plan, step, size)
    sent = size / problem.hardware.links[-1].bandwidth_bytes_per_second if has_partner_node(job) else 0.0
    setting = job.checkpoint.in_memory_every_steps
    interval = setting if isinstance(setting, int) else interval_steps(stall, step.seconds)
    interval = max(interval, math.ceil((copied + sent) / step.seconds))  # each waits for the one before
    if interval >= steps:  # rarer than on disk: they restore nothing, and still stall
        return CheckpointTiers(
            CheckpointTier(stall * steps / interval, disk.restore_seconds, disk.completion_seconds)
        ), (disk_seconds,)
    seconds = interval * step.seconds
    memory = CheckpointTier(stall, MEMORY_RESTART_SECONDS + copied, copied)
    if not has_partner_node(job):
        return CheckpointTiers(disk, memory=memory), (seconds, disk_seconds)
    partner = CheckpointTier(0.0, PARTNER_RESTART_SECONDS + sent + copied, copied + sent)
    return CheckpointTiers(disk, partner, memory), (seconds, seconds, disk_seconds)


def _in_memory_checkpoint_seconds(
    problem: PlanningProblem, plan: Plan, step: StepTime, copy_bytes: float
) -> tuple[float, float]:
    """Return (stall, total) seconds to copy a rank's part of an in-memory checkpoint.

    CPUs compute nothing else meanwhile; a GPU copies beside the next step until its update.
    """
    if plan.device == "cpu":
        seconds = copy_bytes / CPU_COPY_BYTES_PER_SECOND
        return seconds, seconds
    seconds = copy_bytes / problem.hardware.host.link_bytes_per_second
    return max(seconds - (step.seconds - step.optimizer), 0.0), seconds
