"""Learning rate as a function of the step."""

from __future__ import annotations

import math
from collections.abc import Callable

from wanma.job.sections.train import TrainSection


def learning_rate_function(
    train: TrainSection, user_schedule: Callable[[int], float] | None
) -> Callable[[int], float]:
    """Return the function from an optimizer step (from 0) to its learning rate.

    Args:
        train: `[train]` of the job.
        user_schedule: user's schedule: step -> share of the peak; None: the job's schedule.
    """
    if user_schedule is None:
        return lambda step: learning_rate_at(step, train)
    return lambda step: train.learning_rate * user_schedule(step)


def learning_rate_at(step: int, train: TrainSection) -> float:
    """Return the rate of step `step` (from 0): linear warm-up, then decay to the final share of the peak."""
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
