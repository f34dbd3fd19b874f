"""Layer costs of a decoder: one block, the embedding and the head on one rank.

They consist of products, attention, memory-bound operators and communication, and hold for one micro-batch
and layer under `tp`, `cp` and `ep`. `cost.step` overlaps and adds them up to a step. Pure functions, without
torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from wanma.job.plan.plan import Plan
from wanma.models.config.dimensions import DecoderConfig
from wanma.planner.cost.layer_cost import CostAccumulator, LayerCost
from wanma.planner.hardware_model.collective_time import (
    RankGroup,
    all_gather_seconds,
    all_reduce_seconds,
    all_to_all_seconds,
    deduplicated_dispatch_seconds,
    reduce_scatter_seconds,
    send_seconds,
)
from wanma.planner.hardware_model.model import HardwareModel
from wanma.planner.hardware_model.operator_time import (
    ELEMENT_BYTES,
    attention_seconds,
    matmul_seconds,
    memory_bound_seconds,
)


@dataclass(frozen=True)
class FrameworkTraits:
    """Traits of a training framework that change cost; defaults are those of wanma's own runtime."""

    architecture: Literal["llama", "gpt"] = "llama"
    """Kind of the layers around the matrices: RMS normalization and rotary positions ("llama"), or layer
    normalization, biases, dropout and learned positions ("gpt"). The model's dimensions give the number of
    matrices of a feed-forward network."""
    attention: Literal["fused", "scores"] = "fused"
    """Attention kernel; "scores" stores and computes every score, also those that a causal model masks."""
    attention_efficiency: float = 1.0
    """Rate of the fused kernel over the measured one's."""
    fuses_pointwise: bool = False
    """True if a compiler or hand-written kernels fuse the operators between the products."""
    channels_last: bool = False
    """True if a pixel's channels are contiguous, as convolutions on tensor cores need them. Otherwise each
    convolution transposes its tensors before and after (NVIDIA, "Convolutional Layers User's Guide", "Tensor
    Layouts In Memory")."""
    cuda_graphs: bool = False
    """True if the host replays whole steps (CUDA graphs), so that the device never waits for it."""
    selective_recompute: Literal["products", "attention"] = "products"
    """Recomputed operators: every second product, or attention's core (Korthikanti et al. 2022, sec. 5)."""
    matmul_precision: str | None = None
    """Precision of the blocks' products, such as "nvfp4"; None: the plan's."""
    splits_experts: bool = True
    """True if `tp` splits each expert's matrices as all others. Otherwise `ep` spans the ranks of `tp` too,
    and an expert is unsharded on one rank (Megatron's expert tensor parallel size of 1)."""
    fuses_experts: bool = True
    """True if one kernel computes all experts of a rank; otherwise each has its own per product and cast."""
    deduplicates_dispatch: bool = False
    """True if a token is sent to a rank only once (DeepEP); otherwise once for each of its experts there."""
    expert_overlap: bool = False
    """True if tokens are exchanged while another micro-batch computes."""
    frozen_base_weights: bool = False
    """True if narrow adapters beside the blocks' matrices are trained (LoRA), and the matrices are not."""
    casts_frozen_weights: bool = True
    """True if frozen weights are stored in compute precision, and once; otherwise as trained ones are."""
    tensor_overlap: float = 0.0
    """Share of tensor-parallel communication that is hidden behind its products, 0 .. 1."""
    data_overlap: bool = True
    """True if gradients are reduced while backward runs."""
    gradient_bytes: int = 4
    """Bytes of one gradient element as it is reduced."""
    optimizer_bytes: int = 42
    """Bytes that the update transfers per parameter and step. AdamW reads a gradient, a master weight and two
    moments and writes three of them and a copy in 16 bits (30), after a gradient norm (4) and clipping (8).
    For other optimizers see `optimizer_update`."""
    optimizer_flops: float = 0.0
    """FLOPs of the update per parameter, of products in 16 bits (`optimizer_update.OptimizerCost`)."""
    optimizer_exchanged_bytes: float = 0.0
    """Bytes per parameter of unsharded matrices that the update exchanges (`OptimizerCost`)."""
    optimizer_state_bytes: float = 8.0
    """Bytes of optimizer state per parameter; for AdamW two moments in 32 bits."""
    loss_bytes: int = 28
    """Bytes that the loss moves per logit: a copy in 32 bits, its maximum, sum and gradient, and back."""
    weight_storage: Literal["shards", "copies"] = "shards"
    """Storage of weights. "shards": sharded master weights, gathered in compute precision (FSDP2). "copies":
    unsharded weights and gradients in 16 bits; master weights belong to the optimizer state (Megatron)."""
    accumulation_bytes: int = 4
    """Bytes of one element of unsharded gradients between micro-batches."""
    fuses_gradient_accumulation: bool = False
    """True if a product adds its result to earlier micro-batches' gradient; otherwise another kernel adds."""
    blocking_sends: bool = False
    """True if a pipeline rank with several stages computes nothing while it sends and receives."""
    fragmentation_factor: float = 1.0
    """Allocator memory beside live tensors, over its usual amount (`calibration.CorrectionFactors`)."""
    dummy_weight_gradients: bool = False
    """True if autograd gets an empty tensor of the weight's size where a product accumulates its gradient
    itself; one is allocated for each shape (Transformer Engine)."""
    regathers_sequence: bool = False
    """True if, under sequence parallelism, a product saves its part of its input and gathers the rest again
    in backward (Korthikanti et al. 2022, section 4.2.2); otherwise it saves all of it."""
    stage_buffer_per_micro_batch: bool = True
    """True if a stage has a receive buffer for each micro-batch of a step (torch's pipelines)."""
    shared_memory_nodes: int = 1
    """Number of nodes whose CPU ranks exchange tensors in shared memory; 0: over TCP everywhere."""
    logits_copies: float = 2.0
    """Copies of a micro-batch's logits in compute precision at the loss: the logits and their gradient; in
    wanma's own decoders the gradient replaces them."""

    def shares_memory(self, plan: Plan) -> tuple[bool, bool]:
        """Return whether the data-parallel shards, and whether all replicas, share the memory of one node."""
        if plan.device != "cpu" or not self.shared_memory_nodes:
            return False, False
        if self.shared_memory_nodes == 1:
            return True, True
        ranks_per_node, group = plan.world_size // self.shared_memory_nodes, plan.shard_group_size * plan.tp
        return (group <= ranks_per_node and ranks_per_node % group == 0), False

    def has_shared_memory_weights(self, plan: Plan) -> bool:
        """Return whether ranks that shard weights compute with one common copy of them."""
        return plan.shard_group_size > 1 and plan.offload_parameters == "none" and self.shares_memory(plan)[0]

    def replicates_frozen_weights(self, plan: Plan) -> bool:
        """Return whether every data rank stores all frozen weights of its stage."""
        is_gathered = plan.shard == "parameters" and (plan.pp == 1 or (plan.fp8 and plan.tp == 1))
        is_gathered |= plan.offload_parameters != "none"
        return self.casts_frozen_weights and not is_gathered and not self.has_shared_memory_weights(plan)


