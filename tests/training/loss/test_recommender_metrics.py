"""Metrics of recommenders beside formulas written out, whatever the cut into batches."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from wanma.data.interactions.dataset import InteractionDataset
from wanma.job.sections.data import DataSection
from wanma.models.recommender.config import RecommenderConfig
from wanma.training.loss.recommender_metrics import RecommenderMetrics, area_under_curve


def values(metrics: RecommenderMetrics, cuts: list[int]) -> dict[str, float]:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(40, 3, generator=generator).round(decimals=1)
    ranks = torch.randint(1, 20, (40,), generator=generator)
    metrics.reset()
    bounds = [0, *cuts, 40]
    for start, end in itertools.pairwise(bounds):
        output = {"scores": scores[start:end], "rank": ranks[start:end]}
        metrics.add(output, torch.ones(end - start), torch.ones(end - start, dtype=torch.bool))
    padding = {"scores": torch.full((1, 3), math.nan), "rank": torch.ones(1, dtype=torch.int64)}
    metrics.add(padding, torch.ones(1), torch.zeros(1, dtype=torch.bool))
    sums = [float(number) for number in metrics.sums(torch.device("cpu"), contributes=True)]
    return {
        name: total / count for name, total, count in zip(metrics.names, sums[::2], sums[1::2], strict=True)
    } | {"expected": float((ranks <= 10).double().mean())}


def test_all_metrics_are_the_same_for_any_cut_into_batches() -> None:
    keys = {"target": "click", "split": "leave_last", "negatives": 2}
    section = DataSection.model_validate({"path": "synthetic:9x9x40", "interactions": keys})
    config = RecommenderConfig("matrix_factorization", objective="log_loss")
    metrics = RecommenderMetrics(config, InteractionDataset(section, 0, 1), {})
    whole, cut = values(metrics, []), values(metrics, [7, 8, 30])
    assert set(whole) == {"recall@10", "ndcg@10", "log_loss", "auc", "expected"}
    assert cut == pytest.approx(whole, rel=1e-12)
    assert whole["recall@10"] == whole["expected"]


@pytest.mark.parametrize("ties", [False, True])
def test_the_area_is_the_share_of_ordered_pairs(ties: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    scores = torch.randn(60, generator=generator, dtype=torch.float64)
    scores = scores.round() if ties else scores
    labels = (torch.rand(60, generator=generator) < 0.3).double()
    positive, negative = scores[labels == 1][:, None], scores[labels == 0][None]
    pairs = (positive > negative).double() + 0.5 * (positive == negative).double()
    assert area_under_curve(scores, labels) == pytest.approx(float(pairs.mean()), rel=1e-12)


def test_an_area_without_one_of_the_classes_is_unknown_and_of_no_number_no_number() -> None:
    assert area_under_curve(torch.randn(4), torch.ones(4)) is None
    area = area_under_curve(torch.tensor([1.0, math.nan]), torch.tensor([1.0, 0.0]))
    assert area is not None
    assert math.isnan(area)
