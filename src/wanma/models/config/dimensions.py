"""Dimensions of a decoder and of an image classifier: parameters and arithmetic as data. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ActivationFunction = Literal["swiglu", "gelu"]
"""Activation function of a feed-forward network.

"swiglu": three matrices, one of them a gate (Shazeer 2020). "gelu": the two of GPT, with GELU's approximation
by tanh (Hendrycks and Gimpel 2016), as in GPT-2's code.
"""


@dataclass(frozen=True)
class DecoderConfig:
    """Dimensions of a decoder, which determine parameters and arithmetic, except the sequence length."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    """Number of key and value heads; each serves `heads / kv_heads` query heads."""
    feed_forward: int
    """Inner width of the feed-forward network."""
    vocabulary: int | None
    rope_theta: float = 10_000.0
    norm_epsilon: float = 1e-5
    tie_embeddings: bool = False
    dropout: float = 0.0
    """Dropout probability of each block's two branches before they join the residual stream."""
    explicit_head_dim: int | None = None
    """Width of one head; default: hidden / heads."""
    attention_bias: bool = False
    """True if query, key and value projections have a bias (Qwen 2.5)."""
    qk_norm: bool = False
    """True if queries and keys are RMS-normalized per head (Qwen 3)."""
    query_rank: int = 0
    """Width of the queries' latent vector in multi-head latent attention (DeepSeek-V2); 0: plain attention.

    With it all heads have keys and values of their own.
    """
    key_value_rank: int = 0
    """Width of the latent vector of keys and values in multi-head latent attention; 0: plain attention."""
    explicit_rope_head_dim: int | None = None
    """Elements of a head with rotary position in latent attention, beside those of `explicit_head_dim`."""
    explicit_value_head_dim: int | None = None
    """Width of one head's values in latent attention."""
    experts: int = 0
    """Number of routed experts of a block; 0: one feed-forward network instead."""
    experts_per_token: int = 0
    shared_experts: int = 0
    """Number of experts that process every token; together one network of that multiple of the width."""
    expert_feed_forward: int | None = None
    """Inner width of one expert; default: feed_forward."""
    dense_layers: int = 0
    """Number of first blocks with one network of `feed_forward` and no experts."""
    router: Literal["softmax", "sigmoid"] = "softmax"
    """Function from router logits to scores."""
    normalize_routing_weights: bool = True
    """True if the weights of a token's experts are normalized to a sum of one before they are scaled."""
    routing_scale: float = 1.0
    """Scale of the weights of a token's experts."""
    expert_groups: int = 1
    """Number of groups of neighbouring experts (DeepSeek-V3's n_group).

    A token may choose experts from `expert_groups_per_token` of them (topk_group).
    """
    expert_groups_per_token: int = 1
    balance: Literal["none", "bias", "loss"] = "none"
    """Method that keeps the load of experts even; see `models.layers.router`."""
    balance_rate: float = 0.0
    """Step of the bias, or weight of the loss."""
    balance_group: int = 1
    """Sample group: number of consecutive samples over which a balancing loss and capacity count."""
    capacity_factor: float = 0.0
    """Capacity factor: tokens that an expert accepts per sample group, over an even share; 0: unlimited."""
    activation_function: ActivationFunction = "swiglu"
    """Activation function of the feed-forward network; experts are SwiGLU networks."""

    @property
    def head_dim(self) -> int:
        return self.explicit_head_dim if self.explicit_head_dim is not None else self.hidden // self.heads

    @property
    def rope_head_dim(self) -> int:
        """Elements of a head with rotary position."""
        return self.explicit_rope_head_dim if self.explicit_rope_head_dim is not None else self.head_dim

    @property
    def value_head_dim(self) -> int:
        return self.explicit_value_head_dim if self.explicit_value_head_dim is not None else self.head_dim

    @property
    def uses_latent_attention(self) -> bool:
        """True if attention is multi-head latent attention."""
        return self.key_value_rank > 0

    @property
    def feed_forward_matrices(self) -> int:
        """Number of matrices of a feed-forward network of width `feed_forward`."""
        return 3 if self.activation_function == "swiglu" else 2

    @property
    def expert_width(self) -> int:
        return self.expert_feed_forward if self.expert_feed_forward is not None else self.feed_forward

    @property
    def has_sample_coupling(self) -> bool:
        """True if samples of one `balance_group` must be computed in one micro-batch."""
        return self.balance_group > 1


@dataclass(frozen=True)
class VisionConfig:
    """Dimensions of an image classifier."""

    family: Literal["convnet", "resnet"]
    classes: int
    channels: int
    height: int
    width: int
    depth: int | None
    """Depth of a ResNet, 18 or 50; None: a ConvNet."""
    batch_norm_group: int
    """Sample group: number of samples that share one batch-normalization statistic."""
