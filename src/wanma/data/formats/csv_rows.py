"""Rows of CSV and TSV files, as mappings of the names in the header to texts."""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from wanma.data.formats.byte_ranges import BYTE_ORDER_MARK, RangeFormat, RangeScan, find_lines
from wanma.data.formats.format import BadDataError, Certainty, Content, FileGroup, Probe, Record
from wanma.data.formats.text import is_text
from wanma.data.stores.byte_source import ByteSource

_DELIMITERS = ("::", "\t", ",", ";", "|")
"""Delimiters that are tried; `::` is that of MovieLens."""
_SNIFFED_BYTES = 64 << 10
_SNIFFED_LINES = 20
_CHECKED_ROWS = 21
"""First lines by which a header is told from data."""
_MIN_SENTENCE_SPACES = 4
_SENTENCE_ENDS = (".", "!", "?", "。", "！", "？")
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
_QUOTED_REST = re.compile(rb'[^"]*(?:""[^"]*)*"(?!")')
"""Rest of a quoted field up to its closing quote; a doubled quote is part of the field."""


@dataclass(frozen=True)
class Csv(RangeFormat):
    """Delimited text, quoted as RFC 4180 has it; values stay texts.

    Args:
        delimiter: text between fields; empty: the one of tab, comma, semicolon, bar and `::` by which the
            first lines have equally many fields, else a tab in a .tsv file, a comma in others. A blank: any
            number of blanks and tabs, as in tables that are padded for people.
        header: True if the first line holds the names; False: fields are named `0`, `1` and so on; None: it
            holds names unless one of its fields is empty or a number. A first line of text that reads like
            the lines below it is refused.
        quoted: True if fields may be in double quotes, and then hold delimiters and line feeds.
    """

    delimiter: str = ""
    header: bool | None = None
    quoted: bool = True
    name: ClassVar[str] = "csv"
    layout_version: ClassVar[int] = 4
    suffixes: ClassVar[tuple[str, ...]] = (".csv", ".tsv", ".tab")

    def detect(self, probe: Probe) -> Certainty:
        if not probe.head or b"\0" in probe.head or not is_text(probe.head):
            return Certainty.NO
        fits = self._find_delimiter(probe.head) or probe.ends_with(*self.suffixes)
        return Certainty.POSSIBLE if fits else Certainty.NO

    def scan_ranges(self, source: ByteSource, group: FileGroup) -> RangeScan:
        head = bytes(source.read(0, _SNIFFED_BYTES))
        usual = "\t" if any(suffix in source.url for suffix in (".tsv", ".tab")) else ","
        delimiter = self._find_delimiter(head) or self.delimiter or usual
        starts, ends, digest = find_lines(source, b" \r")
        is_quoted = self.quoted and len(delimiter) == 1 and delimiter != " "
        if is_quoted:
            starts, ends = _join_quoted_lines(source, starts, ends, delimiter.encode())
        facts: dict[str, Any] = {"delimiter": delimiter, "quoted": is_quoted, "names": []}
        if len(starts):
            try:
                first = _split(source.read(int(starts[0]), int(ends[0])), delimiter, is_quoted)
            except ValueError as error:
                raise BadDataError(source.url, f"its first line: {error}") from error
            has_header = self.header
            if has_header is None:
                has_header = not any(not field or _NUMBER.fullmatch(field) for field in first)
                spans = zip(starts[1:_CHECKED_ROWS], ends[1:_CHECKED_ROWS], strict=True)
                rows = [source.read(int(start), int(end)) for start, end in spans]
                if has_header and (value := _data_value(first, rows, delimiter, is_quoted)):
                    raise BadDataError(
                        source.url,
                        f"all its columns are text, and its first line looks like data, not names: {value}",
                        0,
                        "put a line of names before it; or say what the first line is: --option header=true "
                        "(names) or --option header=false (data)",
                    )
            facts["names"] = first if has_header else [str(number) for number in range(len(first))]
            if len(set(facts["names"])) < len(first):
                raise BadDataError(
                    source.url,
                    f"two of its columns have the same name: {', '.join(first)}",
                    hint="rename them, or set --option header=false if the first line is data",
                )
            starts, ends = starts[has_header:], ends[has_header:]
        return RangeScan(starts, ends, facts, digest)

    def parse(self, content: Content, facts: Mapping[str, Any]) -> Record:
        names = facts["names"]
        fields = _split(content, facts["delimiter"], facts["quoted"])
        if len(fields) != len(names):
            raise ValueError(f"{len(fields)} fields, but the file has {len(names)} columns")
        return dict(zip(names, fields, strict=True))

    def _find_delimiter(self, head: bytes) -> str:
        """Return the delimiter that gives the first lines equally many fields, at least two; else empty."""
        lines = head.removeprefix(BYTE_ORDER_MARK).split(b"\n")
        if len(lines) > 1:
            lines = lines[:-1]  # it may be cut
        lines = [line for line in lines[:_SNIFFED_LINES] if line.strip()]
        for delimiter in [self.delimiter] if self.delimiter else _DELIMITERS:
            counts = {_count_fields(line, delimiter, self.quoted) for line in lines}
            if len(counts) == 1 and min(counts) > 1:
                return delimiter
        return ""


