"""litdata: JSON lines are tokenized by `optimize` in its processes, and read from its chunks."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from litdata import StreamingDataLoader, StreamingDataset, TokensLoader, optimize
from reading import begin, measure, parse
from text_data import SEQUENCE, TextData, load_tokenizer
from torch import Tensor
from torch_batches import token_batches


def main() -> None:
    options = parse(__doc__)
    data = TextData.of(options)
    content = data.content_of_json_blocks(len(data.json_files))
    folder = tempfile.mkdtemp(prefix="cache-", dir=options.folder)
    encode = partial(_tokens, tokenizer_file=data.tokenizer_file, end=data.end_of_document)
    try:
        began = begin(options, *data.json_files)
        optimize(
            encode,
            data.json_files,
            output_dir=folder,
            chunk_size=(SEQUENCE + 1) * 1024,
            item_loader=TokensLoader(),
            num_workers=2,
        )
        dataset = StreamingDataset(
            folder, item_loader=TokensLoader(block_size=SEQUENCE + 1), shuffle=True, seed=1
        )
        loader = StreamingDataLoader(dataset, batch_size=options.batch, num_workers=options.workers)
        measure(token_batches(loader), content, options, began)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _tokens(path: Path, tokenizer_file: Path, end: int) -> Iterator[Tensor]:
    tokenizer = load_tokenizer(tokenizer_file)
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            ids = tokenizer.encode(json.loads(line)["text"]).ids
            yield torch.tensor([*ids, end], dtype=torch.int32).to(torch.uint16)


if __name__ == "__main__":
    main()
