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
from wanma.job.sections.parallel import Schedule
from wanma.planner.cost.data_parallel import DataParallelCost, exposed_seconds
from wanma.planner.cost.decoder_layers import FrameworkTraits
from wanma.planner.cost.layer_cost import LayerCost
from wanma.planner.cost.offload import (
    master_weight_bytes,
    optimizer_state_transfer_seconds,
    returns_freed_memory,
    updates_on_cpu,
    uses_offload,
)
from wanma.planner.cost.site_synchronization import SiteExchange, site_exchange
from wanma.planner.hardware_model.collective_time import RankGroup, all_gather_seconds
from wanma.planner.hardware_model.model import FORWARD_OVERHEAD_SHARE, HardwareModel
from wanma.planner.hardware_model.operator_time import matmul_rate, memory_bound_seconds
from wanma.planner.pipeline.schedules import SPLIT_BACKWARD
from wanma.planner.pipeline.simulation import PipelineSimulator, StageCost, simulate_pipeline

OPTIMIZER_KERNELS = 20
"""Kernels of an update that is fused over many parameters, with gradient norm and clipping."""

_KINDS = ("compute", "tensor", "context", "expert", "data", "moving")


@dataclass(frozen=True)
class StageLayers:
    """Layers of one pipeline stage, with their costs and parameters."""

    blocks: tuple[tuple[LayerCost, int, float], ...]
    """Groups of equal blocks: cost of one, their number, and parameters of one that this rank gathers and
    reduces."""
    recompute_share: float
    """Share of its blocks that recompute, 0 .. 1."""
    end_layers: tuple[tuple[LayerCost, float], ...]
    """Layers that are no blocks, such as embedding and head, each with its parameters."""
    parameters: float
    """Parameters of the whole stage, before `tp`, on one rank of `ep`."""


@dataclass(frozen=True)
class StepComponents:
    """Components of a step's time: `assemble_step_time` adds them up, the timeline of a plan draws them."""

    plan: Plan
    micro_batches: int
    costs: tuple[StageCost, ...]
    """Costs of every stage, in the order of the model."""
    forward: tuple[dict[str, float], ...]
    """Seconds of each stage's forward of one micro-batch, by kind."""
    backward: tuple[dict[str, float], ...]
    """Seconds of each stage's backward of one micro-batch by kind, including weight gradients."""
    stage_send_seconds: float
    """Seconds of sending a stage's output to the next pipeline rank."""
    in_flight: int | None
    """Largest number of in-flight micro-batches, as in `simulate_pipeline`."""
    reduce_seconds: float
    """Seconds, once a step, of reducing the gradients of the rank with most parameters."""
    gather_seconds: float
    """Seconds, once a step, of gathering its updated weights."""
    is_overlapped: bool
    """True if reduction and gather run beside the last backward and the first forward."""
    optimizer_seconds: float
    uncertainty: float
    blocking_send_seconds: float = 0.0
    """Seconds within each forward and backward in which the rank waits while it sends and receives."""
    threads_per_core: float = 1.0
    """Threads of all ranks per core, as in `HardwareModel.shared`."""
    site_exchange: SiteExchange | None = None
    """Exchange between sites; None for a plan without sites."""

    @property
    def pipeline(self) -> tuple[Schedule, tuple[StageCost, ...], int, int, float, int | None]:
        """Return the arguments of `simulate_pipeline`."""
        plan, send_seconds = self.plan, self.stage_send_seconds
        return plan.schedule, self.costs, plan.pp, self.micro_batches, send_seconds, self.in_flight

    def exposed_reduce_gather_seconds(self, slowest_rank: int) -> tuple[float, float]:
        """Return the seconds that reduction and gather add to the step, (reduce, gather).

        Args:
            slowest_rank: pipeline rank that computes longest; its last backward hides the reduction, its
                first forward the gather.
        """
        if not self.is_overlapped:
            return self.reduce_seconds, self.gather_seconds
        rank_costs = [self.costs[stage] for stage in self.plan.stages_of_pipeline_rank(slowest_rank)]
        forward = sum(cost.forward for cost in rank_costs)
        backward = sum(cost.seconds - cost.forward for cost in rank_costs)
        return exposed_seconds(self.reduce_seconds, backward), exposed_seconds(self.gather_seconds, forward)


