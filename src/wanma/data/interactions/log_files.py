"""Stored files of an interaction log: their format, and the fields that hold its columns. No torch."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, get_args

import numpy as np

from wanma.data.documents.record_fields import field_value
from wanma.data.formats.csv_rows import Csv
from wanma.data.formats.detection import format_named
from wanma.data.formats.format import BadDataError, Format, Record
from wanma.data.index.build import Progress
from wanma.data.index.records import cache_folder, open_index, read_each, without_descriptions
from wanma.data.index.sample_index import SampleIndex
from wanma.data.interactions.id_hashing import is_missing
from wanma.data.stores.listing import StoredFile, list_files
from wanma.job.errors import JobError
from wanma.job.sections.data import DataSection
from wanma.job.sections.data_sources import ColumnsSection, InteractionRole
from wanma.job.sections.recommender import InteractionsSection

ROLES: tuple[InteractionRole, ...] = get_args(InteractionRole)
"""Roles of the fields of a file without a header, in their order."""
MAX_ID = 1 << 40
MAX_RAW_ID = 1 << 63
"""End of the ids of tables that admit them."""
_FIRST_ROWS = 16
"""Rows of which the first that can be read shows the fields."""
_SEPARATOR = re.compile(r"[|,; ]+")
_PADDED = Csv(delimiter=" ")
"""Format of tables that are padded for people by blanks."""


def list_log_files(section: DataSection) -> list[StoredFile]:
    """List the files of a job's interactions.

    Raises:
        JobError: an entry is missing, or has no file of rows.
    """
    files = without_descriptions(list_files(section.path, "data.path", section.store_retry_seconds))
    if not files:
        raise JobError("data.path: no file holds interactions", "name files, or folders with files")
    return files


def open_log(section: DataSection, progress: Progress | None = None) -> SampleIndex:
    """Open the rows of a job's interactions.

    Raises:
        JobError: a file is missing, or the format is unknown.
        BadDataError, WanmaError: files cannot be read, or have no known format.
    """
    files = list_log_files(section)
    data_format = log_format(section, files, progress)
    return _open(section, files, data_format, skip_damaged=section.bad_data == "skip", progress=progress)


def log_format(section: DataSection, files: Sequence[StoredFile], progress: Progress | None = None) -> Format:
    """Return the format of the files: the job's, else that of the first file that can be read."""
    if section.format:
        return format_named(section.format)
    faults: list[BadDataError] = []
    for file in [one for one in files if one.size] or files:
        try:
            return _format_of_file(partial(_open, section, [file], progress=progress))
        except BadDataError as error:
            faults.append(error)
            if section.bad_data != "skip":
                break
    raise faults[0]


def _open(
    section: DataSection,
    files: Sequence[StoredFile],
    data_format: Format | None = None,
    *,
    skip_damaged: bool = False,
    progress: Progress | None = None,
) -> SampleIndex:
    return open_index(
        files,
        cache_folder(section.cache),
        section.cache_bytes,
        data_format=data_format,
        skip_damaged=skip_damaged,
        progress=progress,
        retry_seconds=section.store_retry_seconds,
    )


def _format_of_file(open_as: partial[SampleIndex]) -> Format:
    """Return the format of a file by which its rows have several fields."""
    try:
        index = open_as()
        if list(first_record(index)) == ["text"]:  # lines of a file whose name does not say what they are
            index = open_as(Csv())
        if len(first_record(index)) > 1:
            return index.data_format
    except BadDataError:
        if len(first_record(open_as(_PADDED))) == 1:
            raise
    return _PADDED


def first_record(index: SampleIndex) -> Record:
    """Return the first record that can be read.

    Raises:
        BadDataError: none of the first rows can be read.
    """
    found = read_each(index, np.arange(min(_FIRST_ROWS, index.rows)))
    whole = [one for one in found if not isinstance(one, BadDataError)]
    if not whole and isinstance(found[0], BadDataError):
        raise found[0]
    return whole[0]


