"""Bands around forecasts of a scaling: 90 % intervals from the recorded errors of forecasts.

Two figures come from the records, both for 90 % of them (`benchmarks.planner.scale_errors` writes them):

- the *level*: |ln(measured / forecast)| in units of the forecast's own uncertainty, for a class of hardware;
- the *drift*: how much that logarithm changes between two numbers of ranks of the same model and machine,
  over the square root of the doublings between them, as of a random walk.

The plain forecast, with its level, and the forecast times the ratio of the nearest measurement, with the
drift from there, are two estimates; the band is that of their mean, weighted by inverse squares. So it agrees
with a measurement where there is one, and returns to the plain forecast, with its wider band, far away from
all. Beyond the largest machine of the records the level widens by the drift too.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

COVERAGE = 0.9
"""Share of measurements that a band is to contain."""
FILE = Path(__file__).with_name("bands.csv")
"""Rules by class of hardware, under the names of their fields."""


class Band(NamedTuple):
    """Estimate of a time, as a factor of its forecast, with its interval."""

    factor: float
    low: float
    high: float


@dataclass(frozen=True)
class Observation:
    """Measurement beside its forecast."""

    ranks: int
    log_ratio: float
    """ln(measured / forecast) of a step's time."""
    half_width: float = 0.0
    """Half of the measurement's interval, as a share of its median."""


@dataclass(frozen=True)
class BandRule:
    """Widths of the bands of one class of hardware."""

    kind: str
    """Class of hardware and model."""
    level: float
    """Half width of a band over the forecast's own uncertainty, in logarithms."""
    drift: float
    """Half width that each doubling adds, in quadrature."""
    max_ranks: int
    """Largest machine of the records."""
    record_count: int
    """Records that the level comes from."""
    pair_count: int
    """Pairs of records on different numbers of ranks that the drift comes from."""

    def band(self, ranks: int, uncertainty: float, observations: Sequence[Observation] = ()) -> Band:
        """Return the band of a step's time."""
        beyond = max(math.log2(ranks / self.max_ranks), 0.0)
        level = (self.level * uncertainty) ** 2 + self.drift**2 * beyond
        if not observations:
            return _band(0.0, math.sqrt(level))
        near = min(observations, key=lambda one: (abs(math.log2(ranks / one.ranks)), -one.ranks))
        drifted = near.half_width**2 + self.drift**2 * abs(math.log2(ranks / near.ranks))
        # A forecast that missed a measurement by more than its band has a wider one.
        level = max(level, near.log_ratio**2)
        if level + drifted == 0:
            return Band(1.0, 1.0, 1.0)
        weight = level / (level + drifted)
        # Both errors have causes in common, so they may add up instead of averaging out.
        half = weight * math.sqrt(drifted) + (1 - weight) * math.sqrt(level)
        return _band(weight * near.log_ratio, half)

    def speedup_half_width(self, ranks: int, first: int) -> float:
        """Return the half width of a forecast speedup, in logarithms: what both share cancels out."""
        return self.drift * math.sqrt(abs(math.log2(ranks / first)))


def band_rule(kind: str) -> BandRule:
    """Return the rule of one class of hardware, as of `ScaledJob.hardware_class`."""
    with FILE.open(newline="", encoding="utf-8") as file:
        (row,) = (row for row in csv.DictReader(file) if row["kind"] == kind)
    counts = (int(row[name]) for name in ("max_ranks", "record_count", "pair_count"))
    return BandRule(kind, float(row["level"]), float(row["drift"]), *counts)


def _band(center: float, half: float) -> Band:
    return Band(math.exp(center), math.exp(center - half), math.exp(center + half))
