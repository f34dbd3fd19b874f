"""Ratios of contenders and the rank tests behind them, against enumeration and reference values of scipy."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from wanma.bench.statistics import rank_tests
from wanma.bench.statistics.estimates import student_quantile
from wanma.bench.statistics.ratios import cliffs_delta, estimate_paired_ratio, estimate_ratio

FIRST = [1.504, 0.6, 1.087, 0.893, 0.913, 0.958, 0.668, 0.955, 0.841, 1.944, 1.046, 0.932, 0.945, 0.875, 0.81]
SECOND = [0.97, 1.067, 1.541, 1.261, 0.796, 1.104, 0.976, 1.139, 0.801, 1.16, 1.158, 1.515]


def test_signed_ranks_have_the_distribution_of_all_signs() -> None:
    counts = np.zeros(7 * 8 // 2 + 1)
    for signs in itertools.product((0, 1), repeat=7):
        counts[sum(rank for rank, sign in enumerate(signs, 1) if sign)] += 1
    assert rank_tests.signed_rank_chances(7) == pytest.approx(counts / 2**7)


def test_rank_sums_have_the_distribution_of_all_orders() -> None:
    counts = np.zeros(4 * 5 + 1)
    for places in itertools.combinations(range(9), 4):
        counts[sum(places) - 6] += 1
    assert rank_tests.rank_sum_chances(4, 5) == pytest.approx(counts / math.comb(9, 4))


def test_p_values_are_those_of_scipy() -> None:
    """scipy 1.17.1: mannwhitneyu(FIRST, SECOND, method="exact"), wilcoxon of the pairs, method="exact"."""
    rank_sum = sum(a > b for a in FIRST for b in SECOND)
    assert rank_sum == 49
    chances = rank_tests.rank_sum_chances(15, 12)
    assert 2 * chances[: rank_sum + 1].sum() == pytest.approx(0.046866346139465005)
    assert 2 * rank_tests.signed_rank_chances(12)[:27].sum() == pytest.approx(0.33935546875)


def test_bounds_of_large_samples_continue_the_exact_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = rank_tests.signed_rank_bound(50, 0.05), rank_tests.rank_sum_bound(30, 30, 0.05)
    monkeypatch.setattr(rank_tests, "MAX_EXACT", 10)
    close = rank_tests.signed_rank_bound(50, 0.05), rank_tests.rank_sum_bound(30, 30, 0.05)
    assert close == pytest.approx(exact, abs=1)


def test_a_ratio_without_pairs_has_the_interval_of_the_inverted_rank_sum_test() -> None:
    """scipy 1.17.1: the ratios r for which mannwhitneyu(log FIRST − log r, log SECOND) has p > 0.05."""
    found = estimate_ratio(FIRST, SECOND)
    assert (found.low, found.high) == pytest.approx((0.72402855, 0.99273927), rel=1e-6)
    assert (found.median, found.count) == (pytest.approx(0.8359882281740463), 12)


def test_a_ratio_of_rounds_has_the_interval_of_the_inverted_signed_rank_test() -> None:
    """scipy 1.17.1: the same with wilcoxon."""
    found = estimate_paired_ratio(FIRST[:12], SECOND)
    assert (found.low, found.high) == pytest.approx((0.69854057, 1.1401917), rel=1e-6)
    assert found.median == pytest.approx(0.8650140884313258)


def test_ratios_of_few_values_have_the_interval_of_student() -> None:
    """scipy 1.17.1: ttest_rel of the logarithms; ttest_ind(equal_var=False), whose 3.02 degrees become 3."""
    paired = estimate_paired_ratio(FIRST[:4], SECOND[:4])
    assert (paired.low, paired.high) == pytest.approx((0.40067264, 1.6471131), rel=1e-6)
    unpaired = estimate_ratio(FIRST[:3], SECOND[:3])
    assert (unpaired.low, unpaired.high) == pytest.approx((0.32472542, 2.22711991), rel=0.005)
    assert unpaired.low < 0.32472542


def test_a_slow_round_cancels_out_of_a_paired_ratio() -> None:
    rounds = [1.0, 1.3, 0.9, 2.0, 1.1, 1.0, 0.8]
    found = estimate_paired_ratio([1.05 * value for value in rounds], rounds)
    assert (found.low, found.median, found.high) == pytest.approx((1.05, 1.05, 1.05))
    unpaired = estimate_ratio([1.05 * value for value in rounds], rounds)
    assert unpaired.contains(1.0)


def test_one_outlier_does_not_move_the_interval_of_ten_rounds() -> None:
    generator = np.random.default_rng(0)
    first, second = np.exp(generator.normal(size=(2, 10)) * 0.01) * [[1.05], [1.0]]
    calm = estimate_paired_ratio(first.tolist(), second.tolist())
    first[4] *= 10
    moved = estimate_paired_ratio(first.tolist(), second.tolist())
    assert moved.low > 1
    assert moved.median == pytest.approx(calm.median, rel=0.01)


def test_constant_values_have_an_interval_without_width() -> None:
    for count in (3, 8):
        for function in (estimate_ratio, estimate_paired_ratio):
            found = function([2.0] * count, [1.0] * count)
            assert (found.low, found.median, found.high) == pytest.approx((2.0, 2.0, 2.0))


def test_too_few_values_have_no_interval_and_wrong_ones_are_refused() -> None:
    assert not estimate_paired_ratio([1.0, 2.0], [1.0, 1.0]).has_interval
    assert not estimate_ratio([1.0, 2.0], [1.0] * 9).has_interval
    with pytest.raises(ValueError, match="1 and 2"):
        estimate_paired_ratio([1.0], [1.0, 2.0])
    for wrong in ([], [0.0, 1.0, 1.0], [-1.0, 1.0, 1.0], [math.nan, 1.0, 1.0]):
        with pytest.raises(ValueError, match="positive, finite"):
            estimate_ratio(wrong, [1.0, 1.0, 1.0])


def test_cliffs_delta_counts_pairs_in_which_one_is_greater() -> None:
    assert cliffs_delta([2.0, 3.0], [1.0, 1.5]) == 1
    assert cliffs_delta([1.0, 2.0], [1.0, 2.0]) == 0
    assert cliffs_delta([1.0, 2.0, 3.0], [2.5]) == pytest.approx(-1 / 3)


def test_few_values_of_which_one_series_does_not_vary_have_two_degrees_of_freedom() -> None:
    """Welch's degrees are 2 exactly; rounding must not make them 1."""
    for spread in (0.01, 0.03, 0.07, 0.1, 0.3):
        found = estimate_ratio([1.0, 1.0 + spread, 1.0 + 2 * spread], [1.0] * 3, 0.05)
        logarithms = np.log([1.0, 1.0 + spread, 1.0 + 2 * spread])
        half = student_quantile(0.975, 2) * np.std(logarithms, ddof=1) / math.sqrt(3)
        assert math.log(found.high / found.low) / 2 == pytest.approx(half)
