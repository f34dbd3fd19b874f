"""Images in the archives of libraries; WebDataset's tar is written by Python's own library, and equal."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

from image_data import ImageData

ROW_GROUP_ROWS = 32


def tar_names(data: ImageData) -> list[str]:
    """Return the names of the archives that `write_tar` writes."""
    return [f"{number:06}.tar" for number in range(data.shards)]


def write_tar(data: ImageData, folder: Path) -> None:
    """Write archives as WebDataset reads them: `KEY.jpg` and `KEY.cls` for each image."""
    files = data.files()
    for shard, name in enumerate(tar_names(data)):
        with tarfile.open(folder / name, "w") as archive:
            for number in range(shard, len(files), data.shards):
                path, label = files[number]
                for suffix, content in (("jpg", path.read_bytes()), ("cls", str(label).encode())):
                    member = tarfile.TarInfo(f"{number:06}.{suffix}")
                    member.size = len(content)
                    archive.addfile(member, io.BytesIO(content))


def write_parquet(data: ImageData, folder: Path) -> None:
    """Write tables with the columns `image` and `label`, in row groups of `ROW_GROUP_ROWS` rows."""
    import pyarrow
    from pyarrow import parquet

    files = data.files()
    for shard in range(data.shards):
        rows = [_read(file) for file in files[shard :: data.shards]]
        table = pyarrow.table({"image": [row[0] for row in rows], "label": [row[1] for row in rows]})
        parquet.write_table(
            table, folder / f"{shard:06}.parquet", row_group_size=ROW_GROUP_ROWS, compression="none"
        )


def write_litdata(data: ImageData, folder: Path) -> None:
    """Write chunks of litdata."""
    from litdata import optimize

    optimize(_read, data.files(), output_dir=str(folder), chunk_bytes="8MB", num_workers=1)


def _read(file: tuple[Path, int]) -> tuple[bytes, int]:
    return file[0].read_bytes(), file[1]
