"""Tables of Arrow and Parquet, read by record batches and row groups.

Values come as they are stored: numbers, texts and bytes; lists of numbers as arrays, without a copy where the
table holds no nulls.
"""

from __future__ import annotations

import struct
import threading
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from wanma.data.formats.byte_ranges import Cursor, describe_fault
from wanma.data.formats.compression import SourceStream
from wanma.data.formats.format import (
    BadDataError,
    Certainty,
    FileGroup,
    Format,
    Layout,
    Lists,
    Probe,
    Record,
    RowReader,
    Rows,
)
from wanma.data.stores.byte_source import ByteSource, MappedFile
from wanma.job.errors import missing_extra_error

_CACHED_GROUPS = 2
_FILE_MAGIC = b"ARROW1"
_CONTINUATION = b"\xff\xff\xff\xff"
_SCHEMA, _DICTIONARY, _BATCH = 1, 2, 3
"""Kinds of messages (Message.fbs of Arrow)."""


def import_pyarrow(url: str) -> Any:
    """Import pyarrow, or raise the error that names its extra."""
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError as error:
        raise missing_extra_error("pyarrow", "data", f"the table {url}") from error
    return pyarrow


@dataclass(frozen=True)
class Parquet(Format):
    """Parquet files; a read decodes the row groups that it needs, and the last two stay decoded.

    Args:
        columns: names of the columns to read; empty: all.
    """

    columns: tuple[str, ...] = ()
    name: ClassVar[str] = "parquet"
    suffixes: ClassVar[tuple[str, ...]] = (".parquet", ".pq")

    def detect(self, probe: Probe) -> Certainty:
        return Certainty.SURE if probe.head.startswith((b"PAR1", b"PARE")) else Certainty.NO

    def scan(self, group: FileGroup) -> Layout:
        source = group.open()
        metadata = _open_parquet(source).metadata
        # Not its columns: of damaged ones pyarrow ends the process (a C++ exception that nothing catches).
        sizes = [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]
        if sum(sizes) != metadata.num_rows:
            raise BadDataError(source.url, f"{metadata.num_rows} rows, but {sum(sizes)} in its row groups")
        schema = metadata.schema.to_arrow_schema()
        columns = _describe_columns(source, schema, self.columns)
        return Layout(metadata.num_rows, {"group_starts": _starts_of(sizes)}, {"columns": columns})

    def open(self, group: FileGroup, layout: Layout) -> RowReader:
        return _ParquetReader(group.open(), layout, self.columns)


@dataclass(frozen=True)
class ArrowTables(Format):
    """Files and streams of Arrow's IPC format, read by record batches, over mapped memory without a copy.

    Args:
        columns: names of the columns to read; empty: all.
    """

    columns: tuple[str, ...] = ()
    name: ClassVar[str] = "arrow"
    layout_version: ClassVar[int] = 1
    suffixes: ClassVar[tuple[str, ...]] = (".arrow", ".feather", ".ipc", ".arrows")

    def detect(self, probe: Probe) -> Certainty:
        if probe.head.startswith(_FILE_MAGIC):
            return Certainty.SURE
        if probe.head[:4] == _CONTINUATION and len(probe.head) > 16:
            size = int.from_bytes(probe.head[4:8], "little")
            try:
                kind, _, _ = _parse_message(probe.head[8 : 8 + size])
            except (struct.error, IndexError):
                kind = 0
            return Certainty.SURE if kind == _SCHEMA else Certainty.NO
        return Certainty.NO

    def scan(self, group: FileGroup) -> Layout:
        source = group.open()
        sizes, batches, dictionaries = [], [], []
        schema_range = None
        for start, end, kind, rows in _messages(source):
            if kind == _SCHEMA:
                schema_range = [start, end]
            elif kind == _DICTIONARY:
                dictionaries.append((start, end))
            elif kind == _BATCH:
                sizes.append(rows)
                batches.append((start, end))
        if schema_range is None:
            raise BadDataError(source.url, "it holds no schema: the file is empty or truncated")
        schema = _read_schema(source, schema_range)
        columns = _describe_columns(source, schema, self.columns)
        return Layout(
            sum(sizes),
            {
                "group_starts": _starts_of(sizes),
                "group_ranges": np.array(batches, np.int64).reshape(-1, 2),
                "dictionaries": np.array(dictionaries, np.int64).reshape(-1, 2),
            },
            {"schema": schema_range, "columns": columns},
        )

    def open(self, group: FileGroup, layout: Layout) -> RowReader:
        return _ArrowReader(group.open(), layout, self.columns)


