"""Grain: the map path, which shuffles globally and resumes at a position in constant time."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import grain
import torch
from contents import Batch
from reading import begin, measure, parse
from token_data import TokenData
from torch_batches import split


def main() -> None:
    options = parse(__doc__)
    data = TokenData.of(options)
    content = data.content_of_rows()
    began = begin(options, options.folder / "rows")
    dataset = grain.MapDataset.source(data.rows()).seed(1).shuffle().repeat().batch(options.batch)
    dataset = dataset[options.start // options.batch :].to_iter_dataset()
    if options.workers:
        dataset = dataset.mp_prefetch(grain.MultiprocessingOptions(num_workers=options.workers))
    measure(_batches(iter(dataset)), content, options, began)


def _batches(read: Iterator) -> Iterator[Batch]:
    for rows in read:
        yield split(torch.from_numpy(rows))


if __name__ == "__main__":
    main()
