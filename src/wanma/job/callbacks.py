"""User callbacks of a run (`wanma.Callback`) and the events they receive, in the process that started it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

Outcome = Literal["finished", "interrupted", "failed"]


class StopTraining(Exception):  # noqa: N818  # a request, not an error
    """Request of a callback for an orderly end of the run within the next steps.

    The same call continues the run.

    Args:
        reason: text for the console.
    """

    def __init__(self, reason: str = "") -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True)
class RunStart:
    """Event: all ranks have loaded a state and begin training."""

    run: Path
    """Path of the run directory."""
    step: int
    """Optimizer steps done; later steps are repeated if they were done before a failure."""
    steps: int
    """Optimizer steps of the job."""
    ranks: int
    plan: str
    is_recovery: bool
    """True if the ranks were restarted after a failure, or with another number of nodes."""


@dataclass(frozen=True)
class StepEnd:
    """Event: an optimizer step is finished."""

    step: int
    loss: float
    """Mean loss over all targets of the global batch."""
    gradient_norm: float
    """Global L2 norm of the gradient before clipping."""
    learning_rate: float
    samples: int
    """Samples consumed since the start of the run."""
    seconds: float
    layer_gradient_norms: Mapping[str, float] = field(default_factory=dict)
    """Gradient norm of each layer; empty except at steps of `observe.gradient_norms_every_steps`."""


@dataclass(frozen=True)
class ValidationEnd:
    """Event: the validation after `step` is finished."""

    step: int
    loss: float
    """Mean loss; NaN: no validation sample has a target."""
    metrics: Mapping[str, float]
    """Value of each metric by name: perplexity or accuracy, and the user's own; none without samples."""


@dataclass(frozen=True)
class CheckpointEnd:
    """Event: the complete checkpoint of `step` is on disk."""

    step: int
    path: Path
    """Folder that `wanma.load(run, step=step)` reads."""


@dataclass(frozen=True)
class RunEnd:
    """Event: the run has ended; no callback follows it."""

    step: int
    """Optimizer steps done."""
    outcome: Outcome
    error: str = ""
    """Error message of a failed run; empty otherwise."""


class Callback:
    """Base class of user callbacks; override the methods that you need.

    Callbacks run on no rank, but in the process that called `wanma.train` (on several nodes: in the one that
    holds rank 0), one after another in a separate thread. They may block and keep state, and they cannot
    change the training: they see the run's records, not its tensors. Callbacks of a `wanma.session` run in
    the process of rank 0.
    """

    def on_start(self, event: RunStart) -> None:
        """Handle the start of the ranks; called again after each recovery."""

    def on_step(self, event: StepEnd) -> None:
        """Handle the end of an optimizer step."""

    def on_validation(self, event: ValidationEnd) -> None:
        """Handle the end of a validation."""

    def on_checkpoint(self, event: CheckpointEnd) -> None:
        """Handle a checkpoint that is complete on disk."""

    def on_end(self, event: RunEnd) -> None:
        """Handle the end of the run, successful or not."""
