"""Mosaic Streaming: shards of MDS, written by its writer, read by `StreamingDataset` and a `DataLoader`."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from made_data import made
from mosaic_library import import_streaming
from reading import begin, measure, parse
from token_data import SEQUENCE, TokenData
from torch.utils.data import DataLoader
from torch_batches import token_batches


def main() -> None:
    options = parse(__doc__)
    data = TokenData.of(options)
    content = data.content_of_rows()
    folder = made(options.folder, "mds", partial(_write, data))
    streaming = import_streaming()
    began = begin(options, folder)
    dataset = streaming.StreamingDataset(
        local=str(folder), shuffle=True, batch_size=options.batch, shuffle_seed=1
    )
    if options.start:  # a state as its own `StreamingDataLoader` saves it
        epoch, sample = divmod(options.start, data.row_count)
        state = dataset.state_dict(num_samples=0, from_beginning=True)
        dataset.load_state_dict(state | {"epoch": epoch, "sample_in_epoch": sample})
    loader = DataLoader(dataset, options.batch, num_workers=options.workers)
    measure(token_batches(loader, "tokens"), content, options, began)


def _write(data: TokenData, folder: Path) -> None:
    columns = {"tokens": f"ndarray:uint16:{SEQUENCE + 1}"}
    with import_streaming().MDSWriter(out=str(folder), columns=columns) as writer:
        for row in data.rows():
            writer.write({"tokens": row})


if __name__ == "__main__":
    main()
