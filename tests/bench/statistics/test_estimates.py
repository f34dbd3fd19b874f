"""Medians with their intervals, against order statistics, reference values of scipy, and known truths."""

from __future__ import annotations

import json
import math

import numpy as np
import numpy.typing as npt
import pytest

from wanma.bench.statistics.block_length import choose_block_length
from wanma.bench.statistics.estimates import (
    Estimate,
    estimate,
    estimate_measurements,
    student_quantile,
)


def correlated(
    generator: np.random.Generator, shape: tuple[int, ...], correlation: float, deviation: float
) -> npt.NDArray[np.float64]:
    """AR(1) noise along the last axis with this standard deviation."""
    noise = generator.normal(size=shape) * deviation
    series = np.empty(shape)
    series[..., 0] = noise[..., 0]
    for step in range(1, shape[-1]):
        series[..., step] = (
            correlation * series[..., step - 1] + math.sqrt(1 - correlation**2) * noise[..., step]
        )
    return series


def test_the_interval_is_that_of_scipy() -> None:
    """scipy 1.17.1: stats.bootstrap((values,), np.median, n_resamples=200000, method="percentile")."""
    values = [
        1.504, 0.6, 1.087, 0.893, 0.913, 0.958, 0.668, 0.955, 0.841, 1.944, 1.046, 0.932, 0.945, 0.875, 0.81,
    ]  # fmt: skip
    assert estimate(values) == Estimate(0.932, 0.841, 1.046, 15)


def test_the_interval_lies_at_the_order_statistics_of_the_median() -> None:
    """For n values, P(median of a resample <= k-th value) is a binomial tail (Efron 1979, section 3)."""
    count = 21
    values = np.arange(count, dtype=float)
    below = [
        sum(
            math.comb(count, more) * (k / count) ** more * (1 - k / count) ** (count - more)
            for more in range(count // 2 + 1, count + 1)
        )
        for k in range(1, count + 1)
    ]
    low, high = (next(k for k, chance in enumerate(below) if chance >= level) for level in (0.025, 0.975))
    found = estimate(values.tolist())
    assert (found.low, found.median, found.high) == (low, 10, high)


@pytest.mark.parametrize("count", [1, 2])
def test_one_or_two_values_have_no_interval(count: int) -> None:
    for found in (
        estimate([1.5] * count),
        estimate_measurements([[1.5] * 30] * count),
    ):
        assert not found.has_interval
        assert found.contains(1e9)
        assert found.relative_half_width == math.inf
        assert (str(found), found.count) == ("1.50", count)


@pytest.mark.parametrize("count", [3, 4, 5])
def test_few_values_have_the_interval_of_student_where_it_is_wider(count: int) -> None:
    values = [1.0, 1.1, 1.3, 1.6, 2.0][:count]
    quantile = {3: 4.302652729749462, 4: 3.182446305283, 5: 2.776445105198}[count]
    half = quantile * np.std(np.log(values), ddof=1) / math.sqrt(count)
    found = estimate(values)
    assert found.low == pytest.approx(min(math.exp(np.mean(np.log(values)) - half), 1.0))
    assert found.high == pytest.approx(max(math.exp(np.mean(np.log(values)) + half), values[-1]))
    differences = [value - 1.0 for value in values]
    half = quantile * np.std(differences, ddof=1) / math.sqrt(count)
    assert estimate(differences).low == pytest.approx(min(np.mean(differences) - half, 0.0))


def test_intervals_of_three_values_contain_the_median_in_95_percent() -> None:
    values = np.exp(np.random.default_rng(5).normal(size=(500, 3)) * 0.05)
    assert np.mean([estimate(row.tolist(), draws=100).contains(1.0) for row in values]) >= 0.92


@pytest.mark.parametrize("values", [[], [1.0, math.nan], [1.0, math.inf, 2.0]])
def test_no_value_and_no_number_are_refused(values: list[float]) -> None:
    for function in (estimate, lambda found: estimate_measurements([found])):
        with pytest.raises(ValueError, match="an estimate needs"):
            function(values)
    with pytest.raises(ValueError, match="at least one measurement"):
        estimate_measurements([])


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (Estimate(1.234, 1.2, 1.3, 7), "1.23 (1.20–1.30)"),
        (Estimate(0.01234, 0.0123, 0.0125, 7), "0.0123 (0.0123–0.0125)"),
        (Estimate(12345.6, 12000.4, 13000.0, 7), "12,346 (12,000–13,000)"),
        (Estimate(0.0, 0.0, 0.0, 7), "0.00 (0.00–0.00)"),
        (Estimate(1e-5, -math.inf, math.inf, 2), "0.0000100"),
    ],
)
def test_an_estimate_prints_with_digits_that_its_size_needs(found: Estimate, text: str) -> None:
    assert str(found) == text
    assert Estimate.from_json(json.loads(json.dumps(found.to_json(), allow_nan=False))) == found


