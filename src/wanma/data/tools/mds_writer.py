"""Writer of MDS, the shards of mosaicml-streaming, with the entries of their `index.json`.

All shards of a conversion have the same columns. Their encodings follow from the values of all rows, which
are read for it first, as for the schema of a table.
"""

from __future__ import annotations

import datetime
import decimal
import hashlib
import json
import mmap
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import xxhash

from wanma.data.formats.arrow_tables import import_pyarrow
from wanma.data.formats.format import Record
from wanma.data.formats.image_folder import is_image
from wanma.data.tools.images import image_format
from wanma.data.tools.shard_writers import ShardWriter, json_value
from wanma.job.errors import WanmaError

INDEX_FILE = "index.json"
_HASHES = ("sha1", "xxh3_64")
"""Hashes of each file, by the names that mosaicml-streaming has for them."""
_ARRAY_TYPES = {
    **{f"uint{bits}": bits for bits in (8, 16, 32, 64)},
    **{f"int{bits}": bits + 1 for bits in (8, 16, 32, 64)},
    **{f"float{bits}": bits + 2 for bits in (16, 32, 64)},
}
"""Types of arrays and their codes in `streaming.base.format.mds.encodings`."""
_SHAPE_TYPES = ("<u1", "<u2", "<u4", "<u8")
_BINARY = ("bytes", "jpeg", "png")
_FIXED_SIZES = {"int": 8, "float64": 8}
_MAX_SHARD_BYTES = (1 << 32) - 1
"""Positions of samples are uint32."""
_ENCODED_TYPES = 8
"""Kinds of values of one field that are kept apart; more become one."""


@dataclass(frozen=True)
class MdsColumns:
    """Columns of the shards, by name: their encodings in the words of mosaicml-streaming."""

    encodings: Mapping[str, str]

    @property
    def config(self) -> dict[str, Any]:
        """Columns as index.json and the head of a shard describe them, in alphabetical order."""
        names = sorted(self.encodings)
        encodings = [self.encodings[name] for name in names]
        sizes = [_fixed_size(encoding) for encoding in encodings]
        return {"column_names": names, "column_encodings": encodings, "column_sizes": sizes}


@dataclass(frozen=True)
class FieldKinds:
    """Kinds of the values of each field among some rows: encodings, and "null"."""

    rows: int
    kinds: Mapping[str, frozenset[str]]
    present: Mapping[str, int]
    """Rows that have the field."""


def find_kinds(records: Sequence[Record]) -> FieldKinds:
    """Return the kinds of the values of all fields of records."""
    kinds: dict[str, set[str]] = {}
    present: dict[str, int] = {}
    for record in records:
        for name, value in record.items():
            found = kinds.setdefault(name, set())
            found.add(_kind(value))
            present[name] = present.get(name, 0) + 1
            if len(found) > _ENCODED_TYPES:
                kinds[name] = _without_shapes(found)
    return FieldKinds(len(records), {name: frozenset(one) for name, one in kinds.items()}, present)


def join_kinds(parts: Iterable[FieldKinds]) -> FieldKinds:
    """Return the kinds of the rows of all parts."""
    rows = 0
    kinds: dict[str, set[str]] = {}
    present: dict[str, int] = {}
    for part in parts:
        rows += part.rows
        for name, found in part.kinds.items():
            joined = kinds.setdefault(name, set()) | found
            kinds[name] = _without_shapes(joined) if len(joined) > _ENCODED_TYPES else joined
            present[name] = present.get(name, 0) + part.present[name]
    return FieldKinds(rows, {name: frozenset(one) for name, one in kinds.items()}, present)


def choose_columns(found: FieldKinds) -> MdsColumns:
    """Return the columns that hold the values of all rows.

    Raises:
        ValueError: no encoding holds all values of a field.
    """
    encodings = {}
    for name, kinds in found.kinds.items():
        has_null = "null" in kinds or found.present[name] < found.rows
        encodings[name] = _join_encodings(name, kinds - {"null"}, has_null=has_null)
    if not encodings:
        raise ValueError("the rows have no field")
    return MdsColumns(encodings)


