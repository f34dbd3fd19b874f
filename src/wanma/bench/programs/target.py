"""Target of a training: a figure to be reached, or convergence.

    loss<=2.5                  training loss of a step
    validation_loss<=2.4       loss, perplexity or accuracy of a validation
    accuracy>=0.9
    converged:0.01/2000        loss no better by 0.01 in 2,000 samples

The time to a target is that of the first step, or validation, that reaches it; noise included, as MLPerf
Training has it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from wanma.job.errors import EXIT_USAGE, WanmaError

_FIGURE = re.compile(r"([a-z][a-z0-9_]*)\s*(<=|>=)\s*([-+0-9.eE]+)")
_CONVERGED = re.compile(r"converged:([0-9.eE+-]+)/([0-9_,]+)")


@dataclass(frozen=True)
class Progress:
    """Point of a training: a step, or a validation after it."""

    time: float
    """Unix seconds."""
    samples: float
    """Samples consumed since the start."""
    figures: dict[str, float]
    """`loss` of a step; `validation_loss`, `accuracy` and the like of a validation."""


@dataclass(frozen=True)
class Target:
    """Figure to be reached, or convergence of the loss."""

    text: str
    figure: str
    is_minimum: bool
    """True if the figure is to be at least `value`."""
    value: float
    """Limit; of convergence the least improvement that counts."""
    patience_samples: float = 0.0
    """Samples without improvement after which the training has converged; 0: a limit is the target."""

    def first_reached(self, points: Sequence[Progress]) -> Progress | None:
        """Return the first point that reaches the target; None: not yet."""
        if self.patience_samples:
            return self._first_converged(points)
        for point in points:
            value = point.figures.get(self.figure, math.nan)
            if value >= self.value if self.is_minimum else value <= self.value:
                return point
        return None

    def _first_converged(self, points: Sequence[Progress]) -> Progress | None:
        best, best_point = math.inf, None
        for point in points:
            value = point.figures.get(self.figure)
            if value is None or not math.isfinite(value):
                continue
            if value < best - self.value:
                best, best_point = value, point
            elif best_point is not None and point.samples - best_point.samples >= self.patience_samples:
                return best_point  # the time at which the last improvement was reached
        return None


def parse_target(text: str) -> Target:
    """Parse the text of a target.

    Raises:
        WanmaError: it is none.
    """
    if match := _FIGURE.fullmatch(text.strip()):
        try:
            return Target(text, match[1], match[2] == ">=", float(match[3]))
        except ValueError:
            pass
    if match := _CONVERGED.fullmatch(text.strip()):
        try:
            least, samples = float(match[1]), float(match[2].replace("_", "").replace(",", ""))
        except ValueError:
            samples = 0.0
        if samples > 0:
            return Target(text, "loss", False, least, samples)
    raise WanmaError(
        f"'{text}' is not a target",
        "write loss<=2.5, validation_loss<=2.4, accuracy>=0.9, or converged:0.01/2000 (no better by 0.01 in "
        "2,000 samples)",
        EXIT_USAGE,
    )
