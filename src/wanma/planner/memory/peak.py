"""Memory of a plan by kind: of its fullest rank, or of every pipeline rank.

A rank is fullest at one of six moments: as the loss is computed, when all activations are kept; as backward
makes the head's gradient; as it enters its first block; as it comes to its last, when the gradients of the
others are there; as it comes to what is before the blocks; or as it ends, when all gradients are there.
What is there at other moments only does not add up. Pure functions, without torch.
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
"""Resident memory of a rank on a CPU beside its tensors: 300 to 310 MiB of Python, torch and their libraries,
half of them in the heap, when the first steps have brought in all that they need; and about 15 of holes
between these small things, which are the same for small and large models."""

CUDA_CONTEXT_BYTES = 600 << 20
"""What a process takes of a GPU before its first tensor: CUDA's context, its libraries' kernels and their
workspaces. Not counted by torch."""

NCCL_GROUP_BYTES = 256 << 20
"""Buffers of a communicator's channels on a GPU, likewise."""


class Unused(NamedTuple):
    """What an allocator holds beyond the tensors, as shares of them."""

    gathered: float
    """Of what is gathered of the parameters."""
    passing: float
    """Of gradients, activations, logits and buffers at their peak."""
    late: float
    """Of what is made as backward ends, where nothing as large has left a place for it."""


_ON_GPU = Unused(0.12, 0.12, 0.0)
"""Of torch's allocator: 10 to 16 % of what comes and goes in torchtitan's runs of December 2024, which say
what they reserved (benchmarks/results/planner-memory.md)."""

_ON_CPU = Unused(0.0, 0.1, 1.0)
"""Of glibc's heap, which keeps what was freed, with the settings of `elastic.heap`. What lasts is made
before the first step and lies below all else, without holes (`training.optimizer`).

*Passing*: while an aligned tensor is placed, its place needs up to 96 bytes more than it will have, so that
one between two that stay is too small for the next of its size; and a large place is filled by what is
small. A tenth is the least with which none of the fitted runs of benchmarks/planner/memory_runs.py needs
2 % more than its forecast.

*Late*: gradients lie where backward found room, and until the update nothing larger than the holes between
them has room there. An embedding's gradient, made last of all, and the buffer in which a unit's gradients
are reduced find a place of their size only where something as large was freed: the logits; or, if the places
of gradients are those of earlier micro-batches, a head's gradient that was added to them, or activations.
Else the heap grows by all of it.
"""


