"""Step time of a plan, by kind: what its operators and links cost, put together as the runtime runs them.

Compute and the communication that waits inside it fill each stage's forward and backward; the pipeline's
schedule is played with these; gradients' reduction, gathered parameters and the optimizer come around it.
Pure functions, without torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

from wanma.job.forecast import StepTime
from wanma.job.plan import Plan
from wanma.models.block_workload import attention_half, feed_forward_half
from wanma.models.dimensions import DecoderDimensions
from wanma.planner.communication import (
    Group,
    all_gather_seconds,
    all_reduce_seconds,
    reduce_scatter_seconds,
    send_seconds,
)
from wanma.planner.compute import streaming_seconds
from wanma.planner.machine import Machine
from wanma.planner.operators import PartTime, Software, block_time, embedding_time, head_time
from wanma.planner.pipeline import StageCost, pipeline_seconds
from wanma.planner.stages import SPLIT_BACKWARD

INTERFERENCE = 0.15
"""Of the time of communication that runs beside compute, what the compute loses: collectives occupy some of
the multiprocessors and of the memory's bandwidth (NCCL uses 16 to 24 blocks of 108 to 132)."""


def step_time(
    dimensions: DecoderDimensions,
    sequence: int,
    plan: Plan,
    global_batch: int,
    machine: Machine,
    software: Software | None = None,
    in_flight: int | None = None,
) -> StepTime:
    """Forecast of one optimizer step of `global_batch` sequences of `sequence` tokens.

    Args:
        in_flight: as of `pipeline_seconds`.

    Raises:
        ValueError: the machine has fewer devices than the plan's ranks, or no rate for its precision.
    """
    software = software or Software(fused=plan.compile)
    if plan.world_size > machine.devices:
        raise ValueError(f"{plan.world_size} ranks on {machine.devices} devices")
    micro_batches = plan.accumulation(global_batch)
    stages = _stages(dimensions, sequence, plan, machine, software)
    data = _DataParallel(plan, machine, software)

    costs, kinds = [], []
    for stage in stages:
        cost, kind = _stage_cost(stage, plan, machine, software, data)
        costs.append(cost)
        kinds.append(kind)
    boundary = _boundary_seconds(dimensions, sequence, plan, machine)
    played = pipeline_seconds(plan.schedule, costs, plan.pp, micro_batches, boundary, in_flight)
    busiest = max(range(plan.pp), key=lambda rank: played.busy[rank])
    mine = [kinds[stage] for stage in plan.stages_of(busiest)]
    by_kind = {name: micro_batches * sum(kind[name] for kind in mine) for name in _KINDS}

    backward = sum(costs[stage].seconds - costs[stage].forward for stage in plan.stages_of(busiest))
    parameters = max(
        sum(stages[stage].parameters for stage in plan.stages_of(rank)) for rank in range(plan.pp)
    )
    forward = sum(costs[stage].forward for stage in plan.stages_of(busiest))
    reduced = data.step_seconds(parameters, forward, backward)
    updated = 0.0 if software.frozen else parameters / plan.tp / plan.shard_ranks
    optimizer = streaming_seconds(machine.chip, updated * software.optimizer_bytes, _OPTIMIZER_KERNELS)
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


_OPTIMIZER_KERNELS = 20
"""Of an update fused over many parameters, with norm and clipping."""

_KINDS = ("compute", "tensor", "context", "expert", "data")


def _uncertainty(plan: Plan) -> float:
    """Half a 90 % interval: a rank computes as forecast within 10 %, and each kind of communication adds its
    doubt; experts most, whose load and host are known least. About that share of the published measurements
    lies inside (benchmarks/results/planner.md)."""
    axes = (plan.pp, plan.tp, plan.cp, plan.data_ranks)
    doubts = [0.10, *[0.06 for size in axes if size > 1], *[0.15 for size in (plan.ep,) if size > 1]]
    return math.sqrt(sum(doubt * doubt for doubt in doubts))


@dataclass(frozen=True)
class _Stage:
    """What a stage holds."""

    blocks: tuple[tuple[PartTime, int, float], ...]
    """Equal blocks: what one costs, how many, parameters of one that this rank gathers and reduces."""
    again: float
    """Share of its blocks that recompute."""
    ends: tuple[tuple[PartTime, float], ...]
    """Embedding and head, each with its parameters."""
    parameters: float
    """Of the whole stage, before `tp`, on one rank of `ep`."""


