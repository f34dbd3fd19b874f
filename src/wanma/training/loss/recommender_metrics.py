"""Validation metrics of recommenders: RMSE, AUC, log loss, recall and NDCG over the whole catalogue.

The scores of all ranks and batches are gathered, so that a metric that is no mean is that of one process.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from wanma.data.interactions.dataset import InteractionDataset
from wanma.models.recommender.config import PAIR_KINDS, RecommenderConfig
from wanma.training.loss.recommender_loss import candidate_labels
from wanma.training.loss.validation_metrics import MetricFunction, Metrics, MetricValue


class RecommenderMetrics(Metrics):
    """Metrics of a recommender beside those of the user's.

    Args:
        config: of the model.
        data: the interaction log.
        functions: metrics of the user's by name.
    """

    def __init__(
        self, config: RecommenderConfig, data: InteractionDataset, functions: Mapping[str, MetricFunction]
    ) -> None:
        own: dict[str, MetricFunction] = {}
        if data.ranks_items and config.kind in PAIR_KINDS:
            k = data.top_k
            own = {f"recall@{k}": partial(_recall, k), f"ndcg@{k}": partial(_ndcg, k)}
        if config.objective == "log_loss":
            own["log_loss"] = _log_loss
        super().__init__({**own, **functions})
        self._gathered_name = "rmse" if config.objective == "squared_error" else "auc"
        self._scores: list[Tensor] = []
        self._has_negatives = data.has_negatives

    @property
    def names(self) -> tuple[str, ...]:
        gathered = self._gathered_name == "rmse" or self._has_negatives
        return (*super().names, *((self._gathered_name,) if gathered else ()))

    def reset(self) -> None:
        """Reset the sums, and drop the scores."""
        super().reset()
        self._scores = []

    def add(self, output: Any, targets: Any, real: Tensor) -> None:
        """Add the values of a batch; arguments as of `Metrics.add`."""
        super().add(output, targets, real)
        if self._gathered_name in self.names:
            scores = output["scores"][real].double()
            labels = candidate_labels(scores, targets[real].double())
            self._scores.append(torch.stack([scores.flatten(), labels.flatten()]))

    def sums(self, device: torch.device, *, contributes: bool) -> tuple[Tensor, ...]:
        """Return sum and count of each metric; every rank calls it. That of all scores counts on rank 0."""
        sums = super().sums(device, contributes=contributes)
        if self._gathered_name not in self.names:
            return sums
        own = torch.cat(self._scores, 1) if self._scores else torch.zeros(2, 0, dtype=torch.float64)
        scores, labels = _gather_columns(own.to(device), contributes=contributes)
        value = _rmse(scores, labels) if self._gathered_name == "rmse" else area_under_curve(scores, labels)
        is_first = not dist.is_initialized() or dist.get_rank() == 0
        counts = is_first and value is not None
        pair = (value or 0.0, 1.0) if counts else (0.0, 0.0)
        return *sums, *(torch.tensor(number, dtype=torch.float64, device=device) for number in pair)


def area_under_curve(scores: Tensor, labels: Tensor) -> float | None:
    """Return the share of pairs of a positive and a negative in the right order; equal scores count half.

    Args:
        scores: (samples,).
        labels: (samples,), 1 or 0.

    Returns:
        None without positives or without negatives; NaN if a score is no number.
    """
    positives = int((labels > 0.5).sum())
    negatives = len(labels) - positives
    if not positives or not negatives:
        return None
    if bool(scores.isnan().any()):
        return math.nan
    _, inverse, counts = scores.unique(return_inverse=True, return_counts=True)
    ends = counts.cumsum(0).double()
    mean_ranks = ends - (counts.double() - 1) / 2  # the Mann-Whitney statistic
    rank_sum = float(mean_ranks[inverse][labels > 0.5].sum())
    return (rank_sum - positives * (positives + 1) / 2) / (positives * negatives)


def _rmse(scores: Tensor, targets: Tensor) -> float | None:
    return float(((scores - targets) ** 2).mean().sqrt()) if len(scores) else None


def _gather_columns(own: Tensor, *, contributes: bool) -> Tensor:
    """Return the columns (2, samples) of all ranks in their order."""
    own = own if contributes else own[:, :0]
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return own
    count = torch.tensor([own.shape[1]], device=own.device)
    counts = [torch.zeros_like(count) for _ in range(dist.get_world_size())]
    dist.all_gather(counts, count)
    sizes = [int(size) for size in counts]
    padded = F.pad(own, (0, max(sizes) - own.shape[1])).contiguous()
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded)
    return torch.cat([part[:, :size] for part, size in zip(parts, sizes, strict=True)], 1)


def _recall(k: int, output: Mapping[str, Tensor], targets: Tensor) -> MetricValue:
    return (output["rank"] <= k).double(), targets > 0


def _ndcg(k: int, output: Mapping[str, Tensor], targets: Tensor) -> MetricValue:
    """Return the gain of one relevant item: 1 / log2(rank + 1), within the first `k`."""
    rank = output["rank"].double()
    return torch.where(rank <= k, 1 / torch.log2(rank + 1), 0.0), targets > 0


def _log_loss(output: Mapping[str, Tensor], targets: Tensor) -> MetricValue:
    """Return the log loss of all candidates alike."""
    scores = output["scores"].double()
    labels = candidate_labels(scores, targets.double())
    losses = F.binary_cross_entropy_with_logits(scores, labels, reduction="none")
    return losses.sum(), losses.numel()