class TableReader(RowReader):
    """Reader of rows of a table in groups; the last groups that were used stay in memory."""

    def __init__(self, source: ByteSource, layout: Layout) -> None:
        self.rows = layout.rows
        self._source = source
        self._group_starts = np.asarray(layout.tables["group_starts"])
        self._groups: OrderedDict[int, Any] = OrderedDict()
        self._lock = threading.Lock()

    @abstractmethod
    def _read_group(self, number: int) -> Any:
        """Return a row group or record batch as a table or batch of pyarrow."""

    def read(self, rows: Rows) -> list[Record]:
        self._check(rows)
        numbers = np.searchsorted(self._group_starts, rows, side="right") - 1
        records: list[Record | None] = [None] * len(rows)
        for number in np.unique(numbers).tolist():
            places = np.flatnonzero(numbers == number)
            local = rows[places] - self._group_starts[number]
            values = self._values(number, local, int(rows[places[0]]))
            names = list(values)
            for place, row in zip(places.tolist(), zip(*values.values(), strict=True), strict=True):
                records[place] = dict(zip(names, row, strict=True))
        return [record for record in records if record is not None]

    def read_lists(self, field: str, start: int, end: int) -> Lists | None:
        pyarrow = import_pyarrow(self._source.url)
        arrays: list[Any] = []
        try:
            while start < end:
                number = int(np.searchsorted(self._group_starts, start, side="right")) - 1
                table, first = self._group(number), start - int(self._group_starts[number])
                count = min(end - start, table.num_rows - first)
                if field not in table.schema.names or count <= 0:
                    return None
                column = table.column(field).slice(first, count)
                arrays += column.chunks if isinstance(column, pyarrow.ChunkedArray) else [column]
                start += count
            return list_values(arrays[0] if len(arrays) == 1 else pyarrow.concat_arrays(arrays), pyarrow)
        except (BadDataError, pyarrow.ArrowException, OSError, ValueError):
            return None

    def _values(self, number: int, local: Rows, first_row: int) -> dict[str, Any]:
        """Return the columns of some rows of a group; `first_row` names the place in errors."""
        pyarrow = import_pyarrow(self._source.url)
        try:
            table = self._group(number)
            is_range = bool((np.diff(local) == 1).all())  # without a copy
            table = table.slice(int(local[0]), len(local)) if is_range else table.take(pyarrow.array(local))
            return {
                name: column_values(column, pyarrow)
                for name, column in zip(table.schema.names, table.columns, strict=True)
            }
        except (pyarrow.ArrowException, OSError, ValueError) as error:
            if len(local) > 1:  # name the first row that cannot be read alone
                for position in range(len(local)):
                    row = first_row + int(local[position] - local[0])
                    self._values(number, local[position : position + 1], row)
            cause = f"group {number} cannot be decoded: {describe_fault(error)}"
            raise BadDataError(self._source.url, cause, first_row) from error

    def _group(self, number: int) -> Any:
        with self._lock:
            if number not in self._groups:
                self._groups[number] = self._read_group(number)
                while len(self._groups) > _CACHED_GROUPS:
                    self._groups.popitem(last=False)
            self._groups.move_to_end(number)
            return self._groups[number]


class _ParquetReader(TableReader):
    def __init__(self, source: ByteSource, layout: Layout, columns: tuple[str, ...]) -> None:
        super().__init__(source, layout)
        self._file = _open_parquet(source)
        self._columns = list(columns) or None

    def _read_group(self, number: int) -> Any:
        return self._file.read_row_group(number, columns=self._columns, use_threads=False)


