"""One set of labelled images, written in each format that holds images."""

from __future__ import annotations

import io
import itertools
import json
import tarfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from support.data_files import add_member, example, frame
from support.table_files import write_table

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


def write_samples(
    path: Path, images: Iterable[bytes], labels: Iterable[Any] = itertools.repeat(1), first: int = 0
) -> None:
    """Write a WebDataset shard of images with labels in `.cls`, numbered from `first` on."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for number, (image, one) in enumerate(zip(images, labels, strict=False), first):
            add_member(archive, f"{number:04d}.png", image)
            add_member(archive, f"{number:04d}.cls", one if isinstance(one, bytes) else str(one).encode())


def write_tar(folder: Path, count: int) -> None:
    """Write two WebDataset shards with labels in `.cls`."""
    for shard, numbers in enumerate((range(count // 3), range(count // 3, count))):
        path = folder / f"shard-{shard}.tar"
        write_samples(path, map(picture, numbers), map(label, numbers), numbers.start)


def write_json_tar(folder: Path, count: int) -> None:
    """Write a WebDataset shard with the label in `.json`."""
    with tarfile.open(folder / "a.tar", "w") as archive:
        for number in range(count):
            add_member(archive, f"{number:04d}.jpg", picture(number, "jpeg"))
            add_member(archive, f"{number:04d}.json", json.dumps({"label": label(number)}).encode())


def _write_table(name: str) -> Callable[[Path, int], None]:
    """Return the writer of a table, see `write_table`; without a name into the folder itself."""

    def write(folder: Path, count: int) -> None:
        images = [{"bytes": picture(number), "path": None} for number in range(count)]
        rows = [{"image": image, "label": label(number)} for number, image in enumerate(images)]
        write_table(folder / name, rows)

    return write


write_huggingface = _write_table("")


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
    "parquet": _write_table("part-0.parquet"),
    "arrow": _write_table("a.arrow"),
    "huggingface": write_huggingface,
    "tfrecord": write_tfrecord,
}
"""Format -> function (folder, count) that writes the images 0 to count - 1."""