def test_an_estimate_takes_a_format() -> None:
    assert Estimate(0.012, 0.01, 0.0135, 7).text("+.1%", " to ") == "+1.2% (+1.0% to +1.4%)"
    assert Estimate(0.012, -math.inf, math.inf, 2).text("+.1%") == "+1.2%"


def test_equal_values_leave_no_uncertainty() -> None:
    assert str(estimate([1.5] * 7)) == "1.50 (1.50–1.50)"


def test_the_relative_half_width_is_that_of_the_interval() -> None:
    assert Estimate(2.0, 1.9, 2.2, 7).relative_half_width == pytest.approx(0.075)
    assert Estimate(0.0, 0.0, 0.0, 7).relative_half_width == 0
    assert Estimate(0.0, -1.0, 1.0, 7).relative_half_width == math.inf


def test_quantiles_of_student_are_those_of_scipy() -> None:
    """scipy 1.17.1: stats.t.ppf."""
    reference = {
        (0.975, 1): 12.706204736174694,
        (0.975, 2): 4.302652729749462,
        (0.975, 7): 2.364624251592784,
        (0.9, 30): 1.3104150253913955,
        (0.995, 5): 4.032142983555228,
    }
    for (probability, degrees), value in reference.items():
        assert student_quantile(probability, degrees) == pytest.approx(value, rel=1e-10)
    assert student_quantile(0.75, 1) == pytest.approx(1.0), "Cauchy: tan(π/4)"
    with pytest.raises(ValueError, match="no quantile"):
        student_quantile(0.4, 3)


def test_blocks_grow_with_the_correlation_of_the_steps() -> None:
    generator = np.random.default_rng(1)
    lengths = [
        choose_block_length(correlated(generator, (1000,), correlation, 1.0))
        for correlation in (0.0, 0.3, 0.6, 0.9)
    ]
    assert lengths == sorted(lengths)
    assert lengths[0] <= 3
    # Of AR(1) it is (2 · (2ρ / (1 − ρ²))² · 3/4 · n)^(1/3) (Politis & White 2004): 51 for 0.9, 17 for 0.6.
    assert 10 <= lengths[2] <= 24
    assert 32 <= lengths[3] <= 80


def test_a_constant_or_short_series_has_blocks_of_one() -> None:
    assert choose_block_length(np.full(100, 0.1)) == 1
    assert choose_block_length(np.arange(7.0)) == 1


@pytest.mark.parametrize("count", [3, 5, 8])
def test_measurements_with_offsets_of_their_own_need_the_hierarchical_interval(count: int) -> None:
    """Offsets of 2 % between measurements, as of memory placement; the pooled steps do not show them."""
    generator = np.random.default_rng(3)
    hits, pooled_hits, experiments = 0, 0, 40
    for _ in range(experiments):
        offsets = generator.normal(size=(count, 1)) * 0.02
        steps = np.exp(correlated(generator, (count, 30), 0.3, 0.02) + offsets)
        hits += estimate_measurements(steps.tolist(), draws=300).contains(1.0)
        pooled_hits += estimate(steps.ravel().tolist(), draws=200).contains(1.0)
    assert hits / experiments >= 0.9
    assert pooled_hits / experiments <= 0.6


def test_an_estimate_is_the_same_each_time_and_follows_the_unit() -> None:
    generator = np.random.default_rng(4)
    steps = np.exp(generator.normal(size=(4, 30)) * 0.05)
    found = estimate(steps[0].tolist())
    assert estimate(steps[0].tolist()) == found
    scaled = estimate((steps[0] * 1000).tolist())
    assert (scaled.low, scaled.high) == pytest.approx((found.low * 1000, found.high * 1000))
    assert estimate_measurements(steps.tolist()) == estimate_measurements(steps.tolist())
