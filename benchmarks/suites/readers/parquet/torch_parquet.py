"""PyTorch: an iterable dataset over row groups read by pyarrow, shuffled in a buffer, with a `DataLoader`."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from pyarrow import parquet
from reading import begin, measure, parse
from text_data import SEQUENCE, TextData
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torch_batches import shuffled, token_batches


class RowGroups(IterableDataset[Tensor]):
    def __init__(self, files: list[Path]) -> None:
        self.files = files

    def __iter__(self) -> Iterator[Tensor]:
        worker = get_worker_info()
        groups = [
            (path, number)
            for path in self.files
            for number in range(parquet.ParquetFile(path).num_row_groups)
        ]
        if worker is not None:
            groups = groups[worker.id :: worker.num_workers]
        return shuffled(_rows(random.sample(groups, len(groups))))


def _rows(groups: list[tuple[Path, int]]) -> Iterator[Tensor]:
    for path, number in groups:
        table = parquet.ParquetFile(path).read_row_group(number, columns=["tokens"])
        values = table.column("tokens").combine_chunks().flatten().to_numpy()
        yield from map(torch.from_numpy, values.reshape(-1, SEQUENCE + 1).astype(np.int64))


def main() -> None:
    options = parse(__doc__)
    data = TextData.of(options)
    content = data.content_of_parquet_rows()
    dataset = RowGroups(data.parquet_files)
    began = begin(options, *data.parquet_files)
    loader = DataLoader(dataset, options.batch, num_workers=options.workers)
    measure(token_batches(loader), content, options, began)


if __name__ == "__main__":
    main()
