"""Time of one optimizer step, assembled from the costs of its stages.

Compute and the communication exposed inside it fill each stage's forward and backward; the pipeline's
schedule is simulated with these; the reduction of gradients, the gather of weights and the optimizer are
added. It holds for every kind of model: `cost.decoder` fills the stages of decoders, `cost.traced_module`
those of any module. Pure functions, without torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from wanma.job.forecast.forecast import StepTime
from wanma.job.plan.plan import Plan
from wanma.planner.cost.data_parallel import DataParallel, exposed
from wanma.planner.cost.decoder_layers import PartTime, Software
from wanma.planner.cost.offload import (
    is_moving,
    master_bytes,
    state_seconds,
    trims,
    updates_on_host,
)
from wanma.planner.cost.site_synchronization import Between, between_sites
from wanma.planner.hardware_model.collective_time import Group, all_gather_seconds
from wanma.planner.hardware_model.model import FORWARD_OF_PROGRAM, Machine
from wanma.planner.hardware_model.operator_time import product_rate, streaming_seconds
from wanma.planner.pipeline.schedules import SPLIT_BACKWARD
from wanma.planner.pipeline.simulation import Play, StageCost, pipeline_seconds

OPTIMIZER_KERNELS = 20
"""Kernels of an update that is fused over many parameters, with gradient norm and clipping."""

_KINDS = ("compute", "tensor", "context", "expert", "data", "moving")


@dataclass(frozen=True)
class Stage:
    """Layers of one pipeline stage, with their costs and parameters."""

    blocks: tuple[tuple[PartTime, int, float], ...]
    """Groups of equal blocks: cost of one, their number, and parameters of one that this rank gathers and
    reduces."""
    again: float
    """Share of its blocks that recompute, 0 .. 1."""
    ends: tuple[tuple[PartTime, float], ...]
    """Layers that are no blocks, such as embedding and head, each with its parameters."""
    parameters: float
    """Parameters of the whole stage, before `tp`, on one rank of `ep`."""


@dataclass(frozen=True)
class Anatomy:
    """Components of a step's time: `step_of` adds them up, the timeline of a plan draws them."""

    plan: Plan
    micro_batches: int
    costs: tuple[StageCost, ...]
    """Costs of every stage, in the order of the model."""
    forward: tuple[dict[str, float], ...]
    """Seconds of each stage's forward of one micro-batch, by kind."""
    backward: tuple[dict[str, float], ...]
    """Seconds of each stage's backward of one micro-batch by kind, including weight gradients."""
    boundary_seconds: float
    """Seconds of sending a stage's output to the next pipeline rank."""
    in_flight: int | None
    """Largest number of in-flight micro-batches, as in `pipeline_seconds`."""
    reduce_seconds: float
    """Seconds, once a step, of reducing the gradients of the rank with most parameters."""
    gather_seconds: float
    """Seconds, once a step, of gathering its updated weights."""
    is_overlapped: bool
    """True if reduction and gather run beside the last backward and the first forward."""
    optimizer_seconds: float
    uncertainty: float
    waiting_seconds: float = 0.0
    """Seconds within each forward and backward in which the rank waits while it sends and receives."""
    shared: float = 1.0
    """Threads of all ranks per core, as in `Machine.shared`."""
    between: Between | None = None
    """Exchange between sites; None for a plan without sites."""

    def exchange_seconds(self, busiest: int) -> tuple[float, float]:
        """Return the seconds that reduction and gather add to the step, (reduce, gather).

        Args:
            busiest: pipeline rank that computes longest; its last backward hides the reduction, its first
                forward the gather.
        """
        if not self.is_overlapped:
            return self.reduce_seconds, self.gather_seconds
        mine = [self.costs[stage] for stage in self.plan.stages_of(busiest)]
        forward = sum(cost.forward for cost in mine)
        backward = sum(cost.seconds - cost.forward for cost in mine)
        return exposed(self.reduce_seconds, backward), exposed(self.gather_seconds, forward)


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
    """Return the forecast of one optimizer step; arguments and errors as in `anatomy_of_stages`."""
    return step_of(
        anatomy_of_stages(
            stages,
            plan,
            micro_batches,
            machine,
            software,
            boundary_seconds=boundary_seconds,
            in_flight=in_flight,
            trained_share=trained_share,
        )
    )


