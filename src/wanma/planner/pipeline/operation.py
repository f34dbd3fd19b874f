"""What a pipeline runs: one micro-batch's forward, backward or weights' gradients in one stage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

Kind = Literal["forward", "backward", "weights"]


class Operation(NamedTuple):
    kind: Kind
    stage: int
    micro_batch: int


class Interval(NamedTuple):
    """One operation as it is played."""

    rank: int
    operation: Operation
    start: float
    """Seconds from the pipeline's begin."""
    seconds: float


@dataclass(frozen=True)
class StageCost:
    """Seconds of one micro-batch in one stage."""

    forward: float
    backward: float
    """With what runs again; of a schedule that takes backward apart, for the inputs' gradients alone."""
    weights: float = 0.0
    """For the weights' gradients, where a schedule computes them on their own."""

    @property
    def seconds(self) -> float:
        return self.forward + self.backward + self.weights
