"""Plain torch modules of the kinds that people bring: a recommender, an encoder with a decoder, a ViT."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Recommender(nn.Module):
    """After DLRM (Naumov et al. 2019): tables of embeddings, dot products between them, two networks."""

    def __init__(
        self, rows: tuple[int, ...] = (1000, 5000), width: int = 16, dense: int = 13, sparse: bool = False
    ) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(size, width, mode="sum", sparse=sparse) for size in rows)
        self.bottom = nn.Sequential(nn.Linear(dense, 64), nn.ReLU(), nn.Linear(64, width), nn.ReLU())
        pairs = (len(rows) + 1) * len(rows) // 2
        self.top = nn.Sequential(nn.Linear(width + pairs, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, dense: Tensor, indices: Tensor) -> Tensor:
        """(rows, dense) and (rows, tables, bag) int64 to (rows, 1)."""
        x = self.bottom(dense)
        vectors = [x, *(table(indices[:, number]) for number, table in enumerate(self.tables))]
        stacked = torch.stack(vectors, 1)
        products = torch.bmm(stacked, stacked.transpose(1, 2))
        upper = torch.triu_indices(len(vectors), len(vectors), 1)
        return self.top(torch.cat([x, products[:, upper[0], upper[1]]], 1))


class Translator(nn.Module):
    """An encoder and a decoder, as T5 has them."""

    def __init__(self, hidden: int = 64, heads: int = 4, layers: int = 2, vocabulary: int = 300) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.encoder = nn.ModuleList(
            nn.TransformerEncoderLayer(hidden, heads, 4 * hidden, 0.0, batch_first=True)
            for _ in range(layers)
        )
        self.decoder = nn.ModuleList(
            nn.TransformerDecoderLayer(hidden, heads, 4 * hidden, 0.0, batch_first=True)
            for _ in range(layers)
        )
        self.head = nn.Linear(hidden, vocabulary)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Two of (rows, sequence) int64 to logits (rows, sequence, vocabulary)."""
        memory, x = self.embedding(source), self.embedding(target)
        for layer in self.encoder:
            memory = layer(memory)
        for layer in self.decoder:
            x = layer(x, memory)
        return self.head(x)


class ImageTransformer(nn.Module):
    """After ViT (Dosovitskiy et al. 2020): patches by a convolution, blocks of attention, one class token."""

    def __init__(
        self, hidden: int = 64, heads: int = 4, layers: int = 3, patch: int = 8, size: int = 32
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, hidden, patch, patch)
        self.token = nn.Parameter(torch.zeros(1, 1, hidden))
        self.positions = nn.Parameter(torch.zeros(1, (size // patch) ** 2 + 1, hidden))
        self.blocks = nn.Sequential(*(_Block(hidden, heads) for _ in range(layers)))
        self.head = nn.Linear(hidden, 10)

    def forward(self, images: Tensor) -> Tensor:
        """(rows, 3, size, size) to logits (rows, 10)."""
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.positions
        logits: Tensor = self.head(self.blocks(x)[:, 0])
        return logits


class _Block(nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.after = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.joined, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.wide, self.narrow = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        rows, tokens, hidden = x.shape
        parts = self.joined(self.before(x)).view(rows, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(*parts.unbind(0))
        x = x + self.out(seen.transpose(1, 2).reshape(rows, tokens, hidden))
        return x + self.narrow(F.gelu(self.wide(self.after(x))))
