"""Hugging Face datasets: an Arrow table on disk, with a `DataLoader`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from contents import Batch
from datasets import Dataset, Features, List, Value, load_from_disk
from made_data import made
from reading import begin, measure, parse
from token_data import SEQUENCE, TokenData
from torch.utils.data import DataLoader, RandomSampler
from torch_batches import split

EPOCHS = 1000


def main() -> None:
    options = parse(__doc__)
    data = TokenData.of(options)
    content = data.content_of_rows()
    folder = made(options.folder, "datasets", partial(_write, data))
    began = begin(options, folder)
    dataset = load_from_disk(str(folder)).with_format("torch")
    sampler = RandomSampler(
        dataset, num_samples=EPOCHS * len(dataset), generator=torch.Generator().manual_seed(1)
    )
    loader = DataLoader(dataset, options.batch, sampler=sampler, num_workers=options.workers)
    measure(_batches(loader, options.start // options.batch), content, options, began)


def _batches(loader: DataLoader, skipped: int) -> Iterator[Batch]:
    for sample in loader:
        if skipped:
            skipped -= 1
        else:
            yield split(sample["tokens"])


def _rows(data: TokenData) -> Iterator[dict[str, object]]:
    for row in data.rows():
        yield {"tokens": row}


def _write(data: TokenData, folder: Path) -> None:
    features = Features({"tokens": List(Value("uint16"), length=SEQUENCE + 1)})
    Dataset.from_generator(
        _rows, features, gen_kwargs={"data": data}, cache_dir=str(folder / "cache")
    ).save_to_disk(str(folder))


if __name__ == "__main__":
    main()
