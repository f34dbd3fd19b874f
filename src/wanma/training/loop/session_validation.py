"""Validation of a session, by the user's own forward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from wanma.data.batch import Batch
from wanma.training.loss.target_counting import TargetCounter
from wanma.training.loss.validation_metrics import ReportedMetrics, ValidationResult, split_metrics
from wanma.training.run.trainer import Trainer

LossesFunction = Callable[[Batch], ValidationResult]
"""User's forward pass: a function from a batch to its losses, in validation perhaps with metrics."""


class SessionValidation:
    """Sums of losses and metrics over batches, without a step.

    Args:
        trainer: this rank's run.
        losses_of: user's forward pass.
        target_counter: counter of the session's targets.
    """

    def __init__(self, trainer: Trainer, losses_of: LossesFunction, target_counter: TargetCounter) -> None:
        self.metrics = ReportedMetrics()
        """Metrics that `evaluate` computes beside the loss."""
        self._trainer, self._losses_of, self._target_counter = trainer, losses_of, target_counter

    def evaluate(self, batches: Iterable[Batch]) -> tuple[Tensor, ...]:
        """Evaluate this rank's batches without gradients; every rank calls it.

        Returns:
            (sum of losses, number of targets, and the sum and count of each metric).
        """
        mesh, model = self._trainer.parallel_mesh, self._trainer.state.parallel_model
        loss_sum, targets = (torch.zeros((), dtype=torch.float64, device=mesh.device) for _ in range(2))
        self.metrics.reset()
        with torch.no_grad():
            for batch in batches:
                of_batch, number = self.losses(batch.to(mesh.device), self.metrics)
                loss_sum += of_batch
                targets += number
        model.reshard()
        model.wait_until_weights_unused()
        return loss_sum, targets, *self.metrics.sums(mesh.device, contributes=mesh.contributes_loss)

    def losses(self, batch: Batch, metrics: ReportedMetrics | None = None) -> tuple[Tensor, Tensor]:
        """Return (sum of the losses, number of targets) of a batch.

        Args:
            batch: batch of samples, on this rank's device.
            metrics: sums of the metrics to which those of the batch are added.
        """
        model = self._trainer.state.parallel_model
        with model.random_draws.forward(model.module, batch.samples) as forward:
            losses, values = split_metrics(self._losses_of(batch))
            sums = self._target_counter(losses, batch)
            if metrics is not None:
                metrics.add(values, batch.rows, batch.real)
            forward.end_forward()
        return sums
