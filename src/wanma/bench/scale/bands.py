"""Bands around forecasts of a scaling: 90 % intervals from the recorded errors of forecasts.

Two figures come from the records, both for 90 % of them (split conformal prediction: the smallest width that
holds ⌈0.9 (n + 1)⌉ of n records):

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
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

COVERAGE = 0.9
"""Share of measurements that a band is to contain."""
COLUMNS = ("kind", "family", "ranks", "uncertainty", "log_ratio", "is_fitted")
"""Columns of the records."""
_FILE = Path(__file__).with_name("recorded_errors.csv")


class ErrorRecord(NamedTuple):
    """Error of one recorded forecast."""

    kind: str
    """Class of hardware and model, as of `ScaledJob.hardware_class`."""
    family: str
    """Source, model and device; records of one family differ in layout and ranks."""
    ranks: int
    uncertainty: float
    """Half of the forecast's own 90 % interval, as a share of its time."""
    log_ratio: float
    """ln(measured step time / forecast step time)."""
    is_fitted: bool
    """True if constants were fitted to the measurement: it checks nothing."""


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
        """Return the band of a step's time.

        Args:
            ranks: ranks of the forecast.
            uncertainty: its own uncertainty.
            observations: measurements of the same curve.
        """
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


def band_rule(kind: str, records: Iterable[ErrorRecord] | None = None) -> BandRule:
    """Return the rule of one class of hardware.

    Args:
        kind: the class.
        records: recorded errors; None: those of this version.

    Raises:
        ValueError: there are no records of this class.
    """
    records = read_records() if records is None else tuple(records)
    own = [one for one in records if one.kind == kind]
    checks = [one for one in own if not one.is_fitted]
    if not checks:
        raise ValueError(f"no recorded forecasts of {kind}")
    level = upper_quantile([abs(one.log_ratio) / one.uncertainty for one in checks])
    device = kind.partition("-")[0]
    drifts = scaled_drifts(one for one in records if one.kind.partition("-")[0] == device)
    return BandRule(
        kind, level, upper_quantile(drifts), max(one.ranks for one in own), len(checks), len(drifts)
    )


def scaled_drifts(records: Iterable[ErrorRecord]) -> list[float]:
    """Return |difference of errors| / √doublings of all pairs of records within a family."""
    families: defaultdict[tuple[str, str], list[ErrorRecord]] = defaultdict(list)
    for record in records:
        families[record.kind, record.family].append(record)
    return [
        abs(more.log_ratio - fewer.log_ratio) / math.sqrt(math.log2(more.ranks / fewer.ranks))
        for family in families.values()
        for fewer in family
        for more in family
        if more.ranks > fewer.ranks
    ]


def upper_quantile(values: Sequence[float], coverage: float = COVERAGE) -> float:
    """Return the smallest value that holds ⌈coverage (n + 1)⌉ of n values; the largest of too few."""
    ordered = sorted(values)
    return ordered[min(math.ceil(coverage * (len(ordered) + 1)), len(ordered)) - 1]


@cache
def read_records() -> tuple[ErrorRecord, ...]:
    """Return the recorded errors of this version."""
    with _FILE.open(newline="", encoding="utf-8") as file:
        return tuple(
            ErrorRecord(
                row["kind"],
                row["family"],
                int(row["ranks"]),
                float(row["uncertainty"]),
                float(row["log_ratio"]),
                row["is_fitted"] == "1",
            )
            for row in csv.DictReader(file)
        )


def _band(center: float, half: float) -> Band:
    return Band(math.exp(center), math.exp(center - half), math.exp(center + half))
