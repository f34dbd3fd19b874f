"""Layer costs of a decoder: one block, the embedding and the head on one rank.

They consist of products, attention, memory-bound operators and communication, and hold for one micro-batch
and layer under `tp`, `cp` and `ep`. `cost.step` overlaps and adds them up to a step. Pure functions, without
torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from wanma.job.plan.plan import Plan
from wanma.models.config.dimensions import DecoderDimensions
from wanma.planner.hardware_model.collective_time import (
    Group,
    all_gather_seconds,
    all_reduce_seconds,
    all_to_all_seconds,
    reduce_scatter_seconds,
    routed_seconds,
    send_seconds,
)
from wanma.planner.hardware_model.model import Machine
from wanma.planner.hardware_model.operator_time import (
    ELEMENT_BYTES,
    attention_seconds,
    product_seconds,
    streaming_seconds,
)


@dataclass(frozen=True)
class Software:
    """Traits of a training framework that change cost; defaults are those of wanma's own runtime."""

    architecture: Literal["llama", "gpt"] = "llama"
    """Kind of the layers around the matrices: RMS normalisation and rotary positions ("llama"), or layer
    normalisation, biases, dropout and learned positions ("gpt"). The model's dimensions give the number of
    matrices of a feed-forward network."""
    attention: Literal["fused", "scores"] = "fused"
    """Attention kernel; "scores" stores and computes every score, also those that a causal model masks."""
    attention_efficiency: float = 1.0
    """Rate of the fused kernel over the measured one's."""
    fused: bool = False
    """True if a compiler or hand-written kernels fuse the operators between the products."""
    channels_last: bool = False
    """True if a pixel's channels are contiguous, as convolutions on tensor cores need them. Otherwise each
    convolution transposes its tensors before and after (NVIDIA, "Convolutional Layers User's Guide", "Tensor
    Layouts In Memory")."""
    graphs: bool = False
    """True if the host replays whole steps (CUDA graphs), so that the device never waits for it."""
    selective: Literal["products", "attention"] = "products"
    """Recomputed operators: every second product, or attention's core (Korthikanti et al. 2022, sec. 5)."""
    product_precision: str | None = None
    """Precision of the blocks' products, such as "nvfp4"; None: the plan's."""
    splits_experts: bool = True
    """True if `tp` splits each expert's matrices as all others. Otherwise `ep` spans the ranks of `tp` too,
    and an expert is unsharded on one rank (Megatron's expert tensor parallel size of 1)."""
    fuses_experts: bool = True
    """True if one kernel computes all experts of a rank; otherwise each has its own per product and cast."""
    routes_once: bool = False
    """True if a token is sent to a rank only once (DeepEP); otherwise once for each of its experts there."""
    expert_overlap: bool = False
    """True if tokens are exchanged while another micro-batch computes."""
    frozen: bool = False
    """True if narrow adapters beside the blocks' matrices are trained (LoRA), and the matrices are not."""
    rounds_frozen: bool = True
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
    """FLOPs of the update per parameter, of products in 16 bits (`optimizer_update.Update`)."""
    optimizer_exchanged_bytes: float = 0.0
    """Bytes per parameter of unsharded matrices that the update exchanges (`optimizer_update.Update`)."""
    state_bytes: float = 8.0
    """Bytes of optimizer state per parameter; for AdamW two moments in 32 bits."""
    loss_bytes: int = 28
    """Bytes that the loss moves per logit: a copy in 32 bits, its maximum, sum and gradient, and back."""
    weights: Literal["shards", "copies"] = "shards"
    """Storage of weights. "shards": sharded master weights, gathered in compute precision (FSDP2). "copies":
    unsharded weights and gradients in 16 bits; master weights belong to the optimizer state (Megatron)."""
    accumulated_bytes: int = 4
    """Bytes of one element of unsharded gradients between micro-batches."""
    adds_in_product: bool = False
    """True if a product adds its result to earlier micro-batches' gradient; otherwise another kernel adds."""
    waits_for_sends: bool = False
    """True if a pipeline rank with several stages computes nothing while it sends and receives."""
    unused_factor: float = 1.0
    """Allocator memory beside live tensors, over its usual amount (`calibration.Corrections`)."""
    empty_gradients: bool = False
    """True if autograd gets an empty tensor of the weight's size where a product accumulates its gradient
    itself; one is allocated for each shape (Transformer Engine)."""
    regathers: bool = False
    """True if, under sequence parallelism, a product saves its part of its input and gathers the rest again
    in backward (Korthikanti et al. 2022, section 4.2.2); otherwise it saves all of it."""
    boundary_buffers: bool = True
    """True if a stage has a receive buffer for each micro-batch of a step (torch's pipelines)."""
    sharing_machines: int = 1
    """Number of nodes whose CPU ranks exchange tensors in shared memory; 0: over TCP everywhere."""
    logits_copies: float = 2.0
    """Copies of a micro-batch's logits in compute precision at the loss: the logits and their gradient; in
    wanma's own decoders the gradient replaces them."""

    def shares_memory(self, plan: Plan) -> tuple[bool, bool]:
        """Return whether the data-parallel shards, and whether all replicas, share the memory of one node."""
        if plan.device != "cpu" or not self.sharing_machines:
            return False, False
        if self.sharing_machines == 1:
            return True, True
        on_each, group = plan.world_size // self.sharing_machines, plan.shard_ranks * plan.tp
        return (group <= on_each and on_each % group == 0), False

    def has_common_weights(self, plan: Plan) -> bool:
        """Return whether ranks that shard weights compute with one common copy of them."""
        return plan.shard_ranks > 1 and plan.offload_parameters == "none" and self.shares_memory(plan)[0]

    def holds_frozen_whole(self, plan: Plan) -> bool:
        """Return whether every data rank stores all frozen weights of its stage."""
        is_gathered = plan.shard == "parameters" and (plan.pp == 1 or (plan.fp8 and plan.tp == 1))
        is_gathered |= plan.offload_parameters != "none"
        return self.rounds_frozen and not is_gathered and not self.has_common_weights(plan)


