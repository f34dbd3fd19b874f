"""Reading of rows of which some may be damaged: whole ones many at once, damaged ones with their error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

from wanma.data.formats.format import BadDataError, Record, Rows

RowSlice = TypeVar("RowSlice", range, Rows)
"""Numbers of rows: a range, or an array in any order."""


def read_around_damage(
    read: Callable[[RowSlice], list[Record]],
    rows: RowSlice,
    find_common_cause: Callable[[RowSlice], BadDataError | None] | None = None,
) -> Iterator[tuple[int, Record | BadDataError]]:
    """Yield for rows in their order a number of rows, and the record or, if it is damaged, its error.

    After a failure halves of the rows are read, down to the damaged ones. The number is 1, but for damage
    that concerns consecutive rows at once.

    Args:
        read: function that reads several rows, and fails if one is damaged.
        rows: the rows.
        find_common_cause: function that returns the error of rows that are all damaged by one cause, at
            least two; None: each row is read.
    """
    try:
        records = read(rows)
    except BadDataError as error:
        if len(rows) == 1:
            yield 1, error
        elif find_common_cause is not None and (cause := find_common_cause(rows)) is not None:
            yield len(rows), cause
        else:
            middle = len(rows) // 2
            yield from read_around_damage(read, rows[:middle], find_common_cause)
            yield from read_around_damage(read, rows[middle:], find_common_cause)
        return
    for record in records:
        yield 1, record
