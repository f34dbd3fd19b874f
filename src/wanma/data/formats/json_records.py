"""Records of JSON: one object a line, or a list of objects."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import xxhash
from numpy.typing import NDArray

from wanma.data.formats.byte_ranges import (
    BYTE_ORDER_MARK,
    RangeFormat,
    RangeScan,
    check_text,
    chunks,
    concatenate,
    find_lines,
)
from wanma.data.formats.format import BadDataError, Certainty, Content, FileGroup, Probe, Record
from wanma.data.stores.byte_source import ByteSource

_SPACE = b" \t\r\n"
_QUOTE, _BACKSLASH, _COMMA = b'"\\,'
_DEPTH_CHANGE = np.zeros(256, np.int8)
_DEPTH_CHANGE[[91, 123]] = 1
_DEPTH_CHANGE[[93, 125]] = -1
"""Change of the nesting depth by a byte outside of texts: brackets and braces."""
_IS_STRUCTURE = np.isin(np.arange(256), np.frombuffer(b'"\\[]{},', np.uint8))
_IS_SPACE = np.isin(np.arange(256), np.frombuffer(_SPACE, np.uint8))


def parse_object(content: Content) -> Record:
    """Parse an object of JSON.

    Raises:
        ValueError: it is no JSON in UTF-8, or no object.
    """
    record = json.loads(str(content, "utf-8"))
    if not isinstance(record, dict):
        raise ValueError(f"{_KINDS.get(type(record), 'a value')} of JSON where an object is expected")
    return record


_KINDS = {list: "a list", str: "a text", int: "a number", float: "a number", bool: "a truth value"}


@dataclass(frozen=True)
class JsonLines(RangeFormat):
    """Files with one object of JSON in each line; blank lines do not count."""

    name: ClassVar[str] = "jsonl"
    suffixes: ClassVar[tuple[str, ...]] = (".jsonl", ".ndjson", ".json")

    def detect(self, probe: Probe) -> Certainty:
        head = probe.head.removeprefix(BYTE_ORDER_MARK).lstrip(_SPACE)
        if not head.startswith(b"{"):
            return Certainty.NO
        line, newline, _ = head.partition(b"\n")
        try:
            parse_object(line)
        except (ValueError, RecursionError):  # a first line longer than the head is decided by the suffix
            fits = not newline and probe.ends_with(".jsonl", ".ndjson") and b"\0" not in line
            return Certainty.LIKELY if fits else Certainty.NO
        return Certainty.LIKELY

    def scan_ranges(self, source: ByteSource, group: FileGroup) -> RangeScan:
        starts, ends, digest = find_lines(source)
        return RangeScan(starts, ends, digest=digest)

    def parse(self, content: Content, facts: Mapping[str, Any]) -> Record:
        return parse_object(content)


@dataclass(frozen=True)
class JsonList(RangeFormat):
    """Files that are one list of objects of JSON, on one line or many."""

    name: ClassVar[str] = "json-list"
    suffixes: ClassVar[tuple[str, ...]] = (".json",)

    def detect(self, probe: Probe) -> Certainty:
        head = probe.head.removeprefix(BYTE_ORDER_MARK).lstrip(_SPACE)
        if not head.startswith(b"["):
            return Certainty.NO
        body = head[1:].lstrip(_SPACE)
        if body == b"]" and probe.ends_with(".json"):
            return Certainty.LIKELY
        if not body.startswith(b"{"):
            return Certainty.NO
        try:
            json.JSONDecoder().raw_decode(str(body, "utf-8", "ignore"))
        except (ValueError, RecursionError):  # a first object longer than the head is decided by the suffix
            return Certainty.LIKELY if probe.ends_with(".json") else Certainty.NO
        return Certainty.LIKELY

    def scan_ranges(self, source: ByteSource, group: FileGroup) -> RangeScan:
        scanner = _ListScanner(source)
        for position, chunk in chunks(source):
            scanner.add(position, np.frombuffer(chunk, np.uint8))
        return scanner.finish()

    def parse(self, content: Content, facts: Mapping[str, Any]) -> Record:
        return parse_object(content)


class _ListScanner:
    """Scanner of the elements of a list, fed with consecutive chunks of bytes.

    Texts are found by the parity of quotes that no backslash escapes, elements by the nesting depth outside
    of texts: all in numpy, without parsing.
    """

    def __init__(self, source: ByteSource) -> None:
        self._source = source
        self._hash = xxhash.xxh3_128()
        self._separators: list[NDArray[np.int64]] = []
        self._is_in_text = False
        self._is_escaped = False
        """True if the next byte is escaped by a backslash of the last chunk."""
        self._depth = 0
        self._list_start = -1
        self._list_end = -1

    def add(self, position: int, values: NDArray[np.uint8]) -> None:
        check_text(self._source, values, position)
        self._hash.update(values.data)
        if self._list_start < 0:
            self._find_start(position, values)
        places = np.flatnonzero(_IS_STRUCTURE[values])
        kinds = values[places]
        is_quote = (kinds == _QUOTE) & ~self._escaped(places, kinds, len(values))
        parity = np.bitwise_xor.accumulate(is_quote) ^ self._is_in_text
        is_outside = ~parity & ~is_quote  # a closing quote is no structure either
        changes = np.where(is_outside, _DEPTH_CHANGE[kinds], np.int8(0))
        depth = np.cumsum(changes, dtype=np.int64) + self._depth
        if len(places):
            self._is_in_text, self._depth = bool(parity[-1]), int(depth[-1])
        self._check_end(position, values, places[(depth <= 0) & (changes < 0)])
        self._separators.append(places[is_outside & (depth == 1) & (kinds == _COMMA)] + position)

    def finish(self) -> RangeScan:
        if self._list_start < 0:
            raise self._fault("it holds no list")
        if self._list_end < 0:
            where = "inside a text" if self._is_in_text else f"{self._depth} levels deep"
            raise self._fault(f"the list is not closed: the file ends {where}, it is truncated")
        separators = concatenate(self._separators)
        starts = np.concatenate([[self._list_start], separators]) + 1
        ends = np.concatenate([separators, [self._list_end]])
        if len(starts) == 1 and not bytes(self._source.read(int(starts[0]), int(ends[0]))).strip(_SPACE):
            starts, ends = starts[:0], ends[:0]
        return RangeScan(starts.astype(np.int64), ends.astype(np.int64), digest=self._hash.hexdigest())

    def _escaped(self, places: NDArray[np.int64], kinds: NDArray[np.uint8], size: int) -> NDArray[np.bool_]:
        """Return which bytes of structure follow an odd number of backslashes.

        Args:
            places: their positions in the chunk.
            kinds: the bytes.
            size: size of the chunk.
        """
        carried = int(self._is_escaped)
        if carried:  # as if the chunk began with a backslash
            places, kinds = np.concatenate([[-1], places]), np.concatenate([[_BACKSLASH], kinds])
        numbers = np.arange(len(places))
        follows = np.zeros(len(places), np.bool_)
        follows[1:] = (kinds[:-1] == _BACKSLASH) & (np.diff(places) == 1)
        run = numbers - np.maximum.accumulate(np.where(follows, 0, numbers))
        escaped = run % 2 == 1
        self._is_escaped = bool(
            len(places) and places[-1] == size - 1 and kinds[-1] == _BACKSLASH and not escaped[-1]
        )
        return np.asarray(escaped[carried:])

    def _find_start(self, position: int, values: NDArray[np.uint8]) -> None:
        content = values.tobytes()
        body = content.removeprefix(BYTE_ORDER_MARK) if position == 0 else content
        if not (stripped := body.lstrip(_SPACE)):
            return
        if not stripped.startswith(b"["):
            raise self._fault("it does not begin with a list")
        self._list_start = position + len(content) - len(stripped)

    def _check_end(self, position: int, values: NDArray[np.uint8], closing: NDArray[np.int64]) -> None:
        """Note the end of the list, the first of the brackets `closing`, and refuse content after it."""
        start = 0
        if self._list_end < 0:
            if not len(closing):
                return
            start = int(closing[0]) + 1
            self._list_end = position + start - 1
        rest = np.flatnonzero(~_IS_SPACE[values[start:]])
        if len(rest):
            raise self._fault(f"content after the end of the list, at byte {position + start + int(rest[0])}")

    def _fault(self, cause: str) -> BadDataError:
        return BadDataError(self._source.url, cause, hint="write one list of objects, or one object a line")
