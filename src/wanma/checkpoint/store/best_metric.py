"""The rule by which the best checkpoint is found: a metric of validation, and the better direction."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from wanma.checkpoint.format.manifest import Manifest

Mode = Literal["min", "max"]
STATE_KEY = "best_by"
"""Key of a checkpoint's training state; a checkpoint without it has the validation loss."""


@dataclass(frozen=True)
class BestBy:
    """A metric and its direction."""

    metric: str = "loss"
    mode: Mode = "min"

    def score(self, value: float | None) -> float | None:
        """A value of the metric such that lower is better; None for none, or one that is no number."""
        if value is None or not math.isfinite(value):
            return None
        return value if self.mode == "min" else -value

    def score_of(self, manifest: Manifest) -> float | None:
        """The score of a checkpoint; None where it was saved with another metric, or with none."""
        return self.score(manifest.metric) if best_by(manifest) == self else None

    def values(self) -> dict[str, Any]:
        """As a checkpoint's training state keeps it."""
        return {} if self == BestBy() else {STATE_KEY: [self.metric, self.mode]}


def best_by(manifest: Manifest) -> BestBy:
    """The rule under which a checkpoint was saved."""
    found = manifest.state.get(STATE_KEY)
    return BestBy() if found is None else BestBy(*found)


def best_step(scores: Mapping[int, float | None]) -> int | None:
    """The step with the lowest score, the newest of equals; None if none has one."""
    scored = [(value, -step) for step, value in scores.items() if value is not None and math.isfinite(value)]
    return -min(scored)[1] if scored else None
