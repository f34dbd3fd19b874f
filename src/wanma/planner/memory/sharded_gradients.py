"""Gradients of one rank under data parallelism, by the way in which they are reduced.

Replicas without FSDP2 sum gradients in place (DDP). FSDP2 sums unsharded gradients over the micro-batches and
reduces them after the last (ZeRO-0, ZeRO-1, pipelines), or reduce-scatters each unit in every backward
(ZeRO-2, ZeRO-3). All sizes count every parameter as trained.
"""

from __future__ import annotations

from typing import NamedTuple

from wanma.collectives.compression.compression_traits import MAX_IN_FLIGHT, MAX_SLICE_ELEMENTS
from wanma.planner.memory.sharded_weights import released_weight_bytes
from wanma.planner.memory.state_layout import StateLayout

_COMPRESSION_CHUNK_BYTES = 4 * MAX_SLICE_ELEMENTS * MAX_IN_FLIGHT
"""Bytes of gradients that are compressed in one go."""
_COMPRESSION_COPIES = 3
"""Approximate number of copies of those gradients that compression and decompression take beside them."""


class GradientBytes(NamedTuple):
    """Gradients of one rank in bytes, as the fields of `ModelStates` with the same names."""

    accumulated_gradients: float
    reduction_workspace: float
    block_gradients: float
    all_gradients: float
    last_gradient: float
    last_reduction_buffer: float
    unaccumulated_gradients: float = 0.0
    receive_buffers: float = 0.0
    shared_sums: float = 0.0
    """Sums of small gradients in memory that replicas share; once used it stays."""


def gradient_bytes(layout: StateLayout) -> GradientBytes:
    """Return the gradients of one rank that stay on the device."""
    if layout.plan.computes_on_master_weights:
        gradients = _replicated_gradients(layout)
    elif layout.accumulates_unsharded:
        gradients = _unsharded_sum_gradients(layout)
    else:
        gradients = _reduce_scattered_gradients(layout)
    plan = layout.plan
    if plan.compression_methods and plan.data_parallel_size * plan.cp > 1:
        chunk = min(layout.rank_parameters.total * layout.master_bytes, _COMPRESSION_CHUNK_BYTES)
        workspace = _COMPRESSION_COPIES * chunk
        gradients = gradients._replace(all_gradients=gradients.all_gradients + workspace)
    return _without_offloaded_shards(layout, gradients) if layout.updates_on_host else gradients


def _replicated_gradients(layout: StateLayout) -> GradientBytes:
    """Return gradients that replicas without FSDP2 sum in place, in buckets (DDP)."""
    plan, parameters, master = layout.plan, layout.rank_parameters, layout.master_bytes
    all_gradients, last_gradient = parameters.total * master, parameters.embedding * master
    if layout.accumulates_unsharded:  # each gradient is added to the sum as backward makes it
        gradients = GradientBytes(
            accumulated_gradients=all_gradients,
            reduction_workspace=0.0,
            block_gradients=0.0,
            all_gradients=all_gradients,
            last_gradient=last_gradient,
            last_reduction_buffer=0.0,
            unaccumulated_gradients=parameters.pre_block * master,
        )
    else:
        gradients = GradientBytes(
            accumulated_gradients=_accumulated_shards(layout),
            reduction_workspace=parameters.post_block * master,
            block_gradients=parameters.total * parameters.share_passed_by_backward * master,
            all_gradients=all_gradients,
            last_gradient=last_gradient,
            last_reduction_buffer=0.0,
        )
    if plan.replicate_group_size == 1 or plan.compression_methods:
        return gradients
    bucket = min(all_gradients, plan.bucket_bytes)
    if plan.all_reduces_by_messages:  # received parts of a bucket wait to be added up
        return gradients._replace(all_gradients=all_gradients + 2 * bucket)
    if not layout.replicas_share_memory:
        return gradients._replace(all_gradients=all_gradients + bucket)
    # Small gradients are summed in memory that the ranks share, and stay there.
    small = parameters.in_tensors_below(plan.bucket_bytes / master) * master
    return gradients._replace(
        block_gradients=max(gradients.block_gradients - parameters.share_passed_by_backward * small, 0.0),
        all_gradients=all_gradients - small,
        shared_sums=small,
    )


