"""Losses of recommenders: squared error, log loss, and softmax over items with corrected probabilities."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wanma.data.batch import Batch
from wanma.models.recommender.base import Recommender
from wanma.models.recommender.config import RecommenderConfig
from wanma.parallel.data_parallel.global_batch import global_batch, global_rows


@dataclass(frozen=True)
class RecommenderLoss:
    """Loss of a recommender: a function (output, batch) -> (sum over real rows, their number)."""

    config: RecommenderConfig

    def __call__(self, output: Mapping[str, Tensor], batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the sum of the losses of real rows, and their number; for a softmax those of clicks.

        Args:
            output: of the model.
            batch: of an interaction log.
        """
        scores = output["scores"]
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        targets = batch.targets.to(scores.dtype)
        counts = batch.real.to(scores.dtype)
        if self.config.objective == "squared_error":
            losses = (scores[:, 0] - targets) ** 2
        elif self.config.objective == "log_loss":
            losses = self._log_losses(scores, targets, batch)
        else:
            counts = counts * targets
            losses = (
                self._in_batch(output, batch)
                if self.config.objective == "in_batch_softmax"
                else self._sampled(scores, batch)
            )
        # Not by a product: a padding row may be infinite.
        return torch.where(counts > 0, losses, 0.0).sum(), counts.sum()

    def _log_losses(self, scores: Tensor, targets: Tensor, batch: Batch) -> Tensor:
        """Return the mean log loss of each row's candidates, but for negatives that are its own item."""
        labels = candidate_labels(scores, targets)
        counts = ~self._is_own_item(batch, scores.shape[1])
        losses = F.binary_cross_entropy_with_logits(scores, labels, reduction="none")
        return (losses * counts).sum(1) / counts.sum(1)

    def _sampled(self, scores: Tensor, batch: Batch) -> Tensor:
        """Return sampled softmax losses, corrected for the draw (Bengio and Senécal 2008; Yi et al. 2019)."""
        logits = scores - batch.keywords["log_probability"]
        logits = logits.masked_fill(self._is_own_item(batch, scores.shape[1]), float("-inf"))
        return F.cross_entropy(logits, logits.new_zeros(len(logits), dtype=torch.int64), reduction="none")

    def _in_batch(self, output: Mapping[str, Tensor], batch: Batch) -> Tensor:
        """Return softmax losses over the items of the global batch, corrected for their frequency.

        Other rows of the same item are no negatives.
        """
        users, items = output["users"], output["items"][:, 0]
        dtype = torch.promote_types(users.dtype, torch.float32)
        ids = batch.keywords[self.config.item][:, 0]
        logits = users.to(dtype) @ global_batch(items.to(dtype)).T
        logits = logits - global_batch(batch.keywords["log_probability"][:, 0]).to(dtype)
        own = global_rows(users)
        is_same = ids[:, None] == global_batch(ids)
        is_same[torch.arange(len(own), device=own.device), own] = False
        return F.cross_entropy(logits.masked_fill(is_same, float("-inf")), own, reduction="none")

    def _is_own_item(self, batch: Batch, candidates: int) -> Tensor:
        """Return a mask (rows, candidates) of negatives that are the item of their row."""
        ids = batch.keywords[self.config.item]
        if ids.ndim == 1 or candidates == 1:
            return torch.zeros(batch.rows, candidates, dtype=torch.bool, device=ids.device)
        is_own = ids == ids[:, :1]
        is_own[:, 0] = False
        return is_own


def recommender_config(model: nn.Module) -> RecommenderConfig:
    """Return the dimensions of a recommender."""
    assert isinstance(model, Recommender)
    return model.config


def candidate_labels(scores: Tensor, targets: Tensor) -> Tensor:
    """Return the labels (rows, candidates): the target of the first candidate, and 0 for negatives."""
    labels = torch.zeros_like(scores)
    labels[:, 0] = targets
    return labels
