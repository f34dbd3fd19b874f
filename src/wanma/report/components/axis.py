"""Chart axes: mapping of values to positions, and round tick values."""

from __future__ import annotations

import math
from dataclasses import dataclass

TICK_MULTIPLES = (1, 2, 2.5, 5, 10)
MAX_TICKS = 6
MAX_LOG_TICKS = 8
MIN_RELATIVE_RANGE = 1e-6
"""Range of a linear axis, as a share of its values, below which they count as one value."""


@dataclass(frozen=True)
class AxisScale:
    """Mapping of [low, high] to [start, end], linear or logarithmic."""

    low: float
    high: float
    start: float
    end: float
    logarithmic: bool = False

    def __call__(self, value: float) -> float:
        low, high = self.low, self.high
        if self.logarithmic:
            value, low, high = (math.log10(max(v, self.low)) for v in (value, low, high))
        return self.start + (value - low) / (high - low) * (self.end - self.start)

    def ticks(self, unit: float = 1.0) -> list[float]:
        """Return about five round values within the scale; multiples of 1, 2, 2.5 or 5 × 10ⁿ × `unit`."""
        if self.logarithmic:
            return _log_ticks(self.low, self.high)
        return [tick * unit for tick in _linear_ticks(self.low / unit, self.high / unit)]


def _linear_ticks(low: float, high: float) -> list[float]:
    rough = (high - low) / (MAX_TICKS - 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in TICK_MULTIPLES if factor * power >= rough * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors in ((1, 2, 3, 4, 5, 6, 7, 8, 9), (1, 2, 5), (1, 3), (1,)):
        ticks = [factor * 10.0**exponent for exponent in exponents for factor in factors]
        ticks = [tick for tick in ticks if low * (1 - 1e-9) <= tick <= high * (1 + 1e-9)]
        if len(ticks) <= MAX_LOG_TICKS:
            return ticks if len(ticks) >= 2 else _linear_ticks(low, high)
    stride = math.ceil(len(ticks) / MAX_LOG_TICKS)
    return ticks[::stride]


def linear_range(values: list[float], from_zero: bool) -> tuple[float, float]:
    """Return the range of a linear axis that holds `values` with a margin; never empty."""
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    if from_zero:
        low = min(low, 0.0)
    margin = (high - low) * 0.06
    # A range this narrow counts as one value: its ticks would differ only in rounded digits.
    if high - low <= MIN_RELATIVE_RANGE * max(abs(low), abs(high)):
        margin = abs(high) * 0.5 or 1.0
    return (low if from_zero and low == 0 else low - margin), high + margin


def log_range(values: list[float]) -> tuple[float, float]:
    """Return the range of a logarithmic axis that holds `values`, all positive; never empty."""
    low, high = min(values), max(values)
    margin = max((high / low) ** 0.06, 1.05)
    return low / margin, high * margin


def tick_text(value: float) -> str:
    """Return a value as short text: '0.25', '6.8k', '1.5M', '1e-05'."""
    for unit, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= unit:
            return f"{value / unit:.4g}{letter}"
    return f"{value:.4g}"
