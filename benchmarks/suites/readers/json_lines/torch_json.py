"""PyTorch: an iterable dataset that tokenizes and packs lines, shuffled in a buffer, with a `DataLoader`."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from contents import Batch
from reading import begin, measure, parse
from text_data import SEQUENCE, Packer, TextData, load_tokenizer
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torch_batches import split

BUFFER = 1000
"""Sequences among which the next one is drawn."""


class Lines(IterableDataset[Tensor]):
    def __init__(self, data: TextData) -> None:
        self.files, self.tokenizer_file, self.end = data.json_files, data.tokenizer_file, data.end_of_document

    def __iter__(self) -> Iterator[Tensor]:
        worker = get_worker_info()
        files = self.files if worker is None else self.files[worker.id :: worker.num_workers]
        files = random.sample(files, len(files))
        tokenizer, packer = load_tokenizer(self.tokenizer_file), Packer(SEQUENCE + 1)
        buffer: list[Tensor] = []
        for path in files:
            with path.open(encoding="utf-8") as lines:
                for line in lines:
                    ids = tokenizer.encode(json.loads(line)["text"]).ids
                    for block in packer.add([ids], self.end):
                        buffer.append(torch.from_numpy(block))
                        if len(buffer) > BUFFER:
                            yield buffer.pop(random.randrange(len(buffer)))
        random.shuffle(buffer)
        yield from buffer


def main() -> None:
    options = parse(__doc__)
    data = TextData.of(options)
    content = data.content_of_json_blocks(max(options.workers, 1))
    dataset = Lines(data)
    began = begin(options, *data.json_files)
    loader = DataLoader(dataset, options.batch, num_workers=options.workers)
    measure(_batches(loader), content, options, began)


def _batches(loader: DataLoader) -> Iterator[Batch]:
    while True:
        for rows in loader:
            yield split(rows)


if __name__ == "__main__":
    main()