def stage_blocks(dimensions: DecoderDimensions, plan: Plan) -> list[int]:
    """Blocks of each stage: by the plan's cuts, else as even as can be, with fewer where the ends are."""
    if plan.stage_cuts:
        bounds = (0, *plan.stage_cuts, dimensions.layers)
        return [stop - start for start, stop in pairwise(bounds)]
    stages, layers = plan.stages, dimensions.layers
    if layers % stages == 0:
        return [layers // stages] * stages
    if (layers + 2) % stages == 0 and stages > 1:
        each = (layers + 2) // stages
        return [each - 1, *[each] * (stages - 2), each - 1]
    base, extra = divmod(layers, stages)
    # The first ones of the middle have one more.
    order = [*range(1, stages), 0]
    more = set(order[:extra])
    return [base + (stage in more) for stage in range(stages)]


def _stages(
    dimensions: DecoderDimensions, sequence: int, plan: Plan, machine: Machine, software: Software
) -> list[_Stage]:
    sparse_from = dimensions.dense_layers if dimensions.experts else dimensions.layers
    dense = block_time(dimensions, sequence, plan, machine, software)
    sparse = (
        block_time(dimensions, sequence, plan, machine, software, experts=True)
        if dimensions.experts
        else dense
    )
    dense_size = _block_parameters(dimensions, plan, software, experts=False)
    sparse_size = (
        _block_parameters(dimensions, plan, software, experts=True) if dimensions.experts else dense_size
    )
    head = head_time(dimensions, sequence, plan, machine, software)
    embedding = embedding_time(dimensions, sequence, plan, machine, software)
    table = float(dimensions.vocabulary or 0) * dimensions.hidden
    found: list[_Stage] = []
    start = 0
    for stage, count in enumerate(stage_blocks(dimensions, plan)):
        dense_count = max(0, min(start + count, sparse_from) - start)
        ends: list[tuple[PartTime, float]] = []
        if stage == 0:
            ends.append((embedding, table))
        if stage == plan.stages - 1:
            is_shared = dimensions.tie_embeddings and plan.pp == 1
            ends.append((head, 0.0 if is_shared else table))
        parameters = dense_count * dense_size + (count - dense_count) * sparse_size
        parameters += sum(size for _, size in ends)
        blocks = ((dense, dense_count, dense_size), (sparse, count - dense_count, sparse_size))
        again = len(plan.recomputed(count)) / count if count else 0.0
        found.append(_Stage(tuple(b for b in blocks if b[1]), again, tuple(ends), parameters))
        start += count
    return found


def _block_parameters(
    dimensions: DecoderDimensions, plan: Plan, software: Software, *, experts: bool
) -> float:
    attention = attention_half(dimensions).parameters
    half = feed_forward_half(dimensions, experts=experts)
    dense = half.parameters - half.experts
    if not software.gated and not experts:
        dense = 2 * dimensions.hidden * dimensions.feed_forward
    return attention + dense + half.experts / plan.ep


def _stage_cost(
    stage: _Stage, plan: Plan, machine: Machine, software: Software, data: _DataParallel
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
            expert_forward = _exposed(expert_forward, ahead)
            expert_backward = _exposed(expert_backward, back)
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


def _boundary_seconds(dimensions: DecoderDimensions, sequence: int, plan: Plan, machine: Machine) -> float:
    """A stage's output to the next rank: each rank of `tp` sends its part, and gathers the others' inside
    where the sequence is not split (Narayanan et al. 2021, section 4.1)."""
    if plan.pp == 1:
        return 0.0
    whole = plan.micro_batch * sequence / plan.cp * dimensions.hidden * 2.0
    distance = plan.world_size // plan.pp
    seconds = send_seconds(machine, distance, whole / plan.tp)
    return seconds if plan.sequence else seconds + all_gather_seconds(machine, Group(plan.tp), whole)


class _DataParallel:
    """Communication over the ranks that share or repeat a stage's state."""

    def __init__(self, plan: Plan, machine: Machine, software: Software) -> None:
        self.plan, self.machine, self.software = plan, machine, software
        self.shards = Group(plan.shard_ranks, plan.tp)
        self.replicas = Group(plan.replicas, plan.tp * plan.shard_ranks)
        # Of what is frozen nothing is reduced.
        self.gradient_bytes = 0 if software.frozen else software.gradient_bytes

    def per_micro_batch(self, parameters: float, forward: float, backward: float) -> tuple[float, float]:
        """What gathering a block's sharded parameters for forward and backward, and reducing its gradients
        beside the latter, adds to these.

        The next block's are gathered while one computes; a pipeline keeps them gathered.
        """
        if self.plan.shard != "parameters" or self.shards.size == 1 or self.plan.pp > 1:
            return 0.0, 0.0
        whole = parameters / self.plan.tp
        gather = all_gather_seconds(self.machine, self.shards, whole * 2.0)
        reduce = reduce_scatter_seconds(self.machine, self.shards, whole * self.gradient_bytes)
        return _exposed(gather, forward), _exposed(gather + reduce, backward)

    def step_seconds(self, parameters: float, forward: float, backward: float) -> float:
        """Once a step: gradients of a rank's parameters reduced, and what the optimizer's shards give back.

        Of experts a rank holds its part, which fewer ranks share: as many bytes move.
        """
        whole = parameters / self.plan.tp
        gradients = whole * self.gradient_bytes
        by_block = self.plan.shard == "parameters" and self.plan.pp == 1
        reduce = all_reduce_seconds(self.machine, self.replicas, gradients / self.shards.size)
        back = 0.0
        if not by_block:
            reduce += reduce_scatter_seconds(self.machine, self.shards, gradients)
            back = all_gather_seconds(self.machine, self.shards, 0.0 if self.software.frozen else whole * 2.0)
        if not self.software.data_overlap:
            return reduce + back
        # Gradients are reduced beside the last micro-batch's backward, weights gathered beside the first
        # one's forward.
        return _exposed(reduce, backward) + _exposed(back, forward)


def _exposed(communication: float, compute: float) -> float:
    """What communication beside `compute` adds to it."""
    return max(0.0, communication - compute) + INTERFERENCE * min(communication, compute)
