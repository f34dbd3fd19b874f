"""Arrays on disk: numpy's .npy and .npz, MNIST's IDX and CIFAR's binary records; a row is a sample."""

from __future__ import annotations

import struct
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from wanma.data.formats.byte_ranges import describe_fault, read_ranges
from wanma.data.formats.compression import SourceStream, detect_compression, open_copy, open_plain
from wanma.data.formats.format import (
    BadDataError,
    Certainty,
    DataFile,
    FileGroup,
    Format,
    Layout,
    Probe,
    Record,
    RowReader,
    Rows,
)
from wanma.data.stores.byte_source import ByteSource

_NPY_MAGIC = b"\x93NUMPY"
_ZIP_MAGIC = b"PK\x03\x04"
_COPY_BYTES = 1 << 22
_IDX_DTYPES = {8: "|u1", 9: "|i1", 11: ">i2", 12: ">i4", 13: ">f4", 14: ">f8"}
"""Types of IDX (LeCun's MNIST page)."""


@dataclass(frozen=True)
class ArrayPlace:
    """Place of an array in a file; rows follow each other (C order)."""

    offset: int
    """Position of its first byte."""
    dtype: str | list[Any]
    """Type of its elements, as numpy describes it."""
    shape: tuple[int, ...]
    number: int = 0
    """Number of the file within the group."""
    member: str = ""
    """Name in the .npz; of a deflated one `offset` counts within the inflated member."""
    is_deflated: bool = False

    @property
    def element(self) -> np.dtype[Any]:
        described = self.dtype
        if isinstance(described, list):  # JSON has lists where numpy wants tuples
            described = [
                tuple(tuple(part) if isinstance(part, list) else part for part in one) for one in described
            ]
        return np.dtype(described)

    @property
    def row_bytes(self) -> int:
        return int(np.prod(self.shape[1:], dtype=np.int64)) * self.element.itemsize

    @property
    def end(self) -> int:
        return self.offset + self.shape[0] * self.row_bytes


class ArrayReader(RowReader):
    """Reader of rows of arrays with equal numbers of rows; over mapped memory a row is a view."""

    def __init__(self, rows: int, columns: Mapping[str, tuple[ByteSource, ArrayPlace]]) -> None:
        self.rows = rows
        self._columns = columns

    def read(self, rows: Rows) -> list[Record]:
        self._check(rows)
        records: list[Record] = [{} for _ in rows]
        for name, (source, place) in self._columns.items():
            starts = place.offset + rows * place.row_bytes
            contents = read_ranges(source, starts, starts + place.row_bytes)
            for record, content, row in zip(records, contents, rows.tolist(), strict=True):
                if len(content) != place.row_bytes:
                    cause = f"{place.row_bytes} bytes expected, {len(content)} read"
                    raise BadDataError(source.url, cause, row)
                values = np.frombuffer(content, place.element).reshape(place.shape[1:])
                if values.dtype.names:
                    record |= {field: _plain(values[field]) for field in values.dtype.names}
                else:
                    record[name] = _plain(values)
        return records

    def column(self, name: str, start: int, end: int) -> Any:
        """Return rows [start, end) of one array as an array; over mapped memory it is a view.

        Raises:
            BadDataError: the file ends before them.
        """
        source, place = self._columns[name]
        first = place.offset + start * place.row_bytes
        content = source.read(first, first + (end - start) * place.row_bytes)
        if len(content) != (end - start) * place.row_bytes:
            raise BadDataError(source.url, f"the array {name!r} is truncated", start)
        return np.frombuffer(content, place.element).reshape(end - start, *place.shape[1:])


def _plain(values: Any) -> Any:
    """Return a single number as Python has it, an array as it is."""
    return values.item() if values.ndim == 0 else values


@dataclass(frozen=True)
class NumpyArrays(Format):
    """Files .npy and .npz; a row of each array is a field. Arrays of Python objects are refused.

    The field of a .npy is `array`, or those of its structured type. A compressed .npz costs a plain copy.

    Args:
        arrays: names of the arrays of an .npz to read; empty: all, which then have equally many rows.
    """

    arrays: tuple[str, ...] = ()
    name: ClassVar[str] = "numpy"
    suffixes: ClassVar[tuple[str, ...]] = (".npy", ".npz")

    def detect(self, probe: Probe) -> Certainty:
        if probe.head.startswith(_NPY_MAGIC):
            return Certainty.SURE
        if not probe.head.startswith(_ZIP_MAGIC) or len(probe.head) < 30:
            return Certainty.NO
        name_size = int.from_bytes(probe.head[26:28], "little")
        return Certainty.SURE if probe.head[30 : 30 + name_size].endswith(b".npy") else Certainty.NO

    def scan(self, group: FileGroup) -> Layout:
        source = group.open()
        if bytes(source.read(0, 4)) == _ZIP_MAGIC:
            places = _zip_places(source, self.arrays)
        else:
            places = {"array": _npy_place(source, SourceStream(source), source.size)}
        lengths = {name: place.shape[0] for name, place in places.items()}
        if len(set(lengths.values())) > 1:
            shown = ", ".join(f"{name} has {length}" for name, length in lengths.items())
            raise BadDataError(
                source.url,
                f"its arrays have different numbers of rows: {shown}",
                hint="name those of one length in the option `arrays`",
            )
        return _layout(next(iter(lengths.values()), 0), places)

    def open(self, group: FileGroup, layout: Layout) -> RowReader:
        source = group.open()
        columns = {}
        for name, place in _places(layout):
            content = source
            if place.is_deflated:
                content = open_copy(source, group.scratch, place.member, _inflate(source, place.member))
            columns[name] = (content, place)
        return ArrayReader(layout.rows, columns)


