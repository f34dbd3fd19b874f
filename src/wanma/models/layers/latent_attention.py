"""Multi-head latent attention (DeepSeek-AI 2024, "DeepSeek-V2", section 2.1)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from wanma.models.config.dimensions import DecoderConfig
from wanma.models.layers.attention import DotProductAttention
from wanma.models.layers.rms_norm import RMSNorm
from wanma.models.layers.rotary_embedding import RotaryFrequencies, apply_rotary_embedding


class LatentAttention(nn.Module):
    """Latent attention: causal attention with queries, and keys and values, each from a narrow latent vector.

    The last `rope_head_dim` elements of a head's query and key have a rotary position; those of the key are
    shared by all heads, and are computed from the hidden state directly. This is the form for training,
    with keys and values computed explicitly; published weights have the same matrices.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        hidden, epsilon, heads = config.hidden, config.norm_epsilon, config.heads
        query_latent, self.latent_dim = config.query_rank, config.key_value_rank
        self.head_dim, self.rope_head_dim = config.head_dim, config.rope_head_dim
        self.value_head_dim = config.value_head_dim
        self.query_latent = nn.Linear(hidden, query_latent, bias=False)
        self.query_latent_norm = RMSNorm(query_latent, eps=epsilon)
        self.query = nn.Linear(query_latent, heads * (self.head_dim + self.rope_head_dim), bias=False)
        self.key_value_latent = nn.Linear(hidden, self.latent_dim + self.rope_head_dim, bias=False)
        self.key_value_latent_norm = RMSNorm(self.latent_dim, eps=epsilon)
        self.key_value = nn.Linear(self.latent_dim, heads * (self.head_dim + self.value_head_dim), bias=False)
        self.output = nn.Linear(heads * self.value_head_dim, hidden, bias=False)
        self.core = DotProductAttention()

    def forward(self, x: Tensor, rotary: RotaryFrequencies, mask: Tensor | None) -> Tensor:
        """Map (rows, sequence, hidden) to the same shape.

        Args:
            x: hidden states.
            rotary: result of `compute_rotary_frequencies` for `rope_head_dim`.
            mask: result of the model's `AttentionMask`.
        """
        # The number of heads follows from the projections: under tensor parallelism a rank has its share.
        query = self.query(self.query_latent_norm(self.query_latent(x)))
        query = query.unflatten(-1, (-1, self.head_dim + self.rope_head_dim))
        plain_query, rotary_query = query.split((self.head_dim, self.rope_head_dim), dim=-1)
        query = torch.cat((plain_query, apply_rotary_embedding(rotary_query, rotary)), dim=-1)

        latent, shared_key = self.key_value_latent(x).split((self.latent_dim, self.rope_head_dim), dim=-1)
        rotary_key = apply_rotary_embedding(
            shared_key.unsqueeze(-2), rotary
        )  # (rows, sequence, 1, rope_head_dim)
        key_value = self.key_value(self.key_value_latent_norm(latent))
        key_value = key_value.unflatten(-1, (-1, self.head_dim + self.value_head_dim))
        plain_key, value = key_value.split((self.head_dim, self.value_head_dim), dim=-1)
        key = torch.cat((plain_key, rotary_key.expand(*plain_key.shape[:-1], -1)), dim=-1)

        output: Tensor = self.output(self.core(query, key, value, mask).flatten(2))
        return output
