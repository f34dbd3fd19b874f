"""Hugging Face datasets: JSON lines, streamed, tokenized and packed by `map`, shuffled in a buffer."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from datasets import load_dataset
from reading import begin, measure, parse
from text_data import SEQUENCE, TextData, load_tokenizer
from torch.utils.data import DataLoader
from torch_batches import token_batches

DOCUMENTS = 1000
"""Documents that are tokenized and packed together: the default of `map`."""


def main() -> None:
    options = parse(__doc__)
    data = TextData.of(options)
    documents = sum(1 for _ in data.texts())
    content = data.content_of_json_blocks(documents // DOCUMENTS + len(data.json_files) + 1)
    tokenizer, end = load_tokenizer(data.tokenizer_file), data.end_of_document
    names = [str(path) for path in data.json_files]

    def pack(rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
        """Join the documents, and cut them; the rest is dropped, as in its examples of causal models."""
        encoded = tokenizer.encode_batch(rows["text"])
        tokens = list(itertools.chain.from_iterable([*one.ids, end] for one in encoded))
        starts = range(0, len(tokens) - SEQUENCE, SEQUENCE + 1)
        return {"tokens": [tokens[start : start + SEQUENCE + 1] for start in starts]}

    began = begin(options, *data.json_files)
    dataset = load_dataset("json", data_files={"train": names}, split="train", streaming=True)
    dataset = dataset.map(pack, batched=True, batch_size=DOCUMENTS, remove_columns=["text", "number"])
    dataset = dataset.shuffle(seed=1, buffer_size=1000).with_format("torch")
    loader = DataLoader(dataset, options.batch, num_workers=options.workers)
    measure(token_batches(loader, "tokens"), content, options, began)


if __name__ == "__main__":
    main()
