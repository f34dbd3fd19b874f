"""Samples in tar archives, as WebDataset has them: consecutive files with one key are one sample."""

from __future__ import annotations

import io
import re
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from wanma.data.formats.byte_ranges import CURSOR_BYTES, RangeFormat, RangeScan
from wanma.data.formats.compression import SourceStream
from wanma.data.formats.format import BadDataError, Certainty, Content, FileGroup, Probe, Record
from wanma.data.stores.byte_source import ByteSource, MappedFile, MemorySource

_BLOCK = 512
_KEY_AND_FIELD = re.compile(r"^((?:.*/|)[^.]+)[.]([^/]*)$", re.DOTALL)
_META_FILE = re.compile(r"(^|/)__[^/]*__($|/)")
_PICKLED = ("pyd", "pickle", "pkl")
_MAPPED_READ_BYTES = 16 << 10
"""Bytes that a scan of a mapped archive reads at once: mostly a header, as the content is jumped over."""


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
        try:
            tarfile.TarInfo.frombuf(probe.head[:_BLOCK], "utf-8", "surrogateescape")
        except tarfile.HeaderError:
            return Certainty.NO
        return Certainty.SURE

    def scan_ranges(self, source: ByteSource, group: FileGroup) -> RangeScan:
        starts, ends = [], []
        key, names = None, set[str]()
        is_mapped = isinstance(source, MappedFile)
        stream = io.BufferedReader(SourceStream(source), _MAPPED_READ_BYTES if is_mapped else CURSOR_BYTES)
        for member in _members(source, stream):
            path = member.name
            if member.issym() or member.islnk() or member.issparse():
                what = "a sparse file" if member.issparse() else "a link, so that its content is elsewhere"
                raise BadDataError(
                    source.url,
                    f"{path!r} is stored as {what}",
                    hint="write the archive with tar --dereference --hard-dereference, without --sparse",
                )
            parts = split_path(path) if member.isreg() else None
            if parts is None:
                continue
            if parts[0] != key:
                key, names = parts[0], set()
                starts.append(member.offset)
                ends.append(member.offset)
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
            ends[-1] = member.offset_data + member.size
        return RangeScan(np.array(starts, np.int64), np.array(ends, np.int64))

    def parse(self, content: Content, facts: Mapping[str, Any]) -> Record:
        record: Record = {}
        view = memoryview(content)
        try:
            source = MemorySource("", view)
            for member in _members(source, SourceStream(source), is_archive=False):
                parts = split_path(member.name) if member.isreg() else None
                if parts is None:
                    continue
                record["__key__"] = parts[0]
                if not self.fields or parts[1] in self.fields:
                    record[parts[1]] = view[member.offset_data : member.offset_data + member.size]
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


def _members(source: ByteSource, stream: io.IOBase, is_archive: bool = True) -> Iterator[tarfile.TarInfo]:
    """Yield the members of an archive in their order.

    Args:
        source: the archive, or the part of it that holds one sample.
        stream: `source` as a file.
        is_archive: check its end: without the end mark an archive is truncated.

    Raises:
        BadDataError: the archive is damaged or truncated.
    """
    try:
        archive: Any = tarfile.TarFile(fileobj=stream, encoding="utf-8")
        while (member := archive.next()) is not None:
            archive.members.clear()  # those of a large archive would fill the memory
            yield member
            if archive.offset >= source.size:
                break
    except tarfile.TarError as error:
        raise BadDataError(source.url, f"damaged archive: {error}") from error
    if is_archive:
        _check_end(source, archive.offset)


def _check_end(source: ByteSource, position: int) -> None:
    """Check the end mark of two empty blocks, and that nothing follows it."""
    if source.size - position < 2 * _BLOCK:
        cause = f"the archive ends at byte {source.size} without its whole end mark: it is truncated"
        raise BadDataError(source.url, cause)
    if any(source.read(position, position + _BLOCK)):
        raise BadDataError(source.url, f"the header at byte {position} does not match its checksum")
    for start in range(position, source.size, 1 << 20):
        values = np.frombuffer(source.read(start, start + (1 << 20)), np.uint8)
        if values.any():
            raise BadDataError(
                source.url,
                f"content after the end mark of the archive, at byte {start + int(np.argmax(values != 0))}",
                hint="join archives with tar --concatenate rather than cat",
            )