CPU_NORM, CPU_JOIN, CPU_SWIGLU, CPU_TURN = (10.0, 18.0), (6.0, 6.0), (12.0, 24.0), (5.0, 6.0)
CPU_LOSS = (27.0, 23.0)
CPU_LOSS_16_BITS = (27.0, 35.0)
"""Forward and backward bytes per element in 16 bits (of the loss, per logit) of wanma's own decoder on a CPU.

They are measured seconds times the rate of a plain stream, operator by operator on a core of a Xeon with
AVX-512. Exponentials and passes over a cache take longer than their bytes."""
CPU_GELU, CPU_GELU_16_BITS = (16.0, 19.0), (22.0, 29.0)
"""The same for GELU by tanh, from its time beside SwiGLU's on such a core; in 16 bits tanh is no faster."""


@dataclass(frozen=True)
class PartTime:
    """Cost of one layer and micro-batch on one rank: seconds, kernels and bytes."""

    forward: float = 0.0
    backward_inputs: float = 0.0
    backward_weights: float = 0.0
    again: float = 0.0
    """Seconds that recompute would add if every operator of the plan's policy ran again."""
    kernels_forward: int = 0
    kernels_backward: int = 0
    kernels_again: int = 0
    tensor_forward: float = 0.0
    """Seconds of exposed tensor-parallel communication in forward; the fields below are the same for
    backward, for recompute, and for the mesh dimensions `cp` and `ep`."""
    tensor_backward: float = 0.0
    tensor_again: float = 0.0
    context_forward: float = 0.0
    context_backward: float = 0.0
    expert_forward: float = 0.0
    expert_backward: float = 0.0
    kept_bytes: float = 0.0
    """Activations that a plan with offload stores until backward, of a block that does not recompute. For
    other layers: logits and the tensors that they are computed from, which stay on the device."""
    kept_again_bytes: float = 0.0
    """Activations that a plan with offload stores until backward, of a block that recomputes."""


