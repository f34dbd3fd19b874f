"""Formats whose samples are ranges of bytes of one file: found once, read in batches, parsed one by one."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from wanma.data.formats.compression import detect_compression, open_plain
from wanma.data.formats.format import (
    BadDataError,
    Content,
    FileGroup,
    Format,
    Layout,
    Record,
    RowReader,
    Rows,
)
from wanma.data.stores.byte_source import ByteSource

CHUNK_BYTES = 8 << 20
"""Bytes that a scan reads at once."""
CURSOR_BYTES = 4 * CHUNK_BYTES
"""Bytes that a cursor reads at once: of a store, by several requests beside each other."""
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class RangeScan:
    """Byte ranges of all samples of a file, with facts that parsing needs."""

    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    facts: Mapping[str, Any] = field(default_factory=dict)
    digest: str = ""
    """Hash of the whole content if it was read."""


class RangeFormat(Format):
    """Format whose samples are byte ranges of one file; the file may be compressed as a whole."""

    @abstractmethod
    def scan_ranges(self, source: ByteSource, group: FileGroup) -> RangeScan:
        """Find the ranges in the plain content.

        Raises:
            BadDataError: the file is damaged.
        """

    @abstractmethod
    def parse(self, content: Content, facts: Mapping[str, Any]) -> Record:
        """Parse one sample.

        Raises:
            ValueError: the sample is damaged; the message is the cause.
        """

    def compression(self, head: bytes) -> str:
        """Return the compression of a file by its first bytes; empty: none."""
        return detect_compression(head)

    def scan(self, group: FileGroup) -> Layout:
        source = group.open()
        compression = self.compression(bytes(source.read(0, 12)))
        found = self.scan_ranges(open_plain(source, compression, group.scratch), group)
        facts = {**found.facts, "compression": compression} if compression else found.facts
        tables = {"starts": found.starts, "ends": found.ends}
        return Layout(len(found.starts), tables, facts, found.digest)

    def open(self, group: FileGroup, layout: Layout) -> RowReader:
        source = open_plain(group.open(), layout.facts.get("compression", ""), group.scratch)
        return RangeReader(source, layout, self.parse)


class RangeReader(RowReader):
    """Reader of samples that are byte ranges.

    Args:
        layout: tables `starts` and `ends`, in bytes.
    """

    def __init__(
        self,
        source: ByteSource,
        layout: Layout,
        parse: Callable[[Content, Mapping[str, Any]], Record],
    ) -> None:
        self.rows = layout.rows
        self._source, self._facts, self._parse = source, layout.facts, parse
        self._starts, self._ends = layout.tables["starts"], layout.tables["ends"]

    def read(self, rows: Rows) -> list[Record]:
        self._check(rows)
        starts, ends = self._starts[rows], self._ends[rows]
        records = []
        contents = read_ranges(self._source, starts, ends)
        for row, content, size in zip(rows.tolist(), contents, (ends - starts).tolist(), strict=True):
            if len(content) != size:
                raise BadDataError(self._source.url, f"{size} bytes expected, {len(content)} read", row)
            try:
                records.append(self._parse(content, self._facts))
            except (ValueError, RecursionError) as error:
                raise BadDataError(self._source.url, describe_fault(error), row) from error
        return records


def describe_fault(error: Exception) -> str:
    """Return the cause of a failed parse as part of a sentence."""
    if isinstance(error, UnicodeDecodeError):
        return f"invalid UTF-8 at its byte {error.start}"
    if isinstance(error, RecursionError):
        return "nested too deeply"
    return " ".join(str(error).split()) or type(error).__name__


def read_ranges(
    source: ByteSource, starts: NDArray[np.int64], ends: NDArray[np.int64]
) -> list[bytes | memoryview]:
    """Read many ranges at once; a remote source joins neighbours, mapped memory gives views."""
    return source.read_ranges(list(zip(starts.tolist(), ends.tolist(), strict=True)))


class Cursor:
    """Position in a file that a scan reads from front to back, or jumps over; reads in large chunks."""

    def __init__(self, source: ByteSource, chunk_bytes: int = CURSOR_BYTES) -> None:
        self._source, self._chunk_bytes = source, chunk_bytes
        self._start, self._chunk = 0, memoryview(b"")

    def take(self, start: int, size: int) -> bytes:
        """Return bytes [start, start + size); fewer only where the file ends."""
        offset = start - self._start
        if offset < 0 or offset + size > len(self._chunk):
            self._start, offset = start, 0
            self._chunk = memoryview(self._source.read(start, start + max(size, self._chunk_bytes)))
        return bytes(self._chunk[offset : offset + size])


def chunks(source: ByteSource) -> Iterator[tuple[int, bytes | memoryview]]:
    """Yield the content in chunks, each with the position of its first byte."""
    for start in range(0, source.size, CHUNK_BYTES):
        chunk = source.read(start, min(start + CHUNK_BYTES, source.size))
        if not len(chunk):
            raise BadDataError(source.url, f"the file ends at byte {start} of {source.size}")
        yield start, chunk


def find_lines(
    source: ByteSource, space: bytes = b" \t\r\f\v"
) -> tuple[NDArray[np.int64], NDArray[np.int64], str]:
    """Find the lines of a text, without their line feeds, and without those of white space only.

    Args:
        space: bytes that count as white space.

    Returns:
        First and last byte (exclusive) of each line, and the hash of the content.

    Raises:
        BadDataError: the file holds zero bytes, so it is binary or UTF-16.
    """
    content_hash = xxhash.xxh3_128()
    is_space = np.isin(np.arange(256), np.frombuffer(space, np.uint8))
    starts, ends, suspects = [], [], []
    is_line_start = True
    for position, chunk in chunks(source):
        content_hash.update(chunk)
        values = np.frombuffer(chunk, np.uint8)
        check_text(source, values, position)
        breaks = np.flatnonzero(values == 10)
        line_starts = breaks[breaks < len(values) - 1] + 1
        if is_line_start:
            line_starts = np.concatenate([[0], line_starts])
        is_line_start = bool(values[-1] == 10)
        starts.append(line_starts + position)
        ends.append(breaks + position)
        suspects.append(is_space[values[line_starts]])
    if not is_line_start:
        ends.append(np.array([source.size]))
    first, last = concatenate(starts), concatenate(ends)
    if bytes(source.read(0, 3)) == BYTE_ORDER_MARK:
        first[0] = min(3, last[0])
    is_blank = last <= first
    for number in np.flatnonzero(np.concatenate([*suspects, [False]]) & ~np.append(is_blank, True)).tolist():
        is_blank[number] = not bytes(source.read(int(first[number]), int(last[number]))).strip(space)
    return first[~is_blank], last[~is_blank], content_hash.hexdigest()


def check_text(source: ByteSource, values: NDArray[np.uint8], position: int) -> None:
    """Refuse content with a zero byte, which no UTF-8 text has.

    Args:
        position: position of that part.
    """
    if not values.all():
        zero = position + int(np.argmin(values))
        raise BadDataError(source.url, f"a zero byte at {zero}: the file is binary or UTF-16, not UTF-8 text")


def concatenate(parts: Sequence[NDArray[Any]]) -> NDArray[np.int64]:
    """Return the parts as one array of int64; empty without parts."""
    return np.concatenate([np.empty(0, np.int64), *parts]).astype(np.int64)
