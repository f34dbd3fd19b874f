"""Documents in rows of records: text or token ids in one field, and rows that hold neither. No torch here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wanma.data.documents.record_fields import field_value
from wanma.data.formats.arrays import ArrayReader
from wanma.data.formats.byte_ranges import describe_fault
from wanma.data.formats.format import BadDataError, Record, RowReader
from wanma.data.index.sample_index import read_around_damage

_BATCH_ROWS = 1024
_BATCH_BYTES = 4 << 20
_ARRAY_TOKENS = 1 << 22
"""Tokens of a long array that are checked and written at once."""

Document = bytes | NDArray[Any]
"""Text in UTF-8, or token ids (tokens,) of any integer type."""


def row_batches(start: int, end: int, row_bytes: float) -> Iterator[range]:
    """Yield the rows [start, end) in batches to read at once; `row_bytes` is the size of one, about."""
    step = int(min(max(_BATCH_BYTES / max(row_bytes, 1.0), 1), _BATCH_ROWS))
    for first in range(start, end, step):
        yield range(first, min(first + step, end))


def read_rows(reader: RowReader, rows: range) -> Iterator[tuple[int, Record | BadDataError]]:
    """Yield rows in their order, and for a damaged one its error."""
    found = read_around_damage(lambda part: reader.read_range(part.start, part.stop), rows)
    return zip(rows, (one for _, one in found), strict=True)


def document_of(record: Record, field: str) -> Document:
    """Return the document in a field of a record.

    Raises:
        ValueError: there is no such field, or its value is neither text nor a list of token ids.
    """
    value = field_value(record, field)
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], bytes | memoryview | str):
        value = value[0]  # features of TFRecord are lists
    if isinstance(value, str):
        try:
            return value.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"the field '{field}' holds half a surrogate pair, which UTF-8 has not"
            ) from error
    if isinstance(value, bytes | memoryview):
        content = bytes(value)
        try:
            content.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"the field '{field}': {describe_fault(error)}") from error
        return content
    is_list = isinstance(value, list) and all(type(one) is int for one in value)
    if is_list or isinstance(value, np.ndarray):
        tokens = np.asarray(value, np.int64) if is_list else value
        if tokens.ndim == 1 and tokens.dtype.kind in "iu":
            return tokens
        raise ValueError(
            f"the field '{field}' is an array of {tokens.dtype} with {tokens.ndim} dimensions, no token ids"
        )
    kind = "null" if value is None else f"of type {type(value).__name__}"
    raise ValueError(f"the field '{field}' is {kind}, neither text nor token ids")


def read_array(reader: ArrayReader, name: str) -> Iterator[NDArray[Any]]:
    """Yield the token ids of one array (tokens,) in large pieces."""
    for first in range(0, reader.rows, _ARRAY_TOKENS):
        yield reader.column(name, first, min(first + _ARRAY_TOKENS, reader.rows))
