"""Activations that a block saves for backward on one rank: tensors, splits and recompute policies.

Decoders are counted operator by operator, for wanma and for other frameworks, whose published formulas are
special cases (Korthikanti et al. 2022, equations 1 to 4); other models by the traced elements of their
layers. Pure functions, without torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal, NamedTuple

from wanma.job.forecast.forecast import LayerWorkload
from wanma.job.plan.plan import Plan
from wanma.job.sections.parallel import Recompute
from wanma.models.config.dimensions import DecoderConfig
from wanma.planner.cost.decoder_layers import FrameworkTraits
from wanma.planner.hardware_model.operator_time import ELEMENT_BYTES

UNSPLIT_ACTIVATION_SHARE = 0.25
"""Share of a block's saved activations that tensor parallelism does not split, where the operators are not
known: inputs and outputs of its normalizations, 4 hidden of about 16 to 20 (Korthikanti et al. 2022, section
4.2.1: 10 of 34 bytes)."""

INPUT_SHARE = 1 / 16
"""Share of a block's saved activations that is its input, where it was not traced; about 1 of 16 hidden-sized
tensors in a decoder."""

SELECTIVE_SAVED_SHARE = 3 / 8
"""Share of a block's saved activations that selective recompute saves beside the input, where it was not
traced; about 6 of 16 in a decoder."""

Split = Literal["tp", "sequence", "nothing"]
"""Ranks that split a tensor: those of `tp`; those of `tp` under sequence parallelism; or none."""


class SavedTensor(NamedTuple):
    """Saved tensor: one tensor that a block saves for backward."""

    name: str
    elements: float
    """Elements per token, summed over the ranks of `tp` that split it."""
    split: Split
    recompute_policies: tuple[Recompute, ...] = ("none",)
    """Recompute policies under which it is saved."""
    element_bytes: float | None = None
    """Bytes per element; None: those of the compute precision."""


class BlockBytes(NamedTuple):
    """Bytes of activations of one block, micro-batch and rank."""

    saved: float
    """Bytes saved for backward without recompute."""
    inputs: float
    """Bytes of the input, which a block with recompute saves."""
    selective_saved: float
    """Bytes that selective recompute saves beside the input."""
    backward_workspace: float
    """Largest additional bytes of backward: gradients of the widest tensors."""


def decoder_block_bytes(
    dimensions: DecoderConfig, sequence_length: int, plan: Plan, framework: FrameworkTraits, *, experts: bool
) -> BlockBytes:
    """Return the activation bytes of one block of a decoder.

    Args:
        sequence_length: tokens of one sample.
        experts: the block has experts instead of one feed-forward network.
    """
    tensors = saved_tensors(dimensions, sequence_length, plan, framework, experts=experts)
    tokens = plan.micro_batch * sequence_length / plan.cp

    def size(policy: Recompute) -> float:
        saved_tensors = (tensor for tensor in tensors if policy in tensor.recompute_policies)
        return tokens * bytes_per_token(saved_tensors, plan)

    inputs = size("full")
    return BlockBytes(
        size("none"),
        inputs,
        size("selective") - inputs,
        tokens * _backward_workspace(dimensions, sequence_length, plan, framework),
    )


def bytes_per_token(tensors: Iterable[SavedTensor], plan: Plan) -> float:
    """Return the bytes per token of these tensors on one rank of `tp`."""
    compute = ELEMENT_BYTES[plan.precision]
    ranks = {"tp": plan.tp, "sequence": plan.tp if plan.sequence_parallel else 1, "nothing": 1}
    return sum(
        tensor.elements
        / ranks[tensor.split]
        * (compute if tensor.element_bytes is None else tensor.element_bytes)
        for tensor in tensors
    )


def saved_tensors(
    dimensions: DecoderConfig, sequence_length: int, plan: Plan, framework: FrameworkTraits, *, experts: bool
) -> list[SavedTensor]:
    """Return the saved tensors of one block.

    For GPT (`FrameworkTraits.architecture`, with GELU) in 16 bits these are 34 bytes per token and hidden
    element, with the masks of three dropouts, and 5 bytes per score where scores are saved (Korthikanti et
    al. 2022, equation 1).
    """
    tensors = [
        *_norm_and_dropout("attention", dimensions, framework),
        *_attention(dimensions, sequence_length, plan, framework),
    ]
    tensors += _norm_and_dropout("feed_forward", dimensions, framework)
    if experts:
        tensors += _experts(dimensions, framework)
    else:
        tensors += _feed_forward("feed_forward", dimensions.feed_forward, dimensions, framework)
    tensors[0] = tensors[0]._replace(recompute_policies=("none", "selective", "full"))
    if framework.selective_recompute == "attention":
        return [_selective_unless_score(tensor) for tensor in tensors]
    return tensors + _selective_saved(dimensions, plan, experts=experts)


def layer_block_bytes(layer: LayerWorkload, plan: Plan) -> BlockBytes:
    """Return the activation bytes of a block whose elements were traced, but not its operators."""
    elements = layer.activation_elements_per_sample
    unsplit = UNSPLIT_ACTIVATION_SHARE / plan.tp if plan.sequence_parallel else UNSPLIT_ACTIVATION_SHARE
    share = (unsplit + (1 - UNSPLIT_ACTIVATION_SHARE) / plan.tp) / plan.cp
    size = share * plan.micro_batch * ELEMENT_BYTES[plan.precision]
    inputs = _traced_or_typical(layer.full_recompute_elements_per_sample, elements * INPUT_SHARE)
    costly = _traced_or_typical(
        layer.selective_recompute_elements_per_sample, elements * SELECTIVE_SAVED_SHARE
    )
    return BlockBytes(elements * size, inputs * size, costly * size, 2 * inputs * size)


def _traced_or_typical(counted: float | None, typical: float) -> float:
    return typical if counted is None else counted


# ---------------------------------------------------------------- tensors of a decoder's block

_NONE_OR_SELECTIVE: tuple[Recompute, ...] = ("none", "selective")
_SCORES = "scores"


def _norm_and_dropout(part: str, dimensions: DecoderConfig, framework: FrameworkTraits) -> list[SavedTensor]:
    """Return the saved tensors of the normalization before a half of a block, and of its dropout."""
    hidden = dimensions.hidden
    tensors = [
        SavedTensor(f"{part} norm's input", hidden, "sequence"),
        SavedTensor(f"{part}'s input", hidden, "sequence" if framework.regathers_sequence else "nothing"),
    ]
    if framework.architecture == "llama":
        tensors.append(SavedTensor(f"{part} norm's scale", 1, "sequence", element_bytes=4))
    if dimensions.dropout > 0 or framework.architecture == "gpt":
        tensors.append(SavedTensor(f"{part} dropout's mask", hidden, "sequence", element_bytes=1))
    return tensors


def _attention(
    dimensions: DecoderConfig, sequence_length: int, plan: Plan, framework: FrameworkTraits
) -> list[SavedTensor]:
    heads = dimensions.heads
    if dimensions.uses_latent_attention:
        rank, query_rank = dimensions.key_value_rank, dimensions.query_rank
        plain, rotary, width = dimensions.head_dim, dimensions.rope_head_dim, dimensions.value_head_dim
        # Every rank computes the narrow vectors, and uses them for its own heads.
        tensors = [
            SavedTensor("query's vector, before and after its norm", 2 * query_rank, "nothing"),
            SavedTensor("key and value's vector, likewise, and the rotary key", 2 * rank + rotary, "nothing"),
            SavedTensor("scales of both norms", 2, "nothing", element_bytes=4),
            SavedTensor("query", heads * (plain + rotary), "tp"),
            SavedTensor("key", heads * (plain + rotary), "tp"),
            SavedTensor("plain key and value", heads * (plain + width), "tp"),
        ]
    else:
        width = dimensions.head_dim
        kv_heads = kv_heads_held(dimensions, plan)
        tensors = [
            SavedTensor("query", heads * width, "tp"),
            SavedTensor("key", kv_heads * width, "tp"),
            SavedTensor("value", kv_heads * width, "tp"),
        ]
        if dimensions.qk_norm:
            tensors.append(SavedTensor("head norms' inputs", (heads + kv_heads) * width, "tp"))
            tensors.append(SavedTensor("head norms' scales", heads + kv_heads, "tp", element_bytes=4))
    tensors.append(SavedTensor("attended", heads * width, "tp", _NONE_OR_SELECTIVE))
    if plan.cp > 1 and plan.cp_method == "all_to_all":
        tensors.append(SavedTensor("attended, given back", heads * width, "tp"))
    if framework.attention == "scores":
        # Softmax, its dropout's mask, and the masked output: 2 + 1 + 2 bytes.
        compute = ELEMENT_BYTES[plan.precision]
        tensors.append(SavedTensor(_SCORES, heads * sequence_length, "tp", element_bytes=2 * compute + 1))
    elif framework.architecture == "llama":
        tensors.append(SavedTensor("log-sum-exp", heads, "tp", _NONE_OR_SELECTIVE, element_bytes=4))
    return tensors


def kv_heads_held(dimensions: DecoderConfig, plan: Plan) -> int:
    """Return the number of key and value heads, summed over the ranks of `tp`.

    Each rank has at least one; heads are repeated until the ranks of an all-to-all can share them.
    """
    heads = max(dimensions.kv_heads, plan.tp)
    if plan.cp > 1 and plan.cp_method == "all_to_all":
        heads *= plan.cp // math.gcd(max(heads // plan.tp, 1), plan.cp)
    return heads


def _feed_forward(
    name: str, width: int, dimensions: DecoderConfig, framework: FrameworkTraits
) -> list[SavedTensor]:
    if dimensions.activation_function == "gelu":
        return [SavedTensor(f"{name}'s activation: input and output", 2 * width, "tp")]
    if framework.fuses_pointwise:
        return [SavedTensor(f"{name}'s gate, up and their product", 3 * width, "tp")]
    return [SavedTensor(f"{name}'s gate, its SiLU, up and their product", 4 * width, "tp")]


def _experts(dimensions: DecoderConfig, framework: FrameworkTraits) -> list[SavedTensor]:
    """Return the saved tensors of a block's experts.

    Each token's vector is copied to the ranks of its experts; ranks of `ep` receive as many copies as they
    send, where experts are used evenly.
    """
    choices, width = dimensions.experts_per_token, dimensions.expert_width
    tensors = [
        SavedTensor("router's scores, before and after", 2 * dimensions.experts, "sequence", element_bytes=4),
        SavedTensor("copies for experts", choices * dimensions.hidden, "nothing"),
        SavedTensor("experts' gate, up and weighted product", 3 * choices * width, "tp"),
        SavedTensor("weights of experts", choices, "nothing", element_bytes=4),
    ]
    if dimensions.shared_experts:
        tensors += _feed_forward("shared experts", dimensions.shared_experts * width, dimensions, framework)
    return tensors


def _selective_unless_score(tensor: SavedTensor) -> SavedTensor:
    """Return `tensor` saved under selective recompute too, unless it is a score.

    Only attention's core runs again (Korthikanti et al. 2022, section 5).
    """
    if tensor.name == _SCORES or "full" in tensor.recompute_policies:
        return tensor
    return tensor._replace(recompute_policies=_NONE_OR_SELECTIVE)


def _selective_saved(dimensions: DecoderConfig, plan: Plan, *, experts: bool) -> list[SavedTensor]:
    """Return the tensors that selective recompute saves: every second product, and received tensors."""
    hidden, width = dimensions.hidden, dimensions.expert_width
    products: list[tuple[float, Split]] = []
    if dimensions.uses_latent_attention:
        plain, rotary, value = dimensions.head_dim, dimensions.rope_head_dim, dimensions.value_head_dim
        products += [
            (dimensions.query_rank, "nothing"),
            (dimensions.heads * (plain + rotary), "tp"),
            (dimensions.key_value_rank + rotary, "nothing"),
            (dimensions.heads * (plain + value), "tp"),
            (hidden, "nothing"),
        ]
        attended = dimensions.heads * value
        exchanged = attended + dimensions.heads * (2 * (plain + rotary) + value)
    else:
        key_width = kv_heads_held(dimensions, plan) * dimensions.head_dim
        attended = dimensions.heads * dimensions.head_dim
        products += [(attended, "tp"), (key_width, "tp"), (key_width, "tp"), (hidden, "nothing")]
        exchanged = 2 * attended + 2 * key_width
    networks = 1
    if experts:
        choices = dimensions.experts_per_token
        expert_width = choices * width
        products += [(dimensions.experts, "sequence"), (expert_width, "tp"), (expert_width, "tp")]
        products.append((choices * hidden, "nothing"))
        if dimensions.shared_experts:
            shared = dimensions.shared_experts * width
            products += [(shared, "tp"), (shared, "tp"), (hidden, "nothing")]
            networks = 2
    else:
        forward_width = dimensions.feed_forward
        products += [(forward_width, "tp") for _ in range(dimensions.feed_forward_matrices - 1)]
        products.append((hidden, "nothing"))
    policies: tuple[Recompute, ...] = ("selective",)
    tensors = [
        SavedTensor(f"product {2 * at}", size, split, policies)
        for at, (size, split) in enumerate(products[::2])
    ]
    if plan.sequence_parallel:
        tensors.append(SavedTensor("scattered sums", (1 + networks) * hidden, "sequence", policies))
    if plan.cp > 1 and plan.cp_method == "all_to_all":
        tensors.append(SavedTensor("exchanged heads", exchanged, "tp", policies))
    if experts and plan.ep > 1:
        tensors.append(
            SavedTensor("exchanged copies", 2 * dimensions.experts_per_token * hidden, "nothing", policies)
        )
    return tensors


def _backward_workspace(
    dimensions: DecoderConfig, sequence_length: int, plan: Plan, framework: FrameworkTraits
) -> float:
    """Return the additional bytes per token of backward.

    They are gradients of two of the widest tensors, or of two sets of scores, and of a half's input and
    output.
    """
    widest = max(
        dimensions.feed_forward,
        dimensions.heads * dimensions.head_dim,
        dimensions.heads * sequence_length if framework.attention == "scores" else 0,
        dimensions.experts_per_token * max(dimensions.expert_width, dimensions.hidden * plan.tp)
        if dimensions.experts
        else 0,
    )
    return ELEMENT_BYTES[plan.precision] * 2 * (widest / plan.tp + dimensions.hidden)