CPU_NORM, CPU_RESIDUAL_ADD, CPU_SWIGLU, CPU_ROTARY = (10.0, 18.0), (6.0, 6.0), (12.0, 24.0), (5.0, 6.0)
CPU_LOSS = (27.0, 23.0)
CPU_LOSS_16_BITS = (27.0, 35.0)
"""Forward and backward bytes per element in 16 bits (of the loss, per logit) of wanma's own decoder on a CPU.

They are measured seconds times the rate of a plain stream, operator by operator on a core of a Xeon with
AVX-512. Exponentials and passes over a cache take longer than their bytes."""
CPU_GELU, CPU_GELU_16_BITS = (16.0, 19.0), (22.0, 29.0)
"""The same for GELU by tanh, from its time beside SwiGLU's on such a core; in 16 bits tanh is no faster."""


def _accumulator(hardware: HardwareModel, framework: FrameworkTraits, plan: Plan) -> CostAccumulator:
    """Return an empty accumulator of a layer's operators."""
    return CostAccumulator(
        hardware.chip,
        plan,
        fuses_pointwise=framework.fuses_pointwise,
        trains_matrices=not framework.frozen_base_weights,
    )


def matmul_precision(plan: Plan, framework: FrameworkTraits) -> str:
    return framework.matmul_precision or ("fp8" if plan.fp8 else plan.precision)


