"""Columns of an interaction log: arrays of ids, numbers and targets, converted once a node. No torch.

In the cache folder:

    interactions/KEY.columns    columns of a log, named by its content, the versions of its files and settings

Ranks map that file, so that a node reads and holds a log once. It is written in chunks of rows, one of which
is in memory at a time. All such files take at most `data.cache_bytes`, apart from those opened lately.
"""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from wanma.data.formats.format import BadDataError, Layout, Record, UnreadableFileError, row_place
from wanma.data.index.build import Progress
from wanma.data.index.group_scan import open_if_whole
from wanma.data.index.layout_file import array_bytes, hash_json, open_layout, serialize
from wanma.data.index.records import cache_folder, read_each
from wanma.data.index.sample_index import SampleIndex
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
    record_value,
    resolve_columns,
)
from wanma.data.stores.atomic_file import write_once
from wanma.data.text.encoding_task import BadRow
from wanma.job.errors import JobError, WanmaError
from wanma.job.sections.data import DataSection
from wanma.job.sections.data_sources import ColumnsSection
from wanma.job.sections.recommender import InteractionsSection

_VERSION = 2
_CHUNK_ROWS = 65_536
_KEPT_SECONDS = 3600.0
"""Time for which a file stays after its last use: the ranks of a node open it one after the other."""
_PARTS_OF_A_BAG = re.compile(r"[|,;\s]")
"""Characters without which a text of ids is one id."""

Columns = dict[str, NDArray[Any]]
"""Columns by name: `users`, `items`, `targets`, `times`, and `dense` (rows, features).

Of each sparse feature `ids.NAME`, the ids of all rows, and `starts.NAME`, the start of each row's and the end
of the last, (rows + 1,). Bad rows are left out.
"""


def open_columns(
    index: SampleIndex, section: DataSection, progress: Progress | None = None
) -> tuple[Columns, dict[int, str]]:
    """Map the columns of stored rows, and return the cause of each bad row, by its number.

    One process of a node converts them, and the others wait for it.

    Args:
        index: index of the rows.
        section: the job's `[data]`.
        progress: called with (bytes done, bytes in all) while the rows are converted.

    Raises:
        JobError: a field is missing; or rows are bad, and more than the job skips.
        BadDataError, WanmaError: files cannot be read, or the cache cannot be written.
    """
    fields = _fields(resolve_columns(section.columns, section.interactions, first_record(index)))
    folder = cache_folder(section.cache) / "interactions"
    path = folder / f"{_key(index, section, fields)}.columns"
    stored = open_if_whole(path)
    if stored is None:
        try:
            with write_once(path) as file:
                if file is not None:
                    faults = dict[int, str]()
                    columns = _map_chunks(_convert_rows(index, section, fields, faults, progress), folder)
                    layout = Layout(
                        len(columns["users"]), columns, {"faults": faults}, identity=index.fingerprint
                    )
                    file.writelines(serialize(layout))
            stored = open_layout(path)
            _make_room(folder, section.cache_bytes)
        except OSError as error:
            raise WanmaError(
                f"cannot keep the columns of data.path in {folder}: {error.strerror or error}",
                "free space, or choose another folder by data.cache",
            ) from error
    with suppress(OSError):  # a shared cache may be read-only
        os.utime(path)
    found = {int(row): cause for row, cause in stored.facts["faults"].items()}
    return dict(stored.tables), found


def convert_columns(values: Mapping[str, Sequence[Any]], section: DataSection) -> Columns:
    """Return the columns of values by their role, which have no fault and no sparse feature."""
    return _Chunk(values, section).convert()


def row_places(index: SampleIndex, numbers: NDArray[np.int64]) -> list[tuple[str, int]]:
    """Return the file of each row, and the row within it."""
    groups, rows = index.locate(numbers)
    return [(index.groups[group].url, row) for group, row in zip(groups.tolist(), rows.tolist(), strict=True)]


def list_bad_rows(index: SampleIndex, faults: Mapping[int, str]) -> list[BadRow]:
    """Return the bad rows with their places, in their order."""
    numbers = sorted(faults)
    places = row_places(index, np.array(numbers, dtype=np.int64))
    return [[*place, faults[number]] for place, number in zip(places, numbers, strict=True)]


def check_bad_rows(index: SampleIndex, bad_rows: Sequence[BadRow], section: DataSection) -> None:
    """Refuse bad rows and files if the job does not skip them, or if there are more than it allows."""
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


