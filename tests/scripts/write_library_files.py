"""Files of data formats, written by the formats' own libraries: write_library_files.py LIBRARY FOLDER.

Those in tests/data/formats/library_files were written so, each in an environment of its library:
webdataset 1.0.2, megatron-core 0.16.1, tensorflow-cpu 2.21.0, datasets 5.2.0.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

from support import library_samples


def write_webdataset(folder: Path) -> None:
    import webdataset

    with webdataset.TarWriter(str(folder / "a.tar")) as writer:
        for sample in library_samples.webdataset_samples():
            writer.write(sample)


def write_megatron(folder: Path) -> None:
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    for dtype in (np.uint8, np.int8, np.int16, np.int32, np.int64, np.float64, np.float32, np.uint16):
        prefix = folder / np.dtype(dtype).name
        builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
        for document in library_samples.megatron_documents():
            tokens = np.concatenate(document).astype(dtype)
            builder.add_document(
                torch.from_numpy(tokens.astype(np.float64)), [len(part) for part in document]
            )
        builder.finalize(f"{prefix}.idx")
    builder = IndexedDatasetBuilder(f"{folder / 'modes'}.bin", dtype=np.int32, multimodal=True)
    for document in library_samples.megatron_documents():
        for part in document:
            builder.add_item(torch.tensor(part), mode=1)
        builder.end_document()
    builder.finalize(f"{folder / 'modes'}.idx")


def write_tfrecord(folder: Path) -> None:
    import tensorflow

    def feature(value: Any) -> Any:
        if isinstance(value, list):
            return tensorflow.train.Feature(bytes_list=tensorflow.train.BytesList(value=value))
        if value.dtype == np.float32:
            return tensorflow.train.Feature(float_list=tensorflow.train.FloatList(value=value))
        return tensorflow.train.Feature(int64_list=tensorflow.train.Int64List(value=value))

    for compression in ("", "GZIP", "ZLIB"):
        path = folder / f"{compression or 'plain'}.tfrecord"
        with tensorflow.io.TFRecordWriter(str(path), compression) as writer:
            for sample in library_samples.tfrecord_samples():
                features = {name: feature(value) for name, value in sample.items()}
                example = tensorflow.train.Example(features=tensorflow.train.Features(feature=features))
                writer.write(example.SerializeToString())


def write_datasets(folder: Path) -> None:
    import datasets

    data = datasets.Dataset.from_list(library_samples.table_rows())
    data.save_to_disk(str(folder / "saved"), num_shards=2)
    splits = data.train_test_split(test_size=3, shuffle=False)
    splits.save_to_disk(str(folder / "splits"))
    data.select([3, 1]).save_to_disk(str(folder / "selected"))
    (folder / "parquet").mkdir()
    data.to_parquet(str(folder / "parquet" / "a.parquet"))


if __name__ == "__main__":
    library, target = sys.argv[1], Path(sys.argv[2])
    target.mkdir(parents=True, exist_ok=True)
    globals()[f"write_{library}"](target)
