"""Writers of shards: JSON lines, Parquet, WebDataset and Megatron's indexed data.

A writer gets prepared records in their order. A record that its format cannot hold is a `ValueError` whose
message is the cause.
"""

from __future__ import annotations

import datetime
import decimal
import gzip
import io
import json
import tarfile
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from wanma.data.formats.arrow_tables import import_pyarrow
from wanma.data.formats.format import Record
from wanma.data.formats.image_folder import is_image
from wanma.data.formats.tar_samples import split_path
from wanma.data.tools.images import image_format
from wanma.data.tools.record_content import BINARY_SUFFIXES, KEY_FIELD, content_bytes
from wanma.job.errors import WanmaError

FRAME_BYTES = 4 << 20
"""Plain bytes of a compressed frame: small ones are read at any position without a plain copy."""
_ROW_GROUP_BYTES = 32 << 20
_MAGIC = b"MMIDIDX\0\0"
_MEGATRON_CODES = {"uint16": 8, "int32": 4, "int64": 5}
"""Codes of `DType` in megatron.core.datasets.indexed_dataset."""


class ShardWriter(ABC):
    """Writer of one shard; a context that lets go of its files, also of an unfinished shard."""

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    @abstractmethod
    def write(self, record: Record) -> None:
        """Write one record.

        Raises:
            ValueError: the format cannot hold it.
        """

    @abstractmethod
    def close(self) -> None:
        """Write the end of the shard.

        Raises:
            ValueError: the format cannot hold the last records.
        """

    @abstractmethod
    def release(self) -> None:
        """Close the files without the end of the shard; after `close` nothing."""


class JsonLinesWriter(ShardWriter):
    """Writer of JSON lines.

    Args:
        path: the file.
        compression: "", "gzip" or "zstd".
    """

    def __init__(self, path: Path, compression: str = "") -> None:
        self._file = path.open("wb")
        self._compression = compression
        self._lines: list[bytes] = []
        self._size = 0

    def write(self, record: Record) -> None:
        values = {name: json_value(name, value) for name, value in record.items()}
        line = json.dumps(values, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode() + b"\n"
        self._lines.append(line)
        self._size += len(line)
        if self._size >= FRAME_BYTES:
            self._flush()

    def close(self) -> None:
        self._flush()
        self._file.close()

    def release(self) -> None:
        self._file.close()

    def _flush(self) -> None:
        plain = b"".join(self._lines)
        self._lines, self._size = [], 0
        if plain:
            self._file.write(self._compress(plain))

    def _compress(self, plain: bytes) -> bytes:
        if self._compression == "gzip":
            return gzip.compress(plain, mtime=0)
        if self._compression == "zstd":
            compressed: bytes = import_pyarrow("in zstd").compress(plain, codec="zstd", asbytes=True)
            return compressed
        return plain


def json_value(name: str, value: Any) -> Any:
    """Return a value as JSON has it: arrays as lists, dates as texts of ISO 8601.

    Raises:
        ValueError: it holds bytes.
    """
    if isinstance(value, bytes | bytearray | memoryview):
        raise ValueError(f"the field '{name}' holds bytes, which JSON has not")
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, Mapping):
        return {str(key): json_value(f"{name}.{key}", part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(name, part) for part in value]
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, decimal.Decimal | datetime.timedelta):
        return str(value)
    return value


class ParquetWriter(ShardWriter):
    """Writer of Parquet by pyarrow, in row groups of some 32 MiB.

    Args:
        path: the file.
        schema: schema of all shards, as `table_schema` gives it.
    """

    def __init__(self, path: Path, schema: Any) -> None:
        self._pyarrow = import_pyarrow(str(path))
        self._schema = schema
        try:
            self._writer = self._pyarrow.parquet.ParquetWriter(
                path, schema, compression="zstd", write_page_checksum=True
            )
        except self._pyarrow.ArrowException as error:
            raise WanmaError(
                f"Parquet cannot hold these columns: {' '.join(str(error).split())}",
                "leave the column out with --exclude, or write JSON lines",
            ) from error
        self._records: list[Record] = []
        self._size = 0

    def write(self, record: Record) -> None:
        self._records.append({name: table_value(value) for name, value in record.items()})
        self._size += content_bytes(record)
        if self._size >= _ROW_GROUP_BYTES:
            self._flush()

    def close(self) -> None:
        self._flush()
        self._writer.close()

    def release(self) -> None:
        self._writer.close()

    def _flush(self) -> None:
        records, self._records, self._size = self._records, [], 0
        if not records:
            return
        try:
            self._writer.write_table(self._pyarrow.Table.from_pylist(records, schema=self._schema))
        except (self._pyarrow.ArrowException, TypeError, OverflowError) as error:
            raise ValueError(f"no column holds its values: {' '.join(str(error).split())}") from error


