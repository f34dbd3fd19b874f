"""Cost of a whole run: duration with batch ramp, validations and failures, energy at the wall, price.

    cost = run_cost(problem, plan, forecast(problem, plan).step)

A device draws between its idle power and its limit, by its activity; the rest of a node (processors, memory,
cards, fans, losses of the supply) draws a share of what its maker allows for. Switches between nodes and the
cooling of the hall are not counted. Pure functions, without torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from wanma.job.cluster import NodeGroup
from wanma.job.forecast.forecast import RunCost, StepTime
from wanma.job.plan.plan import Plan
from wanma.job.sections.train import TrainSection
from wanma.planner.cost.decoder_layers import matmul_precision
from wanma.planner.forecast.goodput import forecast_goodput, nodes_used
from wanma.planner.forecast.problem import PlanningProblem
from wanma.planner.forecast.step_overhead import step_overhead
from wanma.planner.hardware_model.operator_time import matmul_rate

MATMUL_POWER_SHARE, MEMORY_BOUND_POWER_SHARE, COMMUNICATION_POWER_SHARE, IDLE_POWER_SHARE = 1.0, 0.7, 0.5, 0.3
"""Power of a device as a share of its limit, by activity.

Products of training run into the limit, which is why clocks fall under them
(`hardware.catalogue.efficiency`). While a large model's ranks communicate, power falls to about half, and
while they wait to 0.2 (Patel et al. 2024, "Characterizing Power Management Opportunities for LLMs in the
Cloud", recalled), or less far where a kernel polls for its peers. Streaming operators are assumed to lie
between.
"""

HOST_POWER_SHARE = 0.5
"""Power of a node's parts beside its devices, as a share of what the maker allows for them.

That is 4.6 kW in a DGX H100. Eight H100 that train drew at most 8.4 of 10.2 kW (Latif et al. 2024, recalled),
which leaves 0.6 of that rest; less where a hall cools without the nodes' own fans.
"""

MIN_GOODPUT = 0.01
"""Goodput below which the cost of a run is not forecast."""

DEFAULT_HOST_POWER_RATIO = 0.8
"""Limit of a node's parts beside its devices over the devices' limits, where the node's is not stated.

It is 0.46 in a DGX-1, 1.0 in a DGX A100, 0.8 in a DGX H100 and B200 (their data sheets, in the catalogue).
"""


@dataclass(frozen=True)
class DeviceActivity:
    """Activity of a device averaged over a step, as shares of its time that add up to one."""

    matmul: float
    memory_bound: float
    communication: float
    idle: float

    @property
    def power_share(self) -> float:
        """Return the device's mean power as a share of its limit."""
        busy = MATMUL_POWER_SHARE * self.matmul + MEMORY_BOUND_POWER_SHARE * self.memory_bound
        return busy + COMMUNICATION_POWER_SHARE * self.communication + IDLE_POWER_SHARE * self.idle


FULL_LOAD = DeviceActivity(matmul=1.0, memory_bound=0.0, communication=0.0, idle=0.0)
"""Activity at which a device draws the most power."""


def run_cost(problem: PlanningProblem, plan: Plan, step: StepTime) -> RunCost | None:
    """Forecast duration, energy and price of the job's run; None for a goodput below `MIN_GOODPUT`.

    The run has all the job's steps, with the smaller ones of its batch ramp, its validations, the write of
    the last state, and the losses to failures and checkpoints (`goodput`). Nodes of which the plan fills a
    part count whole. While a run recovers, they draw power as if it trained.
    """
    useful = forecast_goodput(problem, plan, step)
    if useful.share < MIN_GOODPUT:
        return None
    seconds = run_seconds(problem.job.train, problem.global_batch, plan, step) / useful.share
    seconds += step_overhead(problem, plan).final_checkpoint_seconds
    used = [(problem.cluster.nodes[0], nodes_used(problem, plan))]
    return replace(price_run(seconds, used, device_activity(problem, plan, step)), useful=useful)


def price_run(
    seconds: float, node_counts: Sequence[tuple[NodeGroup, int]], activity: DeviceActivity
) -> RunCost:
    """Return the cost of nodes busy for `seconds`; energy or price is None where it is unknown for a node."""
    energy, price = 0.0, 0.0
    unknown_energy = unknown_price = False
    for node, count in node_counts:
        watts = node_watts(node, activity)
        unknown_energy |= watts is None
        unknown_price |= node.price_per_hour is None
        energy += seconds * count * (watts or 0.0)
        price += seconds / 3600 * count * (node.price_per_hour or 0.0)
    return RunCost(seconds, None if unknown_energy else energy, None if unknown_price else price)


def run_seconds(train: TrainSection, global_batch: int, plan: Plan, step: StepTime) -> float:
    """Return the seconds of all steps and validations, without failures.

    In a step with a smaller batch, time spent in micro-batches shrinks with their number; the bubble,
    reductions, the optimizer and saving stay. Validations run the forward alone: a third of a micro-batch's
    time, or a quarter where backward recomputes it.

    Args:
        train: section [train] of the job.
        global_batch: batch of the step that was forecast, in samples.
        plan: the plan.
        step: forecast of that step.
    """
    repeated = step.compute + step.tensor + step.context + step.expert + step.moving
    once = step.seconds - repeated
    per_micro_batch = repeated / plan.gradient_accumulation_steps(global_batch)
    seconds = 0.0
    ramp = [(0, train.global_batch), *(entry for entry in train.batch_ramp if entry[0] < train.steps)]
    for number, (start, batch) in enumerate(ramp):
        stop = ramp[number + 1][0] if number + 1 < len(ramp) else train.steps
        seconds += (stop - start) * (once + per_micro_batch * plan.gradient_accumulation_steps(batch))
    validations = 1 if train.validate_every_steps == 0 else max(train.steps // train.validate_every_steps, 1)
    forward = 1 / 4 if plan.recompute == "full" else 1 / 3
    samples = plan.gradient_accumulation_steps(train.validation_samples)
    return seconds + validations * forward * (per_micro_batch * samples + step.bubble)


def device_activity(problem: PlanningProblem, plan: Plan, step: StepTime) -> DeviceActivity:
    """Return the activity of a device over a step.

    Products run at the rate that the device sustains; the rest of computing and the optimizer count as
    streaming; then exposed communication, and waiting.
    """
    chip = problem.hardware.chip
    precision = matmul_precision(plan, problem.framework)
    flops = problem.workload.flops_per_sample * problem.global_batch / plan.world_size
    recompute_factor = 4 / 3 if plan.recompute == "full" else 1.0
    products = min(recompute_factor * flops / matmul_rate(chip, precision), step.compute)
    communicating = step.tensor + step.context + step.expert + step.data + step.moving
    streaming = step.compute - products + step.optimizer + step.checkpoint
    parts = (products, streaming, communicating, step.bubble + step.loading)
    return DeviceActivity(*(part / step.seconds for part in parts))


def node_watts(node: NodeGroup, activity: DeviceActivity) -> float | None:
    """Return the power of one node at the wall, in W, whose devices do the same; None where unknown."""
    devices = node.devices or ((node.cpu,) if node.cpu else ())
    limits = [device.power_watts for device in devices]
    limit = sum(watts for watts in limits if watts is not None)
    if not limits or None in limits:
        return None
    device_limit = (
        DEFAULT_HOST_POWER_RATIO * limit if node.power_watts is None else max(node.power_watts - limit, 0.0)
    )
    return limit * activity.power_share + HOST_POWER_SHARE * device_limit
