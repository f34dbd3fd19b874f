"""Request to train a job, sent to its workers. Free of torch: the command line makes one too."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from wanma.data.stores.client import Traffic
from wanma.job.plan.plan import Plan
from wanma.job.run.parameter_servers import ServerAccess
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
    servers: ServerAccess | None = None
    """Access to the parameter servers that hold the model; None: the ranks hold it."""
    process_state: dict[str, int] = field(default_factory=dict)
    """State of the user's process, as of `process_state.process_state`; empty: it is not compared."""
    prepared_traffic: Traffic = field(default_factory=Counter)
    """Traffic with stores on this node before its ranks started."""


@dataclass(frozen=True)
class ProcessSettings:
    """Settings of the user's process that its ranks take over, before they import the user's modules."""

    arguments: tuple[str, ...]
    """`sys.argv`, which modules may read while they are imported."""
    default_dtype: Any = None
    """Default dtype of torch; None: the process has not imported torch."""
    float32_matmul_precision: str = ""

    @classmethod
    def of_this_process(cls) -> ProcessSettings:
        arguments, torch = tuple(sys.argv), sys.modules.get("torch")
        if torch is None:
            return cls(arguments)
        return cls(arguments, torch.get_default_dtype(), torch.get_float32_matmul_precision())

    def apply(self) -> None:
        """Let this process, which has imported torch, have the settings."""
        sys.argv[:] = self.arguments
        if self.default_dtype is not None:
            torch = sys.modules["torch"]
            torch.set_default_dtype(self.default_dtype)
            torch.set_float32_matmul_precision(self.float32_matmul_precision)
