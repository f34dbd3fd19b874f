"""PyTorch: a map-style dataset of an image folder, with a `DataLoader`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from image_data import ImageData, transform
from reading import begin, measure, parse
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, RandomSampler

EPOCHS = 1000


class Images(Dataset[tuple[Tensor, int]]):
    def __init__(self, files: list[tuple[Path, int]]) -> None:
        self.files = files

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path, label = self.files[index]
        return transform(path.read_bytes()), label


def main() -> None:
    options = parse(__doc__)
    data = ImageData.of(options)
    content = data.content()
    began = begin(options, data.image_folder)
    dataset = Images(data.files())
    sampler = RandomSampler(
        dataset, num_samples=EPOCHS * len(dataset), generator=torch.Generator().manual_seed(1)
    )
    loader = DataLoader(dataset, options.batch, sampler=sampler, num_workers=options.workers)
    measure(iter(loader), content, options, began)


if __name__ == "__main__":
    main()