class _ArrowReader(TableReader):
    def __init__(self, source: ByteSource, layout: Layout, columns: tuple[str, ...]) -> None:
        super().__init__(source, layout)
        self._pyarrow = import_pyarrow(source.url)
        self._ranges, self._dictionaries = layout.tables["group_ranges"], layout.tables["dictionaries"]
        self._schema_range = layout.facts["schema"]
        self._schema = _read_schema(source, self._schema_range)
        self._columns = columns

    def _read_group(self, number: int) -> Any:
        batch = self._read_batch(number)
        batch.validate(full=True)  # damaged positions would let pyarrow read, and write, any memory
        return batch.select(list(self._columns)) if self._columns else batch

    def _read_batch(self, number: int) -> Any:
        start, end = self._ranges[number].tolist()
        content = self._source.read(start, end)
        if not len(self._dictionaries):
            message = self._pyarrow.ipc.read_message(self._pyarrow.py_buffer(content))
            return self._pyarrow.ipc.read_record_batch(message, self._schema)
        # Only a stream can hand dictionaries to a batch.
        is_before = self._dictionaries[:, 0] < start
        parts = [
            bytes(self._source.read(first, last))
            for first, last in [self._schema_range, *self._dictionaries[is_before].tolist()]
        ]
        stream = b"".join([*parts, bytes(content), _CONTINUATION, bytes(4)])
        return self._pyarrow.ipc.open_stream(stream).read_next_batch()


def column_values(column: Any, pyarrow: Any) -> Any:
    """Return the values of a column: lists of numbers as arrays, all others as Python has them."""
    column = _joined(column, pyarrow)
    if not len(column) or (lists := list_values(column, pyarrow)) is None:
        return column.to_pylist()
    values, bounds = lists
    if pyarrow.types.is_fixed_size_list(column.type):
        return list(values.reshape(len(column), -1))
    return np.split(values, bounds[1:-1].tolist())


def list_values(column: Any, pyarrow: Any) -> Lists | None:
    """Return the numbers of a column of lists; None: it holds anything else, or nulls."""
    kind, types = column.type, pyarrow.types
    is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    is_numeric = is_list and (types.is_integer(kind.value_type) or types.is_floating(kind.value_type))
    if isinstance(column, pyarrow.ChunkedArray) or not is_numeric or column.null_count:
        return None
    if types.is_fixed_size_list(kind):
        bounds = np.arange(column.offset, column.offset + len(column) + 1, dtype=np.int64) * kind.list_size
    else:
        bounds = column.offsets.to_numpy().astype(np.int64)
    # Not `flatten`: it imports `pyarrow.compute`, which takes 30 ms.
    values = column.values.slice(int(bounds[0]), int(bounds[-1] - bounds[0]))
    return None if values.null_count else (values.to_numpy(zero_copy_only=False), bounds - bounds[0])


def _joined(column: Any, pyarrow: Any) -> Any:
    """Return a column as one array, where its type allows it."""
    if not isinstance(column, pyarrow.ChunkedArray):
        return column
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def _starts_of(sizes: list[int]) -> NDArray[np.int64]:
    """Return the first row of each group."""
    return np.cumsum([0, *sizes[:-1]], dtype=np.int64)[: len(sizes)]


def _describe_columns(source: ByteSource, schema: Any, columns: tuple[str, ...]) -> dict[str, str]:
    """Return the types of all columns by name, and check that `columns` are among them."""
    try:
        described = {field.name: str(field.type) for field in schema}
    except ValueError as error:
        raise BadDataError(source.url, "the name of a column is no UTF-8") from error
    if missing := [name for name in columns if name not in described]:
        raise BadDataError(
            source.url,
            f"it has no column {', '.join(map(repr, missing))}",
            hint=f"its columns are {', '.join(described)}",
        )
    if len(described) < len(schema):
        raise BadDataError(source.url, f"two of its columns have the same name: {', '.join(schema.names)}")
    return described