def _join_encodings(name: str, kinds: frozenset[str], *, has_null: bool) -> str:
    binary = kinds & set(_BINARY)
    if binary and (has_null or kinds - binary):
        cause = (
            "is missing in some rows" if has_null else "holds bytes in some rows and other values in others"
        )
        raise ValueError(f"the field '{name}' {cause}, and no encoding of MDS holds both")
    if has_null or not kinds:
        return "json"
    if len(kinds) == 1:
        return next(iter(kinds))
    if binary:
        return "bytes"
    if kinds <= {"int", "float64"}:
        return "float64"
    if kinds <= {"int", "str_int"}:
        return "str_int"
    if all(kind.startswith("ndarray:") for kind in kinds):
        types = {kind.split(":")[1] for kind in kinds}
        return f"ndarray:{next(iter(types))}" if len(types) == 1 else "ndarray"
    return "json"


def _without_shapes(kinds: set[str]) -> set[str]:
    """Return kinds without the shapes of arrays; each type stays."""
    return {":".join(kind.split(":")[:2]) for kind in kinds}


def _kind(value: Any) -> str:
    """Return the encoding that fits a value best, or "null"."""
    if value is None:
        return "null"
    if isinstance(value, np.ndarray) and value.ndim:
        is_encodable = value.dtype.name in _ARRAY_TYPES and value.size and value.ndim < 64
        return f"ndarray:{value.dtype.name}:{','.join(map(str, value.shape))}" if is_encodable else "json"
    if isinstance(value, np.ndarray | np.generic):
        return _kind(value.item())
    if isinstance(value, bytes | bytearray | memoryview):
        head = bytes(value[:16])
        kind = image_format(head).lower() if is_image(head) else "bytes"
        return kind if kind in _BINARY else "bytes"
    if isinstance(value, bool):
        return "json"
    if isinstance(value, int):
        return "int" if -(1 << 63) <= value < 1 << 63 else "str_int"
    kinds: dict[type | tuple[type, ...], str] = {
        float: "float64",
        (str, datetime.date, datetime.time, datetime.timedelta): "str",
        decimal.Decimal: "str_decimal",
    }
    return next((kind for types, kind in kinds.items() if isinstance(value, types)), "json")


def _fixed_size(encoding: str) -> int | None:
    """Return the bytes of each value; None: they differ."""
    kind, _, options = encoding.partition(":")
    if kind == "ndarray" and ":" in options:
        dtype, _, shape = options.partition(":")
        return int(np.prod([int(size) for size in shape.split(",")])) * np.dtype(dtype).itemsize
    return _FIXED_SIZES.get(encoding)


def encode_value(name: str, value: Any, encoding: str) -> bytes:
    """Return a value as MDS stores it.

    Raises:
        ValueError: the encoding does not hold it.
    """
    if encoding.startswith("ndarray"):
        return _encode_array(np.asarray(value), encoding.split(":")[1:])
    if encoding in _BINARY:
        return bytes(value)
    if encoding == "json":
        return json.dumps(json_value(name, value), allow_nan=False).encode()
    if isinstance(value, np.ndarray | np.generic):
        value = value.item()
    if encoding == "int":
        return int(value).to_bytes(8, "little", signed=True)
    if encoding == "float64":
        return np.array(value, "<f8").tobytes()
    if encoding == "str":
        return str(json_value(name, value)).encode()
    return str(value).encode()  # str_int, str_decimal


def _encode_array(values: np.ndarray[Any, Any], options: Sequence[str]) -> bytes:
    """Encode an array: type and shape come before the values unless the encoding has them."""
    head = b"" if options else bytes([_ARRAY_TYPES[values.dtype.name]])
    if len(options) < 2:
        code = next(n for n, kind in enumerate(_SHAPE_TYPES) if max(values.shape) <= np.iinfo(kind).max)
        head += bytes([values.ndim << 2 | code]) + np.array(values.shape, _SHAPE_TYPES[code]).tobytes()
    return head + values.astype(values.dtype.newbyteorder("<")).tobytes()


