"""PyTorch: an iterable dataset that tokenizes and packs lines, shuffled in a buffer, with a `DataLoader`."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from reading import begin, measure, parse
from text_data import SEQUENCE, Packer, TextData, load_tokenizer
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torch_batches import shuffled, token_batches


class Lines(IterableDataset[Tensor]):
    def __init__(self, data: TextData) -> None:
        self.files, self.tokenizer_file, self.end = data.json_files, data.tokenizer_file, data.end_of_document

    def __iter__(self) -> Iterator[Tensor]:
        worker = get_worker_info()
        files = self.files if worker is None else self.files[worker.id :: worker.num_workers]
        return shuffled(self._blocks(random.sample(files, len(files))))

    def _blocks(self, files: list[Path]) -> Iterator[Tensor]:
        tokenizer, packer = load_tokenizer(self.tokenizer_file), Packer(SEQUENCE + 1)
        for path in files:
            with path.open(encoding="utf-8") as lines:
                for line in lines:
                    ids = tokenizer.encode(json.loads(line)["text"]).ids
                    yield from map(torch.from_numpy, packer.add([ids], self.end))


def main() -> None:
    options = parse(__doc__)
    data = TextData.of(options)
    content = data.content_of_json_blocks(max(options.workers, 1))
    dataset = Lines(data)
    began = begin(options, *data.json_files)
    loader = DataLoader(dataset, options.batch, num_workers=options.workers)
    measure(token_batches(loader), content, options, began)


if __name__ == "__main__":
    main()