class _Adder:
    """Accumulator of the operators of one layer."""

    def __init__(self, machine: Machine, software: Software, plan: Plan) -> None:
        self.chip, self.software = machine.chip, software
        self.width = ELEMENT_BYTES[plan.precision] / 2
        self.is_eager_on_cpu = plan.device == "cpu" and not software.fused
        self.forward = self.inputs = self.weights = self.again = 0.0
        self.kernels = [0, 0, 0]

    def product(
        self, m: float, n: float, k: float, precision: str, *, count: int = 1, again: bool = False
    ) -> None:
        trained = not self.software.frozen
        forward = product_seconds(self.chip, m, n, k, precision, count)
        self.forward += forward
        self.inputs += product_seconds(self.chip, m, k, n, precision, count)
        if trained:
            self.weights += product_seconds(self.chip, k, n, m, precision, count)
        launches = 1
        if ELEMENT_BYTES[precision] < 2:  # operands are scaled and cast, along both of their sides
            casts = streaming_seconds(self.chip, count * m * k * (2 + 2 * ELEMENT_BYTES[precision]))
            self.forward += casts
            forward += casts
            self.inputs += streaming_seconds(self.chip, count * m * n * (2 + 2 * ELEMENT_BYTES[precision]))
            launches = 2
        self.again += forward if again else 0.0
        self.launch(launches, 2 * launches, launches if again else 0)

    def stream(
        self, elements: float, forward: float, backward: float, kernels: int = 1, *, again: bool = False
    ) -> None:
        """Add a memory-bound operator of `forward` and `backward` bytes per element in 16 bits."""
        elements *= self.width
        seconds = streaming_seconds(self.chip, elements * forward, kernels)
        self.forward += seconds
        self.inputs += streaming_seconds(self.chip, elements * backward, kernels)
        self.again += seconds if again else 0.0
        self.launch(kernels, kernels, kernels if again else 0)

    def sum_gradients(self, elements: float, tensors: int) -> None:
        """Add, to backward, the sums of the gradients of a tensor that `tensors` + 1 operators read."""
        seconds = streaming_seconds(self.chip, tensors * elements * self.width * 6.0, tensors)
        self.inputs += seconds
        self.launch(0, tensors, 0)

    def attend(self, forward: float, backward: float, kernels: int, *, again: bool) -> None:
        self.forward += forward
        self.inputs += backward
        self.again += forward if again else 0.0
        self.launch(kernels, kernels, kernels if again else 0)

    def launch(self, *kernels: int) -> None:
        """Add the numbers of kernels that the host launches in forward, in backward, and in recompute."""
        self.kernels = [have + more for have, more in zip(self.kernels, kernels, strict=True)]

    def part(self) -> PartTime:
        return PartTime(self.forward, self.inputs, self.weights, self.again, *self.kernels)


def product_precision(plan: Plan, software: Software) -> str:
    return software.product_precision or ("fp8" if plan.fp8 else plan.precision)


