"""Grain: files of Parquet read side by side, shuffled in a window."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import grain
import numpy as np
import torch
from contents import Batch
from grain.experimental import ParquetIterDataset, WindowShuffleIterDataset
from reading import begin, measure, parse
from text_data import TextData
from torch_batches import split

WINDOW = 1000
"""Rows that are shuffled together."""


def main() -> None:
    options = parse(__doc__)
    data = TextData.of(options)
    content = data.content_of_parquet_rows()
    began = begin(options, *data.parquet_files)
    dataset = WindowShuffleIterDataset(
        ParquetIterDataset([str(path) for path in data.parquet_files]).seed(1), window_size=WINDOW, seed=1
    )
    dataset = dataset.map(_tokens).batch(options.batch)
    if options.workers:
        dataset = dataset.mp_prefetch(grain.MultiprocessingOptions(num_workers=options.workers))
    measure(_batches(dataset), content, options, began)


def _tokens(row: dict[str, np.ndarray]) -> np.ndarray:
    return row["tokens"].astype(np.int64)


def _batches(dataset: grain.IterDataset) -> Iterator[Batch]:
    while True:
        for rows in dataset:
            yield split(torch.from_numpy(rows))


if __name__ == "__main__":
    main()
