"""Files of every data format, and the samples that they hold."""

from __future__ import annotations

import csv
import gzip
import io
import json
import random
import struct
import tarfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from wanma.data.formats.arrays import Cifar, Idx, NumpyArrays
from wanma.data.formats.arrow_tables import ArrowTables, Parquet
from wanma.data.formats.csv_rows import Csv
from wanma.data.formats.format import FileGroup, Format
from wanma.data.formats.hugging_face import HuggingFaceDataset
from wanma.data.formats.image_folder import ImageFolder
from wanma.data.formats.json_records import JsonLines, JsonList
from wanma.data.formats.megatron import Megatron
from wanma.data.formats.tar_samples import TarSamples
from wanma.data.formats.text import TextDocuments, TextLines
from wanma.data.formats.tfrecord import TFRecord, masked_crc
from wanma.data.stores.byte_source import ByteSource, MappedFile, MemorySource

Record = dict[str, Any]


@dataclass(frozen=True)
class LocalFile:
    """Local file, as listed."""

    path: Path
    size: int
    version: str

    @classmethod
    def of(cls, path: Path) -> LocalFile:
        status = path.stat()
        return cls(path, status.st_size, f"{status.st_size}:{status.st_mtime_ns}")

    @property
    def url(self) -> str:
        return str(self.path)

    def open(self) -> ByteSource:
        return MappedFile(self.path)


class RemoteSource:
    """Source that is no mapped file, as those of remote stores."""

    def __init__(self, file: RemoteFile) -> None:
        self.url, self.version = file.url, file.version
        self._content, self._calls = file.path.read_bytes(), file.calls
        self.size = len(self._content)

    def read(self, start: int, end: int) -> bytes | memoryview:
        return self.read_ranges([(start, end)])[0]

    def read_ranges(self, ranges: Sequence[tuple[int, int]]) -> list[bytes | memoryview]:
        self._calls.append(list(ranges))
        return [self._content[start:end] for start, end in ranges]


@dataclass(frozen=True)
class RemoteFile(LocalFile):
    """Local file that is read as a remote one; it records the calls."""

    calls: list[list[tuple[int, int]]] = field(default_factory=list, compare=False)
    """Ranges of each call."""

    def open(self) -> ByteSource:
        return RemoteSource(self)


@dataclass(frozen=True)
class MemoryFile:
    """File in memory."""

    url: str
    content: bytes
    version: str = ""

    @property
    def size(self) -> int:
        return len(self.content)

    def open(self) -> ByteSource:
        return MemorySource(self.url, self.content)


def in_memory(name: str, content: bytes) -> FileGroup:
    """Return the group of one file in memory."""
    return FileGroup((MemoryFile(name, content),))


def list_files(folder: Path, kind: type[LocalFile] = LocalFile) -> list[LocalFile]:
    """List the files below a folder, sorted."""
    return [kind.of(path) for path in sorted(folder.rglob("*")) if path.is_file()]


def one_group(path: Path, scratch: Path | None = None) -> FileGroup:
    """Return the group of one file."""
    return FileGroup((LocalFile.of(path),), scratch=scratch)


def plain(value: Any) -> Any:
    """Return a value with views as bytes and arrays as (type, shape, values), so that it can be compared."""
    if isinstance(value, memoryview):
        return bytes(value)
    if isinstance(value, np.ndarray):
        return (value.dtype.newbyteorder("=").str, value.shape, value.tolist())
    if isinstance(value, Mapping):
        return {key: plain(part) for key, part in value.items()}
    if isinstance(value, list):
        return [plain(part) for part in value]
    return value


@dataclass(frozen=True)
class Case:
    """Way to write a format."""

    data_format: Format
    write: Callable[[Path, int, random.Random], list[Record]]
    """Function (folder, count, generator) that writes `count` samples or more, and returns them in order."""
    truncation: str = "refused"
    """Consequence of a cut file: "refused", unless no sample is lost; "boundary": refused unless it is cut
    between two samples; "text": its last sample may be shorter, because any beginning of a text is a text."""
    needs_suffix: bool = False
    """True if only the suffix tells the format from others."""


