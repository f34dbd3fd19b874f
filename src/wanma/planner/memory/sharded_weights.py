"""Weights of one rank under FSDP2: shards of master weights, gathered copies, and shared-memory buffers.

FSDP2 computes with a copy of the weights in compute precision beside the shards, also with one shard. Plans
that compute on the master weights themselves gather nothing.
"""

from __future__ import annotations

from wanma.planner.memory.state_layout import StateLayout


def stored_weight_bytes(layout: StateLayout) -> float:
    """Return the bytes of the weights that one rank stores, on the device or where they are offloaded."""
    trained, total = layout.rank_parameters.trainable_share, layout.rank_parameters.total
    if layout.is_frozen_gather_free and not layout.has_shared_memory_weights:
        # Every rank stores all frozen weights.
        trained_shard = layout.sharded_elements * layout.master_bytes * trained
        return trained_shard + total * layout.frozen_bytes * (1 - trained)
    return layout.sharded_elements * (layout.master_bytes * trained + layout.frozen_bytes * (1 - trained))


def gathered_weight_bytes(layout: StateLayout) -> float:
    """Return the bytes of weights that one rank gathers into memory of its own, at most at once."""
    plan, parameters = layout.plan, layout.rank_parameters
    if plan.computes_on_master_weights:
        return 0.0
    if layout.has_shared_memory_weights:  # only experts that no other rank holds a part of
        experts = parameters.largest_block_experts if plan.reshards_after_forward else parameters.experts
        gathered = experts if layout.local_experts else 0.0
    elif plan.reshards_after_forward:
        # On a GPU the next block is gathered while one computes.
        gathered = parameters.end_layers + (1 if plan.device == "cpu" else 2) * parameters.largest_block
    else:  # in a pipeline blocks stay gathered after their backward
        gathered = parameters.total
    if layout.is_frozen_gather_free:
        gathered *= parameters.trainable_share
    return gathered * layout.compute_bytes


def released_weight_bytes(layout: StateLayout) -> float:
    """Return the part of the gathered weights that is freed before the last unit's gradients are reduced.

    FSDP2 frees gathered weights before it reduces. Where they stay gathered from one micro-batch to the next,
    gradients are reduced beside them, unless they wait for the last.
    """
    is_freed = layout.plan.reshards_after_forward or layout.accumulates_unsharded or layout.micro_batches == 1
    return gathered_weight_bytes(layout) if is_freed else 0.0


def exchange_buffer_bytes(layout: StateLayout) -> float:
    """Return one rank's bytes of shared memory for gathering units and reducing their gradients.

    Shared-memory weights need no gathering: in 16 bits there is one copy of them beside the shards, in 32
    bits the shards are that copy. Unsharded experts are not exchanged.
    """
    if not layout.reduces_in_shared_memory:
        return 0.0
    parameters, shard_ranks = layout.rank_parameters, layout.plan.shard_group_size
    block = parameters.largest_block
    if not layout.is_single_unit:
        block -= layout.local_experts
    if layout.is_single_unit:
        reduced = gathered = parameters.total - layout.local_experts
    else:
        reduced = max(parameters.end_layers, block)
        # Layers outside the blocks are gathered first, and stay until the first block is gathered. Where a
        # block is larger, the next one has no room in the hole that they leave.
        gathered = parameters.end_layers + block * (2 if block > parameters.end_layers else 1)
    reduction_bytes = reduced * layout.master_bytes * parameters.trainable_share
    if not layout.has_shared_memory_weights:
        return max(gathered * layout.compute_bytes, reduction_bytes)
    if layout.compute_bytes == layout.master_bytes:
        return reduction_bytes
    # Shards of frozen weights are parts of the common copy.
    copied_share = parameters.trainable_share if layout.frozen_needs_no_cast else 1.0
    copied_bytes = layout.compute_bytes
    buffers = reduction_bytes + (
        (parameters.dense_blocks + parameters.end_layers) / shard_ranks * copied_bytes * copied_share
    )
    if parameters.experts and not layout.local_experts:
        buffers += parameters.experts / layout.plan.expert_group_sizes[1] * copied_bytes * copied_share
    return buffers
