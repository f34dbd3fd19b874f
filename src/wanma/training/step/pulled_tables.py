"""Embedding tables of which a worker holds only the rows of its step, pulled from parameter servers."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wanma.data.batch import Batch
from wanma.models.recommender.embedding_tables import OFFSETS, EmbeddingTables


class PulledTables(nn.Module):
    """Rows of embedding tables by feature name, with the interface of `EmbeddingTables` and no parameter."""

    def __init__(self, tables: EmbeddingTables, dtype: torch.dtype) -> None:
        super().__init__()
        self.names, self._dtype = tuple(tables.rows), dtype
        self.ids: dict[str, Tensor] = {}
        """By feature the ids of the rows that are here, in order, (rows,)."""
        self.rows: dict[str, Tensor] = {}
        """By feature the rows, (rows, width)."""

    def forward(self, features: Mapping[str, Tensor]) -> Callable[[], list[Tensor]]:
        vectors = [self._sums(name, features[name], features[name + OFFSETS]) for name in self.names]
        return lambda: vectors

    def _sums(self, name: str, ids: Tensor, starts: Tensor) -> Tensor:
        """Return the sum of the rows of each bag, (bags, width)."""
        places, rows = self._places(name, ids), self.rows[name]
        is_single = len(ids) == len(starts) and bool((starts.diff() == 1).all())
        if is_single and rows.device.type == "cpu":  # on GPUs its backward adds up in any order
            return rows.index_select(0, places).to(self._dtype)
        return F.embedding_bag(places, rows, starts, mode="sum").to(self._dtype)

    def lookup(self, name: str, ids: Tensor) -> Tensor:
        """Return the vectors (..., width) of single ids (...)."""
        return F.embedding(self._places(name, ids), self.rows[name]).to(self._dtype)

    def _places(self, name: str, ids: Tensor) -> Tensor:
        return torch.searchsorted(self.ids[name], ids)


class WorkerTables:
    """All embedding tables of a worker's model, by the names of their parameters.

    Args:
        model: recommender whose `EmbeddingTables` are replaced in place; other models have none.
        dtype: dtype of the vectors, whose rows and sums are fp32.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype = torch.float32) -> None:
        self._features: dict[str, tuple[PulledTables, str]] = {}
        """By parameter its tables and feature."""
        found = [
            (path, module) for path, module in model.named_modules() if isinstance(module, EmbeddingTables)
        ]
        for path, module in found:
            pulled = PulledTables(module, dtype)
            model.set_submodule(path, pulled)
            for name in module.rows:
                self._features[f"{path}.tables.of_{name}.weight"] = (pulled, name)

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._features)

    def ids(self, batches: list[Batch]) -> dict[str, Tensor]:
        """Return by parameter the ids of the rows that the batches need, each once and in order."""
        by_feature: dict[str, Tensor] = {}
        for _, feature in self._features.values():
            if feature not in by_feature:
                parts = [batch.keywords[feature].reshape(-1) for batch in batches]
                by_feature[feature] = torch.cat(parts).unique()
        return {name: by_feature[feature] for name, (_, feature) in self._features.items()}

    def fill(self, ids: Mapping[str, Tensor], rows: Mapping[str, Tensor], device: torch.device) -> None:
        """Hold rows until the next step; their gradients are added up."""
        for name, (tables, feature) in self._features.items():
            tables.ids[feature] = ids[name].to(device)
            tables.rows[feature] = rows[name].to(device).requires_grad_()

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients of the rows, zero for rows that the loss does not depend on."""
        gradients = {}
        for name, (tables, feature) in self._features.items():
            rows = tables.rows[feature]
            gradients[name] = torch.zeros_like(rows) if rows.grad is None else rows.grad
        return gradients
