"""Interaction log in memory: columns of ids, of numbers and of targets, read from stored files. No torch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wanma.data.formats.format import row_place
from wanma.data.index.build import Progress
from wanma.data.index.sample_index import DamagedFile, SampleIndex
from wanma.data.interactions.log_columns import (
    check_bad_rows,
    convert_columns,
    list_bad_rows,
    open_columns,
    row_places,
)
from wanma.data.interactions.log_files import open_log
from wanma.data.interactions.synthetic import make_synthetic_log
from wanma.data.text.encoding_task import BadRow
from wanma.job.errors import JobError
from wanma.job.sections.data import DataSection
from wanma.job.sections.data_sources import SYNTHETIC_LOG

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
    index: SampleIndex | None = None
    """Index of the stored rows; None: the log is synthetic."""
    bad_rows: Sequence[BadRow] = ()
    """Stored rows that are left out, in their order."""
    bad_numbers: Sequence[int] = ()
    """Numbers of those rows in the index."""

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
        good_before = np.array(self.bad_numbers, dtype=np.int64) - np.arange(len(self.bad_numbers))
        number = row + int(np.searchsorted(good_before, row, side="right"))
        ((file, stored_row),) = row_places(self.index, np.array([number]))
        return row_place(file, stored_row)


def read_log(section: DataSection, progress: Progress | None = None) -> InteractionLog:
    """Read the log of a job.

    Args:
        progress: called with (bytes done, bytes in all) while an index is built, and again while the rows
            are read.

    Raises:
        JobError: a field is missing, or a value is no id or number; names the file, row, column and value.
            Where the job skips bad rows: there are more than it allows.
        BadDataError, WanmaError: files cannot be read.
    """
    synthetic = _synthetic_values(section)
    if synthetic is not None:
        return _log_of(convert_columns(synthetic, section), section)
    index = open_log(section, progress)
    columns, faults = open_columns(index, section, progress)
    bad_rows = list_bad_rows(index, faults)
    check_bad_rows(index, bad_rows, section)
    if not len(columns["users"]):
        cause = f"{row_place(*bad_rows[0][:2])}: {bad_rows[0][2]}"
        raise JobError(f"data.path: none of {len(faults):,} rows can be read; {cause}", "mend the data")
    return replace(_log_of(columns, section), index=index, bad_rows=bad_rows, bad_numbers=sorted(faults))


def _log_of(columns: Mapping[str, NDArray[Any]], section: DataSection) -> InteractionLog:
    names = section.columns.sparse
    features = {name: Bags(columns[f"ids.{name}"], columns[f"starts.{name}"]) for name in names}
    return InteractionLog(
        users=columns["users"],
        items=columns["items"],
        targets=columns["targets"],
        times=columns["times"],
        features=features,
        dense=columns["dense"],
    )


def _synthetic_values(section: DataSection) -> dict[str, Any] | None:
    """Return the values of a log that wanma makes, by their role; None: the job names files."""
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
    return make_synthetic_log(users, items, rows)
