"""Sublayer cost: parameters, products and saved elements of a decoder's sublayers, per token by formula.

Saved elements are what autograd keeps for backward, in elements of the hidden states' dtype, after
Korthikanti et al. 2022 (section 4.1) for these architectures; the attention scores are never saved.
"""

from __future__ import annotations

from dataclasses import dataclass

from wanma.models.config.dimensions import DecoderConfig


@dataclass(frozen=True)
class SublayerCost:
    """Cost of one sublayer: attention or feed-forward network, with the normalization before it."""

    parameters: int
    matmul_widths: tuple[int, ...]
    """Widths of the outputs of its matrix products, in their order."""
    matmul_input_widths: tuple[int, ...]
    """Widths of their inputs, in the same order; of experts those of one."""
    saved_elements: int
    expert_parameters: int = 0
    """Number of parameters of routed experts, included in `parameters`."""
    inactive_expert_parameters: int = 0
    """Number of parameters of experts that a token is not routed to, included in `expert_parameters`."""
    score_multiply_adds: int = 0
    """Number of multiply-adds per pair of tokens in attention."""
    always_saved_elements: int = 0
    """Elements that selective recompute saves beside every second product, included in `saved_elements`."""

    @property
    def product_multiply_adds(self) -> tuple[int, ...]:
        """Number of multiply-adds of each matrix product, in their order."""
        pairs = zip(self.matmul_widths, self.matmul_input_widths, strict=True)
        return tuple(output_width * input_width for output_width, input_width in pairs)

    @property
    def multiply_adds(self) -> int:
        """Number of multiply-adds of all matrix products."""
        return sum(self.product_multiply_adds)


def attention_cost(config: DecoderConfig) -> SublayerCost:
    """Return the cost of attention.

    Plain attention, with q = heads · head width and k likewise of the key/value heads, saves

        2 hidden            the normalization's input and output
        2 q + 2 k + heads   query, key, value, attention's output and its log-sum-exp
        1                   the normalization's scale

    and with normalized heads also q + k + heads + key/value heads. See `_latent_attention_cost` for the
    other kind.
    """
    if config.uses_latent_attention:
        return _latent_attention_cost(config)
    hidden, heads, kv_heads = config.hidden, config.heads, config.kv_heads
    query, key = heads * config.head_dim, kv_heads * config.head_dim
    matrices = hidden * (2 * query + 2 * key)
    parameters = matrices + hidden
    saved_elements = 2 * hidden + 2 * query + 2 * key + heads + 1
    if config.attention_bias:
        parameters += query + 2 * key
    if config.qk_norm:
        parameters += 2 * config.head_dim
        saved_elements += query + key + heads + kv_heads
    return SublayerCost(
        parameters,
        (query, key, key, hidden),
        (hidden, hidden, hidden, query),
        saved_elements,
        score_multiply_adds=2 * query,
        always_saved_elements=query + heads,
    )


def feed_forward_cost(config: DecoderConfig, *, has_experts: bool) -> SublayerCost:
    """Return the cost of the feed-forward network, or of the experts.

    One network of `feed_forward` saves

        2 hidden         the normalization's input and output
        4 feed_forward   gate, SiLU of gate, up, and their product
        1                the normalization's scale

    where GELU's saves 2 feed_forward instead of 4, its input and its output. Experts, to each of which a
    token's vector is copied beside the others of that expert, save

        2 hidden + 1                       as above
        choices · (hidden + 3 width + 1)   the copies; gate, up and their weighted product; the weights
        2 experts                          the router's scores, before and after the sigmoid or softmax
        4 · shared width                   as above, of the shared experts
    """
    hidden = config.hidden
    if not has_experts:
        inner_width = config.feed_forward
        input_matrices = config.feed_forward_matrices - 1
        matrices = (input_matrices + 1) * hidden * inner_width
        return SublayerCost(
            matrices + hidden,
            (*[inner_width] * input_matrices, hidden),
            (*[hidden] * input_matrices, inner_width),
            2 * hidden + 2 * input_matrices * inner_width + 1,
        )
    count, choices, width = config.experts, config.experts_per_token, config.expert_width
    shared = config.shared_experts * width
    expert_parameters = 3 * hidden * width
    always_used = hidden * count + 3 * hidden * shared
    products = (count, choices * width, choices * width, choices * hidden)
    inputs = (hidden, hidden, hidden, width)
    return SublayerCost(
        hidden + always_used + count * expert_parameters,
        (*products, shared, shared, hidden) if shared else products,
        (*inputs, hidden, hidden, shared) if shared else inputs,
        2 * hidden + 1 + choices * (hidden + 3 * width + 1) + 2 * count + 4 * shared,
        expert_parameters=count * expert_parameters,
        inactive_expert_parameters=(count - choices) * expert_parameters,
    )


def _latent_attention_cost(config: DecoderConfig) -> SublayerCost:
    """Return the cost of multi-head latent attention.

    It saves

        2 hidden + 1                          the normalization's input, output and scale
        2 query rank + 1                      the same of the queries' latent vector
        2 key/value rank + rotary width + 1   the same of the other, with the shared part of the keys
        heads · (head + rotary width)         query; and as much of the key
        heads · (head + value width)          the plain part of the key and the value, which are one tensor
        heads · (value width + 1)             attention's output and its log-sum-exp
    """
    hidden, heads = config.hidden, config.heads
    query_rank, rank = config.query_rank, config.key_value_rank
    plain, rotary, value = config.head_dim, config.rope_head_dim, config.value_head_dim
    products = (query_rank, heads * (plain + rotary), rank + rotary, heads * (plain + value), hidden)
    inputs = (hidden, query_rank, hidden, rank, heads * value)
    matrices = sum(
        input_width * output_width for input_width, output_width in zip(inputs, products, strict=True)
    )
    saved_elements = 2 * hidden + 2 * query_rank + 2 * rank + rotary + 3
    saved_elements += 2 * heads * (plain + rotary) + heads * (plain + value) + heads * (value + 1)
    return SublayerCost(
        matrices + hidden + query_rank + rank,
        products,
        inputs,
        saved_elements,
        score_multiply_adds=heads * (plain + rotary + value),
        always_saved_elements=heads * (value + 1),
    )
