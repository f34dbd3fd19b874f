"""Optimizers of embedding tables are those of `torch.optim` on the rows that a step uses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Optimizer, SparseAdam

from wanma.job.errors import JobError
from wanma.job.sections.train import TrainSection
from wanma.parallel.embedding.sharded_embedding import TableGradient
from wanma.parallel.embedding.table_layout import TableLayout
from wanma.planner.embedding_placement import TablePlacement
from wanma.training.optimizer.table_optimizer import TableOptimizer

ROWS = {"user": 6, "item": 4}
REFERENCES: dict[str, Callable[[Iterable[Tensor]], Optimizer]] = {
    "sgd": lambda parameters: SGD(parameters, lr=0.1),
    "adagrad": lambda parameters: Adagrad(parameters, lr=0.1, eps=1e-14),
    "adam": lambda parameters: SparseAdam(list(parameters), lr=0.1, betas=(0.9, 0.95), eps=1e-14),
}
USED = ([0, 3, 7], [3, 9], [1, 3, 7, 8])


def build(matrix: Tensor, optimizer: str, **train: Any) -> tuple[TableOptimizer, Any]:
    placed = {name: TablePlacement("row_wise") for name in ROWS}

    def zeros(states: Sequence[str], row_states: Sequence[str]) -> dict[str, Tensor]:
        of_rows = {name: matrix.new_zeros(len(matrix)) for name in row_states}
        return {name: torch.zeros_like(matrix) for name in states} | of_rows

    embedding = SimpleNamespace(
        matrix=matrix,
        allocate_states=zeros,
        matrix_rows=lambda rows: rows,
        cache=None,
        layout=TableLayout(ROWS, placed, 0, 1),
        parameter_names={name: f"tables.of_{name}.weight" for name in ROWS},
        gradient=None,
    )
    section = TrainSection.model_validate(
        {"embedding_optimizer": optimizer, "weight_decay": 0.5, "epsilon": 1e-14, **train}
    )
    return TableOptimizer(cast(Any, embedding), section), embedding


def take_steps(optimizer: TableOptimizer, embedding: Any, rate: float = 0.1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    gradients = []
    for step, used in enumerate(USED, start=1):
        values = torch.randn(len(used), 3, dtype=torch.float64, generator=generator)
        embedding.gradient = TableGradient(torch.tensor(used), values, len(used))
        gradients.append(values.clone())
        optimizer.step(rate, step)
    return gradients


@pytest.mark.parametrize("name", REFERENCES)
def test_used_rows_follow_the_rule_of_torch(name: str) -> None:
    start = torch.randn(10, 3, dtype=torch.float64)
    optimizer, embedding = build(start.clone(), name)
    gradients = take_steps(optimizer, embedding)
    expected = start.clone().requires_grad_()
    reference = REFERENCES[name]([expected])
    for used, values in zip(USED, gradients, strict=True):
        sparse = torch.sparse_coo_tensor(torch.tensor([used]), values, (10, 3))
        expected.grad = sparse if name == "adam" else sparse.to_dense()
        reference.step()
    torch.testing.assert_close(embedding.matrix, expected.detach(), rtol=1e-9, atol=1e-9)
    unused = sorted(set(range(10)).difference(*USED))
    assert torch.equal(embedding.matrix[unused], start[unused])


def test_rowwise_adagrad_keeps_the_mean_square_of_a_row() -> None:
    start = torch.ones(10, 3, dtype=torch.float64)
    optimizer, embedding = build(start.clone(), "rowwise_adagrad")
    gradients = take_steps(optimizer, embedding)
    total = torch.zeros(10, dtype=torch.float64)
    for used, values in zip(USED, gradients, strict=True):
        total[used] += values.square().mean(1)
        start[used] -= 0.1 * values / (total[used].sqrt() + 1e-14)[:, None]
    torch.testing.assert_close(embedding.matrix, start, rtol=1e-12, atol=1e-12)


def test_a_frozen_table_is_refused() -> None:
    with pytest.raises(JobError, match=r"train\.parameter_groups.*of_item"):
        build(torch.ones(10, 3), "sgd", parameter_groups=[{"match": "*item*", "frozen": True}])


def test_parameter_groups_scale_rates_and_decay_used_rows_by_table() -> None:
    groups = [{"match": "*of_item.weight", "learning_rate_scale": 0.5, "weight_decay": 0.1}]
    start = torch.ones(10, 3, dtype=torch.float64)
    optimizer, embedding = build(start.clone(), "sgd", parameter_groups=groups)
    (values, *_) = take_steps(optimizer, embedding, rate=0.2)
    assert torch.allclose(embedding.matrix[0], 1 - 0.2 * values[0])  # no decay: a user's
    alone, other = build(start.clone(), "sgd", parameter_groups=groups)
    other.gradient = TableGradient(torch.tensor([7]), values[2:3].clone(), 1)
    alone.step(0.2, 1)
    torch.testing.assert_close(other.matrix[7], 1 - 0.5 * 0.2 * (values[2] + 0.1))
    assert torch.equal(other.matrix[6], torch.ones(3, dtype=torch.float64))
