"""Decoder and data of the peers' suites in plain PyTorch; wanma and all peers on PyTorch train them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from tokens import draw_tokens, draw_weights
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset


class Block(nn.Module):
    """Block of GPT-2: attention and feed-forward network, each after a norm (Radford et al. 2019)."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(hidden)
        self.attention_in, self.attention_out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.feed_forward_norm = nn.LayerNorm(hidden)
        self.feed_forward_in = nn.Linear(hidden, 4 * hidden)
        self.feed_forward_out = nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:  # (batch, sequence, hidden)
        queries, keys, values = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)  # (batch, heads, sequence, width)
            for part in self.attention_in(self.attention_norm(x)).chunk(3, dim=-1)
        )
        attention = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        x = x + self.attention_out(attention.transpose(1, 2).flatten(-2))
        inner: Tensor = self.feed_forward_out(F.gelu(self.feed_forward_in(self.feed_forward_norm(x))))
        return x + inner


class Decoder(nn.Module):
    """GPT-2 with an output matrix of its own: tokens (batch, sequence) to logits (…, vocabulary)."""

    def __init__(
        self, vocabulary: int, sequence: int, layers: int, hidden: int, heads: int, seed: int
    ) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, hidden), nn.Embedding(sequence, hidden)
        self.blocks = nn.ModuleList(Block(hidden, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(hidden), nn.Linear(hidden, vocabulary, bias=False)
        weights = draw_weights(vocabulary, sequence, layers, hidden, seed)
        self.load_state_dict({name: torch.from_numpy(value) for name, value in weights.items()})

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class Samples(Dataset[tuple[Tensor, Tensor]]):
    """Samples in memory: inputs and targets (sequence,)."""

    def __init__(self, samples: int, sequence: int, vocabulary: int, seed: int) -> None:
        self.rows = torch.from_numpy(draw_tokens(samples, sequence, vocabulary, seed))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.rows[index, :-1], self.rows[index, 1:]


class SampleStream(IterableDataset[tuple[Tensor, Tensor]]):
    """The same in their order: wanma shuffles what has numbers, and the peers' samplers do not."""

    def __init__(self, samples: int, sequence: int, vocabulary: int, seed: int) -> None:
        self.samples = Samples(samples, sequence, vocabulary, seed)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for index in range(len(self.samples)):
            yield self.samples[index]
