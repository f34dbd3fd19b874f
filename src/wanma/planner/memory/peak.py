"""Peak memory of a plan by kind: of the rank with the largest peak, or of every pipeline rank.

A rank's memory peaks at one of six moments: at the loss, when all activations are saved; as backward makes
the head's gradient; as it enters its first block; as it reaches its last, when the gradients of the others
exist; as it reaches the layers before the blocks; or as it ends, when all gradients exist. Memory that exists
at other moments only does not add up. Pure functions, without torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from wanma.job.forecast.forecast import Forecast, Workload
from wanma.job.plan.plan import Plan
from wanma.models.config.dimensions import DecoderConfig
from wanma.planner.cost.decoder_layers import FrameworkTraits
from wanma.planner.memory.memory_table import MemoryTable, build_memory_table
from wanma.planner.memory.model_states import MemoryInputs, ModelStates, model_states_of
from wanma.planner.memory.rank_parameters import RankParameters
from wanma.planner.pipeline import schedules

CPU_RUNTIME_BYTES = 325 << 20
"""Resident bytes of a CPU rank beside its tensors: 300 to 310 MiB of Python, torch and their libraries, half
of them in the heap, after the first steps have loaded all that they need; and about 15 of holes between these
small objects, which are the same for small and large models."""

CUDA_CONTEXT_BYTES = 600 << 20
"""Bytes of a GPU that a process takes before its first tensor: CUDA's context, its libraries' kernels and
their workspaces. torch does not count them."""

NCCL_GROUP_BYTES = 256 << 20
"""Bytes of the channel buffers of one communicator on a GPU, which torch does not count either."""


class FragmentationShares(NamedTuple):
    """Fragmentation: memory that an allocator holds beyond the live tensors, as shares of them."""

    gathered_parameters: float
    """Share of the bytes of gathered parameters."""
    transient: float
    """Share of gradients, activations, logits and buffers at their peak."""
    last_gradient: float
    """Share of tensors that are made as backward ends, and for which no freed tensor left a hole of their
    size."""


_ON_GPU = FragmentationShares(0.12, 0.12, 0.0)
"""Shares of torch's allocator: 10 to 16 % of temporary tensors in torchtitan's runs of December 2024, which
state their reserved memory (docs/results/planner-memory.md)."""

_ON_CPU = FragmentationShares(0.0, 0.1, 1.0)
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


def fragmentation_shares(plan: Plan, framework: FrameworkTraits) -> FragmentationShares:
    """Return the fragmentation shares of the allocator of the plan's devices."""
    shares = _ON_CPU if plan.device == "cpu" else _ON_GPU
    return FragmentationShares(*(framework.fragmentation_factor * share for share in shares))


def forecast_memory(
    workload: Workload,
    plan: Plan,
    optimizer: str,
    *,
    micro_batches: int = 2,
    weight_average: bool = False,
    dimensions: DecoderConfig | None = None,
    framework: FrameworkTraits | None = None,
    table: MemoryTable | None = None,
    in_flight: int | None = None,
) -> Forecast:
    """Return the memory forecast of the rank with the largest peak.

    Args:
        optimizer: value of `train.optimizer`.
        micro_batches: largest number of micro-batches of one step and rank.
        weight_average: an averaged copy of the weights is stored.
        dimensions: dimensions of a decoder, whose operators are then known one by one.
        framework: traits of the training framework; None: wanma's own.
        table: memory table of this plan, if it exists already.
        in_flight: largest number of in-flight micro-batches of each stage, for a schedule with such a limit.
    """
    framework = framework or FrameworkTraits(fuses_pointwise=plan.compile)
    table = table or build_memory_table(workload, plan, dimensions, framework)
    stages = block_counts_of_stages(table, plan)
    step = MemoryInputs(optimizer, micro_batches, weight_average, framework, in_flight)
    ranks = [
        _rank_memory(rank, table, plan, stages, step) for rank in representative_ranks(plan, stages, step)
    ]
    fullest = ranks[0] if len(ranks) == 1 else max(ranks, key=lambda rank: rank.total)
    return fullest.forecast


def pipeline_rank_memory(
    workload: Workload,
    plan: Plan,
    optimizer: str,
    *,
    micro_batches: int = 2,
    weight_average: bool = False,
    dimensions: DecoderConfig | None = None,
    framework: FrameworkTraits | None = None,
    in_flight: int | None = None,
) -> list[RankMemory]:
    """Return the memory of each pipeline rank; arguments as in `forecast_memory`."""
    framework = framework or FrameworkTraits(fuses_pointwise=plan.compile)
    table = build_memory_table(workload, plan, dimensions, framework)
    stages = block_counts_of_stages(table, plan)
    step = MemoryInputs(optimizer, micro_batches, weight_average, framework, in_flight)
    return [_rank_memory(rank, table, plan, stages, step) for rank in range(plan.pp)]