def table_value(value: Any) -> Any:
    """Return a value as pyarrow takes it: arrays as lists, views as bytes."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, memoryview | bytearray):
        return bytes(value)
    if isinstance(value, Mapping):
        return {str(key): table_value(part) for key, part in value.items()}
    return [table_value(part) for part in value] if isinstance(value, list | tuple) else value


def table_schema(records: Sequence[Record]) -> Any:
    """Return the schema (pyarrow) of records; a field without a value has the type null.

    Raises:
        ValueError: values of one field have types that no column holds together.
    """
    pyarrow = import_pyarrow("to write")
    types: dict[str, Any] = {}
    names = dict.fromkeys(name for record in records for name in record)
    for name in names:
        values = [record[name] for record in records if record.get(name) is not None]
        arrays = {(value.dtype.name, value.ndim) for value in values if isinstance(value, np.ndarray)}
        try:
            if len(arrays) == 1 and all(isinstance(value, np.ndarray) for value in values):
                ((dtype, dimensions),) = arrays
                types[name] = pyarrow.from_numpy_dtype(dtype)
                for _ in range(dimensions):
                    types[name] = pyarrow.list_(types[name])
            else:
                types[name] = pyarrow.array([table_value(value) for value in values]).type
        except (pyarrow.ArrowException, TypeError, OverflowError) as error:
            raise ValueError(f"no column holds the field '{name}': {' '.join(str(error).split())}") from error
    return pyarrow.schema(list(types.items()))


def join_schemas(schemas: Sequence[Any]) -> Any:
    """Return the schema that holds the rows of all; whole numbers become floating-point where both occur.

    Raises:
        ValueError: types of one field that no column holds together.
    """
    pyarrow = import_pyarrow("to write")
    try:
        return pyarrow.unify_schemas(list(schemas), promote_options="permissive")
    except (pyarrow.ArrowException, TypeError) as error:
        raise ValueError(f"no column holds all its values: {' '.join(str(error).split())}") from error


class TarWriter(ShardWriter):
    """Writer of WebDataset: bytes and arrays as files of their own, all other fields in the `.json`.

    Args:
        path: the file.
        first_row: number of the first row, which names samples without a key.
        is_raw: records come from WebDataset, and their files keep their names.
    """

    def __init__(self, path: Path, first_row: int, *, is_raw: bool = False) -> None:
        self._file = path.open("wb")
        self._archive = tarfile.TarFile(fileobj=self._file, mode="w", format=tarfile.PAX_FORMAT)
        self._row, self._is_raw = first_row, is_raw
        self._last_key: str | None = None

    def write(self, record: Record) -> None:
        key = record.get(KEY_FIELD, f"{self._row:09d}")
        if not isinstance(key, str) or split_path(f"{key}.json") != (key, "json") or key == self._last_key:
            raise ValueError(f"its {KEY_FIELD} {key!r} names no sample: it is repeated, or has a dot")
        for name, content in self._members(record).items():
            if split_path(f"{key}.{name}") != (key, name):
                raise ValueError(f"the field '{name}' cannot name a file: use small letters, no slash")
            info = tarfile.TarInfo(f"{key}.{name}")
            info.size = len(content)
            self._archive.addfile(info, io.BytesIO(content))
        self._row, self._last_key = self._row + 1, key

    def close(self) -> None:
        self._archive.close()
        self._file.close()

    def release(self) -> None:
        self._file.close()

    def _members(self, record: Record) -> dict[str, bytes]:
        fields = {name: value for name, value in record.items() if name != KEY_FIELD}
        if self._is_raw:
            return {name: bytes(value) for name, value in fields.items()}
        members, texts = {}, {}
        for name, value in fields.items():
            if isinstance(value, bytes | bytearray | memoryview):
                members[_member_name(name, bytes(value[:16]))] = bytes(value)
            elif isinstance(value, np.ndarray):
                buffer = io.BytesIO()
                np.save(buffer, value, allow_pickle=False)
                members[name if name == "npy" else f"{name}.npy"] = buffer.getvalue()
            else:
                texts[name] = json_value(name, value)
        if texts or not members:
            members["json"] = json.dumps(texts, ensure_ascii=False, allow_nan=False).encode()
        return members


def _member_name(name: str, head: bytes) -> str:
    """Return the name of a file in a sample: the field, with a suffix by its content if it is none itself."""
    if name.rpartition(".")[2] in BINARY_SUFFIXES:
        return name
    suffix = image_format(head).lower().replace("jpeg", "jpg") if is_image(head) else "bin"
    return f"{name}.{suffix}"


def without_image_mappings(record: Record) -> Record:
    """Return a record whose images are bytes, as `{"bytes": ..., "path": ...}` of Hugging Face holds them."""
    plain: Record = {}
    for name, value in record.items():
        if isinstance(value, Mapping) and value.keys() == {"bytes", "path"} and value["bytes"] is not None:
            plain[name] = value["bytes"]
            if value["path"] is not None:
                plain["_".join((name, "path"))] = value["path"]
        else:
            plain[name] = value
    return plain


class MegatronWriter(ShardWriter):
    """Writer of a pair .bin and .idx (MMIDIDX); a record is `{"tokens": array}`, a document of one sequence.

    Args:
        path: the .bin file.
        index_path: the .idx file.
        dtype: "uint16", "int32" or "int64".
    """

    def __init__(self, path: Path, index_path: Path, dtype: str) -> None:
        self._file, self._index_path = path.open("wb"), index_path
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._code = _MEGATRON_CODES[dtype]
        self._lengths: list[int] = []

    def write(self, record: Record) -> None:
        tokens = np.asarray(record["tokens"])
        limits = np.iinfo(self._dtype)
        if len(tokens) and not limits.min <= tokens.min() <= tokens.max() <= limits.max:
            raise ValueError(f"a token of {tokens.max()} does not fit into {self._dtype.name}")
        self._file.write(tokens.astype(self._dtype).tobytes())
        self._lengths.append(len(tokens))

    def release(self) -> None:
        self._file.close()

    def close(self) -> None:
        self._file.close()
        lengths = np.array(self._lengths, "<i4")
        starts = np.zeros(len(lengths), "<i8")
        starts[1:] = np.cumsum(lengths[:-1], dtype=np.int64) * self._dtype.itemsize
        documents = np.arange(len(lengths) + 1, dtype="<i8")
        head = [1, self._code, len(lengths), len(documents)]
        sizes = [8, 1, 8, 8]
        with self._index_path.open("wb") as index:
            index.write(_MAGIC)
            for number, size in zip(head, sizes, strict=True):
                index.write(number.to_bytes(size, "little"))
            index.writelines(part.tobytes() for part in (lengths, starts, documents))