def _open_parquet(source: ByteSource) -> Any:
    pyarrow = import_pyarrow(source.url)
    if source.size < 12:
        raise BadDataError(source.url, f"a file of {source.size} bytes is no Parquet file")
    if isinstance(source, MappedFile):
        file = pyarrow.BufferReader(pyarrow.py_buffer(source.read(0, source.size)))
    else:
        file = pyarrow.PythonFile(SourceStream(source), "r")
    try:
        return pyarrow.parquet.ParquetFile(
            file, pre_buffer=not isinstance(source, MappedFile), page_checksum_verification=True
        )
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        cause = f"its footer cannot be read: {describe_fault(error)}"
        raise BadDataError(source.url, cause, hint="write or download it again") from error


def _read_schema(source: ByteSource, schema_range: list[int]) -> Any:
    pyarrow = import_pyarrow(source.url)
    content = bytes(source.read(*schema_range))
    try:
        return pyarrow.ipc.read_schema(pyarrow.py_buffer(content))
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        cause = f"its schema cannot be read: {describe_fault(error)}"
        raise BadDataError(source.url, cause) from error


def _messages(source: ByteSource) -> Iterator[tuple[int, int, int, int]]:
    """Yield first byte, end, kind and number of rows of each message of a file or stream of Arrow.

    A file is a stream between a magic number and a footer that repeats positions ("IPC File Format" of the
    Arrow specification). A stream on disk without its end mark is taken for truncated.
    """
    is_file = bytes(source.read(0, 6)) == _FILE_MAGIC
    if is_file and bytes(source.read(source.size - 6, source.size)) != _FILE_MAGIC:
        raise BadDataError(source.url, "it does not end with the mark of an Arrow file: it is truncated")
    cursor = Cursor(source, 64 << 10)
    position = 8 if is_file else 0
    while True:
        head = cursor.take(position, 8)
        if len(head) < 8 or head[:4] != _CONTINUATION:
            cause = "truncated" if len(head) < 8 else "no message of Arrow, or one of a version before 0.15"
            raise BadDataError(source.url, f"at byte {position}: {cause}")
        size = int.from_bytes(head[4:], "little", signed=True)
        if size == 0:
            return
        metadata = cursor.take(position + 8, max(size, 0))
        try:
            kind, body, rows = _parse_message(metadata)
        except (struct.error, IndexError) as error:
            raise BadDataError(source.url, f"at byte {position}: a damaged message of Arrow") from error
        end = position + 8 + size + body
        if end > source.size or body < 0 or len(metadata) < size:
            raise BadDataError(
                source.url,
                f"a message at byte {position} ends at {end}, but the file at {source.size}: truncated",
            )
        yield position, end, kind, rows
        position = end


def _parse_message(metadata: bytes) -> tuple[int, int, int]:
    """Return kind, size of the body and number of rows of a message (Message.fbs; FlatBuffers' layout)."""
    table = struct.unpack_from("<I", metadata, 0)[0]
    kind_at, header_at, body_at = (_field(metadata, table, number) for number in (1, 2, 3))
    kind = metadata[kind_at] if kind_at else 0
    body = struct.unpack_from("<q", metadata, body_at)[0] if body_at else 0
    rows = 0
    if kind == _BATCH and header_at:
        header = header_at + struct.unpack_from("<I", metadata, header_at)[0]
        if length_at := _field(metadata, header, 0):
            rows = struct.unpack_from("<q", metadata, length_at)[0]
        if nodes_at := _field(metadata, header, 1):
            nodes = nodes_at + struct.unpack_from("<I", metadata, nodes_at)[0]
            count, first_length = struct.unpack_from("<Iq", metadata, nodes)
            if rows < 0 or (count and first_length != rows):
                raise IndexError(first_length)  # the first column has another number of rows
    return kind, body, rows


def _field(metadata: bytes, table: int, number: int) -> int:
    """Return the position of a field of a FlatBuffers table; 0: the field is left out."""
    if table + 4 > len(metadata):
        raise IndexError(table)
    vtable = table - struct.unpack_from("<i", metadata, table)[0]
    if vtable < 0:
        raise IndexError(vtable)
    if 4 + 2 * number >= struct.unpack_from("<H", metadata, vtable)[0]:
        return 0
    offset = struct.unpack_from("<H", metadata, vtable + 4 + 2 * number)[0]
    return table + int(offset) if offset else 0
