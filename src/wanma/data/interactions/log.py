"""Interaction log in memory: columns of ids, of numbers and of targets, read from stored files. No torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wanma.data.formats.format import BadDataError, UnreadableFileError, row_place
from wanma.data.index.build import Progress
from wanma.data.index.records import read_each
from wanma.data.index.sample_index import DamagedFile, SampleIndex
from wanma.data.interactions.id_hashing import hash_ids, is_missing
from wanma.data.interactions.log_files import (
    ROLES,
    first_record,
    id_end,
    id_fault,
    id_of,
    ids_in,
    number_fault,
    number_of,
    open_log,
    record_value,
    resolve_columns,
)
from wanma.data.interactions.synthetic import make_synthetic_log
from wanma.data.text.encoding_task import BadRow
from wanma.job.errors import JobError
from wanma.job.sections.data import DataSection
from wanma.job.sections.data_sources import SYNTHETIC_LOG
from wanma.job.sections.recommender import InteractionsSection

_BATCH = 65_536
_SYNTHETIC = re.compile(rf"{SYNTHETIC_LOG}(\d{{1,7}})x(\d{{1,7}})x(\d{{1,9}})")


@dataclass(frozen=True)
class Bags:
    """Ids of a feature, any number in each row."""

    ids: NDArray[np.int64]
    """Ids of all rows, one after the other."""
    starts: NDArray[np.int64]
    """Start of each row's ids, and the end of the last, (rows + 1,)."""

    @cached_property
    def _have_one_id(self) -> bool:
        """True if each row has one id."""
        return np.array_equal(self.starts, np.arange(len(self.ids) + 1))

    def take(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the ids of some rows, one after the other, and the start of each."""
        if self._have_one_id:
            return self.ids[rows], np.arange(len(rows))
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
    bad_rows: Sequence[BadRow] = ()
    """Rows that were left out."""
    index: SampleIndex | None = None
    """Index of the stored rows; None: the log is synthetic."""
    numbers: NDArray[np.int64] | None = None
    """Numbers of the rows in the index, (rows,); None: all of it."""

    def __len__(self) -> int:
        return len(self.users)

    @property
    def damaged(self) -> tuple[DamagedFile, ...]:
        """Files that were left out as a whole."""
        return () if self.index is None else self.index.damaged

    def place(self, row: int) -> str:
        """Return the file of a row, and the row within it."""
        if self.index is None:
            return f"row {row} of the synthetic log"
        number = row if self.numbers is None else int(self.numbers[row])
        ((file, stored_row),) = _places(self.index, np.array([number]))
        return row_place(file, stored_row)

    def take(self, rows: NDArray[np.int64]) -> InteractionLog:
        """Return the log of some rows."""
        bags = {name: one.take(rows) for name, one in self.features.items()}
        return replace(
            self,
            users=self.users[rows],
            items=self.items[rows],
            targets=self.targets[rows],
            times=self.times[rows],
            features={name: Bags(ids, np.append(starts, len(ids))) for name, (ids, starts) in bags.items()},
            dense=self.dense[rows],
            numbers=rows if self.numbers is None else self.numbers[rows],
        )


def read_log(section: DataSection, progress: Progress | None = None) -> InteractionLog:
    """Read the log of a job.

    Args:
        section: the job's `[data]`.
        progress: called with (bytes done, bytes in all) while an index is built, and again while the rows
            are read.

    Raises:
        JobError: a field is missing, or a value is no id or number; names the file, row, column and value.
            Where the job skips bad rows: there are more than it allows.
        BadDataError, WanmaError: files cannot be read.
    """
    keys, names = section.interactions, section.columns
    columns = _synthetic_columns(section) or _stored_columns(section, progress)
    rows = columns.rows
    ratings = columns.numbers("rating") if "rating" in columns.values else np.ones(rows)
    if keys.target == "click" and "rating" in columns.values:
        threshold = keys.positive_from
        ratings = np.ones(rows) if threshold is None else (ratings >= threshold).astype(np.float64)
    has_times = "time" in columns.values
    dense = [columns.numbers(f"dense.{name}", keys.missing_dense) for name in names.dense]
    if keys.log_dense:
        dense = [np.log1p(np.maximum(one, 0)) for one in dense]
    tables = {"user": names.table_name("user"), "item": names.table_name("item")}
    log = InteractionLog(
        users=columns.ids("user", tables["user"]),
        items=columns.ids("item", tables["item"]),
        targets=ratings.astype(np.float32),
        times=columns.numbers("time") if has_times else np.arange(rows, dtype=np.float64),
        features={name: columns.bags(f"sparse.{name}", name) for name in names.sparse},
        dense=np.stack(dense, 1).astype(np.float32) if dense else np.zeros((rows, 0), np.float32),
        index=columns.index,
    )
    return log if columns.index is None else _without_bad_rows(log, columns.index, columns.faults, section)


def _places(index: SampleIndex, numbers: NDArray[np.int64]) -> list[tuple[str, int]]:
    """Return the file of each row, and the row within it."""
    groups, rows = index.locate(numbers)
    return [(index.groups[group].url, row) for group, row in zip(groups.tolist(), rows.tolist(), strict=True)]


@dataclass
class _Columns:
    """Values of the rows of a log by their use: a role, 'sparse.FIELD' or 'dense.FIELD'."""

    values: Mapping[str, Sequence[Any]]
    keys: InteractionsSection
    fields: Mapping[str, str] = field(default_factory=dict)
    """Fields that hold the values, by their use."""
    index: SampleIndex | None = None
    """Index of the stored rows; None: the log is synthetic."""
    faults: dict[int, str] = field(default_factory=dict)
    """Cause of each bad row, by its number."""

    @property
    def rows(self) -> int:
        return len(self.values["user"])

    def ids(self, use: str, table: str) -> NDArray[np.int64]:
        """Return the ids of a use, hashed into the rows of its table if the job says so."""
        return self._ids(use, self.values[use], np.arange(self.rows), table)

    def numbers(self, use: str, missing: float | None = None) -> NDArray[np.float64]:
        """Return the numbers of a use, with `missing` where a row has none if it is given."""
        values = self.values[use]
        if missing is not None:
            values = [missing if is_missing(value) else value for value in values]
        try:
            numbers = np.asarray(values, dtype=np.float64)
        except (TypeError, ValueError, OverflowError):
            numbers = np.zeros((0, 0))
        if numbers.ndim != 1:  # not all are numbers: some are, or all are lists
            numbers = np.array([number_of(value) for value in values])
        self._note(use, values, ~np.isfinite(numbers), np.arange(self.rows), number_fault)
        return numbers

    def bags(self, use: str, table: str) -> Bags:
        """Return the bags of a use; a missing value is an id like others where ids are hashed."""
        lists = [ids_in(value) for value in self.values[use]]
        if self.keys.hash_rows_of(table) is not None:
            lists = [one or [""] for one in lists]
        counts = np.array([len(one) for one in lists], dtype=np.int64)
        values = [value for one in lists for value in one]
        ids = self._ids(use, values, np.repeat(np.arange(len(lists)), counts), table)
        return Bags(ids, np.concatenate([[0], np.cumsum(counts)]))

    def _ids(self, use: str, values: Sequence[Any], rows: NDArray[np.int64], table: str) -> NDArray[np.int64]:
        if (hash_rows := self.keys.hash_rows_of(table)) is not None:
            return hash_ids(values, hash_rows)
        end = id_end(self.keys, table)
        ids = np.array([id_of(value, end) for value in values], dtype=np.int64)
        self._note(use, values, ids < 0, rows, partial(id_fault, end=end))
        return ids

    def _note(
        self,
        use: str,
        values: Sequence[Any],
        is_bad: NDArray[np.bool_],
        rows: NDArray[np.int64],
        fault: Callable[[str, Any], str],
    ) -> None:
        for place in np.flatnonzero(is_bad).tolist():
            self.faults.setdefault(int(rows[place]), fault(self.fields[use], values[place]))


def _synthetic_columns(section: DataSection) -> _Columns | None:
    """Return the columns of a log that wanma makes; None: the job names files."""
    if not any(entry.startswith(SYNTHETIC_LOG) for entry in section.path):
        return None
    match = _SYNTHETIC.fullmatch(section.path[0])
    if match is None or len(section.path) > 1:
        raise JobError(
            f"data.path = {section.path} is no synthetic log",
            "name one, 'synthetic:USERSxITEMSxROWS' such as 'synthetic:943x1682x100000'",
        )
    if section.columns.sparse or section.columns.dense:
        raise JobError(
            "a synthetic log has users, items, ratings and times only", "remove data.columns.sparse and dense"
        )
    users, items, rows = map(int, match.groups())
    return _Columns(make_synthetic_log(users, items, rows), section.interactions)


def _stored_columns(section: DataSection, progress: Progress | None) -> _Columns:
    index = open_log(section, progress)
    size = sum(file.size for group in index.groups for file in group.files)
    names = resolve_columns(section.columns, section.interactions, first_record(index))
    fields: dict[str, str] = {role: getattr(names, role) for role in ROLES if getattr(names, role)}
    for kind in ("sparse", "dense"):
        fields |= {f"{kind}.{name}": name for name in getattr(names, kind)}
    lists: dict[str, list[Any]] = {use: [] for use in fields}
    columns = _Columns(lists, section.interactions, fields, index)
    for start in range(0, index.rows, _BATCH):
        numbers = np.arange(start, min(start + _BATCH, index.rows))
        for row, record in zip(numbers.tolist(), read_each(index, numbers), strict=True):
            if isinstance(record, UnreadableFileError):  # another time it may be whole
                raise record
            if isinstance(record, BadDataError):
                columns.faults[row] = record.cause
                record = {}
            for use, name in fields.items():
                lists[use].append(record[name] if name in record else record_value(record, name))
        if progress is not None:
            progress(size * (start + len(numbers)) // index.rows, size)
    return columns


def _without_bad_rows(
    log: InteractionLog, index: SampleIndex, faults: Mapping[int, str], section: DataSection
) -> InteractionLog:
    """Return the log without its bad rows, which are listed; or refuse them, as the job says."""
    if not faults and not index.damaged:
        return log
    numbers = np.array(sorted(faults), dtype=np.int64)
    places = zip(_places(index, numbers), numbers.tolist(), strict=True)
    bad_rows: list[BadRow] = [[*place, faults[number]] for place, number in places]
    causes = [f"{row_place(file, row)}: {cause}" for file, row, cause in bad_rows]
    if causes and section.bad_data != "skip":
        raise JobError(
            f"data.path: {causes[0]}",
            "mend the row, name other fields in data.columns, or set data.bad_data = 'skip'",
        )
    causes += [f"{one.file}: {one.cause}" for one in index.damaged]
    if len(causes) > section.bad_data_limit:
        raise JobError(
            f"data.bad_data_limit: {len(causes):,} rows and files of interactions cannot be read, more than "
            f"{section.bad_data_limit:,}; the first: {causes[0]}",
            "list them with `wanma data verify`, mend them, or raise data.bad_data_limit",
        )
    kept = np.setdiff1d(np.arange(len(log)), numbers)
    if not len(kept):
        raise JobError(f"data.path: none of {len(log):,} rows can be read; {causes[0]}", "mend the data")
    return replace(log.take(kept), bad_rows=bad_rows)
