"""Tiny decoder in plain PyTorch, imported by both contenders, so that it costs both the same."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, SEQUENCE, HIDDEN, HEADS, LAYERS = 320, 64, 64, 4, 2


class TinyDecoder(nn.Module):
    """Decoder of (rows, sequence) tokens to (rows, sequence, vocabulary) logits."""

    def __init__(
        self, sequence: int = SEQUENCE, hidden: int = HIDDEN, heads: int = HEADS, layers: int = LAYERS
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, hidden)
        self.positions = nn.Parameter(torch.zeros(sequence, hidden))
        self.blocks = nn.ModuleList(Block(hidden, heads) for _ in range(layers))
        self.head = nn.Linear(hidden, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens) + self.positions
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(hidden)
        return logits


class Block(nn.Module):
    """Attention and feed-forward with residuals."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first_norm = nn.LayerNorm(hidden)
        self.projections = nn.Linear(hidden, 3 * hidden)
        self.output = nn.Linear(hidden, hidden)
        self.second_norm = nn.LayerNorm(hidden)
        self.feed_forward = nn.Sequential(
            nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        rows, sequence, _ = hidden.shape
        projected = self.projections(self.first_norm(hidden)).view(rows, sequence, 3, self.heads, -1)
        query, key, value = projected.permute(2, 0, 3, 1, 4)  # (rows, heads, sequence, head width)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.output(attended.transpose(1, 2).flatten(2))
        result: Tensor = hidden + self.feed_forward(self.second_norm(hidden))
        return result