@dataclass(frozen=True)
class Idx(Format):
    """IDX files; `train-images-idx3-ubyte` with `train-labels-idx1-ubyte` are samples of `image` and `label`.

    A file without a partner gives samples of `array`. A compressed file costs a plain copy.
    """

    name: ClassVar[str] = "idx"
    suffixes: ClassVar[tuple[str, ...]] = ("-ubyte", ".idx1", ".idx3")

    def detect(self, probe: Probe) -> Certainty:
        head = probe.head
        if len(head) < 8 or head[:2] != b"\0\0" or head[2] not in _IDX_DTYPES or not 1 <= head[3] <= 4:
            return Certainty.NO
        header = 4 + 4 * head[3]
        shape = struct.unpack_from(f">{head[3]}I", head, 4) if len(head) >= header else (0,)
        size = int(np.prod(shape, dtype=np.float64)) * np.dtype(_IDX_DTYPES[head[2]]).itemsize + header
        return Certainty.SURE if probe.size in (size, -1) else Certainty.LIKELY

    def group(self, files: Sequence[DataFile]) -> list[FileGroup]:
        stems = {file.url.removesuffix(".gz"): file for file in files}
        groups = []
        for stem, file in stems.items():
            folder, slash, name = stem.rpartition("/")
            labels = folder + slash + name.replace("images", "labels").replace("idx3", "idx1")
            images = folder + slash + name.replace("labels", "images").replace("idx1", "idx3")
            if labels != stem and labels in stems:
                groups.append(FileGroup((file, stems[labels]), {"names": ["image", "label"]}))
            elif images == stem or images not in stems:
                groups.append(FileGroup((file,), {"names": ["array"]}))
        return groups

    def scan(self, group: FileGroup) -> Layout:
        places, compressions = {}, []
        for number, name in enumerate(group.facts["names"]):
            source = group.open(number)
            compressions.append(detect_compression(bytes(source.read(0, 12))))
            places[name] = _idx_place(open_plain(source, compressions[-1], group.scratch), number)
        lengths = [place.shape[0] for place in places.values()]
        if len(set(lengths)) > 1:
            raise BadDataError(group.url, f"{lengths[0]} images with {lengths[1]} labels")
        layout = _layout(lengths[0], places)
        return replace(layout, facts={**layout.facts, "compressions": compressions})

    def open(self, group: FileGroup, layout: Layout) -> RowReader:
        columns = {}
        for name, place in _places(layout):
            compression = layout.facts["compressions"][place.number]
            columns[name] = (open_plain(group.open(place.number), compression, group.scratch), place)
        return ArrayReader(layout.rows, columns)


@dataclass(frozen=True)
class Cifar(Format):
    """Binary CIFAR-10 and CIFAR-100: samples of `image` (3, 32, 32), `label`, in the latter `coarse_label`.

    They have no magic number: sizes and the range of the labels tell them.
    """

    name: ClassVar[str] = "cifar"
    suffixes: ClassVar[tuple[str, ...]] = (".bin",)

    def detect(self, probe: Probe) -> Certainty:
        fits = probe.size > 0 and _cifar_dtype(probe.head, probe.size) is not None
        return Certainty.LIKELY if fits else Certainty.NO

    def scan(self, group: FileGroup) -> Layout:
        source = group.open()
        dtype = _cifar_dtype(bytes(source.read(0, 64 << 10)), source.size)
        if dtype is None:
            raise BadDataError(
                source.url,
                f"{source.size:,} bytes are no records of CIFAR: truncated, or labels out of range",
            )
        count = source.size // np.dtype(dtype).itemsize
        place = ArrayPlace(0, np.dtype(dtype).descr, (count,))
        return _layout(count, {"record": place})

    def open(self, group: FileGroup, layout: Layout) -> RowReader:
        source = group.open()
        return ArrayReader(layout.rows, {name: (source, place) for name, place in _places(layout)})