def _data_value(first: Sequence[str], rows: Sequence[Content], delimiter: str, quoted: bool) -> str:
    """Return the reason why a first line of text is a row and not names; empty: it may be names.

    A number in a row below shows that it is names. A value that comes again in its column, or a sentence,
    shows that it is data.
    """
    columns: list[set[str]] = [set() for _ in first]
    for row in rows:
        with suppress(ValueError):  # a damaged row is reported when it is read
            for column, field in zip(columns, _split(row, delimiter, quoted), strict=True):
                column.add(field)
    if any(_NUMBER.fullmatch(field) for column in columns for field in column):
        return ""
    for name, column in zip(first, columns, strict=True):
        if name in column:
            return f"'{name[:60]}' comes again in its column"
        if name.count(" ") >= _MIN_SENTENCE_SPACES or name.endswith(_SENTENCE_ENDS):
            return f"'{name[:60]}' is a sentence"
    return ""


def _count_fields(line: bytes, delimiter: str, quoted: bool) -> int:
    try:
        return len(_split(line, delimiter, quoted and len(delimiter) == 1))
    except ValueError:
        return 0


def _split(content: Content, delimiter: str, quoted: bool) -> list[str]:
    """Split a row into its fields.

    Raises:
        ValueError: no UTF-8, or a quote that is not closed or is followed by content.
    """
    text = str(content, "utf-8").removesuffix("\r")
    if delimiter == " ":
        return text.split()
    if not quoted or '"' not in text:
        return text.split(delimiter)
    try:
        rows = list(csv.reader([text], delimiter=delimiter, strict=True))
    except csv.Error as error:
        raise ValueError(f"damaged quotes: {error}") from error
    return rows[0]


def _join_quoted_lines(
    source: ByteSource, starts: NDArray[np.int64], ends: NDArray[np.int64], delimiter: bytes
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Join lines of a quoted field that holds line feeds; only lines with quotes are looked at."""
    quoted_lines = _lines_with_quotes(source, starts)
    if not len(starts):
        return starts, ends
    is_start = np.ones(len(starts), np.bool_)
    open_since = -1
    for number in quoted_lines:
        line = bytes(source.read(int(starts[number]), int(ends[number])))
        if open_since >= 0:
            is_start[open_since + 1 : number + 1] = False
        if _leaves_open(line, open_since >= 0, delimiter):
            open_since = open_since if open_since >= 0 else number
        else:
            open_since = -1
    if open_since >= 0:
        row = int(is_start[:open_since].sum())
        raise BadDataError(
            source.url,
            "a quote is not closed before the file ends",
            row,
            "close it, or set --option quoted=false if quotes are ordinary characters",
        )
    first = np.flatnonzero(is_start)
    last = np.append(first[1:], len(starts)) - 1
    return starts[first], ends[last]


def _lines_with_quotes(source: ByteSource, starts: NDArray[np.int64]) -> Sequence[int]:
    """Return the numbers of lines that hold a quote."""
    found: list[NDArray[np.int64]] = []
    step = 1 << 23
    for position in range(0, source.size, step):
        values = np.frombuffer(source.read(position, position + step), np.uint8)
        quotes = np.flatnonzero(values == 34) + position
        found.append(np.unique(np.searchsorted(starts, quotes, side="right") - 1))
    lines: list[int] = np.unique(np.concatenate(found)).tolist() if found else []
    return [line for line in lines if line >= 0]


def _leaves_open(line: bytes, is_open: bool, delimiter: bytes) -> bool:
    """Return True if a line ends inside a quoted field; a quote opens one at the start of a field only."""
    position = 0
    while True:
        if not is_open and line[position : position + 1] == b'"':
            is_open, position = True, position + 1
        if is_open:
            closing = _QUOTED_REST.match(line, position)
            if closing is None:
                return True
            is_open, position = False, closing.end()
        position = line.find(delimiter, position) + 1
        if not position:
            return False