def anatomy_of_stages(
    stages: Sequence[Stage],
    plan: Plan,
    micro_batches: int,
    machine: Machine,
    software: Software,
    *,
    boundary_seconds: float = 0.0,
    in_flight: int | None = None,
    trained_share: float = 1.0,
) -> Anatomy:
    """Return the components of one optimizer step.

    Args:
        stages: all stages, in the order of the model.
        micro_batches: micro-batches of the step on each data rank.
        boundary_seconds: seconds of sending a stage's output to the next pipeline rank.
        in_flight: largest number of in-flight micro-batches, as in `pipeline_seconds`.
        trained_share: share of the parameters that is trained.

    Raises:
        ValueError: the hardware model has fewer devices than the plan has ranks.
    """
    if plan.world_size > machine.devices:
        raise ValueError(f"{plan.world_size} ranks on {machine.devices} devices")
    data = DataParallel(plan, machine, software, trained_share)
    parts = [stage_cost(stage, plan, machine, software, data, micro_batches) for stage in stages]
    costs = [cost for cost, _, _ in parts]
    waiting_seconds = 0.0
    if software.waits_for_sends and plan.virtual_stages > 1:
        waiting_seconds, boundary_seconds = boundary_seconds, 0.0
        costs = [
            StageCost(cost.forward + waiting_seconds, cost.backward + waiting_seconds, cost.weights)
            for cost in costs
        ]
    parameters = max(
        sum(stages[stage].parameters for stage in plan.stages_of(rank)) for rank in range(plan.pp)
    )
    reduce, gather = data.once_a_step(parameters)
    return Anatomy(
        plan=plan,
        micro_batches=micro_batches,
        costs=tuple(costs),
        forward=tuple(forward for _, forward, _ in parts),
        backward=tuple(backward for _, _, backward in parts),
        boundary_seconds=boundary_seconds,
        in_flight=in_flight,
        reduce_seconds=reduce,
        gather_seconds=gather,
        is_overlapped=software.data_overlap and data.hides_sums,
        optimizer_seconds=optimizer_seconds(parameters, plan, machine, software, trained_share),
        waiting_seconds=waiting_seconds,
        uncertainty=uncertainty(
            [machine.doubt, machine.host.doubt if is_moving(plan) else 0.0],
            (plan.pp, plan.tp, plan.cp, plan.data_ranks),
            plan.ep,
        ),
        shared=machine.shared,
        between=between_sites(plan, machine, software, parameters, trained_share),
    )


def optimizer_seconds(
    parameters: float, plan: Plan, machine: Machine, software: Software, trained_share: float = 1.0
) -> float:
    """Return the seconds of the update of a rank's `parameters`, counted before `tp` and sharding."""
    updated = 0.0 if software.frozen else parameters * trained_share / plan.tp / plan.shard_ranks
    passed = updated * software.optimizer_bytes
    if updates_on_host(plan):
        seconds = passed / machine.host.memory_bytes_per_second
    else:
        seconds = streaming_seconds(machine.chip, passed, OPTIMIZER_KERNELS)
    if updated and software.optimizer_flops:
        precision = "bf16" if "bf16" in machine.chip.products else plan.precision
        flops = updated / plan.replicas * software.optimizer_flops
        seconds += flops / product_rate(machine.chip, precision)
    exchanged = parameters * trained_share * software.optimizer_exchanged_bytes if updated else 0.0
    for ranks in (plan.tp * plan.shard_ranks, plan.tp * plan.shard_ranks * plan.replicas):
        seconds += all_gather_seconds(machine, Group(ranks), exchanged)
    moved = state_seconds(machine, plan, updated, software.state_bytes) if is_moving(plan) else 0.0
    if trims(plan):  # gradients, whose memory was returned to the kernel
        moved += updated * master_bytes(plan) / machine.host.fresh_bytes_per_second
    return seconds * machine.optimizer_factor + moved


def step_of(anatomy: Anatomy, play: Play = pipeline_seconds) -> StepTime:
    """Return the step's time: the pipeline's schedule is simulated, and the components are added to it."""
    plan = anatomy.plan
    played = play(
        plan.schedule,
        anatomy.costs,
        plan.pp,
        anatomy.micro_batches,
        anatomy.boundary_seconds,
        anatomy.in_flight,
    )
    busiest = max(range(plan.pp), key=lambda rank: played.busy[rank])
    mine = [part[stage] for stage in plan.stages_of(busiest) for part in (anatomy.forward, anatomy.backward)]
    by_kind = {name: anatomy.micro_batches * sum(kind[name] for kind in mine) for name in _KINDS}
    exchanged = sum(anatomy.exchange_seconds(busiest))
    waiting = 2 * plan.virtual_stages * anatomy.micro_batches * anatomy.waiting_seconds
    seconds, bubble = played.seconds, played.bubble_seconds + waiting
    if anatomy.shared > 1:
        # Ranks that wait leave their cores to the others: a step takes at least all the work on all cores,
        # and at least its critical path with cores to itself.
        seconds = max(played.seconds / anatomy.shared, fmean(played.busy))
        mine_seconds = sum(by_kind.values())
        by_kind = {name: min(1.0, seconds / mine_seconds) * one for name, one in by_kind.items()}
        bubble = seconds - sum(by_kind.values())
    if anatomy.between is not None:
        exchanged += anatomy.between.seconds(seconds + exchanged + anatomy.optimizer_seconds)
    return StepTime(
        seconds=seconds + exchanged + anatomy.optimizer_seconds,
        compute=by_kind["compute"],
        tensor=by_kind["tensor"],
        context=by_kind["context"],
        expert=by_kind["expert"],
        data=by_kind["data"] + exchanged,
        moving=by_kind["moving"],
        bubble=bubble,
        optimizer=anatomy.optimizer_seconds,
        uncertainty=anatomy.uncertainty,
    )


