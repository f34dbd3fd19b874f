"""Detection of plain text by its first bytes, beside JSON records and binary formats. No torch here."""

from __future__ import annotations

import json
from typing import Literal

from wanma.job.errors import JobError

Content = Literal["text", "records", "binary"]

_INSPECTED_BYTES = 8192
_FORMAT_SIGNATURES = (
    (b"PAR1", "a Parquet file"),
    (b"ARROW1", "an Arrow file"),
    (b"ORC", "an ORC file"),
    (b"Obj\x01", "an Avro file"),
    (b"SQLite format 3", "an SQLite database"),
    (b"PK\x03\x04", "a zip archive, such as .npz, .docx or a PyTorch file"),
    (b"\x1f\x8b", "compressed by gzip"),
    (b"\x28\xb5\x2f\xfd", "compressed by zstd"),
    (b"BZh", "compressed by bzip2"),
    (b"\xfd7zXZ", "compressed by xz"),
    (b"%PDF-", "a PDF"),
    (b"\x89PNG", "an image"),
    (b"\xff\xd8\xff", "an image"),
    (b"\x93NUMPY", "a numpy array"),
    (b"\x89HDF", "an HDF5 file"),
    (b"\xff\xfe", "UTF-16; save it as UTF-8"),
    (b"\xfe\xff", "UTF-16; save it as UTF-8"),
)
"""First bytes of binary files, and the names of their formats."""
_AMBIGUOUS_SIGNATURES = (b"ORC", b"BZh")
"""Magic numbers with which a text may begin, too."""


def detect_content(head: bytes) -> tuple[Content, str]:
    """Detect the kind of a file's content, and the name of its format if it is binary.

    Args:
        head: its first bytes, up to the end of a line where there are lines.
    """
    for start, name in _FORMAT_SIGNATURES:
        if head.startswith(start) and (
            start not in _AMBIGUOUS_SIGNATURES or b"\0" in head[:_INSPECTED_BYTES]
        ):
            return "binary", name
    if b"\0" in head[:_INSPECTED_BYTES]:  # as git and grep distinguish binary from text
        return "binary", "binary"
    return ("records", "") if _has_records(head) else ("text", "")


def unsupported_content_error(key: str, url: str, name: str) -> JobError:
    """Build the error about a file that holds neither text nor records."""
    return JobError(
        f"{key}: {url} is not plain text: {name}",
        "write its text to plain text files, JSON lines or Parquet, or return a dataset of tokens from "
        "data.factory; images are read by data.images",
    )


def records_without_text_error(key: str, reasons: str) -> JobError:
    """Build the error about records that lack the field of the text."""
    return JobError(
        f"{key}: {reasons}",
        "name the field that holds the text, token ids or messages in data.columns, or leave these files out",
    )


def _has_records(head: bytes) -> bool:
    """Return True if text begins as JSON lines or as a list of JSON objects."""
    begin = head.lstrip()
    if begin.startswith(b"["):
        return begin[1:].lstrip().startswith(b"{") and _is_list(begin)
    if not begin.startswith(b"{"):
        return False
    lines = [line for line in head.split(b"\n") if line.strip()][:2]
    return all(_is_object(line) for line in lines)


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


def _is_list(text: bytes) -> bool:
    """Return True if the first item of a list is a complete JSON object."""
    try:
        body = text[1:].decode("utf-8", "ignore").lstrip()
        return isinstance(json.JSONDecoder().raw_decode(body)[0], dict)
    except ValueError:
        return False