def _cifar_dtype(head: bytes, size: int) -> list[Any] | None:
    """Return the record whose size and labels fit (Krizhevsky's page); None: neither."""
    for labels, classes in ((["label"], [10]), (["coarse_label", "label"], [20, 100])):
        dtype = [*((name, "|u1") for name in labels), ("image", "|u1", (3, 32, 32))]
        itemsize = np.dtype(dtype).itemsize
        if size % itemsize:
            continue
        records = np.frombuffer(head[: len(head) // itemsize * itemsize], np.uint8).reshape(-1, itemsize)
        if (records[:, : len(labels)] < classes).all():
            return dtype
    return None


def _layout(rows: int, places: Mapping[str, ArrayPlace]) -> Layout:
    described = {
        name: [place.offset, place.dtype, place.shape, place.number, place.member, place.is_deflated]
        for name, place in places.items()
    }
    return Layout(rows, {}, {"arrays": described})


def _places(layout: Layout) -> Iterator[tuple[str, ArrayPlace]]:
    for name, (offset, dtype, shape, number, member, is_deflated) in layout.facts["arrays"].items():
        yield name, ArrayPlace(offset, dtype, tuple(shape), number, member, is_deflated)


def _npy_place(source: ByteSource, stream: Any, size: int, label: str = "it") -> ArrayPlace:
    """Read the header of a .npy."""
    try:
        version = np.lib.format.read_magic(stream)
        reader = {
            (1, 0): np.lib.format.read_array_header_1_0,
            (2, 0): np.lib.format.read_array_header_2_0,
        }.get(version)
        if reader is None:
            raise ValueError(f"version {version} of the .npy format")
        shape, is_fortran, dtype = reader(stream)
    except Exception as error:  # numpy reads the header as Python, whose parser has errors of its own
        raise BadDataError(
            source.url, f"the header of {label} is damaged: {describe_fault(error)}"
        ) from error
    if dtype.hasobject:
        raise BadDataError(
            source.url,
            f"{label} holds Python objects: reading them could run any program",
            hint="save an array of numbers",
        )
    if not shape or (is_fortran and len(shape) > 1):
        cause = "is in Fortran's order" if shape else "is a single number, which has no rows"
        raise BadDataError(source.url, f"{label} {cause}", hint="save it with numpy.ascontiguousarray")
    place = ArrayPlace(stream.tell(), dtype.descr if dtype.names else dtype.str, shape)
    if place.end != size:
        raise BadDataError(
            source.url,
            f"{label} has {size - place.offset:,} bytes of values, {place.end - place.offset:,} expected",
        )
    return place


def _zip_places(source: ByteSource, names: Sequence[str]) -> dict[str, ArrayPlace]:
    places = {}
    try:
        with zipfile.ZipFile(SourceStream(source)) as archive:
            members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
            if missing := [name for name in names if name not in members]:
                raise BadDataError(
                    source.url, f"it has no array {missing[0]!r}", hint=f"its arrays are {', '.join(members)}"
                )
            for name in names or members:
                info = members[name]
                with archive.open(info) as stream:
                    place = _npy_place(source, stream, info.file_size, f"the array {name!r}")
                offset, is_deflated = place.offset, info.compress_type != zipfile.ZIP_STORED
                if not is_deflated:
                    local = bytes(source.read(info.header_offset, info.header_offset + 30))
                    name_size, extra_size = struct.unpack_from("<HH", local, 26)
                    offset += info.header_offset + 30 + name_size + extra_size
                places[name] = ArrayPlace(offset, place.dtype, place.shape, 0, info.filename, is_deflated)
    except (zipfile.BadZipFile, zlib.error, OSError, EOFError, struct.error, NotImplementedError) as error:
        raise BadDataError(source.url, f"damaged archive: {error}") from error
    return places


def _inflate(source: ByteSource, member: str) -> Iterator[bytes]:
    try:
        with zipfile.ZipFile(SourceStream(source)) as archive, archive.open(member) as stream:
            while chunk := stream.read(_COPY_BYTES):
                yield chunk
    except (zipfile.BadZipFile, zlib.error, OSError, EOFError) as error:
        raise BadDataError(source.url, f"the array {member} is damaged: {error}") from error


def _idx_place(source: ByteSource, number: int) -> ArrayPlace:
    head = bytes(source.read(0, 4))
    if len(head) < 4 or head[:2] != b"\0\0" or head[2] not in _IDX_DTYPES or not head[3]:
        raise BadDataError(source.url, "it does not have the header of an IDX file")
    header = 4 + 4 * head[3]
    sizes = bytes(source.read(4, header))
    if len(sizes) < 4 * head[3]:
        raise BadDataError(source.url, "truncated inside its header")
    place = ArrayPlace(header, _IDX_DTYPES[head[2]], struct.unpack(f">{head[3]}I", sizes), number)
    if place.end != source.size:
        raise BadDataError(
            source.url, f"{source.size - header:,} bytes of values for the shape {place.shape}: truncated"
        )
    return place