@dataclass(frozen=True)
class _Block:
    """Block whose operators are added up, with what their cost depends on."""

    add: CostAccumulator
    dimensions: DecoderConfig
    sequence_length: int
    plan: Plan
    hardware: HardwareModel
    framework: FrameworkTraits

    @property
    def tokens(self) -> float:
        """Tokens of a micro-batch on one rank."""
        return self.plan.micro_batch * self.sequence_length / self.plan.cp

    @property
    def precision(self) -> str:
        return matmul_precision(self.plan, self.framework)

    @property
    def recomputes_all(self) -> bool:
        return self.plan.recompute == "full"

    @property
    def recomputes_second(self) -> bool:
        """True if every second product, and what lies between the products, runs again."""
        selective = self.plan.recompute == "selective" and self.framework.selective_recompute == "products"
        return self.recomputes_all or selective


def block_cost(
    dimensions: DecoderConfig,
    sequence_length: int,
    plan: Plan,
    hardware: HardwareModel,
    framework: FrameworkTraits,
    *,
    experts: bool = False,
) -> LayerCost:
    """Return the cost of one block; literals of streams are bytes per element in 16 bits."""
    add = _accumulator(hardware, framework, plan)
    block = _Block(add, dimensions, sequence_length, plan, hardware, framework)
    hidden, tp, tokens = dimensions.hidden, plan.tp, block.tokens
    # Layers between the split matrices run on every `tp` rank for all tokens, or for its part of them.
    between = tokens / tp if plan.sequence_parallel else tokens

    # Two normalizations, and two branches that join the residual stream (with bias and dropout in GPT).
    is_gpt = framework.architecture == "gpt"
    join = (7.0, 5.0) if is_gpt else (6.0, 4.0)
    # RMS normalization has no kernel of its own in eager PyTorch: a square, a mean, a root and two products.
    norm = (4.0, 8.0, 1) if framework.fuses_pointwise or is_gpt else (14.0, 24.0, 5)
    if add.is_eager_on_cpu:
        join, norm = CPU_RESIDUAL_ADD, (*CPU_NORM, 5)
        # Queries, keys and values, and both halves of SwiGLU, are products of one tensor each.
        add.add_gradient_sums(between * hidden, dimensions.feed_forward_matrices)
    for _ in range(2):
        add.add_memory_bound(between * hidden, *norm, is_recomputed=block.recomputes_second)
        add.add_memory_bound(between * hidden, *join, 1, is_recomputed=block.recomputes_second)

    context = _attention(block)
    expert = 0.0
    if experts:
        expert = _experts(block)
    else:
        _feed_forward(block, dimensions.feed_forward)

    activation = tokens * hidden * ELEMENT_BYTES[plan.precision]
    exchange_seconds = _tensor_parallel_seconds(hardware, plan, activation) * (1 - framework.tensor_overlap)
    # Two exchanges forward and two backward (Shoeybi et al. 2020, section 3); with sequence parallelism
    # each is a gather and a scatter, which together move as much (Korthikanti et al. 2022, section 4.2.2).
    return replace(
        add.layer_cost(),
        tensor_forward=2 * exchange_seconds,
        tensor_backward=2 * exchange_seconds,
        tensor_recompute=2 * exchange_seconds if block.recomputes_all else 0.0,
        context_forward=context,
        context_backward=2 * context,
        expert_forward=expert,
        expert_backward=expert,
    )


