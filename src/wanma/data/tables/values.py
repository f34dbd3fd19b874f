"""Values of a table's row as numbers: features, target, and what is wrong with them. No torch here."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from wanma.data.documents.record_fields import field_value
from wanma.data.formats.format import Record
from wanma.data.images.fields import read_label
from wanma.job.sections.data_sources import ColumnsSection


def feature_names(record: Record, columns: ColumnsSection) -> list[str]:
    """Return the fields of the features in order, each pattern as the fields of `record` that it names."""
    return [
        name
        for one in columns.features
        for name in ([name for name in record if fnmatchcase(name, one)] if "*" in one else [one])
        if name != columns.target or "*" not in one
    ]


def feature_values(record: Record, names: Sequence[str]) -> list[float]:
    """Return the features of a row.

    Raises:
        ValueError: one is missing, no number, or not finite.
    """
    return [number for name in names for number in numbers_of(field_value(record, name), name)]


def row_faults(record: Record, columns: ColumnsSection) -> Iterator[str]:
    """Yield what is wrong with the features and the target of a row."""
    target = columns.target or ""
    try:
        feature_values(record, feature_names(record, columns))
    except ValueError as error:
        yield str(error)
    try:
        if columns.target_type == "number":
            numbers_of(field_value(record, target), target)
        else:
            read_label(record, target)
    except ValueError as error:
        if columns.target_type is not None or not _is_number(record, target):
            yield str(error)


def _is_number(record: Record, name: str) -> bool:
    try:
        return len(numbers_of(field_value(record, name), name)) == 1
    except ValueError:
        return False


def is_float(text: str) -> bool:
    """Return True if a text is a finite number."""
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def numbers_of(value: Any, name: str) -> list[float]:
    """Return the numbers in a field: one, those of a list or an array, or one that a text holds.

    Raises:
        ValueError: it is missing, no number, or not finite.
    """
    if isinstance(value, bytes | memoryview):
        value = bytes(value).decode("utf-8", "replace")
    if isinstance(value, np.ndarray | list | tuple):
        return [number for one in np.asarray(value, object).reshape(-1) for number in numbers_of(one, name)]
    if value is None or value == "":
        raise ValueError(f"the field '{name}' is missing")
    if (isinstance(value, str) and is_float(value)) or isinstance(
        value, bool | int | float | np.number | np.bool_
    ):
        number = float(value)
        if math.isfinite(number):
            return [number]
    raise ValueError(f"the field '{name}' is no finite number: {value!r:.40}")