def block_time(
    dimensions: DecoderDimensions,
    sequence: int,
    plan: Plan,
    machine: Machine,
    software: Software,
    *,
    experts: bool = False,
) -> PartTime:
    """Return the cost of one block; literals of streams are bytes per element in 16 bits."""
    add = _Adder(machine, software, plan)
    hidden, tp = dimensions.hidden, plan.tp
    tokens = plan.micro_batch * sequence / plan.cp
    # Layers between the split matrices run on every `tp` rank for all tokens, or for its part of them.
    between = tokens / tp if plan.sequence_parallel else tokens
    full = plan.recompute == "full"
    halves = full or (plan.recompute == "selective" and software.selective == "products")
    precision = product_precision(plan, software)

    # Two normalisations, and two branches that join the residual stream (with bias and dropout in GPT).
    is_gpt = software.architecture == "gpt"
    join = (7.0, 5.0) if is_gpt else (6.0, 4.0)
    # RMS normalisation has no kernel of its own in eager PyTorch: a square, a mean, a root and two products.
    norm = (4.0, 8.0, 1) if software.fused or is_gpt else (14.0, 24.0, 5)
    if add.is_eager_on_cpu:
        join, norm = CPU_JOIN, (*CPU_NORM, 5)
        # Queries, keys and values, and both halves of SwiGLU, are products of one tensor each.
        add.sum_gradients(between * hidden, dimensions.network_matrices)
    for _ in range(2):
        add.stream(between * hidden, *norm, again=halves)
        add.stream(between * hidden, *join, 1, again=halves)

    context = _attention(add, dimensions, sequence, plan, machine, software, tokens, precision)
    expert = 0.0
    if experts:
        expert = _experts(add, dimensions, plan, machine, software, tokens, precision)
    else:
        _network(add, dimensions.feed_forward, dimensions, plan, software, tokens, precision)

    activation = tokens * hidden * ELEMENT_BYTES[plan.precision]
    one = _tensor_exchange(machine, plan, activation) * (1 - software.tensor_overlap)
    # Two exchanges forward and two backward (Shoeybi et al. 2020, section 3); with sequence parallelism
    # each is a gather and a scatter, which together move as much (Korthikanti et al. 2022, section 4.2.2).
    return replace(
        add.part(),
        tensor_forward=2 * one,
        tensor_backward=2 * one,
        tensor_again=2 * one if full else 0.0,
        context_forward=context,
        context_backward=2 * context,
        expert_forward=expert,
        expert_backward=expert,
    )


def _tensor_exchange(machine: Machine, plan: Plan, moved: float) -> float:
    group = Group(plan.tp)
    if plan.sequence_parallel:
        gather = all_gather_seconds(machine, group, moved, of="tensor_gather")
        return gather + reduce_scatter_seconds(machine, group, moved, of="tensor_scatter")
    return all_reduce_seconds(machine, group, moved)