def _tensor_parallel_seconds(hardware: HardwareModel, plan: Plan, moved_bytes: float) -> float:
    group = RankGroup(plan.tp)
    if plan.sequence_parallel:
        gather = all_gather_seconds(hardware, group, moved_bytes, collective="tensor_gather")
        return gather + reduce_scatter_seconds(hardware, group, moved_bytes, collective="tensor_scatter")
    return all_reduce_seconds(hardware, group, moved_bytes)


def _rotary_traffic(add: CostAccumulator, framework: FrameworkTraits) -> tuple[float, float, int]:
    """Return the bytes of rotary positions per element, forward and backward, and their kernels.

    They are computed in 32 bits, with casts from and to 16; GPT only splits queries, keys and values into
    separate tensors.
    """
    if framework.architecture == "gpt":
        return 2.0, 2.0, 1
    if framework.fuses_pointwise:
        return 4.0, 4.0, 2
    if add.precision_scale >= 2.0:
        return (*CPU_ROTARY, 2) if add.is_eager_on_cpu else (4.0, 4.0, 2)
    return 20.0, 24.0, 5


def _attention(block: _Block) -> float:
    """Add attention's products and scores; return the exposed `cp` communication of forward, in seconds."""
    add, dimensions, plan, framework = block.add, block.dimensions, block.plan, block.framework
    hardware, sequence_length = block.hardware, block.sequence_length
    tp, hidden, tokens, precision = plan.tp, dimensions.hidden, block.tokens, block.precision
    heads = dimensions.heads / tp
    kv_heads = max(dimensions.kv_heads / tp, 1.0)
    full, selective = block.recomputes_all, plan.recompute == "selective"
    second = block.recomputes_second
    if dimensions.uses_latent_attention:
        plain, rotary_width, value = dimensions.head_dim, dimensions.rope_head_dim, dimensions.value_head_dim
        rank, query_rank = dimensions.key_value_rank, dimensions.query_rank
        width = plain + rotary_width
        add.add_matmul(tokens, query_rank + rank + rotary_width, hidden, precision, is_recomputed=full)
        add.add_matmul(tokens, heads * width, query_rank, precision, is_recomputed=second)
        add.add_matmul(tokens, heads * (plain + value), rank, precision, is_recomputed=full)
        add.add_matmul(tokens, hidden, heads * value, precision, is_recomputed=second)
        add.add_memory_bound(tokens * (query_rank + rank), 6.0, 10.0, 2, is_recomputed=second)
        add.add_memory_bound(tokens * heads * width, 8.0, 8.0, 3, is_recomputed=second)
        kv_heads = heads
    else:
        width = value = dimensions.head_dim
        add.add_matmul(tokens, (heads + 2 * kv_heads) * width, hidden, precision, is_recomputed=second)
        add.add_matmul(tokens, hidden, heads * width, precision, is_recomputed=second)
        rotary = _rotary_traffic(add, framework)
        add.add_memory_bound(tokens * (heads + kv_heads) * width, *rotary, is_recomputed=second)
    chip = hardware.chip
    if framework.attention == "scores":
        scores = plan.micro_batch * heads * sequence_length * sequence_length / plan.cp
        batch = max(round(plan.micro_batch * heads), 1)
        two = matmul_seconds(
            chip, sequence_length, sequence_length, width, plan.precision, batch
        ) + matmul_seconds(chip, sequence_length, width, sequence_length, plan.precision, batch)
        # Scaled, masked, normalized in one kernel; dropout in another, with its mask.
        forward = two + memory_bound_seconds(chip, scores * 9.0, 2)
        add.add_attention(
            forward,
            2 * two + memory_bound_seconds(chip, scores * 11.0, 2),
            6,
            is_recomputed=full or selective,
        )
        return 0.0
    forward, backward = (
        attention_seconds(
            chip,
            plan.micro_batch,
            sequence_length / plan.cp,
            sequence_length,
            heads,
            width,
            kv_heads=kv_heads,
            value_head_dim=value,
            backward=backward,
            efficiency=framework.attention_efficiency,
            precision=plan.precision,
        )
        for backward in (False, True)
    )
    add.add_attention(
        forward,
        backward,
        1,
        is_recomputed=full or (selective and framework.selective_recompute == "attention"),
    )
    if plan.cp == 1:
        return 0.0
    element = ELEMENT_BYTES[plan.precision]
    keys_and_values = tokens * kv_heads * (width + value) * element
    queries_and_output = tokens * heads * (width + value) * element
    return _exposed_context_seconds(plan, hardware, keys_and_values, queries_and_output, forward)