def _unsharded_sum_gradients(layout: StateLayout) -> GradientBytes:
    """Return gradients that are summed unsharded and reduced after the last micro-batch (ZeRO-0, ZeRO-1)."""
    parameters, master, compute = layout.rank_parameters, layout.master_bytes, layout.compute_bytes
    accumulated = parameters.total * master
    block = 0.0 if layout.is_single_unit else parameters.largest_block
    # Layers outside the blocks are one unit, whose gradients wait for the last of them to be cast and added.
    workspace = 0.0 if compute == master else (parameters.post_block + block) * compute
    reduction_buffer = layout.unit_elements * layout.reduction_buffer_element_bytes
    return GradientBytes(
        accumulated_gradients=accumulated,
        reduction_workspace=workspace,
        block_gradients=workspace,
        all_gradients=accumulated + reduction_buffer + layout.local_experts * master,
        last_gradient=parameters.embedding * compute,
        last_reduction_buffer=_last_reduction_buffer(layout),
        receive_buffers=_receive_buffers(layout),
    )


def _reduce_scattered_gradients(layout: StateLayout) -> GradientBytes:
    """Return gradients of which each unit is reduce-scattered in every backward (ZeRO-2, ZeRO-3).

    With a single micro-batch, ZeRO-0 and ZeRO-1 do the same; on a CPU in one unit, once backward has ended.
    """
    parameters, master, compute = layout.rank_parameters, layout.master_bytes, layout.compute_bytes
    shard_ranks, buffer = layout.plan.shard_group_size, layout.reduction_buffer_element_bytes
    accumulated = _accumulated_shards(layout)
    workspace = parameters.post_block * compute
    if layout.is_single_unit:
        block_gradients = parameters.total * parameters.share_passed_by_backward * compute
    else:
        workspace += parameters.largest_block * (compute + buffer)
        block_gradients = workspace
        if layout.micro_batches == 1:
            block_gradients += parameters.share_passed_by_backward * layout.sharded_elements * master
    if layout.is_single_unit and shard_ranks == 1:  # the reduction buffer becomes the gradient
        all_gradients = parameters.total * (compute + master)
    else:
        all_gradients = layout.sharded_elements * master + layout.unit_elements * (compute + buffer)
        all_gradients += layout.local_experts * master
        if accumulated:  # the reduced gradients, before they are added to earlier micro-batches
            all_gradients += layout.unit_elements * master / shard_ranks
    return GradientBytes(
        accumulated_gradients=accumulated,
        reduction_workspace=workspace,
        block_gradients=block_gradients,
        all_gradients=all_gradients,
        last_gradient=parameters.embedding * compute,
        last_reduction_buffer=_last_reduction_buffer(layout),
        receive_buffers=_receive_buffers(layout),
    )


def _accumulated_shards(layout: StateLayout) -> float:
    """Return the bytes of reduced gradients that a shard keeps from one micro-batch to the next."""
    return layout.sharded_elements * layout.master_bytes if layout.micro_batches > 1 else 0.0


def _receive_buffers(layout: StateLayout) -> float:
    """Return the bytes that Gloo's reduce-scatter receives: the parts of all other ranks at once."""
    if layout.plan.device != "cpu" or layout.reduces_in_shared_memory:
        return 0.0
    return layout.unit_elements * layout.master_bytes * (1 - 1 / layout.plan.shard_group_size)


def _last_reduction_buffer(layout: StateLayout) -> float:
    """Return the bytes in which the last unit's gradients are reduced, without those in freed memory."""
    plan, unit, master = layout.plan, layout.unit_elements, layout.master_bytes
    reduced_shard = unit * master / plan.shard_group_size
    buffer = _receive_buffers(layout)
    own_buffer = unit * layout.reduction_buffer_element_bytes
    if layout.reduction_buffer_element_bytes:
        has_room = layout.is_single_unit and released_weight_bytes(layout) >= own_buffer
        if not has_room:
            buffer += own_buffer
        if not layout.accumulates_unsharded and _accumulated_shards(layout):
            buffer += reduced_shard
    if layout.has_shared_memory_weights and layout.compute_bytes != master:
        # Without common weights the sum has room in freed gathered weights; in 32 bits, where the shards were
        # before they became parts of the common weights.
        buffer += reduced_shard
    return buffer


def _without_offloaded_shards(layout: StateLayout, gradients: GradientBytes) -> GradientBytes:
    """Return the gradients without the reduced shards, which are on the host where the optimizer runs."""
    shards = 0.0 if layout.accumulates_unsharded else layout.sharded_elements * layout.master_bytes
    passed_shards = layout.rank_parameters.share_passed_by_backward * shards
    return gradients._replace(
        accumulated_gradients=max(gradients.accumulated_gradients - shards, 0.0),
        block_gradients=max(gradients.block_gradients - passed_shards, 0.0),
        all_gradients=gradients.all_gradients - shards,
    )
