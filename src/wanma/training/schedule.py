"""Learning rate as a pure function of the step."""

from __future__ import annotations

import math

from wanma.job.sections import TrainSection


def learning_rate(step: int, train: TrainSection) -> float:
    """Rate of optimizer step `step` (from 0): linear warm-up, then decay to the final share of the peak."""
    peak, final = train.learning_rate, train.learning_rate * train.final_learning_rate_share
    if step < train.warmup_steps:
        return peak * (step + 1) / train.warmup_steps
    if train.schedule == "constant":
        return peak
    length = max(train.steps - 1 - train.warmup_steps, 1)
    progress = min((step - train.warmup_steps) / length, 1.0)
    if train.schedule == "linear":
        return peak + (final - peak) * progress
    return final + (peak - final) * 0.5 * (1 + math.cos(math.pi * progress))
