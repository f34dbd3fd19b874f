"""Peak memory of a plan by kind: of the rank with the largest peak, or of every pipeline rank.

A rank's memory peaks at one of six moments: at the loss, when all activations are saved; as backward makes
the head's gradient; as it enters its first block; as it reaches its last, when the gradients of the others
exist; as it reaches the layers before the blocks; or as it ends, when all gradients exist. Memory that exists
at other moments only does not add up. Pure functions, without torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import accumulate
from typing import NamedTuple

from wanma.job.forecast.forecast import Forecast, Workload
from wanma.job.plan.plan import Plan
from wanma.models.config.dimensions import DecoderDimensions
from wanma.planner.cost.decoder_layers import Software
from wanma.planner.memory.memory_table import MemoryTable, tabulate
from wanma.planner.memory.model_states import Parameters, State, state_of
from wanma.planner.pipeline.schedules import blocks_of_stages, kept_forwards

CPU_RUNTIME_BYTES = 325 << 20
"""Resident bytes of a CPU rank beside its tensors: 300 to 310 MiB of Python, torch and their libraries, half
of them in the heap, after the first steps have loaded all that they need; and about 15 of holes between these
small objects, which are the same for small and large models."""

CUDA_CONTEXT_BYTES = 600 << 20
"""Bytes of a GPU that a process takes before its first tensor: CUDA's context, its libraries' kernels and
their workspaces. torch does not count them."""

NCCL_GROUP_BYTES = 256 << 20
"""Bytes of the channel buffers of one communicator on a GPU, which torch does not count either."""


class Unused(NamedTuple):
    """Fragmentation: memory that an allocator holds beyond the live tensors, as shares of them."""

    gathered: float
    """Share of the bytes of gathered parameters."""
    passing: float
    """Share of gradients, activations, logits and buffers at their peak."""
    late: float
    """Share of tensors that are made as backward ends, and for which no freed tensor left a hole of their
    size."""


_ON_GPU = Unused(0.12, 0.12, 0.0)
"""Shares of torch's allocator: 10 to 16 % of temporary tensors in torchtitan's runs of December 2024, which
state their reserved memory (benchmarks/results/planner-memory.md)."""

_ON_CPU = Unused(0.0, 0.1, 1.0)
"""Shares of glibc's heap, which keeps freed memory, under the settings of `elastic` workers. Long-lived
tensors are made before the first step and lie below all others, without holes (`training.optimizer`).

*Passing*: while an aligned tensor is placed, its hole needs up to 96 bytes more than the tensor, so that a
hole between two long-lived tensors is too small for the next of its size; and a large hole is filled by small
tensors. A tenth is the least with which none of the fitted runs of benchmarks/planner/memory_runs.py exceeds
its forecast by 2 %.

*Late*: gradients lie where backward found room, and until the update nothing larger than the holes between
them has room there. An embedding's gradient, made last of all, and the buffer in which a unit's gradients are
reduced find a hole of their size only where something as large was freed: the logits; or, if gradients lie
where those of earlier micro-batches lie, a head's gradient that was added to them, or activations. Otherwise
the heap grows by all of it."""


def unused_shares(plan: Plan, software: Software) -> Unused:
    """Return the fragmentation shares of the allocator of the plan's devices."""
    usual = _ON_CPU if plan.device == "cpu" else _ON_GPU
    return Unused(*(software.unused_factor * share for share in usual))


def forecast_memory(
    workload: Workload,
    plan: Plan,
    optimizer: str,
    *,
    micro_batches: int = 2,
    weight_average: bool = False,
    dimensions: DecoderDimensions | None = None,
    software: Software | None = None,
    table: MemoryTable | None = None,
    in_flight: int | None = None,
) -> Forecast:
    """Return the memory forecast of the rank with the largest peak.

    Args:
        optimizer: value of `train.optimizer`.
        micro_batches: largest number of micro-batches of one step and rank.
        weight_average: an averaged copy of the weights is stored.
        dimensions: dimensions of a decoder, whose operators are then known one by one.
        software: traits of the training framework; None: wanma's own.
        table: memory table of this plan, if it exists already.
        in_flight: largest number of in-flight micro-batches of each stage, for a schedule with such a limit.
    """
    software = software or Software(fused=plan.compile)
    table = table or tabulate(workload, plan, dimensions, software)
    stages = stage_counts(table, plan)
    step = Setting(optimizer, micro_batches, weight_average, software, in_flight)
    ranks = [_rank_memory(rank, table, plan, stages, step) for rank in unlike_ranks(plan, stages, step)]
    fullest = ranks[0] if len(ranks) == 1 else max(ranks, key=lambda rank: rank.total)
    return fullest.forecast


