"""PyTorch: a map-style dataset over mapped memory, with a `DataLoader`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from contents import Batch
from reading import begin, measure, parse
from token_data import TokenData
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, RandomSampler
from torch_batches import split

EPOCHS = 1000


class Rows(Dataset[Tensor]):
    """Rows of tokens, one by one, or a batch at once as `DataLoader` asks for it where that exists."""

    def __init__(self, rows: np.ndarray) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor:
        return torch.from_numpy(self.rows[index].astype(np.int64))


class BatchedRows(Rows):
    def __getitems__(self, indices: list[int]) -> Tensor:
        return torch.from_numpy(self.rows[np.array(indices)].astype(np.int64))


def main() -> None:
    options = parse(__doc__)
    data = TokenData.of(options)
    content = data.content_of_rows()
    began = begin(options, options.folder / "rows")
    measure(_batches(data.rows(), options.batch, options.workers, options.start), content, options, began)


def _batches(rows: np.ndarray, batch: int, workers: int, start: int) -> Iterator[Batch]:
    """Read batches; one process reads a whole batch by one call, processes read row by row as is usual."""
    dataset = Rows(rows) if workers else BatchedRows(rows)
    sampler = RandomSampler(
        dataset, num_samples=EPOCHS * len(dataset), generator=torch.Generator().manual_seed(1)
    )
    collate: Any = None if workers else _as_it_is
    loader = DataLoader(dataset, batch, sampler=sampler, num_workers=workers, collate_fn=collate)
    batches = iter(loader)
    for _ in range(start // batch):  # a DataLoader has no other way to a position
        next(batches)
    for rows_read in batches:
        yield split(rows_read)


def _as_it_is(rows: Tensor) -> Tensor:
    return rows


if __name__ == "__main__":
    main()
