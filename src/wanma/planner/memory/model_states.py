"""Model states of one rank: parameters, gradients and optimizer state, in bytes.

Sharded states follow Rajbhandari et al. 2020, section 5; FSDP2's additional memory follows its own behavior
(one unit of communication per block, another for the rest), which tests measure. Frameworks with unsharded
copies follow Megatron-LM: 2 bytes of weights, 2 or 4 of gradients, and 12 of state per parameter, which a
distributed optimizer shards over the data ranks.
"""

from __future__ import annotations

from typing import NamedTuple

from wanma.job.forecast.forecast import Workload
from wanma.job.plan.plan import OPTIMIZER_CHUNK_PARAMETERS, Plan
from wanma.job.sections.train import TrainSection
from wanma.planner.cost.decoder_layers import FrameworkTraits
from wanma.planner.cost.gradient_collectives import error_feedback_bytes
from wanma.planner.cost.offload import master_weight_bytes
from wanma.planner.memory.rank_parameters import RankParameters
from wanma.planner.memory.sharded_gradients import gradient_bytes
from wanma.planner.memory.sharded_weights import (
    exchange_buffer_bytes,
    gathered_weight_bytes,
    released_weight_bytes,
    stored_weight_bytes,
)
from wanma.planner.memory.state_layout import StateLayout, build_state_layout, frozen_element_bytes


class MemoryInputs(NamedTuple):
    """Settings of a memory forecast beside the plan."""

    optimizer: str
    """Key of `OPTIMIZER_STATE_COPIES`, as `optimizer_rule` returns it."""
    micro_batches: int
    """Largest number of micro-batches of one step and rank."""
    weight_average: bool
    framework: FrameworkTraits
    in_flight: int | None = None
    """Largest number of in-flight micro-batches of each stage, for a schedule with such a limit."""


class ModelStates(NamedTuple):
    """Model states of one rank, in bytes."""

    parameters: float
    """Parameters, including gathered ones."""
    gathered_parameters: float
    """Parameters that are gathered for a step."""
    buffers: float
    """Exchange buffers: this rank's part of memory that ranks share; once used it stays."""
    optimizer: float
    """Optimizer state, with an averaged copy of the weights, error feedback, and the states of sites."""
    accumulated_gradients: float
    """Gradients that exist from one micro-batch to the next."""
    post_block_gradients: float
    """Gradients of layers after the blocks, as one backward makes them: first of all."""
    reduction_workspace: float
    """Additional gradients while backward reduces a block's gradients."""
    block_gradients: float
    """Gradients of the layers that backward has passed when it reaches its last block, with their reduction
    buffers."""
    unaccumulated_gradients: float
    """Last gradient of a micro-batch, before it is added to the sum of earlier ones."""
    all_gradients: float
    """All gradients, as backward ends, with their reduction buffers."""
    released_parameters: float
    """Part of `gathered_parameters` that is freed when backward ends."""
    receive_buffers: float
    """Parts that come from other ranks, beside `all_gradients`."""
    last_gradient: float
    """Gradient tensor that backward makes last."""
    last_reduction_buffer: float
    """Reduction buffer of the last unit's gradients, as far as it has no room in freed memory."""
    host: float
    disk: float


def weight_bytes(workload: Workload, plan: Plan, *, casts_frozen_weights: bool) -> float:
    """Return the bytes of a whole model's weights as they are stored and saved."""
    master = master_weight_bytes(plan)
    frozen = frozen_element_bytes(plan) if casts_frozen_weights else master
    trained = workload.dense_parameters * workload.trainable_share
    tables = workload.parameters - workload.dense_parameters
    return (trained + tables) * master + (workload.dense_parameters - trained) * frozen


