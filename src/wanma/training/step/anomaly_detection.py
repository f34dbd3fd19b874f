"""Detection of steps whose loss or gradient is not finite or a spike, and the policy for them.

They are seen before the weights change, so that leaving such a step out needs no way back. A retry does: its
error ends the ranks, and the run resumes from its newest in-memory checkpoint (`elastic.recovery`), where the
step is made again from the same weights and samples. An accident does not happen again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Literal

from wanma.job.errors import AllRanksError

AnomalyPolicy = Literal["ignore", "stop", "skip", "retry"]
"""Reaction to a step that is not finite or a spike."""

HISTORY_STEPS = 64
"""Number of steps with which a new one is compared: the last ones that changed the weights."""
MIN_HISTORY_STEPS = 16
"""Smallest number of earlier steps with which a step can be a spike."""
MAX_CONSECUTIVE_SKIPS = 10
"""Largest number of consecutive steps that may be left out: with more, the samples are not the cause."""
_MAD_TO_STANDARD_DEVIATION = 1.4826
"""Ratio of standard deviation to median absolute deviation of a normal distribution (Hampel 1974)."""
_MIN_RELATIVE_DEVIATION = 0.02
"""Smallest deviation, as a share of the median: a loss that hardly moves would have spikes otherwise."""


def is_spike(value: float, history: Sequence[float], deviations: float) -> bool:
    """Return whether `value` is over `deviations` robust standard deviations above the earlier median."""
    if len(history) < MIN_HISTORY_STEPS:
        return False
    middle = median(history)
    deviation = _MAD_TO_STANDARD_DEVIATION * median(abs(earlier - middle) for earlier in history)
    return value > middle + deviations * max(deviation, _MIN_RELATIVE_DEVIATION * abs(middle))


@dataclass
class AnomalyDetector:
    """History of a run's steps by which the next is judged.

    It is saved, so that a run that goes back or resumes judges its steps as before.
    """

    losses: deque[float] = field(default_factory=lambda: deque(maxlen=HISTORY_STEPS))
    gradient_norms: deque[float] = field(default_factory=lambda: deque(maxlen=HISTORY_STEPS))
    """Gradient norms of the same steps."""
    skipped_steps: list[int] = field(default_factory=list)
    """Steps that were skipped by policy, counted from 1: samples consumed, weights unchanged."""

    def describe_spike(self, loss: float, gradient_norm: float, deviations: float) -> str:
        """Return the reason why a finite step is a spike; empty where it is none."""
        for name, value, before in (
            ("loss", loss, self.losses),
            ("gradient norm", gradient_norm, self.gradient_norms),
        ):
            if is_spike(value, before, deviations):
                median_text = f"the last {len(before)} steps' median is {median(before):.4g}"
                return f"the {name} of {value:.4g} is a spike: {median_text}"
        return ""

    def record_update(self, loss: float, gradient_norm: float) -> None:
        """Note a step that has changed the weights."""
        self.losses.append(loss)
        self.gradient_norms.append(gradient_norm)

    def record_skip(self, step: int, remedy: str = "") -> None:
        """Record that `step` is skipped.

        Args:
            step: step, counted from 1.
            remedy: advice for the user where it is known; empty: the weights seem to be the cause.

        Raises:
            AllRanksError: too many consecutive steps before it were skipped.
        """
        first = step - MAX_CONSECUTIVE_SKIPS
        if self.skipped_steps[-MAX_CONSECUTIVE_SKIPS:] == list(range(first, step)):
            raise AllRanksError(
                f"step {step}: {MAX_CONSECUTIVE_SKIPS} consecutive steps were skipped, the limit, and "
                "this step would be skipped too",
                remedy
                or "lower train.learning_rate and resume from an earlier checkpoint; the cause is "
                "unlikely to be the data",
            )
        self.skipped_steps.append(step)

    def state_values(self) -> dict[str, Any]:
        """Return the history as JSON has it."""
        return {
            "losses": list(self.losses),
            "gradient_norms": list(self.gradient_norms),
            "skipped": self.skipped_steps.copy(),
        }

    def restore_values(self, values: dict[str, Any]) -> None:
        """Restore the history that `state_values` returned."""
        self.losses = deque(values["losses"], maxlen=HISTORY_STEPS)
        self.gradient_norms = deque(values["gradient_norms"], maxlen=HISTORY_STEPS)
        self.skipped_steps = list(values["skipped"])


def enforce_policy(
    step: int,
    reason: str,
    policy: AnomalyPolicy,
    key: str,
    retried_steps: Collection[int],
    remedy: str = "",
) -> None:
    """Return if the policy skips a step with wrong numbers; raise otherwise.

    Args:
        step: step, counted from 1.
        reason: fault of the step, in words.
        policy: policy of the job.
        key: key of the policy in the job.
        retried_steps: steps that are being made again already.
        remedy: advice for the user where it is known; empty: that against large updates.

    Raises:
        AllRanksError: the run stops, or goes back to make the step again.
    """
    if policy == "stop":
        raise AllRanksError(
            f"step {step}: {reason}",
            f"{remedy or 'lower train.learning_rate, add train.warmup_steps, check the data'}, or set "
            f"{key} = 'skip' to skip such steps",
        )
    if policy == "retry" and step not in retried_steps:
        raise AllRanksError(
            f"step {step}: {reason}",
            f"{key} = 'retry': the ranks restart and repeat the step (cluster.max_restarts); if it fails "
            "again, it is skipped",
            retry_step=step,
        )