WORDS = (
    "horse",
    "ten thousand",
    'a "quoted" word',
    "line\nfeed",
    "comma, and {brace} [1]",
    "马",
    "é\\",
    "",
    " x ",
)


def text(generator: random.Random) -> str:
    return " ".join(generator.choice(WORDS) for _ in range(generator.randint(0, 12)))


def records(count: int, generator: random.Random) -> list[Record]:
    return [
        {"id": number, "text": text(generator), "list": [generator.random(), None, {"a": [number]}]}
        for number in range(count)
    ]


def numpy_generator(generator: random.Random) -> np.random.Generator:
    return np.random.default_rng(generator.getrandbits(32))


def write_json_lines(folder: Path, count: int, generator: random.Random) -> list[Record]:
    found = records(count, generator)
    (folder / "a.jsonl").write_text(
        "\n".join(json.dumps(one, ensure_ascii=bool(one["id"] % 2)) for one in found)
    )
    return found


def write_compressed_json_lines(
    codec: str, suffix: str
) -> Callable[[Path, int, random.Random], list[Record]]:
    def write(folder: Path, count: int, generator: random.Random) -> list[Record]:
        found = records(count, generator)
        lines = [(json.dumps(one) + "\n").encode() for one in found]
        half = len(lines) // 2
        frames = [compress(b"".join(part), codec) for part in (lines[:half], lines[half:])]
        (folder / f"a.jsonl{suffix}").write_bytes(b"".join(frames))
        return found

    return write


def compress(content: bytes, codec: str) -> bytes:
    """Compress as one frame or member."""
    if codec == "gzip":
        return gzip.compress(content, mtime=0)
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, codec) as stream:
        stream.write(content)
    return sink.getvalue().to_pybytes()


def write_json_list(folder: Path, count: int, generator: random.Random) -> list[Record]:
    found = records(count, generator)
    (folder / "a.json").write_text(json.dumps(found, indent=2 if count % 2 else None, ensure_ascii=False))
    return found


def write_documents(folder: Path, count: int, generator: random.Random) -> list[Record]:
    found = [{"text": f"{number} {text(generator)}"} for number in range(count)]
    for number, one in enumerate(found):
        (folder / f"{number:04d}.txt").write_text(one["text"], newline="")
    return found


def write_lines(folder: Path, count: int, generator: random.Random) -> list[Record]:
    found = [{"text": f"{number} {text(generator)}".replace("\n", " ")} for number in range(count)]
    (folder / "a.txt").write_text("\r\n".join(one["text"] for one in found) + "\n\n", newline="")
    return found


