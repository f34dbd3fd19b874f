"""One optimizer step out of what stages cost: compute and the communication that waits inside it fill each
stage's forward and backward; the pipeline's schedule is played with these; gradients' reduction, gathered
parameters and the optimizer come around it.

For every kind of model; `timing` fills the stages of decoders, `module_timing` those of any module. Pure
functions, without torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from wanma.job.forecast import StepTime
from wanma.job.plan import Plan
from wanma.planner.compute import streaming_seconds
from wanma.planner.data_parallel import DataParallel, exposed
from wanma.planner.machine import Machine
from wanma.planner.operators import PartTime, Software
from wanma.planner.pipeline import StageCost, pipeline_seconds
from wanma.planner.stages import SPLIT_BACKWARD

OPTIMIZER_KERNELS = 20
"""Of an update fused over many parameters, with norm and clipping."""

_KINDS = ("compute", "tensor", "context", "expert", "data")


@dataclass(frozen=True)
class Stage:
    """What a stage holds."""

    blocks: tuple[tuple[PartTime, int, float], ...]
    """Equal blocks: what one costs, how many, parameters of one that this rank gathers and reduces."""
    again: float
    """Share of its blocks that recompute."""
    ends: tuple[tuple[PartTime, float], ...]
    """What is no block, such as embedding and head, each with its parameters."""
    parameters: float
    """Of the whole stage, before `tp`, on one rank of `ep`."""


def step_of_stages(
    stages: Sequence[Stage],
    plan: Plan,
    micro_batches: int,
    machine: Machine,
    software: Software,
    *,
    boundary_seconds: float = 0.0,
    in_flight: int | None = None,
    trained_share: float = 1.0,
) -> StepTime:
    """Forecast of one optimizer step.

    Args:
        stages: all of them, in the model's order.
        micro_batches: of the step, on each data rank.
        boundary_seconds: what a stage's output takes to the next rank.
        in_flight: as of `pipeline_seconds`.
        trained_share: of the parameters, those that are trained.

    Raises:
        ValueError: the machine has fewer devices than the plan's ranks.
    """
    if plan.world_size > machine.devices:
        raise ValueError(f"{plan.world_size} ranks on {machine.devices} devices")
    data = DataParallel(plan, machine, software, trained_share)
    costs, kinds = [], []
    for stage in stages:
        cost, kind = _stage_cost(stage, plan, machine, software, data)
        costs.append(cost)
        kinds.append(kind)
    played = pipeline_seconds(plan.schedule, costs, plan.pp, micro_batches, boundary_seconds, in_flight)
    busiest = max(range(plan.pp), key=lambda rank: played.busy[rank])
    mine = [kinds[stage] for stage in plan.stages_of(busiest)]
    by_kind = {name: micro_batches * sum(kind[name] for kind in mine) for name in _KINDS}

    backward = sum(costs[stage].seconds - costs[stage].forward for stage in plan.stages_of(busiest))
    parameters = max(
        sum(stages[stage].parameters for stage in plan.stages_of(rank)) for rank in range(plan.pp)
    )
    forward = sum(costs[stage].forward for stage in plan.stages_of(busiest))
    reduced = data.step_seconds(parameters, forward, backward)
    updated = 0.0 if software.frozen else parameters * trained_share / plan.tp / plan.shard_ranks
    optimizer = streaming_seconds(machine.chip, updated * software.optimizer_bytes, OPTIMIZER_KERNELS)
    optimizer *= machine.optimizer_factor
    return StepTime(
        seconds=played.seconds + reduced + optimizer,
        compute=by_kind["compute"],
        tensor=by_kind["tensor"],
        context=by_kind["context"],
        expert=by_kind["expert"],
        data=by_kind["data"] + reduced,
        bubble=played.bubble_seconds,
        optimizer=optimizer,
        uncertainty=_uncertainty(plan),
    )


def _uncertainty(plan: Plan) -> float:
    """Half a 90 % interval: a rank computes as forecast within 10 %, and each kind of communication adds its
    doubt; experts most, whose load and host are known least. About that share of the published measurements
    lies inside (benchmarks/results/planner.md)."""
    axes = (plan.pp, plan.tp, plan.cp, plan.data_ranks)
    doubts = [0.10, *[0.06 for size in axes if size > 1], *[0.15 for size in (plan.ep,) if size > 1]]
    return math.sqrt(sum(doubt * doubt for doubt in doubts))


def _stage_cost(
    stage: Stage, plan: Plan, machine: Machine, software: Software, data: DataParallel
) -> tuple[StageCost, dict[str, float]]:
    """Seconds of one micro-batch, and the same by kind."""
    forward = inputs = weights = 0.0
    kinds = dict.fromkeys(_KINDS, 0.0)
    parts = [(part, count, size, stage.again) for part, count, size in stage.blocks]
    parts += [(part, 1, size, 0.0) for part, size in stage.ends]
    for part, count, size, share in parts:
        ahead = _with_host(part.forward, part.kernels_forward, machine, software)
        again = share * _with_host(part.again, part.kernels_again, machine, software)
        both = part.backward_inputs + part.backward_weights
        back = _with_host(both, part.kernels_backward, machine, software)
        scale = back / both if both else 1.0
        tensor_again = share * part.tensor_again
        expert_forward, expert_backward = part.expert_forward, part.expert_backward
        if software.expert_overlap:
            expert_forward = exposed(expert_forward, ahead)
            expert_backward = exposed(expert_backward, back)
        gathered_forward, gathered_backward = data.per_micro_batch(
            size, ahead + part.tensor_forward, again + back + part.tensor_backward
        )
        forward += count * (
            ahead + part.tensor_forward + part.context_forward + expert_forward + gathered_forward
        )
        inputs += count * (
            again
            + scale * part.backward_inputs
            + part.tensor_backward
            + tensor_again
            + part.context_backward
            + expert_backward
            + gathered_backward
        )
        weights += count * scale * part.backward_weights
        kinds["compute"] += count * (ahead + again + back)
        kinds["tensor"] += count * (part.tensor_forward + part.tensor_backward + tensor_again)
        kinds["context"] += count * (part.context_forward + part.context_backward)
        kinds["expert"] += count * (expert_forward + expert_backward)
        kinds["data"] += count * (gathered_forward + gathered_backward)
    if plan.schedule in SPLIT_BACKWARD:
        return StageCost(forward, inputs, weights), kinds
    return StageCost(forward, inputs + weights), kinds


def _with_host(seconds: float, kernels: int, machine: Machine, software: Software) -> float:
    """The device waits where the host needs longer to issue kernels than they take."""
    return seconds if software.graphs else max(seconds, kernels * machine.dispatch_seconds)
