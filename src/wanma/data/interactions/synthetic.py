"""Synthetic interaction log: ratings of low rank, items of uneven popularity."""

from __future__ import annotations

from typing import Any

import numpy as np

from wanma.job.errors import JobError

_RANK = 4
_MAX_PAIRS = 1 << 26
"""Largest users × items: all pairs are scored at once."""


def make_synthetic_log(users: int, items: int, rows: int) -> dict[str, Any]:
    """Return a log as columns by their role; the same for the same sizes.

    Ratings from 1 to 5 are biases and a product of rank 4, with noise. A user rates the more popular items,
    and those of their taste, more often (Gumbel's maximum: a draw without replacement), in random order.

    Raises:
        JobError: there are more rows than pairs, or too many pairs.
    """
    if not 0 < users * items <= _MAX_PAIRS or not users <= rows <= users * items:
        raise JobError(
            f"data.path = 'synthetic:{users}x{items}x{rows}' is not possible",
            f"use at least one row for each user, at most users × items rows, and at most {_MAX_PAIRS} pairs",
        )
    generator = np.random.Generator(np.random.Philox(0))
    taste = generator.normal(size=(users, _RANK)) @ generator.normal(size=(_RANK, items)) / _RANK**0.5
    popularity = -np.log(1 + generator.permutation(items))
    biases = 0.3 * generator.normal(size=(users, 1)) + 0.3 * generator.normal(size=items)
    keenness = taste + popularity + generator.gumbel(size=taste.shape)
    best = np.argsort(-keenness, axis=1, kind="stable")
    # One for each user, and the rest by the users' activity.
    activity = generator.exponential(size=users)
    counts = np.minimum(1 + ((rows - users) * activity / activity.sum()).astype(np.int64), items)
    for user in np.resize(np.argsort(-activity, kind="stable"), 64 * users):
        if counts.sum() >= rows:
            break
        counts[user] += min(items - counts[user], rows - counts.sum(), max(rows // (8 * users), 1))
    owner = np.repeat(np.arange(users), counts)
    chosen = np.concatenate([best[user, :count] for user, count in enumerate(counts)])
    rating = 3.5 + biases + 0.6 * taste + 0.6 * generator.normal(size=taste.shape)
    order = generator.permutation(len(owner))
    owner, chosen = owner[order], chosen[order]
    return {
        "user": owner,
        "item": chosen,
        "rating": np.clip(np.rint(rating[owner, chosen]), 1, 5),
        "time": np.arange(len(owner), dtype=np.float64),
    }
