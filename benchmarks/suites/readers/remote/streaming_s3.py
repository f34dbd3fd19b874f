"""Mosaic Streaming: its shards in a store, downloaded by its own client."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from contents import Batch
from image_data import ImageData, transform
from image_stores import write_mds
from made_data import made
from mosaic_library import import_streaming
from reading import begin, measure_link, parse
from remote_store import remote_store
from torch import Tensor
from torch.utils.data import DataLoader

StreamingDataset: Any = import_streaming().StreamingDataset


class Images(StreamingDataset):
    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        sample = super().__getitem__(index)
        return transform(sample["image"]), sample["label"]


def main() -> None:
    options = parse(__doc__)
    data = ImageData.of(options)
    content = data.content()
    made(options.folder / "buckets", "mds", partial(write_mds, data))
    with remote_store(options, options.folder / "buckets") as store:
        began = begin(options, bystanders=(store.process,))
        dataset = Images(
            remote="s3://mds/",
            local=str(store.cache / "mds"),
            shuffle=True,
            batch_size=options.batch,
            shuffle_seed=1,
        )
        loader: DataLoader = DataLoader(dataset, options.batch, num_workers=options.workers)
        measure_link(_batches(loader), content, options, began, store)


def _batches(loader: DataLoader) -> Iterator[Batch]:
    while True:
        yield from loader


if __name__ == "__main__":
    main()
