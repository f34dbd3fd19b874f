"""Verdict on two contenders: the candidate is faster or slower than the baseline, or the data cannot tell."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from wanma.bench.statistics.estimates import MIN_VALUES, Estimate
from wanma.bench.statistics.ratios import (
    ERROR_RATE,
    cliffs_delta,
    estimate_paired_ratio,
    estimate_ratio,
)
from wanma.bench.stored_record import StoredRecord, Upper

MIN_EFFECT = 0.01
"""Difference below which nothing is claimed: changes of layout alone make as much (Mytkowicz et al. 2009)."""
POWER_FACTOR = 1.5
"""Difference found in four of five repetitions, in half widths of a 95 % interval.

1 + 0.84 / 1.96 = 1.43 for a known width (Cohen 1988), and a reserve: the width is itself an estimate."""


class Outcome(StrEnum):
    """Claim about the candidate."""

    FASTER = "faster"
    SLOWER = "slower"
    CANNOT_TELL = "cannot tell"


@dataclass(frozen=True)
class Verdict(StoredRecord):
    """Claim about a candidate against a baseline, with the evidence for it."""

    outcome: Outcome
    ratio: Estimate
    """Speed of the candidate divided by that of the baseline; 1.05: 5 % faster. Its count is the rounds."""
    effect: float
    """Cliff's delta: chance that the candidate is faster than the baseline less the chance that it is slower,
    for a measurement of each drawn at random; −1 to 1."""
    smallest_difference: Upper
    """Relative difference that as much data with this noise finds in four of five repetitions; infinite
    below three rounds."""
    is_paired: bool
    """True if the contenders were compared round by round."""

    def __str__(self) -> str:
        rounds = f"{self.ratio.count} {'rounds' if self.is_paired else 'measurements'}"
        if self.outcome is not Outcome.CANNOT_TELL:
            low, high = sorted(abs(bound - 1) for bound in (self.ratio.low, self.ratio.high))
            return (
                f"{abs(self.ratio.median - 1):.1%} {self.outcome} ({low:.1%} to {high:.1%}), "
                f"Cliff's delta {self.effect:+.2f}, {rounds}"
            )
        if not self.ratio.has_interval:
            return f"cannot tell: {rounds}, of {MIN_VALUES} that are the least"
        return (
            f"cannot tell: speed ratio {self.ratio.median:.3f} ({self.ratio.low:.3f}–{self.ratio.high:.3f}), "
            f"{rounds}, which show differences from {self.smallest_difference:.1%}"
        )


def judge(
    baseline: Mapping[int, float],
    candidate: Mapping[int, float],
    *,
    lower_is_better: bool,
    is_paired: bool = True,
    min_effect: float = MIN_EFFECT,
    error_rate: float = ERROR_RATE,
) -> Verdict:
    """Compare two contenders by one value of each measurement, such as its median step seconds.

    A difference is claimed if the interval of the speed ratio excludes 1 and the ratio differs from 1 by at
    least `min_effect`. So equal contenders are told apart in at most `error_rate` of all comparisons.
    Each of several comparisons with one baseline gets its part of the error rate (Bonferroni).

    Args:
        baseline: value by round, of the measurements that count.
        candidate: the same; rounds that only one contender has are left out of a paired comparison.
        lower_is_better: True for seconds, False for a throughput.
        is_paired: True if both ran in the same rounds; False for measurements of different days.
        min_effect: difference below which nothing is claimed, 0.01 for 1 %.
        error_rate: share of equal contenders for which a difference may be claimed.

    Raises:
        ValueError: no value, no common round, or a value that is not positive and finite.
    """
    rounds = sorted(baseline.keys() & candidate.keys())
    if is_paired and not rounds:
        raise ValueError("the contenders have no round in common; compare them without pairs")
    first = [candidate[number] for number in (rounds if is_paired else sorted(candidate))]
    second = [baseline[number] for number in (rounds if is_paired else sorted(baseline))]
    faster, slower = (second, first) if lower_is_better else (first, second)
    ratio = (estimate_paired_ratio if is_paired else estimate_ratio)(faster, slower, error_rate)
    return Verdict(
        outcome=_outcome(ratio, min_effect),
        ratio=ratio,
        effect=cliffs_delta(faster, slower),
        smallest_difference=_smallest_difference(ratio, min_effect),
        is_paired=is_paired,
    )


def _outcome(ratio: Estimate, min_effect: float) -> Outcome:
    if ratio.contains(1.0) or abs(ratio.median - 1) < min_effect:
        return Outcome.CANNOT_TELL
    return Outcome.FASTER if ratio.median > 1 else Outcome.SLOWER


def _smallest_difference(ratio: Estimate, min_effect: float) -> float:
    if not ratio.has_interval:
        return math.inf
    half = math.log(ratio.high / ratio.low) / 2
    return max(math.expm1(POWER_FACTOR * half), min_effect)