def build_step_components(
    stages: Sequence[StageLayers],
    plan: Plan,
    micro_batches: int,
    hardware: HardwareModel,
    framework: FrameworkTraits,
    *,
    stage_send_seconds: float = 0.0,
    in_flight: int | None = None,
    trainable_share: float = 1.0,
) -> StepComponents:
    """Return the components of one optimizer step.

    Args:
        stages: all stages, in the order of the model.
        micro_batches: micro-batches of the step on each data rank.
        stage_send_seconds: seconds of sending a stage's output to the next pipeline rank.
        in_flight: largest number of in-flight micro-batches, as in `simulate_pipeline`.
        trainable_share: share of the parameters that is trained.

    Raises:
        ValueError: the hardware model has fewer devices than the plan has ranks.
    """
    if plan.world_size > hardware.device_count:
        raise ValueError(f"{plan.world_size} ranks on {hardware.device_count} devices")
    data = DataParallelCost(plan, hardware, framework, trainable_share)
    parts = [stage_cost(stage, plan, hardware, framework, data, micro_batches) for stage in stages]
    costs = [cost for cost, _, _ in parts]
    waiting_seconds = 0.0
    if framework.blocking_sends and plan.virtual_stages > 1:
        waiting_seconds, stage_send_seconds = stage_send_seconds, 0.0
        costs = [
            StageCost(cost.forward + waiting_seconds, cost.backward + waiting_seconds, cost.backward_weight)
            for cost in costs
        ]
    parameters = max(
        sum(stages[stage].parameters for stage in plan.stages_of_pipeline_rank(rank))
        for rank in range(plan.pp)
    )
    reduce, gather = data.reduce_gather_per_step(parameters)
    return StepComponents(
        plan=plan,
        micro_batches=micro_batches,
        costs=tuple(costs),
        forward=tuple(forward for _, forward, _ in parts),
        backward=tuple(backward for _, _, backward in parts),
        stage_send_seconds=stage_send_seconds,
        in_flight=in_flight,
        reduce_seconds=reduce,
        gather_seconds=gather,
        is_overlapped=framework.data_overlap and data.overlaps_gradient_reduction,
        optimizer_seconds=optimizer_seconds(parameters, plan, hardware, framework, trainable_share),
        blocking_send_seconds=waiting_seconds,
        uncertainty=forecast_uncertainty(
            [hardware.doubt, hardware.host.doubt if uses_offload(plan) else 0.0],
            (plan.pp, plan.tp, plan.cp, plan.data_parallel_size),
            plan.ep,
        ),
        threads_per_core=hardware.shared,
        site_exchange=site_exchange(plan, hardware, framework, parameters, trainable_share),
    )


def optimizer_seconds(
    parameters: float,
    plan: Plan,
    hardware: HardwareModel,
    framework: FrameworkTraits,
    trainable_share: float = 1.0,
) -> float:
    """Return the seconds of the update of a rank's `parameters`, counted before `tp` and sharding."""
    updated = (
        0.0
        if framework.frozen_base_weights
        else parameters * trainable_share / plan.tp / plan.shard_group_size
    )
    passed = updated * framework.optimizer_bytes
    if updates_on_cpu(plan):
        seconds = passed / hardware.host.memory_bytes_per_second
    else:
        seconds = memory_bound_seconds(hardware.chip, passed, OPTIMIZER_KERNELS)
    if updated and framework.optimizer_flops:
        precision = "bf16" if "bf16" in hardware.chip.products else plan.precision
        flops = updated / plan.replicate_group_size * framework.optimizer_flops
        seconds += flops / matmul_rate(hardware.chip, precision)
    exchanged = parameters * trainable_share * framework.optimizer_exchanged_bytes if updated else 0.0
    for ranks in (
        plan.tp * plan.shard_group_size,
        plan.tp * plan.shard_group_size * plan.replicate_group_size,
    ):
        seconds += all_gather_seconds(hardware, RankGroup(ranks), exchanged)
    transfer = (
        optimizer_state_transfer_seconds(hardware, plan, updated, framework.optimizer_state_bytes)
        if uses_offload(plan)
        else 0.0
    )
    if returns_freed_memory(plan):  # gradients, whose memory was returned to the kernel
        transfer += updated * master_weight_bytes(plan) / hardware.host.fresh_bytes_per_second
    return seconds * hardware.optimizer_factor + transfer


