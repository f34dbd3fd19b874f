"""What fixes a model's parameters and arithmetic, as pure data. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ActivationFunction = Literal["swiglu", "gelu"]
"""Function inside a feed-forward network. "swiglu": three matrices, of which one gates (Shazeer 2020).
"gelu": the two of GPT, with GELU's approximation by tanh (Hendrycks and Gimpel 2016), as in GPT-2's code."""


@dataclass(frozen=True)
class DecoderDimensions:
    """Everything that fixes a decoder's parameters and arithmetic, but for the sequence length."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    """Key and value heads; each serves `heads / kv_heads` query heads."""
    feed_forward: int
    """Inner width of the feed-forward network."""
    vocabulary: int | None
    rope_theta: float = 10_000.0
    norm_epsilon: float = 1e-5
    tie_embeddings: bool = False
    dropout: float = 0.0
    """Of each block's two branches before they join the residual stream."""
    head_size: int | None = None
    """Width of one head; default: hidden / heads."""
    attention_bias: bool = False
    """Query, key and value projections have a bias (Qwen 2.5)."""
    head_norm: bool = False
    """Queries and keys are RMS-normalised per head (Qwen 3)."""
    query_rank: int = 0
    """Multi-head latent attention (DeepSeek-V2): width of the vector that queries are made from; 0: plain
    attention. With it all heads have keys and values of their own."""
    key_value_rank: int = 0
    """Likewise of the one that keys and values are made from."""
    rotary_size: int | None = None
    """Latent attention: elements that know their position, beside those of `head_size`."""
    value_size: int | None = None
    """Latent attention: width of one head's values."""
    experts: int = 0
    """Routed experts of a block; 0: one feed-forward network instead."""
    experts_per_token: int = 0
    shared_experts: int = 0
    """Experts that every token passes; together one network of so many times the width."""
    expert_feed_forward: int | None = None
    """Inner width of one expert; default: feed_forward."""
    dense_layers: int = 0
    """First blocks that have one network of `feed_forward` and no experts."""
    router: Literal["softmax", "sigmoid"] = "softmax"
    """How router logits become scores."""
    normalize_weights: bool = True
    """The weights of a token's experts add up to one before they are scaled."""
    weight_scale: float = 1.0
    """Of those weights."""
    expert_groups: int = 1
    """Groups of neighbouring experts (DeepSeek-V3's n_group), of which
    `groups_per_token` (topk_group) are open to a token."""
    groups_per_token: int = 1
    balance: Literal["none", "bias", "loss"] = "none"
    """What keeps the use of experts even; see `models.routing`."""
    balance_rate: float = 0.0
    """Step of the bias, or weight of the loss."""
    balance_group: int = 1
    """Samples over which a balancing loss and capacity count."""
    capacity: float = 0.0
    """Tokens that an expert takes of such a group, times an even share; 0: all."""
    activation_function: ActivationFunction = "swiglu"
    """Of the feed-forward network; experts are SwiGLU networks."""

    @property
    def head_width(self) -> int:
        return self.head_size if self.head_size is not None else self.hidden // self.heads

    @property
    def rotary_width(self) -> int:
        """Elements of a head that know their position."""
        return self.rotary_size if self.rotary_size is not None else self.head_width

    @property
    def value_width(self) -> int:
        return self.value_size if self.value_size is not None else self.head_width

    @property
    def is_latent(self) -> bool:
        """Whether attention is multi-head latent attention."""
        return self.key_value_rank > 0

    @property
    def network_matrices(self) -> int:
        """Matrices of a feed-forward network of width `feed_forward`."""
        return 3 if self.activation_function == "swiglu" else 2

    @property
    def expert_width(self) -> int:
        return self.expert_feed_forward if self.expert_feed_forward is not None else self.feed_forward

    @property
    def couples_samples(self) -> bool:
        """Whether samples of one `balance_group` must be computed in one micro-batch."""
        return self.balance_group > 1


@dataclass(frozen=True)
class VisionDimensions:
    """Everything that fixes an image classifier."""

    family: Literal["convnet", "resnet"]
    classes: int
    channels: int
    height: int
    width: int
    depth: int | None
    """ResNet: 18 or 50."""
    statistics_group: int
    """Samples that share one batch-normalisation statistic."""