def stage_rank_memory(
    table: MemoryTable,
    plan: Plan,
    rank: int,
    block_counts: tuple[int, ...],
    optimizer: str,
    *,
    framework: FrameworkTraits,
    micro_batches: int = 2,
    weight_average: bool = False,
) -> RankMemory:
    """Return the memory of pipeline rank `rank` with `block_counts` blocks of each of the table's kinds.

    It holds whatever the other ranks hold, for a schedule with one stage on each rank. Other arguments as in
    `forecast_memory`.
    """
    step = MemoryInputs(optimizer, micro_batches, weight_average, framework)
    return _rank_memory(rank, table, plan, [block_counts] * plan.pp, step)


class MemoryMoment(NamedTuple):
    """Bytes of temporary tensors at one moment of a step."""

    gradients: float
    activations: float
    logits: float
    buffers: float
    released: float = 0.0
    """Bytes of gathered parameters that are freed already, as a negative number."""


class RankMemory(NamedTuple):
    """Memory of one pipeline rank, in bytes."""

    model_states: ModelStates
    saved_activations: float
    """Activations on the device that are saved for their backward."""
    offloaded_activations: float
    """Activations that the plan offloads."""
    backward_workspace: float
    """Largest tensors that backward makes beside them in one block, with its recomputed or fetched
    activations."""
    moments: tuple[MemoryMoment, ...]
    """Six moments: at the loss, as backward goes through the head, its first block and its last, as it
    reaches the layers before the blocks, and as it ends."""
    last_gradient_overhead: float
    """Bytes by which tensors made as backward ends exceed the largest moment."""
    plan: Plan
    framework: FrameworkTraits

    @property
    def peak(self) -> MemoryMoment:
        """Return the moment with most temporary bytes."""
        return max(self.moments, key=sum)

    @property
    def total(self) -> float:
        """Return the peak bytes on the device, without those of CUDA's context or Python."""
        constant = self.model_states.parameters + self.model_states.optimizer
        transient = max(map(sum, self.moments))
        return constant + self.model_states.buffers + transient + self._fragmentation(transient)

    def _fragmentation(self, transient: float) -> float:
        shares = fragmentation_shares(self.plan, self.framework)
        gathered = shares.gathered_parameters * self.model_states.gathered_parameters
        return gathered + shares.transient * transient + shares.last_gradient * self.last_gradient_overhead

    @property
    def forecast(self) -> Forecast:
        """Return the memory forecast of this rank, by kind."""
        peak = self.peak
        offloaded = {"none": 0.0, "host": self.model_states.host, "disk": self.model_states.disk}
        offloaded[self.plan.offload_activations] += self.offloaded_activations
        return Forecast(
            parameters_bytes=int(self.model_states.parameters + peak.released),
            gradients_bytes=int(peak.gradients),
            optimizer_bytes=int(self.model_states.optimizer),
            activations_bytes=int(peak.activations),
            logits_bytes=int(peak.logits),
            runtime_bytes=runtime_bytes(self.plan),
            host_bytes=int(offloaded["host"]),
            disk_bytes=int(offloaded["disk"]),
            buffers_bytes=int(peak.buffers + self.model_states.buffers),
            fragmentation_bytes=int(self._fragmentation(sum(peak))),
        )


# ---------------------------------------------------------------- one rank


def block_counts_of_stages(table: MemoryTable, plan: Plan) -> list[tuple[int, ...]]:
    """Return the number of blocks of each of the table's kinds in every stage."""
    counts = tuple(kind.block_count for kind in table.kinds)
    return [counts] if plan.pp == 1 else schedules.block_counts_of_stages(counts, plan)


def representative_ranks(
    plan: Plan, block_counts: list[tuple[int, ...]], memory_inputs: MemoryInputs
) -> Iterable[int]:
    """Return pipeline ranks among which one has the largest peak.

    Of ranks that hold the same layers it is the one that saves most activations: the first of them, except
    for schedules that go down the ranks and up again.
    """
    if plan.pp <= 2:
        return range(plan.pp)
    last = len(block_counts) - 1
    ranks: dict[tuple[object, ...], tuple[int, int]] = {}
    for rank in range(plan.pp):
        numbers = plan.stages_of_pipeline_rank(rank)
        stage_counts = [block_counts[number] for number in numbers]
        key = (numbers[0] == 0, numbers[-1] == last, *stage_counts)
        saved = -rank
        if plan.is_v_shaped:
            saved = sum(
                sum(counts) * count
                for counts, count in zip(
                    stage_counts, in_flight_of_rank(rank, plan, memory_inputs), strict=True
                )
            )
        if key not in ranks or saved > ranks[key][0]:
            ranks[key] = saved, rank
    return [rank for _, rank in ranks.values()]