def unused_shares(plan: Plan, software: Software) -> Unused:
    """Of the allocator where `plan` runs."""
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
    """What the fullest rank needs.

    Args:
        optimizer: `train.optimizer`.
        micro_batches: of one step and rank, at most.
        weight_average: whether an averaged copy of the weights is kept.
        dimensions: of a decoder, whose operators are then known one by one.
        software: habits of the program; None: this runtime's.
        table: of `tabulate` for this plan, where somebody has it.
        in_flight: most forwards of a stage that each rank keeps, where a schedule is given a limit.
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
    """What each pipeline rank needs; arguments as of `forecast_memory`."""
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
    """What pipeline rank `rank` needs with so many blocks of each of the table's kinds, whatever the others
    hold; of a schedule with one stage on each rank. Other arguments as of `forecast_memory`."""
    step = Setting(optimizer, micro_batches, weight_average, software, None)
    return _rank_memory(rank, table, plan, [blocks] * plan.pp, step)


class Moment(NamedTuple):
    """Bytes that come and go."""

    gradients: float
    activations: float
    logits: float
    buffers: float
    gone: float = 0.0
    """Below zero: of what is gathered of the parameters, what is no longer there."""


class RankMemory(NamedTuple):
    """What one pipeline rank holds, in bytes."""

    state: State
    kept: float
    """Activations that wait for their backward, on the device."""
    away: float
    """Where the plan offloads them to."""
    working: float
    """What backward makes beside them in one block, with what of it ran again or was fetched."""
    moments: tuple[Moment, ...]
    """At the loss, as backward goes through the head, its first block and its last, as it comes to what is
    before the blocks, and as it ends."""
    on_top: float
    """Of what is made as backward ends, what has no place within the peak of the moments before."""
    plan: Plan
    software: Software

    @property
    def peak(self) -> Moment:
        return max(self.moments, key=sum)

    @property
    def total(self) -> float:
        """On the device, at its peak, beside what CUDA or Python take."""
        lasting, passing = self.state.parameters + self.state.optimizer, max(map(sum, self.moments))
        return lasting + self.state.buffers + passing + self._fragmentation(passing)

    def _fragmentation(self, passing: float) -> float:
        shares = unused_shares(self.plan, self.software)
        of_state = shares.gathered * self.state.gathered
        return of_state + shares.passing * passing + shares.late * self.on_top

    @property
    def forecast(self) -> Forecast:
        peak, away = self.peak, {"nothing": 0.0, "host": self.state.host, "disk": self.state.disk}
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
    """What a forecast needs beside the plan."""

    optimizer: str
    micro_batches: int
    weight_average: bool
    software: Software
    in_flight: int | None


def stage_counts(table: MemoryTable, plan: Plan) -> list[tuple[int, ...]]:
    """Blocks of each kind in every stage."""
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
    """Pipeline ranks among which is the fullest: one of those that hold the same, which keeps the most.

    That is the first of them, but for schedules that go down the ranks and up again.
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
    if state.accumulated:  # gradients are where those of earlier micro-batches are, and nothing lies between
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
    """Of one pipeline rank.

    Args:
        stages: blocks of each kind in every stage.
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
    # On one rank of a pipeline; without one, as of the whole model.
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
    """Bytes that a rank keeps for backward."""

    kept: float
    """On the device."""
    block: float
    """Of it, what one block keeps for one backward."""
    working: float
    """Beside it, while backward goes through a block: what it makes, and what ran again or was fetched."""
    away: float
    """Where the plan offloads them to."""


def _activations(
    rank: int, table: MemoryTable, plan: Plan, mine: list[tuple[int, ...]], step: Setting
) -> _Activations:
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
            if plan.offload_activations == "nothing":
                kept += plain + costly
            else:  # the results that selective recompute keeps stay on the device
                kept, away = kept + costly, away + plain
            stays = costly + (plain if plan.offload_activations == "nothing" else 0.0)
            block = max(block, stays / (count * flight) if flight else 0.0)
            working = max(working, parts.working)
            if again or plan.offload_activations != "nothing":
                deepest = max(deepest, parts.kept)
    # While backward runs it again or fetches it, one block is here as a whole; on a GPU the next one comes.
    around = 2 if plan.device == "cuda" and plan.offload_activations != "nothing" else 1
    return _Activations(kept, block, working + around * deepest, away)


def kept_of_stages(rank: int, plan: Plan, step: Setting) -> tuple[int, ...]:
    """Forwards whose activations are kept, of each stage of the rank."""
    if plan.pp == 1:
        return (1,)
    if step.in_flight is not None:
        return (min(step.in_flight, step.micro_batches),) * plan.virtual_stages
    return kept_forwards(plan.schedule, plan.pp, plan.virtual_stages, step.micro_batches, rank)


def later_share(flights: tuple[int, ...]) -> float:
    """Of what a rank keeps, how much is still there when backward has come through a stage."""
    most = max(flights, default=1)
    return 1 - 1 / most if most else 0.0


def boundary_bytes(table: MemoryTable, plan: Plan, step: Setting, numbers: tuple[int, ...]) -> float:
    """Places for what stages send each other: of each micro-batch what comes, with its gradient on the way
    back, and the gradient that comes back."""
    if plan.pp == 1:
        return 0.0
    places = sum(2 * (number > 0) + (number < plan.stages - 1) for number in numbers)
    return table.boundary * places * (step.micro_batches if step.software.boundary_buffers else 1)


def held_logits(logits: float, plan: Plan, software: Software) -> float:
    """What is left of a micro-batch's logits when backward has left the head: torch's pipelines hold what a
    stage put out until its backward has ended."""
    return logits if plan.pp > 1 and software.boundary_buffers else 0.0


def runtime_bytes(plan: Plan) -> int:
    if plan.device == "cpu":
        return CPU_RUNTIME_BYTES
    axes = (plan.pp, plan.dp_replicate, plan.dp_shard, plan.cp, plan.tp, plan.ep)
    return CUDA_CONTEXT_BYTES + NCCL_GROUP_BYTES * sum(size > 1 for size in axes)
