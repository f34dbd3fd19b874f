"""Hashing of ids into the rows of a table: the same row on any machine and in any version. No torch."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray


def hash_ids(values: Iterable[Any], rows: int) -> NDArray[np.int64]:
    """Return the rows of ids, (ids,): the first 8 bytes of BLAKE2b, little-endian, modulo `rows`.

    An id's text is hashed, in UTF-8: of a whole number the decimal one, of a missing id the empty one.
    """
    known: dict[str, int] = {}
    hashed = []
    for value in values:
        text = _text(value)
        row = known.get(text)
        if row is None:
            digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
            row = known[text] = int.from_bytes(digest, "little") % rows
        hashed.append(row)
    return np.array(hashed, dtype=np.int64)


def is_missing(value: Any) -> bool:
    """Return True for an empty field of a text file, no value, or NaN."""
    return value is None or (isinstance(value, str) and not value) or (_is_float(value) and math.isnan(value))


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if is_missing(value):
        return ""
    is_whole = not _is_float(value) or float(value).is_integer()
    return str(int(value)) if is_whole else str(value)


def _is_float(value: Any) -> bool:
    return isinstance(value, float | np.floating)
