"""Llama-style decoder (Touvron et al. 2023), with RMSNorm, rotary embedding and grouped-query attention.

Feed-forward networks are SwiGLU or GELU. The decoder knows no parallelism. Three properties make it
splittable: children may be absent (a pipeline stage holds some of them, under the same names), head counts
follow from the projected tensors, and nothing lives in buffers. `decoder_parallel_spec` declares its
parallel spec.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from wanma.models.config.dimensions import DecoderConfig
from wanma.models.keyed_random.dropout import KeyedDropout
from wanma.models.layers.attention import AttentionMask, DotProductAttention
from wanma.models.layers.experts import MixtureOfExperts
from wanma.models.layers.feed_forward import build_feed_forward
from wanma.models.layers.latent_attention import LatentAttention
from wanma.models.layers.rms_norm import RMSNorm
from wanma.models.layers.rotary_embedding import (
    RotaryFrequencies,
    apply_rotary_embedding,
    compute_rotary_frequencies,
)
from wanma.models.state_dict.decoder_adapter import DecoderStateDictAdapter
from wanma.models.structure.parallel_spec import ParallelSpec, TensorParallelStyle, tie_parameters


class Decoder(DecoderStateDictAdapter, nn.Module):
    """Decoder from tokens to logits.

    Children: `embedding`, `layers` (by number: "0", "1", ...), `norm`, `head`. A pipeline stage sets
    `embedding`, or `norm` and `head`, to None and removes blocks from `layers`; a stage without
    `embedding` takes hidden states where the first takes tokens.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        if config.vocabulary is None:
            raise ValueError("the configuration of a decoder needs a vocabulary")
        self.config = config
        self.parallel_spec = decoder_parallel_spec(config)
        self.mask = AttentionMask()
        self.embedding: nn.Embedding | None = nn.Embedding(config.vocabulary, config.hidden)
        self.layers = nn.ModuleDict({str(number): Block(config, number) for number in range(config.layers)})
        self.norm: RMSNorm | None = RMSNorm(config.hidden, eps=config.norm_epsilon)
        self.head: nn.Linear | None = nn.Linear(config.hidden, config.vocabulary, bias=False)
        tie_parameters(self, self.parallel_spec.tied_parameters)

    def forward(
        self, tokens: Tensor, documents: Tensor | None = None, positions: Tensor | None = None
    ) -> Tensor:
        """Compute the logits of the next token at every position.

        Args:
            tokens: (rows, sequence), integers; without an embedding, hidden states (rows, sequence, hidden).
            documents: (rows, sequence), number of the document each token belongs to; attention stays
                within a document. None: a row is one document.
            positions: (rows, sequence) or (sequence,), position of each token in its document, for the
                rotary angles. None: 0, 1, ... along the row. Hidden states may be a shard of the
                sequence that is gathered inside the blocks; positions are always of the whole sequence.

        Returns:
            (rows, sequence, vocabulary); without a head, hidden states (rows, sequence, hidden).
        """
        self._check_weight_tying()
        if self.embedding is not None and not tokens.is_floating_point():
            tokens = tokens.long()  # torch's embedding takes no smaller integers than int32
        hidden: Tensor = tokens if self.embedding is None else self.embedding(tokens)
        rotary = compute_rotary_frequencies(
            torch.arange(tokens.shape[1], device=tokens.device) if positions is None else positions,
            self.config.rope_head_dim,
            self.config.rope_theta,
            hidden.dtype,
        )
        mask = self.mask(documents)
        for block in self.layers.values():
            hidden = block(hidden, rotary, mask)
        if self.norm is not None:
            hidden = self.norm(hidden)
        if self.head is not None:
            hidden = self.head(hidden)
        return hidden

    def initialize_parameter(self, name: str, tensor: Tensor, generator: torch.Generator) -> None:
        """Fill a tile of parameter `name` in place.

        Normal with deviation 0.02, and 0.02 / sqrt(2 · layers) for the two projections of each block
        that add to the residual stream (Radford et al. 2019, section 2.3); norms one, biases zero.
        """
        module, _, kind = name.rpartition(".")
        if kind == "bias":
            tensor.zero_()
        elif module.endswith("norm"):
            tensor.fill_(1.0)
        else:
            deviation = 0.02
            adds = module.endswith(("attention.output", ".down")) or name.endswith("experts.down")
            if adds:
                deviation /= math.sqrt(2 * self.config.layers)
            tensor.normal_(0.0, deviation, generator=generator)

    def _check_weight_tying(self) -> None:
        for source, copy in self.parallel_spec.tied_parameters:
            if self.embedding is None or self.head is None or self.embedding.weight is self.head.weight:
                continue
            raise RuntimeError(
                f"{source} and {copy} are tied, but are no longer one parameter; call tie_parameters(model, "
                "parallel_spec.tied_parameters) after replacing either"
            )


