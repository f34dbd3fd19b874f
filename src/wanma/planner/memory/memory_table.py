"""Memory table: sizes of a model that depend on a part of the plan only, computed once for many plans.

Pure functions, without torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from wanma.job.forecast.forecast import LayerWorkload, Workload
from wanma.job.plan.plan import Plan
from wanma.models.config.dimensions import DecoderConfig
from wanma.planner.cost.decoder_layers import FrameworkTraits
from wanma.planner.cost.embedding_exchange import table_bytes
from wanma.planner.embedding_placement import shared_table_ranks
from wanma.planner.hardware_model.operator_time import ELEMENT_BYTES
from wanma.planner.memory.activations import (
    BlockBytes,
    decoder_block_bytes,
    kv_heads_held,
    layer_block_bytes,
)


class BlockKind(NamedTuple):
    """Group of equal blocks, with the sizes of one on one rank."""

    block_count: int
    """Number of these blocks in the whole model."""
    dense_parameters: float
    """Parameters of one block without routed experts, on one rank of `tp`."""
    expert_parameters: float
    """Parameters of routed experts, on one rank of `tp` and `ep`."""
    parameters_per_expert: float
    """Parameters of one routed expert."""
    activations: BlockBytes
    matrix_elements: tuple[float, ...] = ()
    """Elements of each of its large tensors, on one rank of `tp` and `ep`; empty where they are not known."""
    trainable_share: float = 1.0
    """Trained share of its parameters, 0 .. 1."""


class MemoryTable(NamedTuple):
    """Sizes of a model that depend only on the settings of a plan in `memory_table_key`."""

    kinds: tuple[BlockKind, ...]
    """Groups of equal blocks, in the order of the model."""
    pre_block_parameters: float
    """Parameters before the blocks, on one rank of `tp`."""
    post_block_parameters: float
    """Parameters after the blocks, on one rank of `tp`."""
    logits_bytes: float
    """Bytes of one micro-batch's output, on one rank of `tp`."""
    head_saved_bytes: float
    """Bytes of activations that are saved to compute the logits' gradients."""
    stage_output_bytes: float
    """Bytes of one micro-batch that one stage sends to the next."""
    exchange_buffer_bytes: float
    """Bytes that ranks exchange within a block, sent and received, beside its saved activations."""
    trainable_share: float
    has_exact_end_layers: bool = False
    """True if `first` and `last` are one tensor each, except for a norm."""
    trainable_pre_block_share: float = 1.0
    """Trained share of `first`."""
    trainable_post_block_share: float = 1.0
    """Trained share of `last`."""
    table_weight_bytes: float = 0.0
    """Bytes of embedding tables that data ranks share, on the fullest rank."""
    table_state_bytes: float = 0.0
    """Bytes of their optimizer state."""
    table_disk_bytes: float = 0.0
    """Bytes of both on disk."""


def memory_table_key(plan: Plan) -> tuple[object, ...]:
    """Return the key of plans with the same memory table, for one workload and one framework."""
    model_key = (plan.tp, plan.sequence_parallel, plan.cp, plan.cp_method, plan.ep, plan.pp > 1)
    tables_key = shared_table_ranks(plan), plan.embedding_memory_bytes
    return (*model_key, plan.micro_batch, plan.precision, plan.compile, *tables_key)


def build_memory_table(
    workload: Workload,
    plan: Plan,
    dimensions: DecoderConfig | None = None,
    framework: FrameworkTraits | None = None,
) -> MemoryTable:
    """Return the memory table of a plan; arguments as in `forecast_memory`."""
    framework = framework or FrameworkTraits(fuses_pointwise=plan.compile)
    compute = ELEMENT_BYTES[plan.precision]
    blocks, before, after = _split_layers(workload)
    sequence = workload.tokens_per_sample
    tokens = plan.micro_batch * sequence / plan.cp
    first = sum(layer.count * layer.parameters for layer in before) / plan.tp
    last = sum(layer.count * layer.parameters for layer in after) / plan.tp
    if dimensions is None or dimensions.vocabulary is None:
        kinds = [_block_kind(layer, plan, layer_block_bytes(layer, plan)) for layer in blocks]
        end_elements = sum(layer.count * layer.activation_elements_per_sample for layer in (*before, *after))
        if not blocks:  # no repeated layers: one unit of communication, whose layers save as blocks do
            kinds = [
                BlockKind(layer.count, 0.0, 0.0, 0.0, layer_block_bytes(layer, plan)) for layer in before
            ]
            end_elements = 0.0
        size = compute * plan.micro_batch / plan.cp
        inputs = max((layer.full_recompute_elements_per_sample or 0.0 for layer in blocks), default=0.0)
        tables = table_bytes(workload, plan)
        in_memory = tables.in_memory(plan)
        return MemoryTable(
            tuple(kinds),
            first,
            last,
            end_elements * size / plan.tp,
            0.0,
            inputs * size,
            0.0,
            workload.trainable_share,
            trainable_pre_block_share=_trainable_share(before),
            trainable_post_block_share=_trainable_share(after),
            table_weight_bytes=in_memory.weights,
            table_state_bytes=in_memory.state,
            table_disk_bytes=0.0 if plan.embedding_memory_bytes is None else sum(tables),
        )
    kinds = []
    for layer in blocks:
        sparse = layer.expert_parameters > 0
        parts = decoder_block_bytes(dimensions, sequence, plan, framework, experts=sparse)
        replicated = _replicated_parameters(dimensions, plan, experts=sparse)
        kind = _block_kind(layer, plan, parts, replicated, dimensions.experts)
        kinds.append(kind._replace(matrix_elements=_matrices(dimensions, plan, kind)))
    between = dimensions.hidden / (plan.tp if plan.sequence_parallel else 1)
    if dimensions.tie_embeddings and plan.pp > 1:
        last += dimensions.vocabulary * dimensions.hidden / plan.tp
    return MemoryTable(
        tuple(kinds),
        first,
        last,
        tokens * dimensions.vocabulary / plan.tp * compute,
        tokens * ((between + dimensions.hidden) * compute + 4),
        tokens * between * compute,
        tokens * _exchange_buffer_bytes(dimensions, plan),
        workload.trainable_share,
        has_exact_end_layers=True,
        trainable_pre_block_share=_trainable_share(before),
        trainable_post_block_share=_trainable_share(after),
    )