def _rank_memory(
    rank: int,
    table: MemoryTable,
    plan: Plan,
    block_counts: list[tuple[int, ...]],
    memory_inputs: MemoryInputs,
) -> RankMemory:
    """Return the memory of one pipeline rank."""
    numbers = plan.stages_of_pipeline_rank(rank) if plan.pp > 1 else (0,)
    parameters = rank_parameters_of(rank, table, plan, block_counts)
    state = model_states_of(parameters, plan, memory_inputs)
    activations = _activations(rank, table, plan, [block_counts[number] for number in numbers], memory_inputs)
    logits, head = (
        (table.logits_bytes, table.head_saved_bytes) if len(block_counts) - 1 in numbers else (0.0, 0.0)
    )
    boundary = stage_buffer_bytes(table, plan, memory_inputs, numbers)
    at_loss = MemoryMoment(
        state.accumulated_gradients,
        activations.saved + head,
        memory_inputs.framework.logits_copies * logits,
        boundary,
    )
    at_head = MemoryMoment(
        state.accumulated_gradients + state.post_block_gradients, activations.saved + head, logits, boundary
    )
    later = remaining_share(in_flight_of_rank(rank, plan, memory_inputs))
    at_first_block = MemoryMoment(
        state.accumulated_gradients + state.reduction_workspace,
        activations.saved + activations.backward_workspace,
        retained_logits(logits, plan, memory_inputs.framework),
        boundary + table.exchange_buffer_bytes,
    )
    at_last_block = MemoryMoment(
        state.accumulated_gradients + state.block_gradients,
        later * activations.saved + activations.block + activations.backward_workspace,
        retained_logits(logits, plan, memory_inputs.framework),
        boundary + table.exchange_buffer_bytes,
    )
    at_first_layer = MemoryMoment(
        state.accumulated_gradients + state.unaccumulated_gradients, later * activations.saved, 0.0, boundary
    )
    at_end = MemoryMoment(
        state.all_gradients, 0.0, 0.0, boundary + state.receive_buffers, -state.released_parameters
    )
    moments = (at_loss, at_head, at_first_block, at_last_block, at_first_layer, at_end)
    freed = logits
    if state.accumulated_gradients:  # gradients lie with those of earlier micro-batches, without holes
        freed = max(logits, state.post_block_gradients, (1 - later) * activations.saved)
    last_gradients = sum(size for size in (state.last_gradient, state.last_reduction_buffer) if size > freed)
    return RankMemory(
        state,
        activations.saved,
        activations.offloaded,
        activations.backward_workspace,
        moments,
        max(max(map(sum, moments[:4])) + last_gradients - max(map(sum, moments)), 0.0),
        plan,
        memory_inputs.framework,
    )


def rank_parameters_of(
    rank: int, table: MemoryTable, plan: Plan, block_counts: list[tuple[int, ...]]
) -> RankParameters:
    """Return the parameters of one pipeline rank.

    Args:
        block_counts: number of blocks of each kind in every stage.
    """
    numbers = plan.stages_of_pipeline_rank(rank) if plan.pp > 1 else (0,)
    shared = experts = block = shapes = routed = trained = 0.0
    tensors: dict[float, float] = {}
    for index, kind in enumerate(table.kinds):
        count = sum(block_counts[number][index] for number in numbers)
        shared += count * kind.dense_parameters
        experts += count * kind.expert_parameters
        trained += count * (kind.dense_parameters + kind.expert_parameters) * kind.trainable_share
        for size in kind.matrix_elements:
            tensors[size] = tensors.get(size, 0.0) + count
        if count:
            block = max(block, kind.dense_parameters + kind.expert_parameters)
            shapes = max(shapes, kind.dense_parameters + kind.parameters_per_expert)
            routed = max(routed, kind.expert_parameters)
    last = table.post_block_parameters if len(block_counts) - 1 in numbers else 0.0
    first = table.pre_block_parameters if 0 in numbers else 0.0
    embedding = first if table.has_exact_end_layers else 0.0
    for size in (first, last):
        if table.has_exact_end_layers and size:
            tensors[size] = tensors.get(size, 0.0) + 1
    trainable_blocks = trained / (shared + experts) if table.trainable_share < 1 and shared + experts else 1.0
    trained += first * table.trainable_pre_block_share + last * table.trainable_post_block_share
    rank_parameters = shared + experts + first + last
    # With a pipeline, the share of this rank; without one, of the whole model.
    share = (
        trained / rank_parameters
        if plan.pp > 1 and table.trainable_share < 1 and rank_parameters
        else table.trainable_share
    )
    return RankParameters(
        shared,
        experts,
        first + last,
        block,
        shapes + last,
        first,
        embedding=embedding,
        largest_block_experts=routed,
        tensors=tuple(sorted(tensors.items())),
        trainable_share=share,
        table_weight_bytes=table.table_weight_bytes,
        table_state_bytes=table.table_state_bytes,
        table_disk_bytes=table.table_disk_bytes,
        trainable_block_share=trainable_blocks,
        trainable_pre_block_share=table.trainable_pre_block_share,
        trainable_post_block_share=table.trainable_post_block_share,
    )