def _attention(
    add: _Adder,
    dimensions: DecoderDimensions,
    sequence: int,
    plan: Plan,
    machine: Machine,
    software: Software,
    tokens: float,
    precision: str,
) -> float:
    """Add attention's products and scores; return the exposed `cp` communication of forward, in seconds."""
    tp, hidden = plan.tp, dimensions.hidden
    heads = dimensions.heads / tp
    kv_heads = max(dimensions.kv_heads / tp, 1.0)
    full, selective = plan.recompute == "full", plan.recompute == "selective"
    second = full or (selective and software.selective == "products")
    if dimensions.is_latent:
        plain, turned, value = dimensions.head_width, dimensions.rotary_width, dimensions.value_width
        rank, query_rank = dimensions.key_value_rank, dimensions.query_rank
        width = plain + turned
        add.product(tokens, query_rank + rank + turned, hidden, precision, again=full)
        add.product(tokens, heads * width, query_rank, precision, again=second)
        add.product(tokens, heads * (plain + value), rank, precision, again=full)
        add.product(tokens, hidden, heads * value, precision, again=second)
        add.stream(tokens * (query_rank + rank), 6.0, 10.0, 2, again=second)
        add.stream(tokens * heads * width, 8.0, 8.0, 3, again=second)
        kv_heads = heads
    else:
        width = value = dimensions.head_width
        add.product(tokens, (heads + 2 * kv_heads) * width, hidden, precision, again=second)
        add.product(tokens, hidden, heads * width, precision, again=second)
        # Rotary positions, in 32 bits, with casts from and to 16; GPT only splits queries, keys and values
        # into separate tensors.
        turns = (20.0, 24.0, 5)
        if software.architecture == "gpt":
            turns = (2.0, 2.0, 1)
        elif software.fused:
            turns = (4.0, 4.0, 2)
        elif add.width >= 2.0:
            turns = (*CPU_TURN, 2) if add.is_eager_on_cpu else (4.0, 4.0, 2)
        add.stream(tokens * (heads + kv_heads) * width, *turns, again=second)
    chip = machine.chip
    if software.attention == "scores":
        scores = plan.micro_batch * heads * sequence * sequence / plan.cp
        batch = max(round(plan.micro_batch * heads), 1)
        two = product_seconds(chip, sequence, sequence, width, plan.precision, batch) + product_seconds(
            chip, sequence, width, sequence, plan.precision, batch
        )
        # Scaled, masked, normalised in one kernel; dropout in another, with its mask.
        forward = two + streaming_seconds(chip, scores * 9.0, 2)
        add.attend(forward, 2 * two + streaming_seconds(chip, scores * 11.0, 2), 6, again=full or selective)
        return 0.0
    forward, backward = (
        attention_seconds(
            chip,
            plan.micro_batch,
            sequence / plan.cp,
            sequence,
            heads,
            width,
            kv_heads=kv_heads,
            value_width=value,
            backward=backward,
            efficiency=software.attention_efficiency,
            precision=plan.precision,
        )
        for backward in (False, True)
    )
    add.attend(forward, backward, 1, again=full or (selective and software.selective == "attention"))
    if plan.cp == 1:
        return 0.0
    element = ELEMENT_BYTES[plan.precision]
    keys_and_values = tokens * kv_heads * (width + value) * element
    if plan.cp_method == "all_to_all":
        # Queries, keys and values on the way there, the output on the way back.
        moved = keys_and_values + tokens * heads * (width + value) * element
        return all_to_all_seconds(machine, Group(plan.cp, tp), moved)
    step = send_seconds(machine, tp, keys_and_values)
    if plan.device == "cpu":  # the cores that compute also send
        return (plan.cp - 1) * step
    # Each step's keys are sent while earlier ones are used; the first are local.
    return max(0.0, (plan.cp - 1) * (step - forward / plan.cp))


def _network(
    add: _Adder,
    width: int,
    dimensions: DecoderDimensions,
    plan: Plan,
    software: Software,
    tokens: float,
    precision: str,
) -> None:
    wide = width / plan.tp
    full = plan.recompute == "full"
    half = full or (plan.recompute == "selective" and software.selective == "products")
    into = dimensions.network_matrices - 1
    add.product(tokens, into * wide, dimensions.hidden, precision, again=full)
    add.product(tokens, dimensions.hidden, wide, precision, again=half)
    _activation(add, tokens * wide, dimensions, software, again=half)


def _activation(
    add: _Adder, elements: float, dimensions: DecoderDimensions, software: Software, *, again: bool
) -> None:
    """Add the activation function: SiLU of one half times the other, or GELU, in GPT after a bias."""
    if dimensions.activation_function == "gelu":
        alone = (4.0, 6.0, 1)
        if add.is_eager_on_cpu:
            alone = (*(CPU_GELU_16_BITS if add.width == 1.0 else CPU_GELU), 1)
        with_bias = software.architecture == "gpt" and not software.fused
        add.stream(elements, *((8.0, 10.0, 2) if with_bias else alone), again=again)
    elif add.is_eager_on_cpu:
        add.stream(elements, *CPU_SWIGLU, 2, again=again)
    else:
        add.stream(elements, *((6.0, 10.0, 1) if software.fused else (10.0, 16.0, 2)), again=again)


