"""Grain: lines by their positions, shuffled globally, tokenized and packed by its own transformation."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import grain
import numpy as np
import torch
from contents import Batch
from grain.experimental import ConcatThenSplitIterDataset
from reading import begin, measure, parse
from text_data import SEQUENCE, TextData, load_tokenizer
from torch_batches import split


class Lines:
    """Lines of files by number."""

    def __init__(self, files: list[Path]) -> None:
        self._contents = [path.read_bytes().splitlines() for path in files]
        self._starts = np.cumsum([0, *map(len, self._contents)])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, index: int) -> bytes:
        file = int(np.searchsorted(self._starts, index, side="right")) - 1
        return self._contents[file][index - self._starts[file]]


class Encode:
    """Tokens of a line; the tokenizer is opened where it is used."""

    def __init__(self, tokenizer_file: Path, end: int) -> None:
        self._file, self._end = tokenizer_file, end
        self._tokenizer: Any = None

    def __call__(self, line: bytes) -> dict[str, np.ndarray]:
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self._file)
        ids = self._tokenizer.encode(json.loads(line)["text"]).ids
        return {"tokens": np.array([*ids, self._end])}

    def __getstate__(self) -> dict[str, Any]:
        return {"_file": self._file, "_end": self._end, "_tokenizer": None}


def main() -> None:
    options = parse(__doc__)
    data = TextData.of(options)
    content = data.content_of_json_blocks(max(options.workers, 1))
    encode = Encode(data.tokenizer_file, data.end_of_document)
    began = begin(options, *data.json_files)
    documents = grain.MapDataset.source(Lines(data.json_files)).seed(1).shuffle()
    documents = documents.repeat(1 if options.check else None).map(encode)
    dataset = ConcatThenSplitIterDataset(
        documents.to_iter_dataset(), length_struct={"tokens": SEQUENCE + 1}
    ).batch(options.batch, drop_remainder=False)
    if options.workers:
        dataset = dataset.mp_prefetch(grain.MultiprocessingOptions(num_workers=options.workers))
    measure(_batches(iter(dataset)), content, options, began)


def _batches(read: Iterator) -> Iterator[Batch]:
    for sample in read:
        yield split(torch.from_numpy(sample["tokens"]))


if __name__ == "__main__":
    main()