OPTIMIZER_STATE_COPIES = {
    "adamw": (2, 2),
    "sgd": (1, 1),
    "plain sgd": (0, 0),
    "muon": (1, 2),
    "adafactor": (0, 0),
}
"""Elements of optimizer state per parameter, of blocks and of other layers. AdamW keeps two moments, SGD a
momentum if any; Muon keeps one for the blocks' matrices and leaves the rest to AdamW; Adafactor keeps a row
and a column for each matrix, which is next to nothing."""


def optimizer_rule(train: TrainSection) -> str:
    """Return the key of `OPTIMIZER_STATE_COPIES` for a job."""
    return "plain sgd" if train.optimizer == "sgd" and train.momentum == 0 else train.optimizer


def optimizer_state_elements(workload: Workload, train: TrainSection) -> float:
    """Return the number of elements of the whole model's optimizer state."""
    block_copies, end_layer_copies = OPTIMIZER_STATE_COPIES[optimizer_rule(train)]
    layers = sum(
        (block_copies if layer.is_block or layer.count > 1 else end_layer_copies)
        * (layer.count * layer.parameters * layer.trainable_share)
        for layer in workload.layers
    )
    return layers + sum(table.rows * table.state_elements_per_row for table in workload.tables)


def model_states_of(rank_parameters: RankParameters, plan: Plan, memory_inputs: MemoryInputs) -> ModelStates:
    """Return the model states of one rank, in bytes."""
    framework = memory_inputs.framework
    trained_share = rank_parameters.trainable_share
    sharded_blocks = rank_parameters.dense_blocks / plan.shard_group_size
    if rank_parameters.experts:
        sharded_blocks += rank_parameters.experts / plan.expert_group_sizes[1]
    sharded_ends = rank_parameters.end_layers / plan.shard_group_size
    block_copies, end_layer_copies = OPTIMIZER_STATE_COPIES[memory_inputs.optimizer]
    elements = (
        block_copies * sharded_blocks * rank_parameters.trainable_block_share
        + end_layer_copies * sharded_ends * rank_parameters.trainable_end_layer_share
    )
    shards = sharded_blocks + sharded_ends
    if framework.weight_storage == "copies":
        return _unsharded_model_states(rank_parameters, shards, elements, trained_share, framework)
    layout = build_state_layout(rank_parameters, shards, plan, memory_inputs.micro_batches, framework)
    return _sharded_model_states(layout, elements, weight_average=memory_inputs.weight_average)


def _unsharded_model_states(
    rank_parameters: RankParameters,
    sharded_elements: float,
    optimizer_elements: float,
    trainable_share: float,
    framework: FrameworkTraits,
) -> ModelStates:
    """Return the model states of frameworks with unsharded copies of weights (Megatron-LM)."""
    gradients = rank_parameters.total * framework.accumulation_bytes * trainable_share
    if framework.dummy_weight_gradients:
        gradients += 2 * rank_parameters.distinct_matrices
    return ModelStates(
        parameters=2 * rank_parameters.total,
        gathered_parameters=0.0,
        buffers=0.0,
        optimizer=4 * (optimizer_elements + sharded_elements * trainable_share),
        accumulated_gradients=gradients,
        post_block_gradients=0.0,
        reduction_workspace=0.0,
        block_gradients=0.0,
        unaccumulated_gradients=0.0,
        all_gradients=gradients,
        released_parameters=0.0,
        receive_buffers=0.0,
        last_gradient=0.0,
        last_reduction_buffer=0.0,
        host=0.0,
        disk=0.0,
    )


