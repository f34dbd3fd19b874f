"""litdata: chunks of JPEG files, written by `optimize`, with its own loader."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from contents import Batch
from image_data import ImageData, transform
from image_stores import write_litdata
from litdata import StreamingDataLoader, StreamingDataset
from made_data import made
from reading import begin, measure, parse
from torch import Tensor


class Images(StreamingDataset):
    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        content, label = super().__getitem__(index)
        return transform(content), label


def main() -> None:
    options = parse(__doc__)
    data = ImageData.of(options)
    content = data.content()
    folder = made(options.folder, "litdata-images", partial(write_litdata, data))
    began = begin(options, folder)
    dataset = Images(str(folder), shuffle=True, drop_last=True, seed=1)
    loader = StreamingDataLoader(dataset, batch_size=options.batch, num_workers=options.workers)
    measure(_batches(loader), content, options, began)


def _batches(loader: StreamingDataLoader) -> Iterator[Batch]:
    while True:
        yield from loader


if __name__ == "__main__":
    main()
