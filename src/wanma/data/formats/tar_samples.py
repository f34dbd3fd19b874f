"""Samples in tar archives, as WebDataset has them: consecutive files with one key are one sample."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from wanma.data.formats.byte_ranges import Cursor, RangeFormat, RangeScan
from wanma.data.formats.compression import MemorySource
from wanma.data.formats.format import BadDataError, Certainty, Content, FileGroup, Probe, Record
from wanma.data.stores.byte_source import ByteSource

_BLOCK = 512
_KEY_AND_FIELD = re.compile(r"^((?:.*/|)[^.]+)[.]([^/]*)$", re.DOTALL)
_META_FILE = re.compile(r"(^|/)__[^/]*__($|/)")
_PICKLED = ("pyd", "pickle", "pkl")
_REGULAR_TYPES = (b"0", b"\0", b"7")
_MAX_EXTENSION_BYTES = 1 << 20


@dataclass(frozen=True)
class TarSamples(RangeFormat):
    """WebDataset archives: `k.jpg` and `k.cls` are the sample `{"__key__": "k", "jpg": ..., "cls": ...}`.

    Fields are bytes as stored. A compressed archive (.tar.gz, .tar.zst) costs a plain copy in the scratch
    folder, because its samples cannot be read at their positions.

    Args:
        fields: fields to keep; empty: all. Pickled fields are refused unless left out here.
    """

    fields: tuple[str, ...] = ()
    name: ClassVar[str] = "webdataset"
    suffixes: ClassVar[tuple[str, ...]] = (".tar",)

    def detect(self, probe: Probe) -> Certainty:
        head = probe.head[:_BLOCK]
        if len(head) < _BLOCK or head == bytes(_BLOCK):
            return Certainty.NO
        return Certainty.SURE if _checksum_fits(head) else Certainty.NO

    def scan_ranges(self, source: ByteSource, group: FileGroup) -> RangeScan:
        starts, ends = [], []
        key, names = None, set[str]()
        for start, data, size, path in _members(source):
            parts = split_path(path)
            if parts is None:
                continue
            if parts[0] != key:
                key, names = parts[0], set()
                starts.append(start)
                ends.append(start)
            row = len(starts) - 1
            if parts[1] in names:
                raise BadDataError(source.url, f"two files {path!r} in the sample {key!r}", row)
            if parts[1].rpartition(".")[2] in _PICKLED and (not self.fields or parts[1] in self.fields):
                raise BadDataError(
                    source.url,
                    f"{path!r} is pickled: reading it could run any program",
                    row,
                    "name the other fields in the option `fields`, or write the value as .json or .npy",
                )
            names.add(parts[1])
            ends[-1] = data + size
        return RangeScan(np.array(starts, np.int64), np.array(ends, np.int64))

    def parse(self, content: Content, facts: Mapping[str, Any]) -> Record:
        record: Record = {}
        view = memoryview(content)
        try:
            for _, data, size, path in _members(MemorySource("", view), is_archive=False):
                parts = split_path(path)
                if parts is None:
                    continue
                record["__key__"] = parts[0]
                if not self.fields or parts[1] in self.fields:
                    record[parts[1]] = view[data : data + size]
        except BadDataError as error:
            raise ValueError(error.cause) from error
        if missing := [name for name in self.fields if name not in record]:
            raise ValueError(f"the sample {record.get('__key__')!r} has no file .{missing[0]}")
        return record


def split_path(path: str) -> tuple[str, str] | None:
    """Split the path of a file into the key of its sample and the field, at the first dot of its name.

    Returns:
        Key and field in lower case; None for files that belong to no sample: without a dot, or `__name__`.
    """
    match = _KEY_AND_FIELD.match(path)
    if match is None or _META_FILE.search(path):
        return None
    return match[1], match[2].lower()


def _members(source: ByteSource, is_archive: bool = True) -> Iterator[tuple[int, int, int, str]]:
    """Yield of each regular file the positions of its first header and of its content, its size and its path.

    Args:
        source: the archive, or the part of it that holds one sample.
        is_archive: check its end: without the end mark an archive is truncated.

    Raises:
        BadDataError: the archive is damaged, truncated, or stores a file in a way without content of its own.
    """
    cursor = Cursor(source)
    position, start = 0, 0
    attributes: dict[str, str] = {}
    while position < source.size:
        header = cursor.view(position, _BLOCK)
        if len(header) < _BLOCK:
            raise BadDataError(source.url, f"truncated inside a header at byte {position}")
        if not any(header):
            if is_archive:
                _check_end(source, position)
            return
        if not _checksum_fits(header):
            raise BadDataError(source.url, f"the header at byte {position} does not match its checksum")
        kind = bytes(header[156:157])
        size = _number(source, header[124:136], position)
        path = _text(header[345:500]) + "/" if bytes(header[257:263]) == b"ustar\0" and header[345] else ""
        path += _text(header[:100])
        data = position + _BLOCK
        if kind in _REGULAR_TYPES and "size" in attributes:
            size = int(attributes["size"])
        if data + size > source.size:
            raise BadDataError(
                source.url,
                f"truncated: the content of {path!r} ends at {data + size}, the file at {source.size}",
            )
        position = data + (size + _BLOCK - 1) // _BLOCK * _BLOCK
        if kind in (b"x", b"L"):
            if size > _MAX_EXTENSION_BYTES:
                raise BadDataError(source.url, f"a header of {size:,} bytes at byte {data}")
            extension = cursor.take(data, size)
            attributes |= _pax(source, extension, data) if kind == b"x" else {"path": _text(extension)}
            continue
        path = attributes.get("path", path)
        if kind in (b"1", b"2", b"S") or any(name.startswith("GNU.sparse") for name in attributes):
            what = "a sparse file" if kind not in (b"1", b"2") else "a link, so that its content is elsewhere"
            raise BadDataError(
                source.url,
                f"{path!r} is stored as {what}",
                hint="write the archive with tar --dereference --hard-dereference, without --sparse",
            )
        if kind in _REGULAR_TYPES and not path.endswith("/"):
            yield start, data, size, path
        if kind not in (b"g", b"K"):
            start, attributes = position, {}
    if is_archive:
        raise BadDataError(
            source.url,
            f"the archive ends at byte {source.size} without its end mark: it is truncated",
            hint="write it again, and close the writer",
        )


def _check_end(source: ByteSource, position: int) -> None:
    """Check the end mark of two empty blocks, and that nothing follows it."""
    if source.size - position < 2 * _BLOCK:
        raise BadDataError(source.url, "the archive ends inside its end mark: it is truncated")
    for start in range(position, source.size, 1 << 20):
        values = np.frombuffer(source.read(start, start + (1 << 20)), np.uint8)
        if values.any():
            raise BadDataError(
                source.url,
                f"content after the end mark of the archive, at byte {start + int(np.argmax(values != 0))}",
                hint="join archives with tar --concatenate rather than cat",
            )


def _checksum_fits(header: Content) -> bool:
    """Compare the sum of a header's bytes, its checksum taken as spaces (POSIX.1-1988, ustar)."""
    try:
        stored = int(bytes(header[148:156]).strip(b" \0") or b"0", 8)
    except ValueError:
        return False
    return stored == sum(header) - sum(header[148:156]) + 8 * 32