def uncertainty(machine_doubts: Sequence[float], axes: Sequence[int], ep: int = 1) -> float:
    """Return the relative uncertainty of a step's time: half of a 90 % interval.

    Compute matches its forecast within 12 %, and each kind of communication adds its uncertainty; expert
    parallelism adds most, since its load and host time are known least. About 90 % of the published
    measurements lie inside (benchmarks/results/planner.md).

    Args:
        axes: sizes of pp, tp, cp, and all data ranks.
    """
    doubts = [0.12, *machine_doubts, *[0.06 for size in axes if size > 1], 0.25 if ep > 1 else 0.0]
    return math.sqrt(sum(doubt * doubt for doubt in doubts))


def stage_cost(
    stage: Stage, plan: Plan, machine: Machine, software: Software, data: DataParallel, micro_batches: int = 1
) -> tuple[StageCost, dict[str, float], dict[str, float]]:
    """Return a stage's cost for one of `micro_batches`, and its forward and its backward seconds by kind."""
    weights = 0.0
    ahead_kinds, back_kinds = dict.fromkeys(_KINDS, 0.0), dict.fromkeys(_KINDS, 0.0)
    moves = is_moving(plan)
    parts = [(part, count, size, stage.again, True) for part, count, size in stage.blocks]
    parts += [(part, 1, size, 0.0, False) for part, size in stage.ends]
    for part, count, size, share, is_block in parts:
        ahead = _with_host(part.forward, part.kernels_forward, machine, software)
        again = share * _with_host(part.again, part.kernels_again, machine, software)
        both = part.backward_inputs + part.backward_weights
        back = _with_host(both, part.kernels_backward, machine, software)
        scale = back / both if both else 1.0
        beside_tensor = machine.program.tensor_seconds if plan.tp > 1 and is_block else 0.0
        tensor_forward = part.tensor_forward + FORWARD_OF_PROGRAM * beside_tensor
        tensor_backward = part.tensor_backward + (1 - FORWARD_OF_PROGRAM) * beside_tensor
        tensor_again = share * part.tensor_again
        if part.tensor_again:
            tensor_again += share * FORWARD_OF_PROGRAM * beside_tensor
        expert_forward, expert_backward = part.expert_forward, part.expert_backward
        if software.expert_overlap:
            expert_forward = exposed(expert_forward, ahead)
            expert_backward = exposed(expert_backward, back)
        gathered_forward, gathered_backward = data.per_micro_batch(
            size, ahead + tensor_forward, again + back + tensor_backward
        )
        if is_block:
            beside_data = data.program_seconds()
            gathered_forward += FORWARD_OF_PROGRAM * beside_data
            gathered_backward += (1 - FORWARD_OF_PROGRAM) * beside_data
        if moves:
            kept = (1 - share) * part.kept_bytes + share * part.kept_again_bytes
            moved_forward, moved_backward = data.moved(
                size,
                kept,
                ahead + tensor_forward,
                again + back + tensor_backward,
                micro_batches,
                is_block=is_block,
            )
            ahead_kinds["moving"] += count * moved_forward
            back_kinds["moving"] += count * moved_backward
        ahead_kinds["compute"] += count * (ahead + data.casting_seconds(size))
        ahead_kinds["tensor"] += count * tensor_forward
        ahead_kinds["context"] += count * part.context_forward
        ahead_kinds["expert"] += count * expert_forward
        ahead_kinds["data"] += count * gathered_forward
        adding = data.adding_seconds(size, micro_batches)
        back_kinds["compute"] += count * (again + back + adding)
        back_kinds["tensor"] += count * (tensor_backward + tensor_again)
        back_kinds["context"] += count * part.context_backward
        back_kinds["expert"] += count * expert_backward
        back_kinds["data"] += count * gathered_backward
        weights += count * (scale * part.backward_weights + adding)
    forward, backward = sum(ahead_kinds.values()), sum(back_kinds.values())
    if plan.schedule in SPLIT_BACKWARD:
        return StageCost(forward, backward - weights, weights), ahead_kinds, back_kinds
    return StageCost(forward, backward), ahead_kinds, back_kinds


def _with_host(seconds: float, kernels: int, machine: Machine, software: Software) -> float:
    """Return the seconds of kernels with the host's launches.

    The device waits where the host takes longer to launch kernels than they run. A CPU is its own host, and
    does one after the other.
    """
    if software.graphs:
        return seconds
    return max(seconds, kernels * machine.dispatch_seconds) + kernels * machine.program.kernel_seconds
