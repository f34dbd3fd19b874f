"""Interaction log in memory: columns of ids, of numbers and of targets, read from stored files. No torch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wanma.data.formats.csv_rows import Csv
from wanma.data.formats.format import BadDataError, Record
from wanma.data.index.records import open_records
from wanma.data.interactions.synthetic import make_synthetic_log
from wanma.job.errors import EXIT_USAGE, JobError, WanmaError
from wanma.job.sections.data import DataSection
from wanma.job.sections.recommender import InteractionsSection

_BATCH = 65_536
_SYNTHETIC = re.compile(r"synthetic:(\d{1,7})x(\d{1,7})x(\d{1,9})")
_SEPARATOR = re.compile(r"[|,; ]+")
_MAX_ID = 1 << 40


@dataclass(frozen=True)
class Bags:
    """Ids of a feature, any number in each row."""

    ids: NDArray[np.int64]
    """Ids of all rows, one after the other."""
    starts: NDArray[np.int64]
    """Start of each row's ids, and the end of the last, (rows + 1,)."""

    def take(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the ids of some rows, one after the other, and the start of each."""
        starts, counts = self.starts[rows], self.starts[rows + 1] - self.starts[rows]
        offsets = np.cumsum(counts) - counts
        return self.ids[np.arange(counts.sum()) + np.repeat(starts - offsets, counts)], offsets


@dataclass(frozen=True)
class InteractionLog:
    """Rows of a log, in their stored order."""

    users: NDArray[np.int64]
    items: NDArray[np.int64]
    targets: NDArray[np.float32]
    """Ratings; or clicks, 1 or 0."""
    times: NDArray[np.float64]
    """Times, or the numbers of the rows where the log has no such column."""
    features: Mapping[str, Bags]
    dense: NDArray[np.float32]
    """Dense features, (rows, features)."""

    def __len__(self) -> int:
        return len(self.users)


def read_log(section: DataSection) -> InteractionLog:
    """Read the log of a job.

    Raises:
        JobError: a column is missing, or a value is no id or number; names the column, value and row.
        BadDataError, WanmaError: files cannot be read.
    """
    keys, entries = section.interactions, section.interaction_log
    if (match := _SYNTHETIC.fullmatch(entries[0])) and len(entries) == 1:
        users, items, row_count = map(int, match.groups())
        columns: dict[str, Any] = make_synthetic_log(users, items, row_count, keys)
    elif any(entry.startswith("synthetic") for entry in entries):
        raise JobError(
            f"data.interaction_log = {entries} is no synthetic log",
            "name one, 'synthetic:USERSxITEMSxROWS' such as 'synthetic:943x1682x100000'",
        )
    else:
        columns = _read_columns(section)
    rows = len(columns[keys.user])
    has_targets = keys.rating in columns
    ratings = _numbers(keys.rating, columns[keys.rating]) if has_targets else np.ones(rows)
    if keys.target == "click" and has_targets:
        threshold = keys.positive_from
        ratings = np.ones(rows) if threshold is None else (ratings >= threshold).astype(np.float64)
    has_times = keys.time in columns
    dense = [_numbers(name, columns[name]) for name in keys.dense]
    return InteractionLog(
        users=_ids(keys.user, columns[keys.user]),
        items=_ids(keys.item, columns[keys.item]),
        targets=ratings.astype(np.float32),
        times=_numbers(keys.time, columns[keys.time]) if has_times else np.arange(rows, dtype=np.float64),
        features={name: _bags(name, columns[name]) for name in keys.features},
        dense=np.stack(dense, 1).astype(np.float32) if dense else np.zeros((rows, 0), np.float32),
    )


def _read_columns(section: DataSection) -> dict[str, list[Any]]:
    keys = section.interactions
    open_as = partial(
        open_records, section.interaction_log, cache=section.cache, cache_bytes=section.cache_bytes
    )
    try:
        records = open_as()
        if list(records[0]) == ["text"]:  # lines of a file whose name does not say what they are: u.data
            records = open_as("csv")
        is_padded = len(records[0]) == 1
    except BadDataError:
        is_padded = len((records := open_as(Csv(delimiter=" ")))[0]) > 1
        if not is_padded:
            raise
    if is_padded:  # for people, by blanks
        records = open_as(Csv(delimiter=" "))
    first = _named(records[0], keys)
    needed = [keys.user, keys.item, *keys.features, *keys.dense]
    needed += [keys.rating] if keys.target == "rating" or keys.positive_from is not None else []
    needed += [keys.time] if keys.split != "random" else []
    if missing := [name for name in needed if name not in first]:
        raise JobError(
            f"data.interaction_log: no column {', '.join(missing)} among {', '.join(first)}",
            "name the columns by data.interactions (user, item, rating, time, features, dense), or those of "
            "a file without a header by data.interactions.columns",
        )
    names = list(dict.fromkeys([*needed, *(n for n in (keys.rating, keys.time) if n in first)]))
    columns: dict[str, list[Any]] = {name: [] for name in names}
    for start in range(0, len(records), _BATCH):
        for record in records.read(range(start, min(start + _BATCH, len(records)))):
            row = _named(record, keys)
            for name in names:
                columns[name].append(row.get(name))
    return columns


def _named(record: Record, keys: InteractionsSection) -> Record:
    """Return a record with the job's names for the numbered fields of files without a header."""
    if "0" not in record:
        return record
    return dict(zip(keys.columns, record.values(), strict=False))


def _numbers(name: str, values: Sequence[Any]) -> NDArray[np.float64]:
    try:
        numbers = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError):
        numbers = np.array([_number(value) for value in values])
    bad = ~np.isfinite(numbers)
    if bad.any():
        row = int(bad.argmax())
        raise _bad_value(name, values[row], row, "a finite number")
    return numbers


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        return float("nan")


def _ids(name: str, values: Sequence[Any], rows: NDArray[np.int64] | None = None) -> NDArray[np.int64]:
    """Return ids as integers; `rows` are the rows of the values, where they are not one in each."""
    try:
        ids = np.array([int(value) for value in values], dtype=np.int64)
        bad = (ids < 0) | (ids >= _MAX_ID)
        bad |= np.array([float(value) != int(value) for value in values], dtype=bool)
    except (TypeError, ValueError, OverflowError):
        bad = np.array([not re.fullmatch(r"\d{1,12}", str(value)) for value in values])
    if bad.any():
        index = int(bad.argmax())
        row = index if rows is None else int(rows[index])
        raise _bad_value(name, values[index], row, f"an id: an integer from 0 to {_MAX_ID - 1}")
    return ids


def _bags(name: str, values: Sequence[Any]) -> Bags:
    lists = [_id_list(value) for value in values]
    counts = np.array([len(one) for one in lists], dtype=np.int64)
    rows = np.repeat(np.arange(len(lists)), counts)
    ids = _ids(name, [value for one in lists for value in one], rows)
    return Bags(ids, np.concatenate([[0], np.cumsum(counts)]))


def _id_list(value: Any) -> list[Any]:
    if value is None:
        return []
    if isinstance(value, str):
        return [part for part in _SEPARATOR.split(value.strip()) if part]
    return list(value) if isinstance(value, list | tuple | np.ndarray) else [value]


def _bad_value(name: str, value: Any, row: int, needed: str) -> WanmaError:
    shown = "no value" if value is None else repr(value)
    return WanmaError(
        f"data.interaction_log: row {row} has {shown} in column {name}, which is not {needed}",
        "mend the row, or name another column in data.interactions",
        EXIT_USAGE,
    )
