"""litdata: its chunks in a store, downloaded by its own client."""

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
from litdata.streaming import downloader
from made_data import made
from reading import begin, measure_link, parse
from remote_store import remote_store
from torch import Tensor

# Its client takes https alone unless told, for which litdata has no option; the store has no TLS. It is set
# here, because processes that are spawned import this file.
downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = "true"


class Images(StreamingDataset):
    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        content, label = super().__getitem__(index)
        return transform(content), label


def main() -> None:
    options = parse(__doc__)
    data = ImageData.of(options)
    content = data.content()
    made(options.folder / "buckets", "litdata", partial(write_litdata, data))
    with remote_store(options, options.folder / "buckets") as store:
        access = {
            "endpoint_url": store.endpoint,
            "aws_access_key_id": "key",
            "aws_secret_access_key": "secret",
        }
        began = begin(options, bystanders=(store.process,))
        dataset = Images(
            "s3://litdata",
            cache_dir=str(store.cache),
            storage_options=access,
            shuffle=True,
            drop_last=True,
            seed=1,
        )
        loader = StreamingDataLoader(dataset, batch_size=options.batch, num_workers=options.workers)
        measure_link(_batches(loader), content, options, began, store)


def _batches(loader: StreamingDataLoader) -> Iterator[Batch]:
    while True:
        yield from loader


if __name__ == "__main__":
    main()