def assemble_step_time(
    components: StepComponents, simulate: PipelineSimulator = simulate_pipeline
) -> StepTime:
    """Return the step's time: the pipeline's schedule is simulated, and the components are added to it."""
    plan = components.plan
    simulated = simulate(*components.pipeline)
    busiest = max(range(plan.pp), key=lambda rank: simulated.compute_seconds[rank])
    rank_kinds = [
        part[stage]
        for stage in plan.stages_of_pipeline_rank(busiest)
        for part in (components.forward, components.backward)
    ]
    by_kind = {name: components.micro_batches * sum(kind[name] for kind in rank_kinds) for name in _KINDS}
    exchanged = sum(components.exposed_reduce_gather_seconds(busiest))
    blocked = 2 * plan.virtual_stages * components.micro_batches * components.blocking_send_seconds
    seconds, bubble = simulated.seconds, simulated.bubble_seconds + blocked
    if components.threads_per_core > 1:
        # Ranks that wait leave their cores to the others: a step takes at least all the work on all cores,
        # and at least its critical path with cores to itself.
        seconds = max(simulated.seconds / components.threads_per_core, fmean(simulated.compute_seconds))
        mine_seconds = sum(by_kind.values())
        by_kind = {
            name: min(1.0, seconds / mine_seconds) * kind_seconds for name, kind_seconds in by_kind.items()
        }
        bubble = seconds - sum(by_kind.values())
    if components.site_exchange is not None:
        exchanged += components.site_exchange.exposed_seconds(
            seconds + exchanged + components.optimizer_seconds
        )
    return StepTime(
        seconds=seconds + exchanged + components.optimizer_seconds,
        compute=by_kind["compute"],
        tensor=by_kind["tensor"],
        context=by_kind["context"],
        expert=by_kind["expert"],
        data=by_kind["data"] + exchanged,
        moving=by_kind["moving"],
        bubble=bubble,
        optimizer=components.optimizer_seconds,
        uncertainty=components.uncertainty,
    )


def forecast_uncertainty(
    rate_uncertainties: Sequence[float], mesh_sizes: Sequence[int], ep: int = 1
) -> float:
    """Return the relative uncertainty of a step's time: half of a 90 % interval.

    Compute matches its forecast within 12 %, and each kind of communication adds its uncertainty; expert
    parallelism adds most, since its load and host time are known least. About 90 % of the published
    measurements lie inside (docs/results/planner.md).

    Args:
        mesh_sizes: sizes of pp, tp, cp, and all data ranks.
    """
    doubts = [0.12, *rate_uncertainties, *[0.06 for size in mesh_sizes if size > 1], 0.25 if ep > 1 else 0.0]
    return math.sqrt(sum(doubt * doubt for doubt in doubts))