def write_csv(folder: Path, count: int, generator: random.Random) -> list[Record]:
    found = [{"id": str(number), "text": text(generator), "b": text(generator)} for number in range(count)]
    with (folder / "a.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["id", "text", "b"])
        writer.writeheader()
        writer.writerows(found)
    return found


def write_ratings(folder: Path, count: int, generator: random.Random) -> list[Record]:
    """Write ratings as MovieLens has them: tabs, and no header."""
    found = [{str(column): str(generator.randint(1, 9999)) for column in range(4)} for _ in range(count)]
    (folder / "u.tsv").write_text("".join("\t".join(one.values()) + "\n" for one in found))
    return found


def table_rows(count: int, generator: random.Random) -> tuple[pa.Table, list[Record]]:
    draw = numpy_generator(generator)
    tokens = [draw.integers(0, 60000, draw.integers(0, 9)).astype("u2") for _ in range(count)]
    found = [
        {
            "id": number,
            "text": text(generator) if number % 5 else None,
            "tokens": tokens[number],
            "pair": draw.random(2).astype("f4"),
            "image": {"bytes": bytes([number % 256]), "path": None},
        }
        for number in range(count)
    ]
    columns = {
        "id": pa.array([one["id"] for one in found], pa.int64()),
        "text": pa.array([one["text"] for one in found], pa.string()),
        "tokens": pa.array([one["tokens"].tolist() for one in found], pa.list_(pa.uint16())),
        "pair": pa.array([one["pair"].tolist() for one in found], pa.list_(pa.float32(), 2)),
        "image": pa.array(
            [one["image"] for one in found], pa.struct([("bytes", pa.binary()), ("path", pa.string())])
        ),
    }
    return pa.table(columns), found


def write_parquet(folder: Path, count: int, generator: random.Random) -> list[Record]:
    table, found = table_rows(count, generator)
    pq.write_table(table, folder / "a.parquet", row_group_size=7)
    return found


def write_arrow_file(folder: Path, count: int, generator: random.Random) -> list[Record]:
    table, found = table_rows(count, generator)
    with pa.ipc.new_file(folder / "a.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=7)
    return found


def write_arrow_stream(folder: Path, count: int, generator: random.Random) -> list[Record]:
    """Write a stream whose texts are in dictionaries that grow from batch to batch."""
    table, found = table_rows(count, generator)
    batches = []
    for batch in table.to_batches(max_chunksize=7):
        columns = [
            column.dictionary_encode() if name == "text" else column
            for name, column in zip(table.schema.names, batch.columns, strict=True)
        ]
        batches.append(pa.record_batch(columns, names=table.schema.names))
    with pa.ipc.new_stream(folder / "a.arrows", batches[0].schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return found


def write_huggingface(folder: Path, count: int, generator: random.Random) -> list[Record]:
    """Write the layout of `Dataset.save_to_disk`: streams of Arrow in the order of state.json."""
    table, found = table_rows(count, generator)
    names = ["data-00001-of-00002.arrow", "data-00000-of-00002.arrow"]
    half = count // 2
    for name, part in zip(names, (table.slice(0, half), table.slice(half)), strict=True):
        with pa.ipc.new_stream(folder / name, table.schema) as writer:
            writer.write_table(part, max_chunksize=7)
    state = {"_data_files": [{"filename": name} for name in names], "_fingerprint": "0", "_split": None}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text("{}")
    return found


def add_member(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    archive.addfile(info, io.BytesIO(content))


def write_tar(
    tar_format: int, mode: str = "w", name: str = "a.tar"
) -> Callable[[Path, int, random.Random], list[Record]]:
    def write(folder: Path, count: int, generator: random.Random) -> list[Record]:
        found = []
        with tarfile.open(folder / name, mode, format=tar_format) as archive:
            for number in range(count):
                key = f"{'long-' * (number % 5 * 10)}folder/{number:05d}{'马' if number % 3 == 0 else ''}"
                content = {
                    "jpg": generator.randbytes(generator.randint(0, 2000)),
                    "seg.png": generator.randbytes(number % 600),
                    "json": json.dumps({"number": number}).encode(),
                }
                if number % 4 == 0:
                    archive.addfile(_folder_entry(f"empty-{number}"))
                for suffix, part in content.items():
                    add_member(archive, f"{key}.{suffix}", part)
                found.append({"__key__": key, **content})
        return found

    return write


def _folder_entry(name: str) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type = tarfile.DIRTYPE
    return info


def varint(number: int) -> bytes:
    number &= 0xFFFFFFFFFFFFFFFF
    content = b""
    while number > 127:
        content += bytes([number & 127 | 128])
        number >>= 7
    return content + bytes([number])


def message(number: int, content: bytes) -> bytes:
    """Return a field of a protocol buffer."""
    return varint(number << 3 | 2) + varint(len(content)) + content


def example(features: Mapping[str, Any]) -> bytes:
    """Return a tf.train.Example: lists of bytes, float32 arrays, int64 arrays."""
    content = b""
    for name, value in features.items():
        if isinstance(value, list):
            feature = message(1, b"".join(message(1, part) for part in value))
        elif value.dtype == np.float32:
            feature = message(2, message(1, value.astype("<f4").tobytes()))
        else:
            feature = message(3, message(1, b"".join(varint(one) for one in value.tolist())))
        content += message(1, message(1, name.encode()) + message(2, feature))
    return message(1, content)


def frame(content: bytes) -> bytes:
    """Return a record of a TFRecord file."""
    length = struct.pack("<Q", len(content))
    crcs = [struct.pack("<I", masked_crc(memoryview(part))) for part in (length, content)]
    return length + crcs[0] + content + crcs[1]


def write_tfrecord(codec: str = "", suffix: str = "") -> Callable[[Path, int, random.Random], list[Record]]:
    def write(folder: Path, count: int, generator: random.Random) -> list[Record]:
        draw = numpy_generator(generator)
        found = [
            {
                "image": [generator.randbytes(generator.randint(0, 5000))],
                "weights": draw.random(number % 4).astype("f4"),
                "label": np.array([number, -number], np.int64),
            }
            for number in range(count)
        ]
        content = b"".join(frame(example(one)) for one in found)
        if codec:
            content = zlib.compress(content) if codec == "zlib" else compress(content, codec)
        (folder / f"a.tfrecord{suffix}").write_bytes(content)
        return found

    return write


def write_megatron(unit: str, dtype: str = "<u2", with_modes: bool = False) -> Callable[..., list[Record]]:
    """Write .bin and .idx as Megatron's builders lay them out; every third document has two sequences."""
    codes = {"<u1": 1, "<i1": 2, "<i2": 3, "<i4": 4, "<i8": 5, "<f8": 6, "<f4": 7, "<u2": 8}

    def write(folder: Path, count: int, generator: random.Random) -> list[Record]:
        draw = numpy_generator(generator)
        documents = [
            [draw.integers(0, 100, draw.integers(1, 20)).astype(dtype) for _ in range(1 + (number % 3 == 0))]
            for number in range(count)
        ]
        sequences = [sequence for document in documents for sequence in document]
        lengths = np.array([len(sequence) for sequence in sequences], np.int64)
        bounds = np.concatenate([[0], np.cumsum(lengths)])
        starts = np.concatenate([[0], np.cumsum([len(document) for document in documents])]).astype("<i8")
        (folder / "a.bin").write_bytes(b"".join(sequence.tobytes() for sequence in sequences))
        head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, codes[dtype], len(lengths), len(starts))
        pointers = bounds[:-1] * np.dtype(dtype).itemsize
        body = lengths.astype("<i4").tobytes() + pointers.astype("<i8").tobytes() + starts.tobytes()
        body += bytes(len(lengths)) if with_modes else b""
        (folder / "a.idx").write_bytes(head + body)
        parts = documents if unit == "document" else [[sequence] for sequence in sequences]
        return [{"tokens": np.concatenate(part)} for part in parts]

    return write


def write_npy(folder: Path, count: int, generator: random.Random) -> list[Record]:
    array = numpy_generator(generator).random((count, 3, 2)).astype("f4")
    np.save(folder / "a.npy", array)
    return [{"array": one} for one in array]


def write_npz(save: Callable[..., None]) -> Callable[[Path, int, random.Random], list[Record]]:
    def write(folder: Path, count: int, generator: random.Random) -> list[Record]:
        draw = numpy_generator(generator)
        images, labels = draw.integers(0, 255, (count, 4, 4)).astype("u1"), draw.integers(0, 9, count)
        save(folder / "a.npz", images=images, labels=labels)
        return [
            {"images": image, "labels": label} for image, label in zip(images, labels.tolist(), strict=True)
        ]

    return write


def write_idx(folder: Path, count: int, generator: random.Random) -> list[Record]:
    draw = numpy_generator(generator)
    images, labels = (
        draw.integers(0, 255, (count, 5, 5)).astype("u1"),
        draw.integers(0, 9, count).astype("u1"),
    )
    for name, array in (("train-images-idx3-ubyte.gz", images), ("train-labels-idx1-ubyte", labels)):
        head = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
        content = head + array.tobytes()
        (folder / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    return [{"image": image, "label": label} for image, label in zip(images, labels.tolist(), strict=True)]


def write_cifar(folder: Path, count: int, generator: random.Random) -> list[Record]:
    draw = numpy_generator(generator)
    found = [
        {"label": int(draw.integers(0, 10)), "image": draw.integers(0, 255, (3, 32, 32)).astype("u1")}
        for _ in range(count)
    ]
    content = b"".join(bytes([one["label"]]) + one["image"].tobytes() for one in found)
    (folder / "data_batch_1.bin").write_bytes(content)
    return found


def write_images(folder: Path, count: int, generator: random.Random) -> list[Record]:
    found = []
    for number in range(count):
        name = ("ant", "bee")[number * 2 // count]
        path = folder / name / f"{number:04d}.{('png', 'jpg', 'webp', 'bmp')[number % 4]}"
        path.parent.mkdir(exist_ok=True)
        Image.new("RGB", (3, 2), (number % 256, 0, 0)).save(path)
        found.append(
            {
                "image": path.read_bytes(),
                "path": f"{name}/{path.name}",
                "class": name,
                "label": ("ant", "bee").index(name),
            }
        )
    return found


CASES: dict[str, Case] = {
    "text": Case(TextDocuments(), write_documents, "text", needs_suffix=True),
    "text-lines": Case(TextLines(), write_lines, "text", needs_suffix=True),
    "jsonl": Case(JsonLines(), write_json_lines, "boundary"),
    "jsonl.gz": Case(JsonLines(), write_compressed_json_lines("gzip", ".gz"), "boundary"),
    "jsonl.zst": Case(JsonLines(), write_compressed_json_lines("zstd", ".zst"), "boundary"),
    "json-list": Case(JsonList(), write_json_list),
    "csv": Case(Csv(), write_csv, "text", needs_suffix=True),
    "tsv": Case(Csv(), write_ratings, "text", needs_suffix=True),
    "parquet": Case(Parquet(), write_parquet),
    "arrow-file": Case(ArrowTables(), write_arrow_file),
    "arrow-stream": Case(ArrowTables(), write_arrow_stream),
    "huggingface": Case(HuggingFaceDataset(), write_huggingface),
    "tar-ustar": Case(TarSamples(), write_tar(tarfile.PAX_FORMAT)),
    "tar-gnu": Case(TarSamples(), write_tar(tarfile.GNU_FORMAT)),
    "tar.gz": Case(TarSamples(), write_tar(tarfile.PAX_FORMAT, "w:gz", "a.tar.gz")),
    "tfrecord": Case(TFRecord(), write_tfrecord(), "boundary"),
    "tfrecord.gz": Case(TFRecord(), write_tfrecord("gzip", ".gz"), "boundary"),
    "tfrecord-zlib": Case(TFRecord(), write_tfrecord("zlib"), "boundary"),
    "megatron": Case(Megatron(), write_megatron("document")),
    "megatron-sequences": Case(Megatron(unit="sequence"), write_megatron("sequence", with_modes=True)),
    "npy": Case(NumpyArrays(), write_npy),
    "npz": Case(NumpyArrays(), write_npz(np.savez)),
    "npz-compressed": Case(NumpyArrays(), write_npz(np.savez_compressed)),
    "idx": Case(Idx(), write_idx),
    "cifar": Case(Cifar(), write_cifar, "boundary"),
    "images": Case(ImageFolder(), write_images, "text"),
}
"""All formats, in the ways in which their files differ."""


def write_case(name: str, folder: Path, count: int = 20, seed: int = 0) -> list[Record]:
    """Write the files of a case into a new folder, and return the samples."""
    folder.mkdir(parents=True, exist_ok=True)
    return CASES[name].write(folder, count, random.Random(seed))
