"""Steps whose numbers cannot be right: a loss or gradient that is not finite, or far above the last ones.

They are seen before the weights change, so leaving such a step out needs no way back. Making it again does:
its error ends the ranks, and the run goes on from its newest copy of the state (`elastic.recovery`), where
the step is made again from the same weights and samples. What was an accident does not come back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Literal

from wanma.job.errors import AgreedError

Policy = Literal["ignore", "stop", "skip", "retry"]
"""What is done about such a step."""

WINDOW = 64
"""Steps that a new one is compared with: the last ones that changed the weights."""
FEWEST = 16
"""With fewer nothing is a spike."""
MOST_SKIPPED = 10
"""Steps in a row that may be left out: with more, it is not the samples."""
_TO_DEVIATION = 1.4826
"""Median absolute deviation to standard deviation, of a normal distribution (Hampel 1974)."""
_SMALLEST_SHARE = 0.02
"""Of the median: less counts as no deviation, or a loss that hardly moves would have spikes."""


def is_spike(value: float, before: Sequence[float], deviations: float) -> bool:
    """Whether `value` is more than so many robust standard deviations above the median of those before."""
    if len(before) < FEWEST:
        return False
    middle = median(before)
    deviation = _TO_DEVIATION * median(abs(one - middle) for one in before)
    return value > middle + deviations * max(deviation, _SMALLEST_SHARE * abs(middle))


@dataclass
class Anomalies:
    """What is remembered of a run's steps to judge the next. It is saved, so that a run that goes back or
    carries on judges its steps as it did before."""

    losses: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    gradient_norms: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    """Of the same steps."""
    skipped: list[int] = field(default_factory=list)
    """Steps that were left out by policy, counted from 1: samples consumed, weights unchanged."""

    def what_is_wrong(self, loss: float, gradient_norm: float, deviations: float) -> str:
        """Why a finite step is a spike; empty where it is none."""
        for name, value, before in (
            ("loss", loss, self.losses),
            ("gradient norm", gradient_norm, self.gradient_norms),
        ):
            if is_spike(value, before, deviations):
                usual = f"the last {len(before)} steps' median is {median(before):.4g}"
                return f"the {name} of {value:.4g} is a spike: {usual}"
        return ""

    def applied(self, loss: float, gradient_norm: float) -> None:
        """A step has changed the weights."""
        self.losses.append(loss)
        self.gradient_norms.append(gradient_norm)

    def skip(self, step: int) -> None:
        """`step` is left out.

        Raises:
            AgreedError: as were too many before it.
        """
        first = step - MOST_SKIPPED
        if self.skipped[-MOST_SKIPPED:] == list(range(first, step)):
            raise AgreedError(
                f"step {step}: the {MOST_SKIPPED} steps before were left out, and this one would be too",
                "so it is not the samples: lower train.learning_rate and carry on from an earlier checkpoint",
            )
        self.skipped.append(step)

    def values(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "losses": list(self.losses),
            "gradient_norms": list(self.gradient_norms),
            "skipped": self.skipped.copy(),
        }

    def restore(self, values: dict[str, Any]) -> None:
        """Put back what `values` gave."""
        self.losses = deque(values["losses"], maxlen=WINDOW)
        self.gradient_norms = deque(values["gradient_norms"], maxlen=WINDOW)
        self.skipped = list(values["skipped"])


def check_policy(step: int, wrong: str, policy: Policy, key: str, retried: Collection[int]) -> None:
    """Returns where the policy leaves a step out whose numbers are wrong.

    Args:
        step: counted from 1.
        wrong: what is, in words.
        key: the policy's.
        retried: steps that are being made again already.

    Raises:
        AgreedError: the run stops, or goes back to make the step again.
    """
    if policy == "stop":
        raise AgreedError(
            f"step {step}: {wrong}",
            "lower train.learning_rate, add train.warmup_steps, check the data, "
            f"or set {key} = 'skip' to leave such steps out",
        )
    if policy == "retry" and step not in retried:
        raise AgreedError(
            f"step {step}: {wrong}",
            f"{key} = 'retry' makes the step again after a recovery (cluster.retries), and leaves it out if "
            "that comes back",
            retry_step=step,
        )