def _trainable_share(layers: Sequence[LayerWorkload]) -> float:
    """Return the trained share of the parameters of some layers, 0 .. 1."""
    parameters = sum(layer.count * layer.parameters for layer in layers)
    trained = sum(layer.count * layer.parameters * layer.trainable_share for layer in layers)
    return trained / parameters if parameters else 1.0


def _split_layers(workload: Workload) -> tuple[list[LayerWorkload], list[LayerWorkload], list[LayerWorkload]]:
    """Return the repeated blocks, the layers before them, and all other layers."""
    blocks = [layer for layer in workload.layers if layer.count > 1 or layer.is_block]
    if not blocks:
        return [], list(workload.layers), []
    begin = workload.layers.index(blocks[0])
    end_layers = [layer for layer in workload.layers[begin:] if layer not in blocks]
    return blocks, list(workload.layers[:begin]), end_layers


def _block_kind(
    layer: LayerWorkload,
    plan: Plan,
    activations: BlockBytes,
    replicated_parameters: float = 0.0,
    experts: int = 1,
) -> BlockKind:
    """Return the sizes of a group of blocks; `replicated_parameters` of each are not split by `tp`."""
    split = layer.parameters - layer.expert_parameters - replicated_parameters
    expert_parameters = layer.expert_parameters / plan.tp
    return BlockKind(
        layer.count,
        split / plan.tp + replicated_parameters,
        expert_parameters / plan.ep,
        expert_parameters / max(experts, 1),
        activations,
        trainable_share=layer.trainable_share,
    )


def _matrices(dimensions: DecoderConfig, plan: Plan, kind: BlockKind) -> tuple[float, ...]:
    """Return the elements of each matrix of one block; routed experts are three tensors."""
    if dimensions.uses_latent_attention:
        return ()
    hidden, head_elements = dimensions.hidden, dimensions.hidden * dimensions.head_dim
    queries = head_elements * dimensions.heads / plan.tp
    keys = head_elements * dimensions.kv_heads / (1 if dimensions.kv_heads % plan.tp else plan.tp)
    attention = (queries, keys, keys, queries)
    if kind.expert_parameters:
        shared = hidden * dimensions.expert_width * dimensions.shared_experts / plan.tp
        return *attention, *(3 * (kind.expert_parameters / 3,)), *(3 * (shared,) if shared else ())
    return *attention, *(dimensions.feed_forward_matrices * (hidden * dimensions.feed_forward / plan.tp,))


def _replicated_parameters(dimensions: DecoderConfig, plan: Plan, *, experts: bool) -> float:
    """Return the number of a block's parameters that `tp` does not split.

    They belong to norms, a router, the projections to latent attention's narrow vectors, and keys and values
    whose number of heads `tp` does not divide.
    """
    hidden = dimensions.hidden
    count = 2 * hidden + (2 * dimensions.head_dim if dimensions.qk_norm else 0)
    if dimensions.uses_latent_attention:
        latent_width = dimensions.query_rank + dimensions.key_value_rank
        count += hidden * (latent_width + dimensions.rope_head_dim) + latent_width
    elif dimensions.kv_heads % plan.tp:
        count += 2 * hidden * dimensions.kv_heads * dimensions.head_dim
    return float(count + (hidden * dimensions.experts if experts else 0))


def _exchange_buffer_bytes(dimensions: DecoderConfig, plan: Plan) -> float:
    """Return the bytes per token that one exchange sends and receives.

    It exchanges a ring's keys and values with their gradients in fp32, or all heads, or the copies for
    experts.
    """
    compute = ELEMENT_BYTES[plan.precision]
    exchanged = [0.0]
    if plan.cp > 1:
        kv_width = (
            kv_heads_held(dimensions, plan) * (dimensions.head_dim + dimensions.value_head_dim) / plan.tp
        )
        heads = dimensions.heads * (dimensions.head_dim + dimensions.value_head_dim) / plan.tp
        ring = plan.cp_method == "ring"
        exchanged.append(
            2 * kv_width * (compute + max(compute, 4)) if ring else 2 * (heads + kv_width) * compute
        )
    if plan.ep > 1:
        exchanged.append(2.0 * dimensions.experts_per_token * dimensions.hidden * compute)
    return max(exchanged)