def memory_of_ranks(
    workload: Workload,
    plan: Plan,
    optimizer: str,
    *,
    micro_batches: int = 2,
    weight_average: bool = False,
    dimensions: DecoderDimensions | None = None,
    software: Software | None = None,
    in_flight: int | None = None,
) -> list[RankMemory]:
    """Return the memory of each pipeline rank; arguments as in `forecast_memory`."""
    software = software or Software(fused=plan.compile)
    table = tabulate(workload, plan, dimensions, software)
    stages = stage_counts(table, plan)
    step = Setting(optimizer, micro_batches, weight_average, software, in_flight)
    return [_rank_memory(rank, table, plan, stages, step) for rank in range(plan.pp)]


def memory_of_stage(
    table: MemoryTable,
    plan: Plan,
    rank: int,
    blocks: tuple[int, ...],
    optimizer: str,
    *,
    software: Software,
    micro_batches: int = 2,
    weight_average: bool = False,
) -> RankMemory:
    """Return the memory of pipeline rank `rank` with `blocks` blocks of each of the table's kinds.

    It holds whatever the other ranks hold, for a schedule with one stage on each rank. Other arguments as in
    `forecast_memory`.
    """
    step = Setting(optimizer, micro_batches, weight_average, software, None)
    return _rank_memory(rank, table, plan, [blocks] * plan.pp, step)


class Moment(NamedTuple):
    """Bytes of temporary tensors at one moment of a step."""

    gradients: float
    activations: float
    logits: float
    buffers: float
    gone: float = 0.0
    """Bytes of gathered parameters that are freed already, as a negative number."""


class RankMemory(NamedTuple):
    """Memory of one pipeline rank, in bytes."""

    state: State
    kept: float
    """Activations on the device that are saved for their backward."""
    away: float
    """Activations that the plan offloads."""
    working: float
    """Largest tensors that backward makes beside them in one block, with its recomputed or fetched
    activations."""
    moments: tuple[Moment, ...]
    """Six moments: at the loss, as backward goes through the head, its first block and its last, as it
    reaches the layers before the blocks, and as it ends."""
    on_top: float
    """Bytes by which tensors made as backward ends exceed the largest moment."""
    plan: Plan
    software: Software

    @property
    def peak(self) -> Moment:
        """Return the moment with most temporary bytes."""
        return max(self.moments, key=sum)

    @property
    def total(self) -> float:
        """Return the peak bytes on the device, without those of CUDA's context or Python."""
        lasting, passing = self.state.parameters + self.state.optimizer, max(map(sum, self.moments))
        return lasting + self.state.buffers + passing + self._fragmentation(passing)

    def _fragmentation(self, passing: float) -> float:
        shares = unused_shares(self.plan, self.software)
        of_state = shares.gathered * self.state.gathered
        return of_state + shares.passing * passing + shares.late * self.on_top

    @property
    def forecast(self) -> Forecast:
        """Return the memory forecast of this rank, by kind."""
        peak, away = self.peak, {"none": 0.0, "host": self.state.host, "disk": self.state.disk}
        away[self.plan.offload_activations] += self.away
        return Forecast(
            parameters_bytes=int(self.state.parameters + peak.gone),
            gradients_bytes=int(peak.gradients),
            optimizer_bytes=int(self.state.optimizer),
            activations_bytes=int(peak.activations),
            logits_bytes=int(peak.logits),
            runtime_bytes=runtime_bytes(self.plan),
            host_bytes=int(away["host"]),
            disk_bytes=int(away["disk"]),
            buffers_bytes=int(peak.buffers + self.state.buffers),
            fragmentation_bytes=int(self._fragmentation(sum(peak))),
        )


# ---------------------------------------------------------------- one rank


class Setting(NamedTuple):
    """Settings of a memory forecast beside the plan."""

    optimizer: str
    micro_batches: int
    weight_average: bool
    software: Software
    in_flight: int | None


def stage_counts(table: MemoryTable, plan: Plan) -> list[tuple[int, ...]]:
    """Return the number of blocks of each kind in every stage."""
    if plan.pp == 1:  # whatever schedule it would have
        return [tuple(kind.blocks for kind in table.kinds)]
    totals = list(accumulate(kind.blocks for kind in table.kinds))
    sizes = blocks_of_stages(totals[-1] if totals else 0, plan)
    if len(totals) == 1:
        return [(size,) for size in sizes]
    before = [0] * len(totals)
    found = []
    for stop in accumulate(sizes):
        upto = [
            min(max(stop - total + kind.blocks, 0), kind.blocks)
            for kind, total in zip(table.kinds, totals, strict=True)
        ]
        found.append(tuple(now - then for now, then in zip(upto, before, strict=True)))
        before = upto
    return found


