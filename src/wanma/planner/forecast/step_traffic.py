"""Bytes and FLOPs of a step by the operator model: what a rank moves through its memory and its link.

The cost model counts seconds, and each of its terms is an amount over a rate. On a device whose other rates
are infinite the seconds are therefore the amount over the one rate that is not. So there is one account of
the operators, that of forecasts, and none beside it. Pure functions, without torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from wanma.job.forecast.forecast import StepTime
from wanma.job.plan.plan import Plan
from wanma.planner.cost.step import assemble_step_time
from wanma.planner.forecast.plan_forecast import step_components, time_unavailable_reason
from wanma.planner.forecast.problem import PlanningProblem
from wanma.planner.hardware_model.model import (
    AttentionCurve,
    DeviceModel,
    HardwareModel,
    LinkLevel,
    MatmulCurve,
)
from wanma.planner.hardware_model.operator_time import ELEMENT_BYTES

UNIT_RATE = 1e9
"""Rate whose time is read off, in bytes per second."""
UNLIMITED = 1e30
"""Rate that takes no time."""


@dataclass(frozen=True)
class StepTraffic:
    """Amounts of one optimizer step on one rank, of the slowest stage of a pipeline."""

    flops: float
    """FLOPs of the model, forward and backward, without recomputation: the mean over the ranks."""
    memory_bytes: float
    """Bytes that operators and optimizer read and write, each operand and result once per operator."""
    network_bytes: float
    """Bytes that the rank sends in collectives and to the next stage."""


def forecast_step_traffic(problem: PlanningProblem, plan: Plan) -> StepTraffic | None:
    """Return the amounts of a step; None where the operators of the model are not known, or ranks differ."""
    memory = _step_time(problem, plan, bandwidth=UNIT_RATE, link=UNLIMITED)
    network = _step_time(problem, plan, bandwidth=UNLIMITED, link=UNIT_RATE)
    if memory is None or network is None:
        return None
    exchanges = network.tensor + network.context + network.expert + network.data + network.bubble
    return StepTraffic(
        problem.workload.flops_per_sample * problem.global_batch / plan.world_size,
        UNIT_RATE * (memory.compute + memory.optimizer),
        UNIT_RATE * exchanges,
    )


def _step_time(problem: PlanningProblem, plan: Plan, *, bandwidth: float, link: float) -> StepTime | None:
    """Return the step time on devices that are limited by one of two rates alone."""
    if plan.placement:
        return None
    curve = AttentionCurve(1.0, 0.0, 1.0)
    chip = DeviceModel(
        "one rate",
        dict.fromkeys(ELEMENT_BYTES, UNLIMITED),
        bandwidth,
        1,
        dict.fromkeys(ELEMENT_BYTES, MatmulCurve(1.0, 0.0)),
        curve,
        dict.fromkeys(ELEMENT_BYTES, curve),
        bandwidth_share=1.0,
        launch_seconds=0.0,
    )
    links = (LinkLevel(max(plan.world_size, 1), 0.0, link),)
    host = replace(problem.hardware.host, link_bytes_per_second=math.inf)
    hardware = HardwareModel(chip, links, dispatch_seconds=0.0, start_seconds=0.0, host=host)
    ideal = replace(problem, hardware=hardware)
    if time_unavailable_reason(ideal, plan) is not None:
        return None
    return assemble_step_time(step_components(ideal, plan))
