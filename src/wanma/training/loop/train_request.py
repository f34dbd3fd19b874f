"""Request to train a job, sent to its workers. Free of torch: the command line makes one too."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from wanma.job.plan.plan import Plan
from wanma.job.sections.job import Job


@dataclass(frozen=True)
class TrainRequest:
    """Job to train under a plan, with the objects that a user passed in Python."""

    job: Job
    plan: Plan
    flops_per_sample: float | None = None
    """Model FLOPs of one sample, forward and backward."""
    peak_flops_per_second: float | None = None
    """Peak FLOP/s of one rank's device; None when unknown."""
    user_objects: dict[str, Any] = field(default_factory=dict)
    """Objects that a user passed in Python, by kind.

    `model` (an nn.Module), `data` (a dataset), `loss` (a function), `metrics` (functions by name),
    `optimizer` (its factory), `schedule` (a function).
    """
    parameter_hooks: dict[str, Any] = field(default_factory=dict)
    """Hooks of that model's parameters, which are sent without them."""
    seeded: bool = False
    """True if the user's program has seeded torch, so that it makes the same model when it runs again."""
