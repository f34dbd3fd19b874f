"""Recommenders whose score is a product of a user's and an item's vector: they rank a whole catalogue."""

from __future__ import annotations

from abc import abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wanma.models.recommender.base import Recommender, perceptron
from wanma.models.recommender.config import RecommenderConfig
from wanma.models.recommender.embedding_tables import EmbeddingTables


class PairModel(Recommender):
    """Base class of models with vectors of users and items, the product of which is the score."""

    def forward(self, **features: Tensor) -> dict[str, Tensor]:
        """Return scores of candidate items, and the vectors of users and items.

        Args:
            features: ids of users, (rows,), and of candidate items, (rows, candidates), by the names of
                their columns; perhaps `seen`, the items of a user in training, (rows, items), filled with -1.

        Returns:
            `scores` (rows, candidates); `users` (rows, width); `items` (rows, candidates, width); with `seen`
                also `rank` (rows,): the place of the first candidate among all items that are not seen, from
                1, behind those of equal score.
        """
        users = self.user_vectors(features[self.config.user])
        ids = features[self.config.item]
        items = self.item_vectors(ids)
        output = {"scores": (users.unsqueeze(1) * items).sum(2), "users": users, "items": items}
        if "seen" in features:
            output["rank"] = self._rank(users, ids[:, 0], features["seen"])
        return output

    def scores_of_all_items(self, users: Tensor) -> Tensor:
        """Return the scores of every item, (rows, items), for users (rows,)."""
        return self.user_vectors(users) @ self._catalogue().T

    @abstractmethod
    def user_vectors(self, ids: Tensor) -> Tensor:
        """Return the vectors (rows, width) of users (rows,)."""

    @abstractmethod
    def item_vectors(self, ids: Tensor) -> Tensor:
        """Return the vectors (..., width) of items (...)."""

    def _catalogue(self) -> Tensor:
        rows = self.config.tables[self.config.item]
        return self.item_vectors(torch.arange(rows, device=next(self.parameters()).device))

    def _rank(self, users: Tensor, items: Tensor, seen: Tensor) -> Tensor:
        scores = users @ self._catalogue().T
        own = scores.gather(1, items[:, None])
        is_seen = torch.zeros_like(scores, dtype=torch.bool)
        rows = torch.arange(len(seen), device=seen.device)[:, None].expand_as(seen)
        is_seen[rows[seen >= 0], seen[seen >= 0]] = True
        is_seen[:, : self.config.shared_rows.get(self.config.item, 0)] = True  # no items of the catalogue
        is_seen.scatter_(1, items[:, None], False)
        # A score that is no number comes last: it is not smaller than any.
        return (~(scores < own) & ~is_seen).sum(1)


class MatrixFactorization(PairModel):
    """Matrix factorization with biases (Koren et al. 2009): u · v + bias of user, of item and of all."""

    def __init__(self, config: RecommenderConfig) -> None:
        super().__init__(config)
        rows = {name: config.tables[name] for name in (config.user, config.item)}
        self.embeddings = EmbeddingTables(rows, config.embedding)
        self.biases = EmbeddingTables(rows, 1)
        self.bias = nn.Parameter(torch.zeros(1))

    def user_vectors(self, ids: Tensor) -> Tensor:
        bias = self.biases.lookup(self.config.user, ids) + self.bias
        return torch.cat([self.embeddings.lookup(self.config.user, ids), bias, torch.ones_like(bias)], -1)

    def item_vectors(self, ids: Tensor) -> Tensor:
        bias = self.biases.lookup(self.config.item, ids)
        return torch.cat([self.embeddings.lookup(self.config.item, ids), torch.ones_like(bias), bias], -1)


class TwoTower(PairModel):
    """Two towers (Yi et al. 2019): a network for each side, whose outputs have length 1."""

    def __init__(self, config: RecommenderConfig) -> None:
        super().__init__(config)
        rows = {name: config.tables[name] for name in (config.user, config.item)}
        self.embeddings = EmbeddingTables(rows, config.embedding)
        widths = (config.embedding, *config.towers)
        self.user_tower = perceptron(widths, ends_with_relu=False)
        self.item_tower = perceptron(widths, ends_with_relu=False)

    def user_vectors(self, ids: Tensor) -> Tensor:
        vectors = self.user_tower(self.embeddings.lookup(self.config.user, ids))
        return F.normalize(vectors, dim=-1) / self.config.temperature

    def item_vectors(self, ids: Tensor) -> Tensor:
        return F.normalize(self.item_tower(self.embeddings.lookup(self.config.item, ids)), dim=-1)
