"""WebDataset: the same tar archives by HTTP, which its documentation reads with curl."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import webdataset
from image_data import ImageData, transform
from image_stores import tar_names, write_tar
from made_data import made
from reading import begin, measure_link, parse
from remote_store import remote_store


def main() -> None:
    options = parse(__doc__)
    data = ImageData.of(options)
    content = data.content()
    made(options.folder / "buckets", "tar", partial(write_tar, data))
    with remote_store(options, options.folder / "buckets") as store:
        shards = [f"{store.endpoint}/tar/{name}" for name in tar_names(data)]
        began = begin(options, bystanders=(store.process,))
        dataset = (
            webdataset.WebDataset(shards, shardshuffle=100)
            .shuffle(1000)
            .to_tuple("jpg", "cls")
            .map_tuple(transform, int)
            .batched(options.batch)
            .repeat()
        )
        loader = webdataset.WebLoader(dataset, batch_size=None, num_workers=options.workers)
        measure_link(iter(loader), content, options, began, store)


if __name__ == "__main__":
    main()