class Block(nn.Module):
    """Decoder block: attention and feed-forward, each with its norm before and a residual connection.

    Args:
        config: of the decoder.
        index: index of this block in the model.
    """

    def __init__(self, config: DecoderConfig, index: int) -> None:
        super().__init__()
        hidden, epsilon, name = config.hidden, config.norm_epsilon, f"layers.{index}"
        self.attention_norm = RMSNorm(hidden, eps=epsilon)
        self.attention = LatentAttention(config) if config.uses_latent_attention else Attention(config)
        self.attention_dropout = _build_dropout(config.dropout, f"{name}.attention_dropout")
        self.feed_forward_norm = RMSNorm(hidden, eps=epsilon)
        is_dense = config.experts == 0 or index < config.dense_layers
        self.feed_forward = build_feed_forward(config) if is_dense else MixtureOfExperts(config)
        self.feed_forward_dropout = _build_dropout(config.dropout, f"{name}.feed_forward_dropout")

    def forward(self, hidden: Tensor, rotary: RotaryFrequencies, mask: Tensor | None) -> Tensor:
        """Map (rows, sequence, hidden) to the same shape."""
        attended = self.attention_dropout(self.attention(self.attention_norm(hidden), rotary, mask))
        hidden = hidden + attended
        feed_forward_output: Tensor = self.feed_forward_dropout(
            self.feed_forward(self.feed_forward_norm(hidden))
        )
        return hidden + feed_forward_output


class Attention(nn.Module):
    """Grouped-query causal attention: query heads share key and value heads (Ainslie et al. 2023)."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        hidden, width, bias = config.hidden, config.head_dim, config.attention_bias
        self.head_dim = width
        self.query = nn.Linear(hidden, config.heads * width, bias=bias)
        self.key = nn.Linear(hidden, config.kv_heads * width, bias=bias)
        self.value = nn.Linear(hidden, config.kv_heads * width, bias=bias)
        self.output = nn.Linear(config.heads * width, hidden, bias=False)
        self.core = DotProductAttention()
        self.query_norm = RMSNorm(width, eps=config.norm_epsilon) if config.qk_norm else nn.Identity()
        self.key_norm = RMSNorm(width, eps=config.norm_epsilon) if config.qk_norm else nn.Identity()

    def forward(self, x: Tensor, rotary: RotaryFrequencies, mask: Tensor | None) -> Tensor:
        """Map (rows, sequence, hidden) to the same shape.

        Args:
            x: hidden states.
            rotary: result of `compute_rotary_frequencies`.
            mask: result of the model's `AttentionMask`.
        """
        # The number of heads follows from the projections: under tensor parallelism a rank has its share.
        query, key, value = (
            projection(x).unflatten(-1, (-1, self.head_dim))
            for projection in (self.query, self.key, self.value)
        )
        query, key = (
            apply_rotary_embedding(self.query_norm(query), rotary),
            apply_rotary_embedding(self.key_norm(key), rotary),
        )
        output: Tensor = self.output(self.core(query, key, value, mask).flatten(2))
        return output


def decoder_parallel_spec(config: DecoderConfig) -> ParallelSpec:
    """Return the parallel spec of a decoder."""
    return ParallelSpec(
        blocks="layers",
        first_stage_modules=("embedding",),
        last_stage_modules=("norm", "head"),
        tensor_parallel_styles={
            "embedding": "vocabulary",
            **(_LATENT_ATTENTION_STYLES if config.uses_latent_attention else _ATTENTION_STYLES),
            **_feed_forward_styles(config),
            "layers.*.*_norm": "norm",
            "norm": "norm",
            "head": "head",
        },
        heads=config.heads,
        kv_heads=config.kv_heads,
        mask_module="mask",
        attention_cores="layers.*.attention.core",
        expert_modules="layers.*.feed_forward.experts" if config.experts else None,
        tied_parameters=(("embedding.weight", "head.weight"),) if config.tie_embeddings else (),
    )


_ATTENTION_STYLES: dict[str, TensorParallelStyle] = {
    "layers.*.attention": "gathered",
    "layers.*.attention.query": "column",
    "layers.*.attention.key": "key_value",
    "layers.*.attention.value": "key_value",
    "layers.*.attention.output": "row",
    "layers.*.attention.*_norm": "head_norm",
}

_LATENT_ATTENTION_STYLES: dict[str, TensorParallelStyle] = {
    "layers.*.attention": "gathered",
    # Every rank computes the latent vectors, and uses them for its own heads.
    "layers.*.attention.*_latent": "head_norm",
    "layers.*.attention.*_norm": "head_norm",
    "layers.*.attention.query": "column",
    "layers.*.attention.key_value": "column",
    "layers.*.attention.output": "row",
}


def _feed_forward_styles(config: DecoderConfig) -> dict[str, TensorParallelStyle]:
    """Return tensor-parallel styles of all networks but experts (`ParallelSpec.expert_modules`)."""
    dense = ["layers.*.feed_forward"]
    if config.experts:
        dense = [f"layers.{number}.feed_forward" for number in range(config.dense_layers)]
        dense.append("layers.*.feed_forward.shared")
    roles: dict[str, TensorParallelStyle] = {
        "layers.*.feed_forward.router": "norm"
    }  # it acts on single tokens
    for network in dense:
        roles[network] = "gathered"
        if config.activation_function == "swiglu":
            roles[f"{network}.gate"] = "column"
        roles |= {f"{network}.up": "column", f"{network}.down": "row"}
    return roles


def _build_dropout(probability: float, name: str) -> nn.Module:
    return KeyedDropout(probability, name) if probability > 0 else nn.Identity()
