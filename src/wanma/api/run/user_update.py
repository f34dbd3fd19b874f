"""Optimizers and learning-rate schedules that a user passes in Python."""

from __future__ import annotations

from typing import Any

from wanma.job.errors import JobError
from wanma.job.sections.job import Job


def check_user_optimizer(job: Job, optimizer: Any, schedule: Any) -> dict[str, Any]:
    """Return the given ones of optimizer and schedule, by name.

    Raises:
        JobError: one is no optimizer factory or no schedule, or the job names one too.
    """
    for key, user_object, names in (
        ("optimizer", optimizer, ("optimizer", "optimizer_factory")),
        ("schedule", schedule, ("schedule", "schedule_factory")),
    ):
        if user_object is not None and (named := job.train.model_fields_set.intersection(names)):
            raise JobError(f"{key}= and train.{named.pop()} of the job are both set", "remove one of them")
    objects = {"optimizer": optimizer, "schedule": schedule}
    objects = {name: value for name, value in objects.items() if value is not None}
    if objects:
        from wanma.training.optimizer.user_optimizer import load_user_optimization

        load_user_optimization(job.train, objects)
    return objects
