"""One set of labelled images, written in each format that holds images."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from support.data_files import add_member, example, frame

CLASSES = ("ant", "bee", "cat")
SIZE = 12


def shade(number: int) -> int:
    """Return the gray level by which image `number` can be told from the others."""
    return 3 * number % 256


def picture(number: int, kind: str = "png", size: tuple[int, int] = (SIZE, SIZE)) -> bytes:
    """Return image `number`, all of one color, encoded."""
    stream = io.BytesIO()
    Image.new("RGB", size, (shade(number), 255 - shade(number), 7)).save(
        stream, kind, **({"quality": 100, "subsampling": 0} if kind == "jpeg" else {})
    )
    return stream.getvalue()


def label(number: int) -> int:
    return number * 7 % len(CLASSES)


def write_folder(folder: Path, count: int) -> None:
    for number in range(count):
        path = folder / CLASSES[label(number)] / f"{number:04d}.png"
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_bytes(picture(number))


def write_tar(folder: Path, count: int) -> None:
    """Write two WebDataset shards with labels in `.cls`."""
    for shard, numbers in enumerate((range(count // 3), range(count // 3, count))):
        with tarfile.open(folder / f"shard-{shard}.tar", "w") as archive:
            for number in numbers:
                add_member(archive, f"{number:04d}.png", picture(number))
                add_member(archive, f"{number:04d}.cls", str(label(number)).encode())


def write_json_tar(folder: Path, count: int) -> None:
    """Write a WebDataset shard with the label in `.json`."""
    with tarfile.open(folder / "a.tar", "w") as archive:
        for number in range(count):
            add_member(archive, f"{number:04d}.jpg", picture(number, "jpeg"))
            add_member(archive, f"{number:04d}.json", json.dumps({"label": label(number)}).encode())


def _table(count: int) -> pa.Table:
    images = [{"bytes": picture(number), "path": None} for number in range(count)]
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    labels = [label(number) for number in range(count)]
    return pa.table({"image": pa.array(images, kind), "label": pa.array(labels, pa.int64())})


def write_parquet(folder: Path, count: int) -> None:
    pq.write_table(_table(count), folder / "part-0.parquet", row_group_size=5)


def write_arrow(folder: Path, count: int) -> None:
    with pa.OSFile(str(folder / "a.arrow"), "wb") as sink, pa.ipc.new_file(sink, _table(1).schema) as writer:
        writer.write_table(_table(count), max_chunksize=5)


def write_huggingface(folder: Path, count: int) -> None:
    """Write the layout of `Dataset.save_to_disk`."""
    with pa.ipc.new_stream(folder / "data-00000-of-00001.arrow", _table(1).schema) as writer:
        writer.write_table(_table(count), max_chunksize=7)
    state = {"_data_files": [{"filename": "data-00000-of-00001.arrow"}], "_fingerprint": "0", "_split": None}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text("{}")


def write_tfrecord(folder: Path, count: int) -> None:
    frames = [
        frame(
            example(
                {
                    "image/encoded": [picture(number)],
                    "image/class/label": np.array([label(number)], np.int64),
                }
            )
        )
        for number in range(count)
    ]
    (folder / "a.tfrecord").write_bytes(b"".join(frames))


WRITERS: dict[str, Callable[[Path, int], None]] = {
    "images": write_folder,
    "webdataset": write_tar,
    "webdataset-json": write_json_tar,
    "parquet": write_parquet,
    "arrow": write_arrow,
    "huggingface": write_huggingface,
    "tfrecord": write_tfrecord,
}
"""Format -> function (folder, count) that writes the images 0 to count - 1."""
