"""litdata: chunks of tokens, written by `optimize`, with its own loader."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from litdata import StreamingDataLoader, StreamingDataset, TokensLoader, optimize
from made_data import made
from reading import begin, measure, parse
from token_data import SEQUENCE, TokenData
from torch import Tensor
from torch_batches import token_batches


def main() -> None:
    options = parse(__doc__)
    data = TokenData.of(options)
    content = data.content_of_rows()
    folder = made(options.folder, "litdata", partial(_write, data))
    began = begin(options, folder)
    dataset = StreamingDataset(
        str(folder), item_loader=TokensLoader(block_size=SEQUENCE + 1), shuffle=True, drop_last=True, seed=1
    )
    loader = StreamingDataLoader(dataset, batch_size=options.batch, num_workers=options.workers)
    if options.start:
        loader.load_state_dict(_state(dataset, data, options))
    measure(token_batches(loader), content, options, began)


def _state(dataset: StreamingDataset, data: TokenData, options: argparse.Namespace) -> dict[str, Any]:
    """Return the state that the loader has after `--start` samples: epochs count from 1."""
    epochs, samples = divmod(options.start, data.row_count)
    of_dataset = dataset.state_dict(samples, options.workers, options.batch)
    return {
        "dataset": of_dataset | {"current_epoch": epochs + 1},
        "current_epoch": epochs + 1,
        "num_samples_yielded": samples,
        "latest_worker_idx": (samples // options.batch - 1) % max(options.workers, 1),
    }


def _tokens(number: int, data: TokenData) -> Iterator[Tensor]:
    rows = data.rows()[number * data.rows_per_file : (number + 1) * data.rows_per_file]
    yield torch.from_numpy(rows.astype(np.int32).reshape(-1)).to(torch.uint16)


def _write(data: TokenData, folder: Path) -> None:
    data.rows()
    optimize(
        partial(_tokens, data=data),
        list(range(data.files)),
        output_dir=str(folder),
        chunk_size=(SEQUENCE + 1) * data.rows_per_file,
        item_loader=TokensLoader(),
        num_workers=1,
    )


if __name__ == "__main__":
    main()
