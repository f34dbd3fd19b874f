"""Map-style dataset of a stored table: numbers of some columns as features, one column as the target.

Rules of types: features are float32. A target is a class (int64, counted from 0) or a number (float32). Where
the job does not say which, floats and texts with a fraction or an exponent are numbers; integers, booleans
and other texts are classes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wanma.data.documents.record_fields import field_value
from wanma.data.formats.arrays import NumpyArrays
from wanma.data.formats.detection import format_named
from wanma.data.formats.format import BadDataError, Record
from wanma.data.images.fields import (
    Classes,
    bad_sample,
    find_classes,
    join_classes,
    only_columns,
    read_label,
)
from wanma.data.images.stored_images import sampled_rows
from wanma.data.index.records import cache_folder, is_description, open_index
from wanma.data.index.sample_index import SampleIndex
from wanma.data.stores.listing import list_files
from wanma.job.errors import JobError
from wanma.job.sections.data import DataSection
from wanma.job.sections.data_sources import EntriesSection


class TableDataset:
    """Rows of a table as samples (features (count,) float32, target); a copy by pickle opens the files again.

    Args:
        section: the job's `[data]`.
        number: number of the source among those of the job.
        index: rows of the files.
        features: fields of the features, in order.
        classes: classes of the target; None: it is a number.
    """

    def __init__(
        self,
        section: DataSection,
        number: int,
        index: SampleIndex,
        features: Sequence[str],
        classes: Classes | None,
    ) -> None:
        self._arguments = section, number
        self._index, self.features, self.classes = index, list(features), classes
        table, source = section.located_sources[number]
        self._target, self._columns_key = source.columns.target or "", f"{table}.columns"

    def __len__(self) -> int:
        return self._index.rows

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor | int]:
        """Return the sample of a row.

        Raises:
            BadDataError: a value is missing or has the wrong type; names file, row and field.
        """
        (record,) = self._index.read(np.array([row]))
        try:
            values = [
                number for name in self.features for number in _numbers(field_value(record, name), name)
            ]
            features = torch.tensor(values, dtype=torch.float32)
            return features, self._read_target(record)
        except ValueError as error:
            found = bad_sample(self._index, row, str(error))
            raise BadDataError(
                found.file,
                found.cause,
                found.row,
                f"mend or remove the row, or name other fields in {self._columns_key}",
            ) from error

    def _read_target(self, record: Record) -> Tensor | int:
        if self.classes is not None:
            return self.classes.number(read_label(record, self._target))
        values = _numbers(field_value(record, self._target), self._target)
        if len(values) != 1:
            raise ValueError(f"the field '{self._target}' has {len(values)} values; a target is one number")
        return torch.tensor(values[0], dtype=torch.float32)

    def __reduce__(self) -> tuple[Any, ...]:
        return _open_again, self._arguments


def open_tables(section: DataSection) -> dict[int, TableDataset]:
    """Open the tables of a job by the number of their source; classes of one name are the same in all.

    Raises:
        JobError: nothing is there, or a column does not exist.
        BadDataError, WanmaError: files cannot be read, or have no known format.
    """
    opened = {
        number: _open_table(section, number)
        for number, (_, source) in enumerate(section.located_sources)
        if source.content == "table"
    }
    found = {str(number): one.classes for number, one in opened.items() if one.classes is not None}
    for number, classes in join_classes(found).items() if found else ():
        opened[int(number)].classes = classes
    if 0 < len(found) < len(opened):
        raise JobError(
            "data.sources: the target of some tables is a class, and that of others a number",
            "set columns.target_type of the sources",
        )
    return opened


def _open_again(section: DataSection, number: int) -> TableDataset:
    return open_tables(section)[number]


def _open_table(section: DataSection, number: int) -> TableDataset:
    table, source = section.located_sources[number]
    columns, key = source.columns, f"{table}.columns"
    listed = list_files(source.entries, f"{table}.{source.entries_key}", section.store_retry_seconds)
    files = [file for file in listed if file.is_named or not is_description(file.url)]
    assert columns.target is not None
    names = (*columns.features, columns.target)
    chosen = format_named(source.format) if source.format else None
    if (
        chosen is None
        and all(file.url.endswith(".npz") for file in files)
        and not any("*" in n for n in names)
    ):
        chosen = NumpyArrays(tuple(dict.fromkeys(names)))
    folder = cache_folder(section.cache)
    try:
        index = open_index(
            files,
            folder,
            section.cache_bytes,
            data_format=chosen,
            retry_seconds=section.store_retry_seconds,
        )
    except BadDataError as error:
        raise JobError(f"{key}: {error.message}", error.hint or "name other files or fields") from error
    rows = sampled_rows(index)
    records = index.read(rows)
    features = [
        name
        for one in columns.features
        for name in ([name for name in records[0] if fnmatchcase(name, one)] if "*" in one else [one])
        if name != columns.target or "*" not in one
    ]
    if not features:
        raise JobError(
            f"{key}.features: no column matches {', '.join(columns.features)}",
            f"the columns are {', '.join(records[0])}",
        )
    for role, name in (*(("features", one) for one in features), ("target", columns.target)):
        try:
            field_value(records[0], name)
        except ValueError as error:
            raise JobError(
                f"{key}.{role}: {error} ({index.groups[0].url})", f"correct {key}.{role}"
            ) from error
    index = only_columns(index, (*features, columns.target))
    classes = None
    if not _is_number(source, records):
        try:
            classes = find_classes(
                index, columns.target, folder, skips_damaged=False, sampled=records, key=f"{key}.target"
            )
        except BadDataError as error:
            raise JobError(
                f"{key}.target: {error.message}",
                f"mend the row; or set {key}.target_type to 'number' if it is one",
            ) from error
    return TableDataset(section, number, index, features, classes)


def _is_number(source: EntriesSection, records: Sequence[Record]) -> bool:
    """Return True if the target is a number; see the rules of the module."""
    columns = source.columns
    if columns.target_type is not None:
        return columns.target_type == "number"
    for record in records:
        value = field_value(record, columns.target or "")
        if isinstance(value, np.ndarray | list) and len(value) == 1:
            value = value[0]
        if isinstance(value, bytes | memoryview):
            value = bytes(value).decode("utf-8", "replace")
        if isinstance(value, str):
            text = value.strip()
            if text.lstrip("+-").isdecimal() or not _is_float(text):
                continue
            return True
        if isinstance(value, float | np.floating):
            return True
    return False


def _is_float(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _numbers(value: Any, name: str) -> list[float]:
    """Return the numbers in a field: one, those of a list or an array, or one that a text holds.

    Raises:
        ValueError: it is missing, no number, or not finite.
    """
    if isinstance(value, bytes | memoryview):
        value = bytes(value).decode("utf-8", "replace")
    if isinstance(value, np.ndarray | list | tuple):
        return [number for one in np.asarray(value, object).reshape(-1) for number in _numbers(one, name)]
    if value is None or value == "":
        raise ValueError(f"the field '{name}' is missing")
    if (isinstance(value, str) and _is_float(value)) or isinstance(
        value, bool | int | float | np.number | np.bool_
    ):
        number = float(value)
        if math.isfinite(number):
            return [number]
    raise ValueError(f"the field '{name}' is no finite number: {value!r:.40}")