class _Activations(NamedTuple):
    """Bytes of activations on one rank."""

    saved: float
    """Bytes saved for backward on the device."""
    block: float
    """Bytes of `kept` that one block saves for one backward."""
    backward_workspace: float
    """Bytes beside `kept` while backward goes through a block: its gradients, and recomputed or fetched
    activations."""
    offloaded: float
    """Bytes that the plan offloads."""


def _activations(
    rank: int,
    table: MemoryTable,
    plan: Plan,
    block_counts: list[tuple[int, ...]],
    memory_inputs: MemoryInputs,
) -> _Activations:
    """Return the bytes of activations of one rank, with its stages' blocks in `block_counts`."""
    flights = in_flight_of_rank(rank, plan, memory_inputs)
    saved = block = offloaded = working = deepest = 0.0
    for counts, flight in zip(block_counts, flights, strict=True):
        blocks = sum(counts)
        recomputed = math.ceil(round(blocks * plan.recompute_share, 9)) if plan.recompute != "none" else 0
        share = recomputed / blocks if blocks else 0.0
        for kind, count in zip(table.kinds, counts, strict=True):
            if not count:
                continue
            parts = kind.activations
            plain = count * flight * ((1 - share) * parts.saved + share * parts.inputs)
            costly = count * flight * share * parts.selective_saved if plan.recompute == "selective" else 0.0
            if plan.offload_activations == "none":
                saved += plain + costly
            else:  # results that selective recompute saves stay on the device
                saved, offloaded = saved + costly, offloaded + plain
            on_device = costly + (plain if plan.offload_activations == "none" else 0.0)
            block = max(block, on_device / (count * flight) if flight else 0.0)
            working = max(working, parts.backward_workspace)
            if recomputed or plan.offload_activations != "none":
                deepest = max(deepest, parts.saved)
    # A recomputed or fetched block exists as a whole in backward; on a GPU the next one is fetched beside it.
    buffers = 2 if plan.device == "cuda" and plan.offload_activations != "none" else 1
    return _Activations(saved, block, working + buffers * deepest, offloaded)


def in_flight_of_rank(rank: int, plan: Plan, memory_inputs: MemoryInputs) -> tuple[int, ...]:
    """Return the in-flight micro-batches of each stage of the rank."""
    if plan.pp == 1:
        return (1,)
    if memory_inputs.in_flight is not None:
        return (min(memory_inputs.in_flight, memory_inputs.micro_batches),) * plan.virtual_stages
    return schedules.in_flight_by_stage(
        plan.schedule, plan.pp, plan.virtual_stages, memory_inputs.micro_batches, rank
    )


def remaining_share(in_flight: tuple[int, ...]) -> float:
    """Return the share of saved activations that is left when backward has passed through a stage, 0 .. 1."""
    max_in_flight = max(in_flight, default=1)
    return 1 - 1 / max_in_flight if max_in_flight else 0.0


def stage_buffer_bytes(
    table: MemoryTable, plan: Plan, memory_inputs: MemoryInputs, stages: tuple[int, ...]
) -> float:
    """Return the bytes of buffers between stages.

    For each micro-batch there is one for the input, one for its gradient on the way back, and one for the
    output's gradient.
    """
    if plan.pp == 1:
        return 0.0
    places = sum(2 * (number > 0) + (number < plan.stage_count - 1) for number in stages)
    return (
        table.stage_output_bytes
        * places
        * (memory_inputs.micro_batches if memory_inputs.framework.stage_buffer_per_micro_batch else 1)
    )


def retained_logits(logits: float, plan: Plan, framework: FrameworkTraits) -> float:
    """Return the bytes of a micro-batch's logits that are left when backward has passed the head.

    torch's pipelines keep a stage's output until its backward has ended.
    """
    return logits if plan.pp > 1 and framework.stage_buffer_per_micro_batch else 0.0


def runtime_bytes(plan: Plan) -> int:
    """Return the bytes of a rank beside its tensors: Python and torch, or CUDA and NCCL."""
    if plan.device == "cpu":
        return CPU_RUNTIME_BYTES
    axes = (plan.pp, plan.dp_replicate, plan.dp_shard, plan.cp, plan.tp, plan.ep)
    return CUDA_CONTEXT_BYTES + NCCL_GROUP_BYTES * sum(size > 1 for size in axes)
