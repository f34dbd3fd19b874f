"""WebDataset: tar files that its writer makes, shuffled in a buffer, with its own loader."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import webdataset
from image_data import ImageData, transform
from image_stores import tar_names, write_tar
from made_data import made
from reading import begin, measure, parse


def main() -> None:
    options = parse(__doc__)
    data = ImageData.of(options)
    content = data.content()
    folder = made(options.folder, "tar", partial(write_tar, data))
    began = begin(options, folder)
    shards = [f"{folder}/{name}" for name in tar_names(data)]
    # Shards drawn with replacement have no pass, which the check needs.
    dataset = (
        webdataset.WebDataset(shards, resampled=not options.check, shardshuffle=False)
        .shuffle(1000)
        .to_tuple("jpg", "cls")
        .map_tuple(transform, int)
        .batched(options.batch)
    )
    loader = webdataset.WebLoader(dataset, batch_size=None, num_workers=options.workers)
    measure(iter(loader), content, options, began)


if __name__ == "__main__":
    main()