def _exposed_context_seconds(
    plan: Plan,
    hardware: HardwareModel,
    key_value_bytes: float,
    query_output_bytes: float,
    forward_seconds: float,
) -> float:
    """Return the exposed `cp` communication of attention's forward, in seconds."""
    if plan.cp_method == "all_to_all":
        # Queries, keys and values on the way there, the output on the way back.
        return all_to_all_seconds(hardware, RankGroup(plan.cp, plan.tp), key_value_bytes + query_output_bytes)
    step = send_seconds(hardware, plan.tp, key_value_bytes)
    if plan.device == "cpu":  # the cores that compute also send
        return (plan.cp - 1) * step
    # Each step's keys are sent while earlier ones are used; the first are local.
    return max(0.0, (plan.cp - 1) * (step - forward_seconds / plan.cp))


def _feed_forward(block: _Block, width: int) -> None:
    add, dimensions, rank_width = block.add, block.dimensions, width / block.plan.tp
    tokens, precision, inputs = block.tokens, block.precision, dimensions.feed_forward_matrices - 1
    add.add_matmul(
        tokens, inputs * rank_width, dimensions.hidden, precision, is_recomputed=block.recomputes_all
    )
    add.add_matmul(tokens, dimensions.hidden, rank_width, precision, is_recomputed=block.recomputes_second)
    _activation(block, tokens * rank_width)


def _activation(block: _Block, elements: float) -> None:
    """Add the activation function: SiLU of one half times the other, or GELU, in GPT after a bias."""
    add, framework, is_recomputed = block.add, block.framework, block.recomputes_second
    if block.dimensions.activation_function == "gelu":
        plain = (4.0, 6.0, 1)
        if add.is_eager_on_cpu:
            plain = (*(CPU_GELU_16_BITS if add.precision_scale == 1.0 else CPU_GELU), 1)
        with_bias = framework.architecture == "gpt" and not framework.fuses_pointwise
        add.add_memory_bound(elements, *((8.0, 10.0, 2) if with_bias else plain), is_recomputed=is_recomputed)
    elif add.is_eager_on_cpu:
        add.add_memory_bound(elements, *CPU_SWIGLU, 2, is_recomputed=is_recomputed)
    else:
        add.add_memory_bound(
            elements,
            *((6.0, 10.0, 1) if framework.fuses_pointwise else (10.0, 16.0, 2)),
            is_recomputed=is_recomputed,
        )


