"""Embedding tables of a recommender: the one place where ids become vectors, so that it may be split."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch.nn.functional as F
from torch import Tensor, nn

OFFSETS = ".offsets"
"""Suffix of the keyword with the start of each row's bag in the ids of a feature."""


class TableLookup(Protocol):
    """Lookup in tables that lie elsewhere, with the methods of `EmbeddingTables`."""

    def start(self, features: Mapping[str, Tensor]) -> Callable[[], list[Tensor]]: ...
    def lookup(self, name: str, ids: Tensor) -> Tensor: ...


class EmbeddingTables(nn.Module):
    """Embedding tables by feature name; a bag of ids becomes the sum of their rows, an empty one zeros."""

    def __init__(
        self, rows: Mapping[str, int], width: int, bag_sizes: Mapping[str, int] | None = None
    ) -> None:
        super().__init__()
        self.rows, self.width = dict(rows), width
        self.bag_sizes = dict(bag_sizes or {})
        """Usual number of ids in a bag of a table; 1 where a table has no entry."""
        # The prefix keeps names such as "type" apart from attributes of modules.
        self.tables = nn.ModuleDict(
            {f"of_{name}": nn.EmbeddingBag(count, width, mode="sum") for name, count in rows.items()}
        )
        self.sharded_lookup: TableLookup | None = None
        """Lookup in tables that ranks share; None: the tables are in this module."""

    def forward(self, features: Mapping[str, Tensor]) -> Callable[[], list[Tensor]]:
        """Start the lookup of bags, and return a function that returns their vectors.

        Vectors of tables that ranks share are on their way until then. There is one vector for each bag of a
        table, (rows, width), in the order of the tables.

        Args:
            features: by feature the ids of all bags, (ids,) int64; and by feature with the suffix `.offsets`
                the start of each bag among them, (rows,) int64.
        """
        if self.sharded_lookup is not None:
            return self.sharded_lookup.start(features)
        vectors = [self.tables[f"of_{name}"](features[name], features[name + OFFSETS]) for name in self.rows]
        return lambda: vectors

    def lookup(self, name: str, ids: Tensor) -> Tensor:
        """Return the vectors (..., width) of single ids (...)."""
        if self.sharded_lookup is not None:
            return self.sharded_lookup.lookup(name, ids)
        table = self.tables[f"of_{name}"]
        assert isinstance(table, nn.EmbeddingBag)
        return F.embedding(ids, table.weight)


@dataclass(frozen=True)
class EmbeddingParameter:
    """Parameter of a model that is an embedding table."""

    name: str
    """Full name of the parameter."""
    table: str
    """Name of the table: that of its column of ids."""
    rows: int


def embedding_parameters(model: nn.Module) -> Iterator[EmbeddingParameter]:
    """Yield the embedding tables of a model; also those that other ranks hold."""
    for path, module in model.named_modules():
        if isinstance(module, EmbeddingTables):
            for table, rows in module.rows.items():
                yield EmbeddingParameter(f"{path}.tables.of_{table}.weight", table, rows)
