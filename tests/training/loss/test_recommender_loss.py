"""Losses of recommenders beside formulas written out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from wanma.data.batch import Batch
from wanma.models.recommender.config import RecommenderConfig
from wanma.training.loss.recommender_loss import RecommenderLoss

ITEMS = torch.tensor([[1, 2, 1], [2, 0, 3], [1, 3, 0]])
CONFIG = {"tables": {"user": 4, "item": 4}}


def batch(targets: list[float], items: Tensor = ITEMS, real: Any = True) -> Batch:
    rows = len(items)
    return Batch(
        inputs=(),
        targets=torch.tensor(targets),
        samples=torch.arange(rows),
        real=torch.as_tensor(real).expand(rows),
        keywords={"item": items, "log_probability": torch.log(torch.tensor([0.1, 0.2, 0.3, 0.4]))[items]},
    )


def loss(objective: Any) -> RecommenderLoss:
    return RecommenderLoss(RecommenderConfig("matrix_factorization", objective=objective, **CONFIG))


def test_squared_errors_are_summed_over_real_rows() -> None:
    scores = torch.tensor([[1.0], [3.0], [float("inf")]])
    total, count = loss("squared_error")(
        {"scores": scores}, batch([2.0, 5.0, 1.0], ITEMS[:, :1], torch.tensor([True, True, False]))
    )
    assert (float(total), float(count)) == (5.0, 2.0)


def test_log_loss_leaves_out_negatives_that_are_the_own_item() -> None:
    scores = torch.randn(3, 3)
    total, count = loss("log_loss")({"scores": scores}, batch([1.0, 1.0, 1.0]))
    plain = F.softplus(torch.cat([-scores[:, :1], scores[:, 1:]], 1))
    assert float(total) == pytest.approx(float(plain[0, :2].mean() + plain[1].mean() + plain[2].mean()))
    assert float(count) == 3


def test_sampled_softmax_is_corrected_and_counts_clicks_alone() -> None:
    scores, given = torch.randn(3, 3), batch([1.0, 0.0, 1.0])
    total, count = loss("sampled_softmax")({"scores": scores}, given)
    logits = scores - given.keywords["log_probability"]
    expected = [logits[0, :2].logsumexp(0) - logits[0, 0], logits[2].logsumexp(0) - logits[2, 0]]
    assert float(total) == pytest.approx(float(sum(expected)), rel=1e-5)
    assert float(count) == 2


def test_in_batch_softmax_compares_with_other_items_of_the_batch() -> None:
    users, items, given = torch.randn(3, 5), torch.randn(3, 1, 5), batch([1.0, 1.0, 1.0], ITEMS[:, :1])
    total, count = loss("in_batch_softmax")(
        {"scores": torch.zeros(3, 1), "users": users, "items": items}, given
    )
    logits = users @ items[:, 0].T - given.keywords["log_probability"][:, 0]
    expected = 0.0
    for row, others in enumerate(([0, 1], [0, 1, 2], [1, 2])):  # rows 0 and 2 have the same item
        expected += float(logits[row, others].logsumexp(0) - logits[row, row])
    assert float(total) == pytest.approx(expected, rel=1e-5)
    assert float(count) == 3


def test_the_correction_makes_sampled_softmax_that_of_the_catalogue() -> None:
    """With many draws, the mean of exp(score) / probability is the sum over all items."""
    generator = torch.Generator().manual_seed(0)
    probability = torch.tensor([0.1, 0.2, 0.3, 0.4])
    scores = torch.tensor([0.3, -1.0, 2.0, 0.5])
    drawn = torch.multinomial(probability, 200_000, replacement=True, generator=generator)
    estimate = (scores[drawn] - probability.log()[drawn]).exp().mean()
    assert float(estimate) == pytest.approx(float(scores.exp().sum()), rel=0.01)
