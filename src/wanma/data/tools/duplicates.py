"""Search for equal rows by their hashes, in more rows than memory holds.

Hashes beyond a limit go to files by their first bits, so that equal ones meet in one file. Each file is
searched by itself: memory holds one at a time.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from wanma.job.errors import WanmaError

ROW_HASH = np.dtype([("high", "<u8"), ("low", "<u8"), ("row", "<i8")])
"""Hash of a row's content, and the number of the row among all rows."""
_MEMORY_ROWS = 4 << 20
"""Rows (24 bytes each) that are held in memory before they go to files."""
_FILE_BITS = 8


@dataclass(frozen=True)
class EqualRows:
    """Rows with one content."""

    rows: int
    """Number of them, at least 2."""
    first: int
    """Number of the first one among all rows."""


@dataclass(frozen=True)
class Duplicates:
    """Rows whose content an earlier row has."""

    counts: NDArray[np.int64]
    """Number of them in each part of the rows."""
    most_repeated: tuple[EqualRows, ...]
    """Contents of most rows, the most first; of equal numbers the first in the data."""


class DuplicateSearch:
    """Collection of the hashes of rows, and its own context manager, which removes its files.

    Args:
        folder: folder in which files are made if memory is not enough.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: Path | None = None
        self._held: list[NDArray[Any]] = []
        self._held_rows = 0

    def add(self, rows: NDArray[Any]) -> None:
        """Add rows of the type `ROW_HASH`, in any order.

        Raises:
            WanmaError: the disk is full, or the folder cannot be written to.
        """
        self._held.append(rows)
        self._held_rows += len(rows)
        if self._held_rows <= _MEMORY_ROWS:
            return
        try:
            self._write()
        except OSError as error:
            raise WanmaError(
                f"cannot keep hashes of rows in {self._folder}: {error.strerror or error}",
                "free space (24 bytes a row), or choose another cache folder with --cache",
            ) from error

    def find(self, part_starts: NDArray[np.int64], shown: int) -> Duplicates:
        """Search all rows that were added.

        Args:
            part_starts: number of the first row of each part, ascending.
            shown: contents to return as the most repeated.
        """
        counts = np.zeros(len(part_starts), np.int64)
        most: list[EqualRows] = []
        for rows in self._pieces():
            repeated, equal = _search(rows, shown)
            parts = np.searchsorted(part_starts, repeated, side="right") - 1
            counts += np.bincount(parts, minlength=len(counts))
            most = sorted([*most, *equal], key=lambda one: (-one.rows, one.first))[:shown]
        return Duplicates(counts, tuple(most))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._files is not None:
            shutil.rmtree(self._files, ignore_errors=True)

    def _write(self) -> None:
        """Append the rows in memory to the files of their first bits."""
        if self._files is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._files = Path(tempfile.mkdtemp(prefix="duplicates-", dir=self._folder))
        rows = np.concatenate(self._held)
        self._held, self._held_rows = [], 0
        numbers = _file_numbers(rows)
        order = np.argsort(numbers, kind="stable")
        bounds = np.searchsorted(numbers[order], np.arange((1 << _FILE_BITS) + 1))
        rows = rows[order]
        for number in range(1 << _FILE_BITS):
            start, end = bounds[number], bounds[number + 1]
            if start < end:
                with (self._files / str(number)).open("ab") as file:
                    file.write(rows[start:end].tobytes())

    def _pieces(self) -> Iterator[NDArray[Any]]:
        """Yield all rows in pieces, equal contents in one."""
        if self._files is None:
            yield np.concatenate([np.empty(0, ROW_HASH), *self._held])
            return
        held = np.concatenate([np.empty(0, ROW_HASH), *self._held])
        numbers = _file_numbers(held)
        for number in range(1 << _FILE_BITS):
            path = self._files / str(number)
            stored = np.fromfile(path, ROW_HASH) if path.exists() else np.empty(0, ROW_HASH)
            yield np.concatenate([stored, held[numbers == number]])


def _file_numbers(rows: NDArray[Any]) -> NDArray[np.int64]:
    """Return for each row the number of its file: the first bits of its hash."""
    return np.asarray(rows["high"] >> np.uint64(64 - _FILE_BITS)).astype(np.int64)


def _search(rows: NDArray[Any], shown: int) -> tuple[NDArray[np.int64], list[EqualRows]]:
    """Return the rows whose content an earlier one has, and the contents of most rows."""
    ranked = rows[np.lexsort((rows["row"], rows["low"], rows["high"]))]
    is_new = np.ones(len(ranked), np.bool_)
    is_new[1:] = (ranked["high"][1:] != ranked["high"][:-1]) | (ranked["low"][1:] != ranked["low"][:-1])
    firsts = np.flatnonzero(is_new)
    counts = np.diff(np.append(firsts, len(ranked)))
    first_rows = ranked["row"][firsts]
    several = np.flatnonzero(counts > 1)
    most = several[np.lexsort((first_rows[several], -counts[several]))[:shown]]
    equal = [EqualRows(int(counts[one]), int(first_rows[one])) for one in most.tolist()]
    return np.asarray(ranked["row"][~is_new]), equal
