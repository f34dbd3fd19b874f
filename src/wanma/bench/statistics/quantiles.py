"""Quantiles of Student's distribution, without scipy."""

from __future__ import annotations

import math
from functools import cache


@cache
def student_quantile(probability: float, degrees: int) -> float:
    """Return the quantile of Student's t distribution with an integer number of degrees of freedom.

    Raises:
        ValueError: the probability is not within 0.5 and 1, or there is no degree of freedom.
    """
    if not 0.5 <= probability < 1 or degrees < 1:
        raise ValueError(f"no quantile {probability} of Student's distribution with {degrees} degrees")
    low, high = 0.0, 1.0
    while student_cdf(high, degrees) < probability:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (middle, high) if student_cdf(middle, degrees) < probability else (low, middle)
    return (low + high) / 2


def student_cdf(value: float, degrees: int) -> float:
    """Return P(T <= value) for value >= 0 (Abramowitz & Stegun 1964, 26.7.3 and 26.7.4)."""
    theta = math.atan2(value, math.sqrt(degrees))
    cosine, sine = math.cos(theta), math.sin(theta)
    term = cosine if degrees % 2 else 1.0
    total = 0.0
    for order in range(degrees % 2 + 2, degrees + 1, 2):
        total += term
        term *= cosine**2 * (order - 1) / order
    both_tails = (theta + sine * total) * 2 / math.pi if degrees % 2 else sine * total
    return (1 + both_tails) / 2