def _sharded_model_states(
    layout: StateLayout, optimizer_elements: float, *, weight_average: bool
) -> ModelStates:
    """Return the model states of master weights in shards (FSDP2), or of replicas without FSDP2."""
    parameters, trained = layout.rank_parameters, layout.rank_parameters.trainable_share
    stored, gathered = stored_weight_bytes(layout), gathered_weight_bytes(layout)
    gradients = gradient_bytes(layout)
    placement = _place_states(layout, stored, optimizer_elements, weight_average=weight_average)
    return ModelStates(
        parameters=(0 if layout.offloads_parameters else stored) + gathered + parameters.table_weight_bytes,
        gathered_parameters=gathered,
        buffers=exchange_buffer_bytes(layout) + gradients.shared_sums * trained,
        optimizer=placement.device_optimizer + parameters.table_state_bytes,
        accumulated_gradients=gradients.accumulated_gradients * trained,
        post_block_gradients=parameters.post_block
        * layout.compute_bytes
        * parameters.trainable_post_block_share,
        reduction_workspace=gradients.reduction_workspace * trained,
        block_gradients=gradients.block_gradients * trained,
        unaccumulated_gradients=gradients.unaccumulated_gradients * trained,
        all_gradients=gradients.all_gradients * trained,
        released_parameters=released_weight_bytes(layout),
        receive_buffers=gradients.receive_buffers * trained,
        last_gradient=gradients.last_gradient * parameters.trainable_pre_block_share,
        last_reduction_buffer=gradients.last_reduction_buffer * trained,
        host=placement.host,
        disk=placement.disk + parameters.table_disk_bytes,
    )


class _StatePlacement(NamedTuple):
    """Bytes of one rank's lasting states by the memory that holds them."""

    device_optimizer: float
    """`ModelStates.optimizer`, without what is offloaded."""
    host: float
    disk: float


def _place_states(
    layout: StateLayout, stored_weights: float, optimizer_elements: float, *, weight_average: bool
) -> _StatePlacement:
    """Return the bytes of optimizer state and offloaded weights on the device, on the host and on disk.

    Args:
        stored_weights: bytes of the rank's shard of the weights.
        optimizer_elements: elements of the rank's optimizer state.
    """
    plan, parameters, master = layout.plan, layout.rank_parameters, layout.master_bytes
    sharded, trained = layout.sharded_elements, layout.rank_parameters.trainable_share
    averaged_share = trained if layout.casts_frozen_weights else 1.0
    average = sharded * master * averaged_share * int(weight_average)
    outer, in_flight = (copies * sharded * master * trained for copies in _site_state_copies(plan))
    error_feedback = error_feedback_bytes(plan, parameters.total, sharded) * trained
    optimizer = optimizer_elements * master
    offloaded = {"none": 0.0, "host": 0.0, "disk": 0.0}
    if plan.synchronization is not None and plan.synchronization.offload == "host":
        offloaded["host"] += outer
        outer = 0.0
    offloaded[plan.offload_parameters] += stored_weights
    if layout.updates_on_host:
        offloaded["host" if plan.offload_optimizer == "none" else plan.offload_optimizer] += optimizer
        offloaded["host"] += average + sharded * master * trained  # with the reduced gradients
        optimizer = average = 0.0
    elif plan.offload_optimizer != "none":
        offloaded[plan.offload_optimizer] += optimizer
        # One chunk is on the device at once.
        optimizer = min(optimizer, optimizer / max(sharded, 1) * OPTIMIZER_CHUNK_PARAMETERS)
    device_optimizer = optimizer + average + error_feedback + outer + in_flight
    return _StatePlacement(device_optimizer, offloaded["host"], offloaded["disk"])


def _site_state_copies(plan: Plan) -> tuple[float, float]:
    """Return (stored, in flight) copies of a rank's trained parameters for exchanges between sites.

    Stored copies are the outer weights and momentum that all sites share; copies in flight exist between
    steps.
    """
    synchronization = plan.synchronization
    if synchronization is None:
        return 0.0, 0.0
    if not synchronization.has_local_weights:
        return 0.0, synchronization.staleness + 1.0
    # Fragments that ranks wait for exist while gradients and activations do not.
    fragments = synchronization.fragments
    overlapping = min(fragments, -(-synchronization.overlap_steps * fragments // synchronization.every))
    return 1.0 + (synchronization.momentum > 0), overlapping / fragments
