"""Grids of cases of which a part runs every day."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def rotated(rows: Iterable[Any], columns: Sequence[Any], ids: Sequence[str] = ()) -> list[Any]:
    """Cases (row, column): every row with one of the columns in turn, and with the others in the full suite.

    Args:
        ids: names of the columns; empty: the columns are their own.
    """
    names = ids or columns
    return [
        pytest.param(
            row,
            column,
            id=f"{row}-{names[place]}",
            marks=() if number % len(columns) == place else pytest.mark.full,
        )
        for number, row in enumerate(rows)
        for place, column in enumerate(columns)
    ]
