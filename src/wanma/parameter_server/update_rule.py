"""Rule from the workers' numbers and summed gradients to one update. Pure, without threads and torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from wanma.job.errors import WanmaError


@dataclass(frozen=True)
class UpdateDecision:
    """Decision on an update, which holds however often it is ordered."""

    factor: float
    """Factor from the summed gradients to the clipped gradient of the mean loss."""
    gradient_norm: float
    is_skipped: bool


@dataclass(frozen=True)
class UpdateRule:
    """Rule from summed gradients to an update, as `[train]` has it."""

    gradient_clip: float
    stops_if_not_finite: bool

    def decide(self, number: int, headers: Sequence[dict[str, Any]], square: float) -> UpdateDecision:
        """Return the decision on an update.

        Args:
            number: number of the update.
            headers: contributions of its workers.
            square: squared norm of the summed gradients.

        Raises:
            WanmaError: no sample has a target, or loss or gradient are not finite, and the job stops then.
        """
        losses, targets = loss_sums(headers)
        scale = 1.0 / (targets * headers[0]["loss_multiplier"]) if targets else 0.0
        norm = math.sqrt(square) * scale if square >= 0 else math.nan
        if not targets and self.stops_if_not_finite:
            raise WanmaError(
                f"step {number}: no sample of the global batch has a target",
                "give the samples targets or remove them, or set train.non_finite = 'skip'",
            )
        if not (math.isfinite(norm) and math.isfinite(losses)) or not targets:
            if self.stops_if_not_finite:
                broken = [str(one["worker"]) for one in headers if not math.isfinite(one["loss_sum"])]
                workers = broken or [str(one["worker"]) for one in headers]
                loss = losses / targets
                raise WanmaError(
                    f"step {number}: the loss is {loss} and the gradient norm {norm}; not finite on worker "
                    f"{', '.join(workers)}",
                    "lower train.learning_rate, or set train.non_finite = 'skip'",
                )
            return UpdateDecision(0.0, norm, True)
        clip = self.gradient_clip
        factor = scale * (min(1.0, clip / (norm + 1e-6)) if clip else 1.0)
        return UpdateDecision(factor, norm, False)


def loss_sums(headers: Sequence[dict[str, Any]]) -> tuple[float, float]:
    """Return the summed losses and the number of targets of an update."""
    return sum(header["loss_sum"] for header in headers), sum(header["target_count"] for header in headers)
