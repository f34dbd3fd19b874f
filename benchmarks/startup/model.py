"""A tiny decoder in plain PyTorch, imported by both contenders: what they start must cost them the same."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, SEQUENCE, HIDDEN, HEADS, LAYERS = 320, 64, 64, 4, 2


class TinyDecoder(nn.Module):
    """(rows, sequence) tokens to (rows, sequence, vocabulary) logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.positions = nn.Parameter(torch.zeros(SEQUENCE, HIDDEN))
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens) + self.positions
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(hidden)
        return logits


class Block(nn.Module):
    """Attention and feed-forward with residuals."""

    def __init__(self) -> None:
        super().__init__()
        self.first_norm = nn.LayerNorm(HIDDEN)
        self.projections = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.output = nn.Linear(HIDDEN, HIDDEN)
        self.second_norm = nn.LayerNorm(HIDDEN)
        self.feed_forward = nn.Sequential(
            nn.Linear(HIDDEN, 4 * HIDDEN), nn.GELU(), nn.Linear(4 * HIDDEN, HIDDEN)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        rows = hidden.shape[0]
        projected = self.projections(self.first_norm(hidden)).view(rows, SEQUENCE, 3, HEADS, -1)
        query, key, value = projected.permute(2, 0, 3, 1, 4)  # (rows, heads, sequence, head width)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.output(attended.transpose(1, 2).flatten(2))
        result: Tensor = hidden + self.feed_forward(self.second_norm(hidden))
        return result