def unlike_ranks(plan: Plan, stages: list[tuple[int, ...]], step: Setting) -> Iterable[int]:
    """Return pipeline ranks among which one has the largest peak.

    Of ranks that hold the same layers it is the one that saves most activations: the first of them, except
    for schedules that go down the ranks and up again.
    """
    if plan.pp <= 2:
        return range(plan.pp)
    last = len(stages) - 1
    ranks: dict[tuple[object, ...], tuple[int, int]] = {}
    for rank in range(plan.pp):
        numbers = plan.stages_of(rank)
        held = [stages[number] for number in numbers]
        key = (numbers[0] == 0, numbers[-1] == last, *held)
        kept = -rank
        if plan.is_v_shaped:
            kept = sum(
                sum(counts) * count
                for counts, count in zip(held, kept_of_stages(rank, plan, step), strict=True)
            )
        if key not in ranks or kept > ranks[key][0]:
            ranks[key] = kept, rank
    return [rank for _, rank in ranks.values()]


def _rank_memory(
    rank: int, table: MemoryTable, plan: Plan, stages: list[tuple[int, ...]], step: Setting
) -> RankMemory:
    """Return the memory of one pipeline rank."""
    numbers = plan.stages_of(rank) if plan.pp > 1 else (0,)
    state = state_of(
        parameters_of(rank, table, plan, stages),
        plan,
        step.optimizer,
        micro_batches=step.micro_batches,
        weight_average=step.weight_average,
        software=step.software,
    )
    activations = _activations(rank, table, plan, [stages[number] for number in numbers], step)
    logits, head = (table.logits, table.head) if len(stages) - 1 in numbers else (0.0, 0.0)
    boundary = boundary_bytes(table, plan, step, numbers)
    at_loss = Moment(
        state.accumulated, activations.kept + head, step.software.logits_copies * logits, boundary
    )
    at_head = Moment(state.accumulated + state.last, activations.kept + head, logits, boundary)
    later = later_share(kept_of_stages(rank, plan, step))
    at_first_block = Moment(
        state.accumulated + state.reducing,
        activations.kept + activations.working,
        held_logits(logits, plan, step.software),
        boundary + table.travelling,
    )
    at_last_block = Moment(
        state.accumulated + state.made,
        later * activations.kept + activations.block + activations.working,
        held_logits(logits, plan, step.software),
        boundary + table.travelling,
    )
    at_first_layer = Moment(state.accumulated + state.added, later * activations.kept, 0.0, boundary)
    at_end = Moment(state.final, 0.0, 0.0, boundary + state.receiving, -state.let_go)
    moments = (at_loss, at_head, at_first_block, at_last_block, at_first_layer, at_end)
    hole = logits
    if state.accumulated:  # gradients lie with those of earlier micro-batches, without holes
        hole = max(logits, state.last, (1 - later) * activations.kept)
    late = sum(size for size in (state.late, state.late_buffer) if size > hole)
    return RankMemory(
        state,
        activations.kept,
        activations.away,
        activations.working,
        moments,
        max(max(map(sum, moments[:4])) + late - max(map(sum, moments)), 0.0),
        plan,
        step.software,
    )


def parameters_of(rank: int, table: MemoryTable, plan: Plan, stages: list[tuple[int, ...]]) -> Parameters:
    """Return the parameters of one pipeline rank.

    Args:
        stages: number of blocks of each kind in every stage.
    """
    numbers = plan.stages_of(rank) if plan.pp > 1 else (0,)
    shared = experts = block = shapes = routed = trained = 0.0
    tensors: dict[float, float] = {}
    for index, kind in enumerate(table.kinds):
        count = sum(stages[number][index] for number in numbers)
        shared += count * kind.shared
        experts += count * kind.experts
        trained += count * (kind.shared + kind.experts) * kind.trained
        for size in kind.matrices:
            tensors[size] = tensors.get(size, 0.0) + count
        if count:
            block = max(block, kind.shared + kind.experts)
            shapes = max(shapes, kind.shared + kind.expert)
            routed = max(routed, kind.experts)
    last = table.last if len(stages) - 1 in numbers else 0.0
    first = table.first if 0 in numbers else 0.0
    embedding = first if table.knows_ends else 0.0
    for size in (first, last):
        if table.knows_ends and size:
            tensors[size] = tensors.get(size, 0.0) + 1
    of_blocks = trained / (shared + experts) if table.trained_share < 1 and shared + experts else 1.0
    trained += first * table.trained_first + last * table.trained_last
    held = shared + experts + first + last
    # With a pipeline, the share of this rank; without one, of the whole model.
    share = trained / held if plan.pp > 1 and table.trained_share < 1 and held else table.trained_share
    return Parameters(
        shared,
        experts,
        first + last,
        block,
        shapes + last,
        first,
        embedding=embedding,
        routed=routed,
        tensors=tuple(sorted(tensors.items())),
        trained_share=share,
        trained_blocks=of_blocks,
        trained_first=table.trained_first,
        trained_last=table.trained_last,
    )


