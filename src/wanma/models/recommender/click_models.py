"""Recommenders that score a row of categorical and dense features: DLRM and DCNv2."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wanma.models.recommender.base import Recommender, perceptron
from wanma.models.recommender.config import RecommenderConfig
from wanma.models.recommender.embedding_tables import OFFSETS, EmbeddingTables


class ClickModel(Recommender):
    """Base class: embeddings of all features, and a network for the dense ones."""

    def __init__(self, config: RecommenderConfig) -> None:
        super().__init__(config)
        self.embeddings = EmbeddingTables(config.tables, config.embedding, config.bag_sizes)
        self.bottom = (
            perceptron((config.dense, *config.bottom), ends_with_relu=True) if config.dense else None
        )
        self.vector_count = len(config.tables) + (self.bottom is not None)
        """Number of vectors that interact."""

    def forward(self, dense: Tensor | None = None, **features: Tensor) -> dict[str, Tensor]:
        """Return `scores` (rows, 1), before a sigmoid.

        Args:
            dense: dense features, (rows, dense); None without any.
            features: ids and offsets as of `EmbeddingTables`; a feature without offsets has one id a row.
        """
        embeddings = self.embeddings(_with_offsets(self.embeddings.rows, features))
        # The network of the dense features runs while vectors are on their way.
        first = [] if self.bottom is None else [self.bottom(dense)]
        return {"scores": self.score([*first, *embeddings()])}

    @abstractmethod
    def score(self, vectors: Sequence[Tensor]) -> Tensor:
        """Return scores (rows, 1) of vectors, each (rows, width)."""


class Dlrm(ClickModel):
    """DLRM (Naumov et al. 2019): products of all pairs of vectors, beside the one of the dense features."""

    def __init__(self, config: RecommenderConfig) -> None:
        super().__init__(config)
        pairs = self.vector_count * (self.vector_count - 1) // 2
        inputs = pairs + (config.embedding if config.dense else 0)
        self.top = perceptron((inputs, *config.top, 1), ends_with_relu=False)
        self.interaction: Callable[[Sequence[Tensor], bool], Tensor] = interact
        """Interaction of the vectors, by torch's operators or compiled code; it may add columns of zeros."""

    def score(self, vectors: Sequence[Tensor]) -> Tensor:
        inputs, (first, *layers) = self.interaction(vectors, self.bottom is not None), self.top
        assert isinstance(first, nn.Linear)
        # A product over columns of zeros takes less time than one over rows that begin within a cache line.
        excess = inputs.shape[1] - first.in_features
        padded = F.pad(first.weight, (0, excess)) if excess else None
        scores: Tensor = first(inputs) if padded is None else F.linear(inputs, padded, first.bias)
        for layer in layers:
            scores = layer(scores)
        return scores


def interact(vectors: Sequence[Tensor], keeps_first: bool) -> Tensor:
    """Return the products of all pairs of vectors, (rows, pairs), after the first vector if it is kept.

    Args:
        vectors: vectors, each (rows, width).
        keeps_first: true if the result begins with the first vector.
    """
    count, stacked = len(vectors), torch.stack(list(vectors), 1)
    first, second = torch.tril_indices(count, count, -1, device=stacked.device)
    # One index is several times as fast on CPUs as two, forward and backward.
    pairs = torch.bmm(stacked, stacked.transpose(1, 2)).flatten(1).index_select(1, first * count + second)
    return torch.cat([vectors[0], pairs], 1) if keeps_first else pairs


class DcnV2(ClickModel):
    """DCNv2 (Wang et al. 2021): low-rank cross layers over all vectors, then a network, as MLPerf has it."""

    def __init__(self, config: RecommenderConfig) -> None:
        super().__init__(config)
        width = self.vector_count * config.embedding
        self.cross = nn.Sequential(
            *(_CrossLayer(width, config.cross_rank) for _ in range(config.cross_layers))
        )
        self.top = perceptron((width, *config.top, 1), ends_with_relu=False)

    def score(self, vectors: Sequence[Tensor]) -> Tensor:
        x = start = torch.cat(list(vectors), 1)
        for layer in self.cross:
            x = layer(start, x)
        scores: Tensor = self.top(x)
        return scores


class _CrossLayer(nn.Module):
    """Low-rank cross layer: start × (U V x + b) + x (Wang et al. 2021, eq. 2)."""

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.down = nn.Linear(width, rank, bias=False)
        self.up = nn.Linear(rank, width)

    def forward(self, start: Tensor, x: Tensor) -> Tensor:
        """Map (rows, width) to (rows, width)."""
        change: Tensor = self.up(self.down(x))
        return start * change + x


def _with_offsets(names: Iterable[str], features: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return features of which those without offsets are bags of one id, that of the first candidate."""
    bags = dict(features)
    for name in names:
        if name + OFFSETS not in features:
            ids = features[name]
            bags[name] = ids[:, 0] if ids.ndim == 2 else ids
            bags[name + OFFSETS] = torch.arange(len(ids), device=ids.device)
    return bags