def _number(source: ByteSource, field: Content, position: int) -> int:
    """Parse a number: octal digits, or big-endian binary behind a byte of 0x80 (GNU)."""
    if field[0] == 0x80:
        return int.from_bytes(field[1:], "big")
    try:
        return int(bytes(field).split(b"\0")[0].strip() or b"0", 8)
    except ValueError as error:
        raise BadDataError(source.url, f"the header at byte {position} holds no size") from error


def _text(field: Content) -> str:
    return bytes(field).split(b"\0")[0].decode("utf-8", "surrogateescape")


def _pax(source: ByteSource, content: bytes, position: int) -> dict[str, str]:
    """Parse extended attributes: records `LENGTH NAME=VALUE` and a line feed (POSIX.1-2001)."""
    attributes = {}
    start = 0
    try:
        while start < len(content):
            length = int(content[start : content.index(b" ", start)])
            name, is_found, value = content[start : start + length - 1].partition(b" ")[2].partition(b"=")
            if length <= 0 or not is_found or start + length > len(content):
                raise ValueError("a record of a wrong length")
            attributes[name.decode()] = value.decode("utf-8", "surrogateescape")
            start += length
        if "size" in attributes:
            int(attributes["size"])
    except ValueError as error:
        raise BadDataError(source.url, f"damaged extended header at byte {position}: {error}") from error
    return attributes
