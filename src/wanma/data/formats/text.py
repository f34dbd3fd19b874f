"""Plain text in UTF-8: one document a file, or one a line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from wanma.data.formats.byte_ranges import (
    BYTE_ORDER_MARK,
    RangeFormat,
    RangeScan,
    check_text,
    chunks,
    find_lines,
)
from wanma.data.formats.format import Certainty, Content, FileGroup, Probe, Record
from wanma.data.stores.byte_source import ByteSource


def is_text(head: bytes) -> bool:
    """Return True if `head` may begin a text in UTF-8; its last character may be cut."""
    try:
        head.decode("utf-8")
    except UnicodeDecodeError as error:
        return error.start >= len(head) - 3 and error.reason == "unexpected end of data"
    return True


@dataclass(frozen=True)
class TextDocuments(RangeFormat):
    """Files of text, each one sample `{"text": ...}`; an empty file has none."""

    name: ClassVar[str] = "text"
    suffixes: ClassVar[tuple[str, ...]] = (".txt", ".md", ".text")

    def detect(self, probe: Probe) -> Certainty:
        fits = bool(probe.head) and b"\0" not in probe.head and is_text(probe.head)
        return Certainty.POSSIBLE if fits else Certainty.NO

    def scan_ranges(self, source: ByteSource, group: FileGroup) -> RangeScan:
        for position, chunk in chunks(source):
            check_text(source, np.frombuffer(chunk, np.uint8), position)
        start = 3 if bytes(source.read(0, 3)) == BYTE_ORDER_MARK else 0
        starts, ends = np.array([start], np.int64), np.array([source.size], np.int64)
        return RangeScan(starts[starts < ends], ends[starts < ends])

    def parse(self, content: Content, facts: Mapping[str, Any]) -> Record:
        return {"text": str(content, "utf-8")}


@dataclass(frozen=True)
class TextLines(RangeFormat):
    """Files of text in which each line that is not blank is one sample `{"text": ...}`.

    No content tells it from documents, so that it is used only by its name.
    """

    name: ClassVar[str] = "text-lines"

    def detect(self, probe: Probe) -> Certainty:
        return Certainty.NO

    def scan_ranges(self, source: ByteSource, group: FileGroup) -> RangeScan:
        starts, ends, digest = find_lines(source)
        return RangeScan(starts, ends, digest=digest)

    def parse(self, content: Content, facts: Mapping[str, Any]) -> Record:
        return {"text": str(content, "utf-8").removesuffix("\r")}
