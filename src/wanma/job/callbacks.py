"""`wanma.Callback`: a user's code that is called as a run goes on, in the process that started it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

Outcome = Literal["finished", "interrupted", "failed"]


class StopTraining(Exception):  # noqa: N818  # it asks for an end and tells of no error
    """Raised in a callback: the run ends in order within the next steps, and the same call carries it on.

    Args:
        reason: shown on the console.
    """

    def __init__(self, reason: str = "") -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True)
class RunStart:
    """The ranks have taken up a state and begin."""

    run: Path
    """The run directory."""
    step: int
    """Optimizer steps done; the steps after it are repeated where they were done before a failure."""
    steps: int
    """Optimizer steps of the job."""
    ranks: int
    plan: str
    is_recovery: bool
    """The ranks were started again after a failure, or with other machines."""


@dataclass(frozen=True)
class StepEnd:
    """An optimizer step is finished."""

    step: int
    loss: float
    """Mean over the global batch's targets."""
    gradient_norm: float
    """Before clipping."""
    learning_rate: float
    samples: int
    """Consumed since the start of the run."""
    seconds: float
    layer_gradient_norms: Mapping[str, float] = field(default_factory=dict)
    """By layer; empty but for the steps of `observe.gradient_norms_every_steps`."""


@dataclass(frozen=True)
class ValidationEnd:
    """The validation after `step` is finished."""

    step: int
    loss: float
    metrics: Mapping[str, float]
    """By name: perplexity or accuracy, and the user's own."""


@dataclass(frozen=True)
class CheckpointEnd:
    """The checkpoint of `step` is on disk, whole."""

    step: int
    path: Path
    """Folder that `wanma.load(run, step=step)` reads."""


@dataclass(frozen=True)
class RunEnd:
    """The run is over; nothing is called afterwards."""

    step: int
    """Optimizer steps done."""
    outcome: Outcome
    error: str = ""
    """Message of a failed run."""


class Callback:
    """Methods that are called as a run goes on; override those that you want.

    They run on no rank, but in the process that called `wanma.train` (of several machines: on that of rank
    0), one after the other in a thread of their own. So they may take their time, keep what they like, and
    change nothing of the training: they have the run's records, not its tensors. Those of a `wanma.session`
    run in the process of rank 0.
    """

    def on_start(self, event: RunStart) -> None:
        """The ranks begin; once more after a recovery."""

    def on_step(self, event: StepEnd) -> None:
        """A step is finished."""

    def on_validation(self, event: ValidationEnd) -> None:
        """A validation is finished."""

    def on_checkpoint(self, event: CheckpointEnd) -> None:
        """A checkpoint is on disk."""

    def on_end(self, event: RunEnd) -> None:
        """The run is over, however it ended."""