def _experts(block: _Block) -> float:
    """Add router, experts and shared experts; return the token exchange under `ep` in forward, in seconds."""
    add, dimensions, plan, framework = block.add, block.dimensions, block.plan, block.framework
    hidden, choices, precision = dimensions.hidden, dimensions.experts_per_token, block.precision
    full, is_recomputed = block.recomputes_all, block.recomputes_second
    local = max(dimensions.experts // plan.ep, 1)
    parts = plan.tp if framework.splits_experts else 1
    routed = block.tokens * parts / plan.tp
    rows = routed * choices
    rank_width = dimensions.expert_width / parts
    add.add_matmul(routed, dimensions.experts, hidden, plan.precision, is_recomputed=full)
    add.add_memory_bound(routed * dimensions.experts, 24.0, 24.0, 8, is_recomputed=is_recomputed)
    # Tokens are put into the order of their experts, and back, on both sides of the exchange.
    # Where a token is sent to a rank only once, the exchange itself does so on one side.
    sides = 8.0 if plan.ep > 1 and not framework.deduplicates_dispatch else 4.0
    add.add_memory_bound(rows * hidden, sides, sides, 4, is_recomputed=full)
    add.add_memory_bound(rows * hidden, 6.0, 6.0, 2, is_recomputed=full)
    add.add_matmul(rows / local, 2 * rank_width, hidden, precision, count=local, is_recomputed=full)
    add.add_matmul(rows / local, hidden, rank_width, precision, count=local, is_recomputed=is_recomputed)
    if not framework.fuses_experts:
        # For two products, each expert's input, weight and gradient are cast on their own, along both sides.
        extra = 2 * (local - 1) * (6 if ELEMENT_BYTES[precision] < 2 else 1)
        add.add_kernels(extra, 2 * extra, extra if full else 0)
    _activation(block, rows * rank_width)
    if dimensions.shared_experts:
        _feed_forward(block, dimensions.shared_experts * dimensions.expert_width)
    group, element = RankGroup(plan.ep, parts), ELEMENT_BYTES[plan.precision]
    if framework.deduplicates_dispatch:
        return 2 * deduplicated_dispatch_seconds(block.hardware, group, routed * hidden * element, choices)
    return 2 * all_to_all_seconds(block.hardware, group, rows * hidden * element)


def head_cost(
    dimensions: DecoderConfig,
    sequence_length: int,
    plan: Plan,
    hardware: HardwareModel,
    framework: FrameworkTraits,
) -> LayerCost:
    """Return the cost of the last normalization, the logits in compute precision and the loss over them."""
    if dimensions.vocabulary is None:
        raise ValueError("a forecast needs dimensions with a vocabulary")
    add = _accumulator(hardware, framework, plan)
    tokens = plan.micro_batch * sequence_length / plan.cp
    logits = dimensions.vocabulary / plan.tp
    add.add_memory_bound(tokens * dimensions.hidden, 4.0, 8.0, 2)
    add.add_matmul(tokens, logits, dimensions.hidden, plan.precision)
    loss_bytes = (framework.loss_bytes / 2, framework.loss_bytes / 2)
    if plan.device == "cpu":
        loss_bytes = CPU_LOSS_16_BITS if ELEMENT_BYTES[plan.precision] == 2 else CPU_LOSS
    forward_bytes, backward_bytes = (
        size / add.precision_scale
        for size in loss_bytes  # these bytes are in 32 bits already
    )
    add.add_memory_bound(tokens * logits, forward_bytes, backward_bytes, 6)
    exchange_seconds = _tensor_parallel_seconds(
        hardware, plan, tokens * dimensions.hidden * ELEMENT_BYTES[plan.precision]
    )
    sums = 3 * all_reduce_seconds(hardware, RankGroup(plan.tp), tokens * 4)
    return replace(add.layer_cost(), tensor_forward=sums, tensor_backward=exchange_seconds)


def embedding_cost(
    dimensions: DecoderConfig,
    sequence_length: int,
    plan: Plan,
    hardware: HardwareModel,
    framework: FrameworkTraits,
) -> LayerCost:
    """Return the cost of the embedding: rows are read, and their gradients added up."""
    add = _accumulator(hardware, framework, plan)
    tokens = plan.micro_batch * sequence_length / plan.cp
    positions = 4.0 if framework.architecture == "gpt" else 0.0
    add.add_memory_bound(tokens * dimensions.hidden, 4.0 + positions, 8.0 + positions, 2)
    activation = tokens * dimensions.hidden * ELEMENT_BYTES[plan.precision]
    return replace(add.layer_cost(), tensor_forward=_tensor_parallel_seconds(hardware, plan, activation))
