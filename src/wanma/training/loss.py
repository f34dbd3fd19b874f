"""Losses as sums with their target counts, so that only the global batch divides (law 1)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from wanma.data.batch import IGNORED, Batch
from wanma.job.errors import WanmaError
from wanma.training.cross_entropy import cross_entropy_sum

LossFunction = Callable[[Any, Batch], tuple[Tensor, Tensor]]
"""(model output, batch) -> (sum of the losses of real targets, their number)."""

UserLoss = Callable[[Any, Any], Tensor]
"""(model output, targets) -> one loss per target, leading dimension the batch's rows."""


def classification_loss(output: Any, batch: Batch, *, spend: bool = False) -> tuple[Tensor, Tensor]:
    """The loss of text and labelled images.

    Args:
        output: logits, or an object that has them, as the models of transformers give it.
        spend: as of `cross_entropy_sum`.
    """
    logits = output if isinstance(output, Tensor) else output.logits
    return cross_entropy_sum(logits, batch.targets, spend=spend), (batch.targets != IGNORED).sum()


def user_loss(function: UserLoss, *, by_position: bool = False) -> LossFunction:
    """Wrap a user's per-target loss, so that padding rows count nothing.

    Args:
        by_position: ranks share each sample's sequence, so losses must be those of single positions.
    """

    def loss(output: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        losses = function(whole_output(output), batch.targets)
        if by_position and losses.shape[:2] != batch.targets.shape[:2]:
            raise WanmaError(
                f"the loss has shape {tuple(losses.shape)} for targets of {tuple(batch.targets.shape)}, but "
                "under parallel.cp a rank sees a part of each sequence and knows the losses of its positions",
                "return one loss per position, or set parallel.cp = 1",
            )
        return sum_losses(losses, batch)

    return loss


def whole_output(output: Any) -> Any:
    """A model's output for code that knows no ranks: logits that are split over the vocabulary, gathered."""
    return output.full_tensor() if isinstance(output, DTensor) else output


def sum_losses(losses: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Sum and number of the losses of `batch`'s real targets: no padding rows, and no class `IGNORED`.

    Raises:
        WanmaError: the loss was already averaged, which no layout could undo.
    """
    if losses.ndim == 0 or losses.shape[0] != batch.rows:
        raise WanmaError(
            f"the loss has shape {tuple(losses.shape)}, but must keep one value per sample "
            f"({batch.rows} rows here)",
            "return unreduced losses (reduction='none'); wanma divides once by the global batch's targets",
        )
    real = batch.real.reshape(-1, *[1] * (losses.ndim - 1)).expand_as(losses)
    if batch.targets.dtype == torch.int64 and batch.targets.shape == losses.shape:
        real = real & (batch.targets != IGNORED)
    return torch.where(real, losses, 0.0).sum(), real.sum()