class MdsWriter(ShardWriter):
    """Writer of one shard; its samples are on disk until their number is known.

    Args:
        path: the file.
        columns: columns of all shards.
        compression: "" or "zstd".
        name: name of the plain file in index.json.
    """

    def __init__(self, path: Path, columns: MdsColumns, compression: str, name: str) -> None:
        self._path, self._columns, self._compression, self._name = path, columns, compression, name
        self._config = columns.config
        self._samples_path = path.with_name(f"{path.name}.samples")
        self._samples = self._samples_path.open("w+b")
        self._sizes: list[int] = []
        self.entry: dict[str, Any] = {}
        """Entry of index.json; there after `close`."""

    def write(self, record: Record) -> None:
        sizes, parts = [], []
        names, encodings = self._config["column_names"], self._config["column_encodings"]
        for name, encoding, size in zip(names, encodings, self._config["column_sizes"], strict=True):
            parts.append(encode_value(name, record.get(name), encoding))
            if size is None:
                sizes.append(len(parts[-1]))
        sample = np.array(sizes, "<u4").tobytes() + b"".join(parts)
        self._samples.write(sample)
        self._sizes.append(len(sample))

    def close(self) -> None:
        head = {
            "compression": self._compression or None,
            "format": "mds",
            "hashes": list(_HASHES),
            "size_limit": None,
            "version": 2,
            **self._config,
        }
        config = json.dumps(head, sort_keys=True).encode()
        offsets = np.cumsum([4 + 4 * (len(self._sizes) + 1) + len(config), *self._sizes], dtype=np.int64)
        if offsets[-1] > _MAX_SHARD_BYTES:
            raise WanmaError(
                f"a shard of {offsets[-1]:,} bytes is too large for MDS, whose positions have 32 bits",
                "set a smaller --shard-size",
            )
        self._samples.seek(0)
        with self._path.open("wb") as file:
            file.write(len(self._sizes).to_bytes(4, "little"))
            file.write(offsets.astype("<u4").tobytes())
            file.write(config)
            shutil.copyfileobj(self._samples, file, 1 << 22)
        self.release()
        raw = _describe_file(self._path, self._name)
        zipped = None
        if self._compression:
            _compress(self._path)
            zipped = _describe_file(self._path, f"{self._name}.zstd")
        self.entry = {**head, "raw_data": raw, "samples": len(self._sizes), "zip_data": zipped}

    def release(self) -> None:
        self._samples.close()
        self._samples_path.unlink(missing_ok=True)


def write_index(folder: Path, entries: Sequence[Mapping[str, Any]]) -> None:
    """Write the index.json of all shards in a folder."""
    content = json.dumps({"shards": list(entries), "version": 2}, sort_keys=True)
    (folder / INDEX_FILE).write_text(content, encoding="utf-8")


def shard_facts(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts by which the format MDS reads a shard, as it takes them of index.json."""
    names = ("column_names", "column_encodings", "column_sizes", "samples")
    facts = {name: entry[name] for name in names}
    return {**facts, "compression": entry["compression"] or "", "bytes": entry["raw_data"]["bytes"]}


def _compress(path: Path) -> None:
    """Replace a file by one frame of zstd, whose head has the plain size, as other readers need it."""
    pyarrow = import_pyarrow("in zstd")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as plain:
        compressed = pyarrow.compress(pyarrow.py_buffer(plain), codec="zstd")
        temporary = path.with_name(f"{path.name}.zip")
        temporary.write_bytes(compressed)
        del compressed
    temporary.rename(path)


def _describe_file(path: Path, name: str) -> dict[str, Any]:
    sha1, xxh3 = hashlib.sha1(usedforsecurity=False), xxhash.xxh3_64()
    with path.open("rb") as file:
        for block in _blocks(file):
            sha1.update(block)
            xxh3.update(block)
    hashes = dict(zip(_HASHES, (sha1.hexdigest(), xxh3.hexdigest()), strict=True))
    return {"basename": name, "bytes": path.stat().st_size, "hashes": hashes}


def _blocks(file: IO[bytes]) -> Iterable[bytes]:
    return iter(lambda: file.read(1 << 20), b"")