def stage_cost(
    stage: StageLayers,
    plan: Plan,
    hardware: HardwareModel,
    framework: FrameworkTraits,
    data: DataParallelCost,
    micro_batches: int = 1,
) -> tuple[StageCost, dict[str, float], dict[str, float]]:
    """Return a stage's cost for one of `micro_batches`, and its forward and its backward seconds by kind."""
    weights = 0.0
    ahead_kinds, back_kinds = dict.fromkeys(_KINDS, 0.0), dict.fromkeys(_KINDS, 0.0)
    moves = uses_offload(plan)
    parts = [(part, count, size, stage.recompute_share, True) for part, count, size in stage.blocks]
    parts += [(part, 1, size, 0.0, False) for part, size in stage.end_layers]
    for part, count, size, share, is_block in parts:
        forward_seconds = _dispatch_bound_seconds(part.forward, part.kernels_forward, hardware, framework)
        recompute_seconds = share * _dispatch_bound_seconds(
            part.recompute, part.kernels_recompute, hardware, framework
        )
        backward_sum = part.backward_input + part.backward_weight
        backward_seconds = _dispatch_bound_seconds(backward_sum, part.kernels_backward, hardware, framework)
        scale = backward_seconds / backward_sum if backward_sum else 1.0
        beside_tensor = hardware.program.tensor_seconds if plan.tp > 1 and is_block else 0.0
        tensor_forward = part.tensor_forward + FORWARD_OVERHEAD_SHARE * beside_tensor
        tensor_backward = part.tensor_backward + (1 - FORWARD_OVERHEAD_SHARE) * beside_tensor
        tensor_again = share * part.tensor_recompute
        if part.tensor_recompute:
            tensor_again += share * FORWARD_OVERHEAD_SHARE * beside_tensor
        expert_forward, expert_backward = part.expert_forward, part.expert_backward
        if framework.expert_overlap:
            expert_forward = exposed_seconds(expert_forward, forward_seconds)
            expert_backward = exposed_seconds(expert_backward, backward_seconds)
        gathered_forward, gathered_backward = data.exposed_per_micro_batch(
            size, forward_seconds + tensor_forward, recompute_seconds + backward_seconds + tensor_backward
        )
        if is_block:
            beside_data = data.framework_overhead_seconds()
            gathered_forward += FORWARD_OVERHEAD_SHARE * beside_data
            gathered_backward += (1 - FORWARD_OVERHEAD_SHARE) * beside_data
        if moves:
            saved_bytes = (1 - share) * part.activation_bytes + share * part.recomputed_activation_bytes
            moved_forward, moved_backward = data.exposed_offload_seconds(
                size,
                saved_bytes,
                forward_seconds + tensor_forward,
                recompute_seconds + backward_seconds + tensor_backward,
                micro_batches,
                is_block=is_block,
            )
            ahead_kinds["moving"] += count * moved_forward
            back_kinds["moving"] += count * moved_backward
        ahead_kinds["compute"] += count * (forward_seconds + data.casting_seconds(size))
        ahead_kinds["tensor"] += count * tensor_forward
        ahead_kinds["context"] += count * part.context_forward
        ahead_kinds["expert"] += count * expert_forward
        ahead_kinds["data"] += count * (gathered_forward + part.embedding_forward)
        adding = data.accumulation_seconds(size, micro_batches)
        back_kinds["compute"] += count * (recompute_seconds + backward_seconds + adding)
        back_kinds["tensor"] += count * (tensor_backward + tensor_again)
        back_kinds["context"] += count * part.context_backward
        back_kinds["expert"] += count * expert_backward
        back_kinds["data"] += count * (gathered_backward + part.embedding_backward)
        weights += count * (scale * part.backward_weight + adding)
    forward, backward = sum(ahead_kinds.values()), sum(back_kinds.values())
    if plan.schedule in SPLIT_BACKWARD:
        return StageCost(forward, backward - weights, weights), ahead_kinds, back_kinds
    return StageCost(forward, backward), ahead_kinds, back_kinds


def _dispatch_bound_seconds(
    seconds: float, kernels: int, hardware: HardwareModel, framework: FrameworkTraits
) -> float:
    """Return the seconds of kernels with the host's launches.

    The device waits where the host takes longer to launch kernels than they run. A CPU is its own host, and
    does one after the other.
    """
    if framework.cuda_graphs:
        return seconds
    return max(seconds, kernels * hardware.dispatch_seconds) + kernels * hardware.program.kernel_seconds
