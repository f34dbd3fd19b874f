"""Learning rate as a function of the step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from wanma.job.sections.train import TrainSection
from wanma.training.optimizer.user_optimizer import UserOptimization, check_schedule


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


def schedule_change_note(
    saved_settings: Mapping[str, Any], train: TrainSection, user_optimization: UserOptimization, step: int
) -> str | None:
    """Return a message on a schedule that gives the next step another learning rate than before; else None.

    Args:
        saved_settings: settings of the run so far, by key of the job.
        train: `[train]` of the job now.
        user_optimization: the user's own schedule.
        step: optimizer steps done.
    """
    names = ("steps", "schedule", "warmup_steps", "final_learning_rate_share")
    saved = {name: saved_settings.get(f"train.{name}", getattr(train, name)) for name in names}
    changed = {name: value for name, value in saved.items() if value != getattr(train, name)}
    if not changed:
        return None
    before = train.model_copy(update=changed)
    function = user_optimization.schedule_function
    earlier_schedule = None if function is None else check_schedule(function, before.steps)
    earlier_rate = learning_rate_function(before, earlier_schedule)(step)
    rate = learning_rate_function(train, user_optimization.schedule)(step)
    if rate == earlier_rate:
        return None
    keys = ", ".join(
        f"train.{name} was {value!r}, and is {getattr(train, name)!r}" for name, value in changed.items()
    )
    return f"{keys}: the learning rate of step {step + 1} is {rate:.3g} in place of {earlier_rate:.3g}"


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
