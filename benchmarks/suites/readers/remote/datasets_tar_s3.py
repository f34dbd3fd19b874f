"""Hugging Face datasets: the same tar archives by HTTP, streamed, shuffled in a buffer."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from contents import Batch
from datasets import Image, load_dataset
from image_data import ImageData, transform
from image_stores import tar_names, write_tar
from made_data import made
from reading import begin, measure_link, parse
from remote_store import remote_store
from torch.utils.data import DataLoader


def main() -> None:
    options = parse(__doc__)
    data = ImageData.of(options)
    content = data.content()
    made(options.folder / "buckets", "tar", partial(write_tar, data))
    with remote_store(options, options.folder / "buckets") as store:
        shards = [f"{store.endpoint}/tar/{name}" for name in tar_names(data)]
        began = begin(options, bystanders=(store.process,))
        dataset = load_dataset(
            "webdataset", data_files={"train": shards}, split="train", streaming=True,
            cache_dir=str(store.cache),
        )  # fmt: skip
        dataset = dataset.cast_column("jpg", Image(decode=False)).shuffle(seed=1, buffer_size=1000)
        dataset = dataset.map(_sample, remove_columns=dataset.column_names).with_format("torch")
        loader = DataLoader(dataset, options.batch, num_workers=options.workers)
        measure_link(_batches(loader), content, options, began, store)


def _sample(row: dict[str, Any]) -> dict[str, Any]:
    return {"pixels": transform(row["jpg"]["bytes"]).numpy(), "label": int(row["cls"])}


def _batches(loader: DataLoader) -> Iterator[Batch]:
    while True:
        for batch in loader:
            yield batch["pixels"], batch["label"]


if __name__ == "__main__":
    main()
