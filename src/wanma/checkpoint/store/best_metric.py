"""Rule for the best checkpoint: a validation metric, and its better direction."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from wanma.checkpoint.format.manifest import Manifest

MetricMode = Literal["min", "max"]
BEST_BY_STATE_KEY = "best_by"
"""Key of a checkpoint's training state; a checkpoint without it uses the validation loss."""


@dataclass(frozen=True)
class BestMetric:
    """Metric and its better direction."""

    metric: str = "loss"
    mode: MetricMode = "min"

    def score(self, value: float | None) -> float | None:
        """Return a score where lower is better; None if `value` is None or not finite."""
        if value is None or not math.isfinite(value):
            return None
        return value if self.mode == "min" else -value

    def score_of(self, manifest: Manifest) -> float | None:
        """Return the score of a checkpoint; None where it was saved with another metric, or with none."""
        return self.score(manifest.metric) if best_metric_of(manifest) == self else None

    def to_state(self) -> dict[str, Any]:
        """Return the entries of a checkpoint's training state that store the rule."""
        return {} if self == BestMetric() else {BEST_BY_STATE_KEY: [self.metric, self.mode]}


def best_metric_of(manifest: Manifest) -> BestMetric:
    """Return the rule under which a checkpoint was saved."""
    arguments = manifest.state.get(BEST_BY_STATE_KEY)
    return BestMetric() if arguments is None else BestMetric(*arguments)


def step_with_best_score(scores: Mapping[int, float | None]) -> int | None:
    """Return the step with the lowest score, the newest of equals; None if none has one."""
    candidates = [
        (value, -step) for step, value in scores.items() if value is not None and math.isfinite(value)
    ]
    return -min(candidates)[1] if candidates else None
