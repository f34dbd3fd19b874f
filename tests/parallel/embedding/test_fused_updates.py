"""Compiled updates of rows are those of the rules, and change no other row."""

from __future__ import annotations

import pytest
import torch

from wanma.models.recommender.row_updates import ROW_RULES, Factor, RowUpdate
from wanma.parallel.embedding import fused_updates
from wanma.parallel.embedding.fused_updates import update_rows

COMPILED = ("adagrad", "rowwise_adagrad")


def update(rows: torch.Tensor, width: int, *, rate: Factor, decay: Factor = 0.0) -> RowUpdate:
    gradient = torch.randn(len(rows), width, generator=torch.Generator().manual_seed(width))
    return RowUpdate(rows, gradient, rate, decay, 1, (0.9, 0.999), 1e-8)


@pytest.mark.parametrize("width", [1, 20, 64])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("rule", COMPILED)
def test_compiled_updates_are_those_of_the_rule(
    rule: str, padded: bool, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    rows = torch.randperm(9_000)[:5_000]
    columns = width * 2 if padded else width
    matrix = torch.randn(9_000, columns)[:, :width]
    states = {name: state.add_(0.1) for name, state in ROW_RULES[rule].new_states(matrix).items()}
    expected, of_rule = matrix.clone(), {name: state.clone() for name, state in states.items()}
    untouched = torch.ones(9_000, dtype=torch.bool).index_fill_(0, rows, False)
    for rate in (0.1, 0.03):
        ROW_RULES[rule].apply(expected, of_rule, update(rows, width, rate=rate))
    before = matrix[untouched].clone()
    with monkeypatch.context() as patch:
        patch.setattr(fused_updates, "ROW_RULES", {})  # only compiled code can update
        for rate in (0.1, 0.03):
            update_rows(rule, matrix, states, update(rows, width, rate=rate))
    torch.testing.assert_close(matrix, expected, rtol=1e-6, atol=1e-6)
    for name, state in states.items():
        torch.testing.assert_close(state, of_rule[name], rtol=1e-6, atol=1e-6)
    assert torch.equal(matrix[untouched], before)


@pytest.mark.parametrize(
    ("rate", "decay"),
    [(0.1, 0.01), (0.1, torch.tensor([[0.0], [0.01]])), (torch.tensor([[0.1], [0.2]]), 0.0)],
    ids=["decay", "decay by table", "rate by table"],
)
@pytest.mark.parametrize("rule", list(ROW_RULES))
def test_what_is_not_compiled_follows_the_rule(rule: str, rate: Factor, decay: Factor) -> None:
    rows = torch.tensor([3, 1])
    matrix = torch.ones(5, 8)
    states = ROW_RULES[rule].new_states(matrix)
    expected, of_rule = matrix.clone(), ROW_RULES[rule].new_states(matrix)
    step = update(rows, 8, rate=rate, decay=decay)
    update_rows(rule, matrix, states, step)
    ROW_RULES[rule].apply(expected, of_rule, step)
    assert torch.equal(matrix, expected)
    assert not torch.equal(matrix[rows], torch.ones(2, 8))