def _experts(
    add: _Adder,
    dimensions: DecoderDimensions,
    plan: Plan,
    machine: Machine,
    software: Software,
    tokens: float,
    precision: str,
) -> float:
    """Add router, experts and shared experts; return the token exchange under `ep` in forward, in seconds."""
    hidden, choices = dimensions.hidden, dimensions.experts_per_token
    full = plan.recompute == "full"
    again = full or (plan.recompute == "selective" and software.selective == "products")
    local = max(dimensions.experts // plan.ep, 1)
    parts = plan.tp if software.splits_experts else 1
    routed = tokens * parts / plan.tp
    rows = routed * choices
    wide = dimensions.expert_width / parts
    add.product(routed, dimensions.experts, hidden, plan.precision, again=full)
    add.stream(routed * dimensions.experts, 24.0, 24.0, 8, again=again)
    # Tokens are put into the order of their experts, and back, on both sides of the exchange.
    # Where a token is sent to a rank only once, the exchange itself does so on one side.
    sides = 8.0 if plan.ep > 1 and not software.routes_once else 4.0
    add.stream(rows * hidden, sides, sides, 4, again=full)
    add.stream(rows * hidden, 6.0, 6.0, 2, again=full)
    add.product(rows / local, 2 * wide, hidden, precision, count=local, again=full)
    add.product(rows / local, hidden, wide, precision, count=local, again=again)
    if not software.fuses_experts:
        # For two products, each expert's input, weight and gradient are cast on their own, along both sides.
        extra = 2 * (local - 1) * (6 if ELEMENT_BYTES[precision] < 2 else 1)
        add.launch(extra, 2 * extra, extra if full else 0)
    _activation(add, rows * wide, dimensions, software, again=again)
    if dimensions.shared_experts:
        _network(
            add,
            dimensions.shared_experts * dimensions.expert_width,
            dimensions,
            plan,
            software,
            tokens,
            precision,
        )
    group, element = Group(plan.ep, parts), ELEMENT_BYTES[plan.precision]
    if software.routes_once:
        return 2 * routed_seconds(machine, group, routed * hidden * element, choices)
    return 2 * all_to_all_seconds(machine, group, rows * hidden * element)


def head_time(
    dimensions: DecoderDimensions, sequence: int, plan: Plan, machine: Machine, software: Software
) -> PartTime:
    """Return the cost of the last normalisation, the logits in compute precision and the loss over them."""
    if dimensions.vocabulary is None:
        raise ValueError("a forecast needs dimensions with a vocabulary")
    add = _Adder(machine, software, plan)
    tokens = plan.micro_batch * sequence / plan.cp
    logits = dimensions.vocabulary / plan.tp
    add.stream(tokens * dimensions.hidden, 4.0, 8.0, 2)
    add.product(tokens, logits, dimensions.hidden, plan.precision)
    moved = (software.loss_bytes / 2, software.loss_bytes / 2)
    if plan.device == "cpu":
        moved = CPU_LOSS_16_BITS if ELEMENT_BYTES[plan.precision] == 2 else CPU_LOSS
    ahead, back = (one / add.width for one in moved)  # these bytes are in 32 bits already
    add.stream(tokens * logits, ahead, back, 6)
    one = _tensor_exchange(machine, plan, tokens * dimensions.hidden * ELEMENT_BYTES[plan.precision])
    sums = 3 * all_reduce_seconds(machine, Group(plan.tp), tokens * 4)
    return replace(add.part(), tensor_forward=sums, tensor_backward=one)


def embedding_time(
    dimensions: DecoderDimensions, sequence: int, plan: Plan, machine: Machine, software: Software
) -> PartTime:
    """Return the cost of the embedding: rows are read, and their gradients added up."""
    add = _Adder(machine, software, plan)
    tokens = plan.micro_batch * sequence / plan.cp
    positions = 4.0 if software.architecture == "gpt" else 0.0
    add.stream(tokens * dimensions.hidden, 4.0 + positions, 8.0 + positions, 2)
    activation = tokens * dimensions.hidden * ELEMENT_BYTES[plan.precision]
    return replace(add.part(), tensor_forward=_tensor_exchange(machine, plan, activation))