def resolve_columns(columns: ColumnsSection, keys: InteractionsSection, first: Record) -> ColumnsSection:
    """Return the columns with the field of each role that the log has.

    An unset role is the field of its name, and in a file without a header the field at its place.

    Raises:
        JobError: the log lacks a field that the job needs.
    """
    has_header = list(first) != [str(number) for number in range(len(first))]
    named = {*(getattr(columns, role) for role in ROLES), *columns.sparse, *columns.dense}
    fields: dict[str, str | None] = {}
    missing = [name for name in (*columns.sparse, *columns.dense) if not _has(first, name)]
    needed = {"user", "item"}
    needed |= {"rating"} if keys.target == "rating" or keys.positive_from is not None else set()
    needed |= {"time"} if keys.split != "random" and columns.time != "" else set()
    for number, role in enumerate(ROLES):
        unset = role if has_header else str(number)
        name = getattr(columns, role) or (None if unset in named else unset)
        if role == "time" and columns.time == "":  # rows are in the order of time
            name = None
        fields[role] = name if name and _has(first, name) else None
        if fields[role] is None and (role in needed or getattr(columns, role)):
            missing.append(role if (name or unset) == role else f"{name or unset} for {role}")
    if missing:
        raise JobError(
            f"data.columns: the interactions have no field {', '.join(missing)} among {', '.join(first)}",
            "name the fields in data.columns (user, item, rating, time, sparse, dense); those of a file "
            "without a header are '0', '1' and so on",
        )
    return columns.model_copy(update=fields)


def _has(record: Record, name: str) -> bool:
    return name in record or record_value(record, name) is not None


def record_value(record: Record, name: str) -> Any:
    """Return the value of a field, which may be a path with dots; None: there is none."""
    try:
        return field_value(record, name)
    except ValueError:
        return None


def id_end(keys: InteractionsSection, table: str) -> int:
    """Return the end of the ids that a table may have."""
    return MAX_ID if keys.admit_rows_of(table) is None else MAX_RAW_ID


def id_of(value: Any, end: int = MAX_ID) -> int:
    """Return a value as an id below `end`; -1: it is none."""
    try:
        number = int(value)
        is_whole = isinstance(value, str | bytes) or bool(value == number)
        return number if 0 <= number < end and is_whole else -1
    except (TypeError, ValueError, OverflowError):
        return -1


def ids_in(value: Any) -> list[Any]:
    """Return the values in a field that holds any number of ids."""
    if value is None:
        return []
    if isinstance(value, str):
        return [part for part in _SEPARATOR.split(value.strip()) if part]
    return list(value) if isinstance(value, list | tuple | np.ndarray) else [value]


def number_of(value: Any) -> float:
    """Return a value as a number; NaN: it is none."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return float("nan")


def id_fault(name: str, value: Any, end: int = MAX_ID) -> str:
    """Return what is wrong with a value that is no id."""
    return f"{_shown(value)} in column {name} is no id, an integer from 0 to {end - 1}"


def number_fault(name: str, value: Any) -> str:
    """Return what is wrong with a value that is no number."""
    return f"{_shown(value)} in column {name} is no finite number"


def _shown(value: Any) -> str:
    return "no value" if value is None else f"{value!r:.40}"


def interaction_faults(record: Record, columns: ColumnsSection, section: DataSection) -> Iterator[str]:
    """Yield what is wrong with the values of a row.

    Args:
        columns: as of `resolve_columns`.
    """
    keys, tables = section.interactions, section.columns.table_names
    for table, name in zip(tables, (columns.user, columns.item, *columns.sparse), strict=True):
        if name is None or keys.hash_rows_of(table) is not None:  # any value is an id to hash
            continue
        value = record_value(record, name)
        for one in ids_in(value) if name in columns.sparse else [value]:
            if id_of(one, end := id_end(keys, table)) < 0:
                yield id_fault(name, one, end)
    for name in (columns.rating, columns.time, *columns.dense):
        value = None if name is None else record_value(record, name)
        is_filled = name in columns.dense and keys.missing_dense is not None and is_missing(value)
        if name and not is_filled and not math.isfinite(number_of(value)):
            yield number_fault(name, value)
