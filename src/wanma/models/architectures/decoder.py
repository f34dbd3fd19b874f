"""Llama-style decoder (Touvron et al. 2023), with RMSNorm, rotary embedding and grouped-query attention.

Feed-forward networks are SwiGLU or GELU. The decoder knows no parallelism. Three properties make it
splittable: children may be absent (a pipeline stage holds some of them, under the same names), head counts
follow from the projected tensors, and nothing lives in buffers. `decoder_layout` declares its parallel spec.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from wanma.models.config.dimensions import DecoderDimensions
from wanma.models.keyed_random.dropout import KeyedDropout
from wanma.models.layers.attention import AttentionMask, DotProductAttention
from wanma.models.layers.experts import MixtureOfExperts
from wanma.models.layers.feed_forward import feed_forward_network
from wanma.models.layers.latent_attention import LatentAttention
from wanma.models.layers.rms_norm import RMSNorm
from wanma.models.layers.rotary_embedding import Rotary, rotary_factors, rotate
from wanma.models.state_dict.decoder_adapter import PublishedDecoder
from wanma.models.structure.parallel_spec import Layout, TensorRole, tie_parameters


class Decoder(PublishedDecoder, nn.Module):
    """Decoder from tokens to logits.

    Children: `embedding`, `layers` (by number: "0", "1", ...), `norm`, `head`. A pipeline stage sets
    `embedding`, or `norm` and `head`, to None and removes blocks from `layers`; a stage without
    `embedding` takes hidden states where the first takes tokens.
    """

    def __init__(self, dimensions: DecoderDimensions) -> None:
        super().__init__()
        if dimensions.vocabulary is None:
            raise ValueError("a decoder needs dimensions with a vocabulary")
        self.dimensions = dimensions
        self.layout = decoder_layout(dimensions)
        self.mask = AttentionMask()
        self.embedding: nn.Embedding | None = nn.Embedding(dimensions.vocabulary, dimensions.hidden)
        self.layers = nn.ModuleDict(
            {str(number): Block(dimensions, number) for number in range(dimensions.layers)}
        )
        self.norm: RMSNorm | None = RMSNorm(dimensions.hidden, eps=dimensions.norm_epsilon)
        self.head: nn.Linear | None = nn.Linear(dimensions.hidden, dimensions.vocabulary, bias=False)
        tie_parameters(self, self.layout.tied)

    def forward(
        self, tokens: Tensor, documents: Tensor | None = None, positions: Tensor | None = None
    ) -> Tensor:
        """Compute the logits of the next token at every position.

        Args:
            tokens: (rows, sequence) int64; without an embedding, hidden states (rows, sequence, hidden).
            documents: (rows, sequence), number of the document each token belongs to; attention stays
                within a document. None: a row is one document.
            positions: (rows, sequence) or (sequence,), position of each token in its document, for the
                rotary angles. None: 0, 1, ... along the row. Hidden states may be a shard of the
                sequence that is gathered inside the blocks; positions are always of the whole sequence.

        Returns:
            (rows, sequence, vocabulary); without a head, hidden states (rows, sequence, hidden).
        """
        self._check_tie()
        hidden: Tensor = tokens if self.embedding is None else self.embedding(tokens)
        rotary = rotary_factors(
            torch.arange(tokens.shape[1], device=tokens.device) if positions is None else positions,
            self.dimensions.rotary_width,
            self.dimensions.rope_theta,
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
                deviation /= math.sqrt(2 * self.dimensions.layers)
            tensor.normal_(0.0, deviation, generator=generator)

    def _check_tie(self) -> None:
        for kept, other in self.layout.tied:
            if self.embedding is None or self.head is None or self.embedding.weight is self.head.weight:
                continue
            raise RuntimeError(
                f"{kept} and {other} have come apart and would be trained as two; whatever replaced "
                "them must call tie_parameters(model, layout.tied)"
            )


class Block(nn.Module):
    """Decoder block: attention and feed-forward, each with its norm before and a residual connection.

    Args:
        dimensions: of the decoder.
        number: index of this block in the model.
    """

    def __init__(self, dimensions: DecoderDimensions, number: int) -> None:
        super().__init__()
        hidden, epsilon, name = dimensions.hidden, dimensions.norm_epsilon, f"layers.{number}"
        self.attention_norm = RMSNorm(hidden, eps=epsilon)
        self.attention = LatentAttention(dimensions) if dimensions.is_latent else Attention(dimensions)
        self.attention_dropout = _dropout(dimensions.dropout, f"{name}.attention_dropout")
        self.feed_forward_norm = RMSNorm(hidden, eps=epsilon)
        is_dense = dimensions.experts == 0 or number < dimensions.dense_layers
        self.feed_forward = feed_forward_network(dimensions) if is_dense else MixtureOfExperts(dimensions)
        self.feed_forward_dropout = _dropout(dimensions.dropout, f"{name}.feed_forward_dropout")

    def forward(self, hidden: Tensor, rotary: Rotary, mask: Tensor | None) -> Tensor:
        """Map (rows, sequence, hidden) to the same shape."""
        attended = self.attention_dropout(self.attention(self.attention_norm(hidden), rotary, mask))
        hidden = hidden + attended
        fed: Tensor = self.feed_forward_dropout(self.feed_forward(self.feed_forward_norm(hidden)))
        return hidden + fed


class Attention(nn.Module):
    """Grouped-query causal attention: query heads share key and value heads (Ainslie et al. 2023)."""

    def __init__(self, dimensions: DecoderDimensions) -> None:
        super().__init__()
        hidden, width, bias = dimensions.hidden, dimensions.head_width, dimensions.attention_bias
        self.head_width = width
        self.query = nn.Linear(hidden, dimensions.heads * width, bias=bias)
        self.key = nn.Linear(hidden, dimensions.kv_heads * width, bias=bias)
        self.value = nn.Linear(hidden, dimensions.kv_heads * width, bias=bias)
        self.output = nn.Linear(dimensions.heads * width, hidden, bias=False)
        self.core = DotProductAttention()
        self.query_norm = (
            RMSNorm(width, eps=dimensions.norm_epsilon) if dimensions.head_norm else nn.Identity()
        )
        self.key_norm = RMSNorm(width, eps=dimensions.norm_epsilon) if dimensions.head_norm else nn.Identity()

    def forward(self, x: Tensor, rotary: Rotary, mask: Tensor | None) -> Tensor:
        """Map (rows, sequence, hidden) to the same shape.

        Args:
            x: hidden states.
            rotary: result of `rotary_factors`.
            mask: result of the model's `AttentionMask`.
        """
        # The number of heads follows from the projections: under tensor parallelism a rank has its share.
        query, key, value = (
            projection(x).unflatten(-1, (-1, self.head_width))
            for projection in (self.query, self.key, self.value)
        )
        query, key = rotate(self.query_norm(query), rotary), rotate(self.key_norm(key), rotary)
        joined: Tensor = self.output(self.core(query, key, value, mask).flatten(2))
        return joined


def decoder_layout(dimensions: DecoderDimensions) -> Layout:
    """Return the parallel spec of a decoder."""
    return Layout(
        blocks="layers",
        first=("embedding",),
        last=("norm", "head"),
        tensor={
            "embedding": "vocabulary",
            **(_LATENT_ATTENTION if dimensions.is_latent else _ATTENTION),
            **_feed_forward_roles(dimensions),
            "layers.*.*_norm": "norm",
            "norm": "norm",
            "head": "head",
        },
        heads=dimensions.heads,
        kv_heads=dimensions.kv_heads,
        mask="mask",
        attention="layers.*.attention.core",
        experts="layers.*.feed_forward.experts" if dimensions.experts else None,
        tied=(("embedding.weight", "head.weight"),) if dimensions.tie_embeddings else (),
    )


_ATTENTION: dict[str, TensorRole] = {
    "layers.*.attention": "gathered",
    "layers.*.attention.query": "column",
    "layers.*.attention.key": "key_value",
    "layers.*.attention.value": "key_value",
    "layers.*.attention.output": "row",
    "layers.*.attention.*_norm": "head_norm",
}

_LATENT_ATTENTION: dict[str, TensorRole] = {
    "layers.*.attention": "gathered",
    # Every rank computes the latent vectors, and uses them for its own heads.
    "layers.*.attention.*_latent": "head_norm",
    "layers.*.attention.*_norm": "head_norm",
    "layers.*.attention.query": "column",
    "layers.*.attention.key_value": "column",
    "layers.*.attention.output": "row",
}


def _feed_forward_roles(dimensions: DecoderDimensions) -> dict[str, TensorRole]:
    """Return tensor-parallel styles of networks that process every token; `Layout.experts` has the others."""
    dense = ["layers.*.feed_forward"]
    if dimensions.experts:
        dense = [f"layers.{number}.feed_forward" for number in range(dimensions.dense_layers)]
        dense.append("layers.*.feed_forward.shared")
    roles: dict[str, TensorRole] = {"layers.*.feed_forward.router": "norm"}  # it acts on single tokens
    for network in dense:
        roles[network] = "gathered"
        if dimensions.activation_function == "swiglu":
            roles[f"{network}.gate"] = "column"
        roles |= {f"{network}.up": "column", f"{network}.down": "row"}
    return roles


def _dropout(probability: float, name: str) -> nn.Module:
    return KeyedDropout(probability, name) if probability > 0 else nn.Identity()
