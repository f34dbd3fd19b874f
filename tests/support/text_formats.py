"""Documents of text in every format that `data.text` reads, as the formats' own libraries lay them out."""

from __future__ import annotations

import json
import struct
import tarfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from support.data_files import add_member, compress, example, frame
from support.table_files import write_table
from wanma.data.documents.text_files import list_documents
from wanma.data.text.token_file import TokenFile, open_or_build_token_file
from wanma.data.text.tokenizer import BytesTokenizer, Tokenizer

Write = Callable[[Path, Sequence[str]], None]


@dataclass(frozen=True)
class TextCase:
    """Way to store documents, and the field that holds them."""

    write: Write
    field: str = "text"


def build_token_file(
    entries: Sequence[str | Path], cache: Path, tokenizer: Tokenizer | None = None, **keywords: Any
) -> TokenFile:
    """Open or build the token file of entries; keywords as of `open_or_build_token_file`."""
    documents = list_documents([str(entry) for entry in entries])
    return open_or_build_token_file(documents, tokenizer or BytesTokenizer(), cache, **keywords)


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
    write_table(folder / "a.jsonl", [{"meta": {"text": text}} for text in documents])


def _write_table(name: str = "") -> Write:
    """Write a table of numbers and documents, see `write_table`; without a name to the folder itself."""

    def write(folder: Path, documents: Sequence[str]) -> None:
        write_table(folder / name, [{"id": number, "text": text} for number, text in enumerate(documents)])

    return write


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
    "json-list": TextCase(_write_table("a.json")),
    "csv": TextCase(_write_table("a.csv")),
    "parquet": TextCase(_write_table("a.parquet")),
    "arrow": TextCase(_write_table("a.arrow")),
    "huggingface": TextCase(_write_table()),
    "tar": TextCase(_write_tar, "txt"),
    "tar of json": TextCase(_write_tar_of_json, "json.text"),
    "tfrecord": TextCase(_write_tfrecord()),
    "tfrecord.gz": TextCase(_write_tfrecord("gzip", ".gz")),
}


def write_megatron(path: Path, documents: Sequence[Sequence[int]], dtype: str = "<u2") -> None:
    """Write .bin and .idx with one sequence a document."""
    code = {"<u2": 8, "<i4": 4, "<i8": 5}[dtype]
    arrays = [np.array(document, dtype) for document in documents]
    lengths = np.array([len(array) for array in arrays], "<i4")
    starts = np.concatenate([[0], np.cumsum(lengths[:-1], dtype=np.int64)]) * np.dtype(dtype).itemsize
    path.write_bytes(b"".join(array.tobytes() for array in arrays))
    head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, code, len(arrays), len(arrays) + 1)
    body = lengths.tobytes() + starts.astype("<i8").tobytes()
    body += np.arange(len(arrays) + 1, dtype="<i8").tobytes()
    path.with_suffix(".idx").write_bytes(head + body)
