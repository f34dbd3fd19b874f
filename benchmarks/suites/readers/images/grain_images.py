"""Grain: the map path over an image folder; decoding in its threads, or in processes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import grain
import numpy as np
import torch
from contents import Batch
from image_data import ImageData, transform
from reading import begin, measure, parse


def main() -> None:
    options = parse(__doc__)
    data = ImageData.of(options)
    content = data.content()
    began = begin(options, data.image_folder)
    dataset = grain.MapDataset.source(data.files()).seed(1).shuffle().repeat().map(_read)
    read = dataset.batch(options.batch).to_iter_dataset()
    if options.workers:
        read = read.mp_prefetch(grain.MultiprocessingOptions(num_workers=options.workers))
    measure(_batches(iter(read)), content, options, began)


def _read(file: tuple[Path, int]) -> tuple[np.ndarray, np.int64]:
    path, label = file
    return transform(path.read_bytes()).numpy(), np.int64(label)


def _batches(read: Iterator) -> Iterator[Batch]:
    for inputs, targets in read:
        yield torch.from_numpy(inputs), torch.from_numpy(targets)


if __name__ == "__main__":
    main()
