"""Changes to what ranks run, for tests of compressed gradients."""

from __future__ import annotations

from typing import Any

import torch

from wanma.parallel.gradients.gradient_compression import GradientCompression
from wanma.training.run.trainer import Trainer


def errors_are_forgotten() -> None:
    """Compression without error feedback: the rest of an exchange is lost."""
    end_step = GradientCompression.end_step

    def forgetting(self: GradientCompression, **keywords: Any) -> None:
        end_step(self, **keywords)
        for memory in self._error_feedbacks.values():
            if memory.residual is not None:
                memory.residual.zero_()

    GradientCompression.end_step = forgetting  # type: ignore[method-assign]


def gradients_of_step_2_are_not_finite() -> None:
    factor = Trainer.loss_multiplier

    def broken(self: Trainer, global_batch: int) -> float:
        return torch.nan if self.state.step == 1 else factor(self, global_batch)

    Trainer.loss_multiplier = broken  # type: ignore[method-assign]
