"""Split of an interaction log into training and validation rows; it depends on no seed and no layout."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from wanma.data.interactions.log import InteractionLog
from wanma.data.sampling.permutation import permute_indices
from wanma.job.errors import JobError
from wanma.job.sections.data import DataSection

_KEY = "interaction folds"


def split_rows(log: InteractionLog, section: DataSection) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the training and the validation rows: rising, or with `split = "time"` in the order of time.

    Raises:
        JobError: one of them has none.
    """
    keys, rows = section.interactions, np.arange(len(log))
    if keys.split == "random":
        is_validation = permute_indices(rows, len(rows), _KEY) % keys.folds == keys.fold
    elif keys.split == "leave_last":
        is_validation = _is_last(log)
    else:
        rows = np.argsort(log.times, kind="stable")
        is_validation = np.arange(len(rows)) >= len(rows) - round(len(rows) * section.validation_fraction)
    if is_validation.all() or not (is_validation.any() or keys.split == "time"):
        raise JobError(
            f"data.interactions.split = '{keys.split}' leaves no rows for "
            f"{'training' if is_validation.all() else 'validation'} of {len(rows)}",
            "use another split, or more rows",
        )
    return rows[~is_validation], rows[is_validation]


def _is_last(log: InteractionLog) -> NDArray[np.bool_]:
    """Return whether a row is the last of its user, who has others; of equal times the later stored."""
    order = np.lexsort((np.arange(len(log)), log.times, log.users))
    users = log.users[order]
    ends = np.append(users[1:] != users[:-1], True)
    starts = np.insert(ends[:-1], 0, True)
    is_last = np.zeros(len(log), dtype=bool)
    is_last[order[ends & ~starts]] = True
    return is_last