def _fields(names: ColumnsSection) -> dict[str, str]:
    """Return the field of each use: a role, 'sparse.FIELD' or 'dense.FIELD'."""
    fields: dict[str, str] = {role: getattr(names, role) for role in ROLES if getattr(names, role)}
    for kind in ("sparse", "dense"):
        fields |= {f"{kind}.{name}": name for name in getattr(names, kind)}
    return fields


def _key(index: SampleIndex, section: DataSection, fields: Mapping[str, str]) -> str:
    keys = section.interactions
    tables = [[keys.hash_rows_of(name), id_end(keys, name)] for name in section.columns.table_names]
    values = [keys.target, keys.positive_from, keys.log_dense, keys.missing_dense]
    return hash_json([_VERSION, index.fingerprint, index.versions, list(fields.items()), tables, values])


def _convert_rows(
    index: SampleIndex,
    section: DataSection,
    fields: Mapping[str, str],
    faults: dict[int, str],
    progress: Progress | None,
) -> Iterator[Columns]:
    """Yield the columns of each chunk of rows, as of `_Chunk.convert`; causes of bad rows go to `faults`."""
    size = sum(file.size for group in index.groups for file in group.files)
    for start in range(0, index.rows, _CHUNK_ROWS):
        numbers = np.arange(start, min(start + _CHUNK_ROWS, index.rows))
        records, bad = list[Record](), dict[int, str]()
        for row, record in enumerate(read_each(index, numbers)):
            if isinstance(record, UnreadableFileError):  # another time it may be whole
                raise record
            if isinstance(record, BadDataError):
                bad[row] = record.cause
            records.append({} if isinstance(record, BadDataError) else record)
        values = {use: _values(records, name) for use, name in fields.items()}
        columns = _Chunk(values, section, fields, start, bad).convert()
        faults |= {start + row: cause for row, cause in bad.items()}
        if bad and (section.bad_data != "skip" or len(faults) > section.bad_data_limit):
            check_bad_rows(index, list_bad_rows(index, faults), section)
        yield columns
        if progress is not None:
            progress(size * (start + len(numbers)) // index.rows, size)


def _values(records: Sequence[Record], name: str) -> list[Any]:
    try:
        return [record[name] for record in records]
    except KeyError:  # a bad row, or a path with dots
        return [record[name] if name in record else record_value(record, name) for record in records]


def _map_chunks(chunks: Iterable[Columns], folder: Path) -> Columns:
    """Return the columns of all chunks, mapped from files without names in `folder`, which go with them."""
    files, rows, ends = dict[str, IO[bytes]](), Counter[str](), Counter[str]()
    columns: Columns = {}
    with ExitStack() as stack:
        for chunk in chunks:
            for name, values in chunk.items():
                kind, _, feature = name.partition(".")
                if kind == "counts":
                    name = f"starts.{feature}"
                    bounds = np.cumsum(np.append(ends[feature], values))
                    values, ends[feature] = bounds[1:] if name in files else bounds, int(bounds[-1])
                if name not in files:
                    files[name] = stack.enter_context(TemporaryFile(dir=folder))
                files[name].write(array_bytes(values))
                rows[name] += len(values)
                columns[name] = values[:0]
        for name, like in columns.items():
            shape = (rows[name], *like.shape[1:])
            if files[name].tell():
                columns[name] = np.memmap(files[name], like.dtype, "r", shape=shape)
            else:  # an empty file cannot be mapped
                columns[name] = np.empty(shape, like.dtype)
    return columns


def _make_room(folder: Path, limit_bytes: int) -> None:
    """Remove files, those first that were not opened for longest, until all take at most the limit.

    A process that maps one keeps its content.
    """
    files = []
    for path in folder.glob("*.columns"):
        with suppress(FileNotFoundError):  # removed by another process
            status = path.stat()
            files.append((status.st_mtime, status.st_size, path))
    total = sum(size for _, size, _ in files)
    for used, size, path in sorted(files):
        if total > limit_bytes and used < time.time() - _KEPT_SECONDS:
            with suppress(OSError):  # a file of another user
                path.unlink(missing_ok=True)
                total -= size


@dataclass
class _Chunk:
    """Values of neighbouring rows, by their use."""

    values: Mapping[str, Sequence[Any]]
    section: DataSection
    fields: Mapping[str, str] = field(default_factory=dict)
    """Fields that hold the values, by their use."""
    start: int = 0
    """Number of the first row."""
    faults: dict[int, str] = field(default_factory=dict)
    """Cause of each bad row, by its number in the chunk; those of the values are added."""

    @property
    def keys(self) -> InteractionsSection:
        return self.section.interactions

    def convert(self) -> Columns:
        """Return the columns of the good rows; `counts.NAME`, the ids of each row, replace `starts.NAME`."""
        keys, names, rows = self.keys, self.section.columns, len(self.values["user"])
        ratings = self._numbers("rating") if "rating" in self.values else np.ones(rows)
        if keys.target == "click" and "rating" in self.values:
            threshold = keys.positive_from
            ratings = np.ones(rows) if threshold is None else (ratings >= threshold).astype(np.float64)
        has_times = "time" in self.values
        times = self._numbers("time") if has_times else np.arange(self.start, self.start + rows, dtype=float)
        columns: Columns = {
            "users": self._ids(self.values["user"], names.table_name("user"), "user"),
            "items": self._ids(self.values["item"], names.table_name("item"), "item"),
            "targets": ratings.astype(np.float32),
            "times": times,
        }
        dense = [self._numbers(f"dense.{name}", keys.missing_dense) for name in names.dense]
        if keys.log_dense:
            dense = [np.log1p(np.maximum(one, 0)) for one in dense]
        columns["dense"] = np.stack(dense, 1).astype(np.float32) if dense else np.zeros((rows, 0), np.float32)
        for name in names.sparse:
            columns |= self._bags(f"sparse.{name}", name)
        return self._without_bad_rows(columns) if self.faults else columns

    def _without_bad_rows(self, columns: Columns) -> Columns:
        is_good = np.ones(len(columns["users"]), dtype=bool)
        is_good[list(self.faults)] = False
        rows = {
            name: np.repeat(is_good, columns[f"counts.{name.removeprefix('ids.')}"])
            for name in columns
            if name.startswith("ids.")
        }
        return {name: values[rows.get(name, is_good)] for name, values in columns.items()}

    def _numbers(self, use: str, missing: float | None = None) -> NDArray[np.float64]:
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
        self._note(use, values, ~np.isfinite(numbers), np.arange(len(values)), number_fault)
        return numbers

    def _bags(self, use: str, table: str) -> Columns:
        """Return the ids and counts of a use; a missing value is an id like others where ids are hashed."""
        values, is_hashed = self.values[use], self.keys.hash_rows_of(table) is not None
        if _are_texts(values) and not _PARTS_OF_A_BAG.search("".join(values)):  # at most one id in each
            counts = np.fromiter((1 if value or is_hashed else 0 for value in values), np.int64, len(values))
            parts = values if is_hashed else [value for value in values if value]
        else:
            bags = [ids_in(value) or ([""] if is_hashed else []) for value in values]
            counts = np.fromiter(map(len, bags), np.int64, len(bags))
            parts = [part for bag in bags for part in bag]
        ids = self._ids(parts, table, use, np.repeat(np.arange(len(counts)), counts))
        return {f"ids.{table}": ids, f"counts.{table}": counts}

    def _ids(
        self, values: Sequence[Any], table: str, use: str, rows: NDArray[np.int64] | None = None
    ) -> NDArray[np.int64]:
        """Return ids, hashed into the rows of their table if the job says so.

        Args:
            rows: row of each id in the chunk; None: each has one.
        """
        if (hash_rows := self.keys.hash_rows_of(table)) is not None:
            return hash_ids(values, hash_rows)
        end = id_end(self.keys, table)
        ids = _parse_ids(values, end)
        self._note(
            use, values, ids < 0, np.arange(len(ids)) if rows is None else rows, partial(id_fault, end=end)
        )
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


def _parse_ids(values: Sequence[Any], end: int) -> NDArray[np.int64]:
    """Return values as ids below `end`; -1: one is none."""
    if _are_texts(values):
        try:
            ids = np.fromiter(map(int, values), np.int64, len(values))
            return np.where(ids <= end - 1, np.maximum(ids, -1), -1)
        except (ValueError, OverflowError):  # one of them is no number
            pass
    return np.array([id_of(value, end) for value in values], dtype=np.int64)


def _are_texts(values: Sequence[Any]) -> bool:
    return set(map(type, values)) <= {str}
