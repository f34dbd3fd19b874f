"""Pipeline operation: forward, backward or weight gradients of one micro-batch in one pipeline stage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

OperationKind = Literal["forward", "backward", "weight gradient"]


class Operation(NamedTuple):
    """One operation: its kind, its stage and its micro-batch, both counted from 0."""

    kind: OperationKind
    stage: int
    micro_batch: int


class Interval(NamedTuple):
    """One simulated operation with its start and duration."""

    rank: int
    operation: Operation
    start: float
    """Seconds since the start of the pipeline."""
    seconds: float


@dataclass(frozen=True)
class StageCost:
    """Seconds of one micro-batch in one stage, by operation."""

    forward: float
    backward: float
    """Seconds of backward with recompute; with split backward, of the input gradients alone."""
    backward_weight: float = 0.0
    """Seconds of the weight gradients, where a schedule splits backward."""

    @property
    def seconds(self) -> float:
        """Return the seconds of all operations."""
        return self.forward + self.backward + self.backward_weight