class _Activations(NamedTuple):
    """Bytes of activations on one rank."""

    kept: float
    """Bytes saved for backward on the device."""
    block: float
    """Bytes of `kept` that one block saves for one backward."""
    working: float
    """Bytes beside `kept` while backward goes through a block: its gradients, and recomputed or fetched
    activations."""
    away: float
    """Bytes that the plan offloads."""


def _activations(
    rank: int, table: MemoryTable, plan: Plan, mine: list[tuple[int, ...]], step: Setting
) -> _Activations:
    """Return the bytes of activations of one rank, with its stages' blocks in `mine`."""
    flights = kept_of_stages(rank, plan, step)
    kept = block = away = working = deepest = 0.0
    for counts, flight in zip(mine, flights, strict=True):
        blocks = sum(counts)
        again = math.ceil(round(blocks * plan.recompute_share, 9)) if plan.recompute != "none" else 0
        share = again / blocks if blocks else 0.0
        for kind, count in zip(table.kinds, counts, strict=True):
            if not count:
                continue
            parts = kind.bytes
            plain = count * flight * ((1 - share) * parts.kept + share * parts.inputs)
            costly = count * flight * share * parts.costly if plan.recompute == "selective" else 0.0
            if plan.offload_activations == "none":
                kept += plain + costly
            else:  # results that selective recompute saves stay on the device
                kept, away = kept + costly, away + plain
            stays = costly + (plain if plan.offload_activations == "none" else 0.0)
            block = max(block, stays / (count * flight) if flight else 0.0)
            working = max(working, parts.working)
            if again or plan.offload_activations != "none":
                deepest = max(deepest, parts.kept)
    # A recomputed or fetched block exists as a whole in backward; on a GPU the next one is fetched beside it.
    around = 2 if plan.device == "cuda" and plan.offload_activations != "none" else 1
    return _Activations(kept, block, working + around * deepest, away)


def kept_of_stages(rank: int, plan: Plan, step: Setting) -> tuple[int, ...]:
    """Return the in-flight micro-batches of each stage of the rank."""
    if plan.pp == 1:
        return (1,)
    if step.in_flight is not None:
        return (min(step.in_flight, step.micro_batches),) * plan.virtual_stages
    return kept_forwards(plan.schedule, plan.pp, plan.virtual_stages, step.micro_batches, rank)


def later_share(flights: tuple[int, ...]) -> float:
    """Return the share of saved activations that is left when backward has passed through a stage, 0 .. 1."""
    most = max(flights, default=1)
    return 1 - 1 / most if most else 0.0


def boundary_bytes(table: MemoryTable, plan: Plan, step: Setting, numbers: tuple[int, ...]) -> float:
    """Return the bytes of buffers between stages.

    For each micro-batch there is one for the input, one for its gradient on the way back, and one for the
    output's gradient.
    """
    if plan.pp == 1:
        return 0.0
    places = sum(2 * (number > 0) + (number < plan.stages - 1) for number in numbers)
    return table.boundary * places * (step.micro_batches if step.software.boundary_buffers else 1)


def held_logits(logits: float, plan: Plan, software: Software) -> float:
    """Return the bytes of a micro-batch's logits that are left when backward has passed the head.

    torch's pipelines keep a stage's output until its backward has ended.
    """
    return logits if plan.pp > 1 and software.boundary_buffers else 0.0


def runtime_bytes(plan: Plan) -> int:
    """Return the bytes of a rank beside its tensors: Python and torch, or CUDA and NCCL."""
    if plan.device == "cpu":
        return CPU_RUNTIME_BYTES
    axes = (plan.pp, plan.dp_replicate, plan.dp_shard, plan.cp, plan.tp, plan.ep)
    return CUDA_CONTEXT_BYTES + NCCL_GROUP_BYTES * sum(size > 1 for size in axes)
