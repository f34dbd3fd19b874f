"""The holdout of rows: one share, whatever the order in which the others are numbered."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from wanma.data.sampling.holdout import Holdout


@given(rows=st.integers(2, 400), fraction=st.floats(0, 0.9))
def test_both_numberings_give_each_row_that_is_not_held_out_once(rows: int, fraction: float) -> None:
    holdout = Holdout.of_share(rows, fraction)
    held_out = holdout.validation_row(np.arange(holdout.validation_rows)).tolist()
    assert len(set(held_out)) == len(held_out) == (max(round(rows * fraction), 1) if fraction else 0)
    expected = sorted(set(range(rows)) - set(held_out))
    numbers = np.arange(holdout.train_rows)
    assert holdout.train_row(numbers, ascending=True).tolist() == expected
    assert sorted(holdout.train_row(numbers, ascending=False).tolist()) == expected


def test_the_numbering_by_hash_is_the_split_that_runs_have_had() -> None:
    """These numbers are a promise to every run that resumes: never update them."""
    holdout = Holdout.of_share(10, 0.2)
    assert sorted(holdout.validation_row(np.arange(2)).tolist()) == [4, 8]


def test_one_row_at_least_is_held_out() -> None:
    assert Holdout.of_share(10, 1e-9).validation_rows == 1
    assert Holdout.of_share(10, 0.0).validation_rows == 0
