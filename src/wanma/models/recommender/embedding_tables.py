"""Embedding tables of a recommender: the one place where ids become vectors, so that it may be split."""

from __future__ import annotations

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor, nn

OFFSETS = ".offsets"
"""Suffix of the keyword with the start of each row's bag in the ids of a feature."""


class EmbeddingTables(nn.Module):
    """Embedding tables by feature name; a bag of ids becomes the sum of their rows, an empty one zeros."""

    def __init__(self, rows: Mapping[str, int], width: int) -> None:
        super().__init__()
        self.names = tuple(rows)
        # The prefix keeps names such as "type" apart from attributes of modules.
        self.tables = nn.ModuleDict(
            {f"of_{name}": nn.EmbeddingBag(count, width, mode="sum") for name, count in rows.items()}
        )

    def forward(self, features: Mapping[str, Tensor]) -> list[Tensor]:
        """Return the vector of each table's bags, (rows, width), in the order of the tables.

        Args:
            features: by feature the ids of all bags, (ids,) int64; and by feature with the suffix `.offsets`
                the start of each bag among them, (rows,) int64.
        """
        return [self.tables[f"of_{name}"](features[name], features[name + OFFSETS]) for name in self.names]

    def lookup(self, name: str, ids: Tensor) -> Tensor:
        """Return the vectors (..., width) of single ids (...)."""
        return F.embedding(ids, self.weight(name))

    def weight(self, name: str) -> Tensor:
        """Return the whole table of a feature, (table rows, width)."""
        table = self.tables[f"of_{name}"]
        assert isinstance(table, nn.EmbeddingBag)
        return table.weight
