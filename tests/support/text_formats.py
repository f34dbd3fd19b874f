"""Documents of text in every format that `data.text` reads, as the formats' own libraries lay them out."""

from __future__ import annotations

import csv
import json
import struct
import tarfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from support.data_files import add_member, compress, example, frame

Write = Callable[[Path, Sequence[str]], None]


@dataclass(frozen=True)
class TextCase:
    """Way to store documents.

    Args:
        write: function (folder, documents) that writes them into a folder.
        field: `data.columns.text`.
    """

    write: Write
    field: str = "text"


def write_plain(folder: Path, documents: Sequence[str]) -> None:
    """Write one file a document."""
    for number, text in enumerate(documents):
        (folder / f"{number:05}.txt").write_text(text, newline="")


def json_lines(documents: Sequence[str]) -> bytes:
    records = ({"id": number, "text": text} for number, text in enumerate(documents))
    return "".join(json.dumps(one, ensure_ascii=one["id"] % 2 == 0) + "\n" for one in records).encode()


def _write_json_lines(codec: str = "", suffix: str = "") -> Write:
    def write(folder: Path, documents: Sequence[str]) -> None:
        content = json_lines(documents)
        (folder / f"a.jsonl{suffix}").write_bytes(compress(content, codec) if codec else content)

    return write


def _write_two_files(folder: Path, documents: Sequence[str]) -> None:
    half = len(documents) // 2
    for name, part in (("part-0.jsonl.zst", documents[:half]), ("part-1.jsonl.zst", documents[half:])):
        (folder / name).write_bytes(compress(json_lines(part), "zstd"))


def _write_nested(folder: Path, documents: Sequence[str]) -> None:
    records = [{"meta": {"text": text}} for text in documents]
    (folder / "a.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))


def _write_json_list(folder: Path, documents: Sequence[str]) -> None:
    (folder / "a.json").write_text(json.dumps([{"text": text} for text in documents], indent=1))


def _write_csv(folder: Path, documents: Sequence[str]) -> None:
    with (folder / "a.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["id", "text"])
        writer.writerows(enumerate(documents))


def table(documents: Sequence[str]) -> pa.Table:
    return pa.table({"id": pa.array(range(len(documents))), "text": pa.array(documents, pa.string())})


def _write_parquet(folder: Path, documents: Sequence[str]) -> None:
    pq.write_table(table(documents), folder / "a.parquet", row_group_size=7)


def _write_arrow(folder: Path, documents: Sequence[str]) -> None:
    with pa.ipc.new_file(folder / "a.arrow", table(documents).schema) as writer:
        writer.write_table(table(documents), max_chunksize=7)


def _write_huggingface(folder: Path, documents: Sequence[str]) -> None:
    with pa.ipc.new_stream(folder / "data-00000-of-00001.arrow", table(documents).schema) as writer:
        writer.write_table(table(documents), max_chunksize=7)
    state = {"_data_files": [{"filename": "data-00000-of-00001.arrow"}], "_fingerprint": "0", "_split": None}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text('{\n  "features": {}\n}\n')


def _write_tar(folder: Path, documents: Sequence[str]) -> None:
    with tarfile.open(folder / "a.tar", "w") as archive:
        for number, text in enumerate(documents):
            add_member(archive, f"{number:05}.json", b'{"label": 1}')
            add_member(archive, f"{number:05}.txt", text.encode())


def _write_tar_of_json(folder: Path, documents: Sequence[str]) -> None:
    with tarfile.open(folder / "a.tar", "w") as archive:
        for number, text in enumerate(documents):
            add_member(archive, f"{number:05}.json", json.dumps({"text": text}).encode())


def _write_tfrecord(codec: str = "", suffix: str = "") -> Write:
    def write(folder: Path, documents: Sequence[str]) -> None:
        content = b"".join(frame(example({"text": [text.encode()]})) for text in documents)
        name = folder / f"a.tfrecord{suffix}"
        name.write_bytes(compress(content, codec) if codec else content)

    return write


TEXT_CASES = {
    "jsonl": TextCase(_write_json_lines()),
    "jsonl.gz": TextCase(_write_json_lines("gzip", ".gz")),
    "jsonl.zst": TextCase(_write_json_lines("zstd", ".zst")),
    "two files": TextCase(_write_two_files),
    "nested": TextCase(_write_nested, "meta.text"),
    "json-list": TextCase(_write_json_list),
    "csv": TextCase(_write_csv),
    "parquet": TextCase(_write_parquet),
    "arrow": TextCase(_write_arrow),
    "huggingface": TextCase(_write_huggingface),
    "tar": TextCase(_write_tar, "txt"),
    "tar of json": TextCase(_write_tar_of_json, "json.text"),
    "tfrecord": TextCase(_write_tfrecord()),
    "tfrecord.gz": TextCase(_write_tfrecord("gzip", ".gz")),
}


def write_megatron(path: Path, documents: Sequence[Sequence[int]], dtype: str = "<u2") -> None:
    """Write .bin and .idx with one sequence a document.

    Args:
        path: the .bin file.
        documents: tokens of each document.
        dtype: type of a token.
    """
    code = {"<u2": 8, "<i4": 4, "<i8": 5}[dtype]
    arrays = [np.array(document, dtype) for document in documents]
    lengths = np.array([len(array) for array in arrays], "<i4")
    starts = np.concatenate([[0], np.cumsum(lengths[:-1], dtype=np.int64)]) * np.dtype(dtype).itemsize
    path.write_bytes(b"".join(array.tobytes() for array in arrays))
    head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, code, len(arrays), len(arrays) + 1)
    body = lengths.tobytes() + starts.astype("<i8").tobytes()
    body += np.arange(len(arrays) + 1, dtype="<i8").tobytes()
    path.with_suffix(".idx").write_bytes(head + body)
