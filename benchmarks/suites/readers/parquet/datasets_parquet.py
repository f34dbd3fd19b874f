"""Hugging Face datasets: Parquet, which the first start converts to Arrow files."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from datasets import load_dataset
from reading import begin, measure, parse
from text_data import TextData
from torch.utils.data import DataLoader
from torch_batches import token_batches


def main() -> None:
    options = parse(__doc__)
    data = TextData.of(options)
    content = data.content_of_parquet_rows()
    names = [str(path) for path in data.parquet_files]
    cache = tempfile.mkdtemp(prefix="cache-", dir=options.folder)
    try:
        began = begin(options, *data.parquet_files)
        measure(token_batches(_loader(names, cache, options), "tokens"), content, options, began)
    finally:
        shutil.rmtree(cache, ignore_errors=True)


def _loader(names: list[str], cache: str, options: argparse.Namespace) -> DataLoader:
    dataset: Any = load_dataset("parquet", data_files={"train": names}, split="train", cache_dir=cache)
    return DataLoader(dataset.with_format("torch"), options.batch, shuffle=True, num_workers=options.workers)


if __name__ == "__main__":
    main()
