"""Bands: they contain about the stated share of recorded measurements, each left out of its own band."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from functools import cache

import pytest
from benchmarks.planner import scale_errors
from benchmarks.planner.scale_errors import ErrorRecord, band_rule_of, upper_quantile

from wanma.bench.scale.bands import COVERAGE, BandRule, Observation, band_rule

KINDS = ("gpu-dense", "gpu-experts", "cpu-uncalibrated", "cpu-calibrated", "cpu-corrected")
RULE = BandRule("gpu-dense", level=1.0, drift=0.1, max_ranks=1024, record_count=100, pair_count=20)


@cache
def read_records() -> tuple[ErrorRecord, ...]:
    return tuple(scale_errors.records())


def is_inside(rule: BandRule, record: ErrorRecord, *observations: Observation) -> bool:
    band = rule.band(record.ranks, record.uncertainty, observations)
    return band.low <= math.exp(record.log_ratio) <= band.high


@pytest.mark.parametrize("kind", KINDS)
def test_bands_contain_the_stated_share_of_records_left_out(kind: str) -> None:
    records = read_records()
    own = [one for one in records if one.kind == kind and not one.is_fitted]
    inside = [
        is_inside(band_rule_of(kind, [other for other in records if other is not one]), one) for one in own
    ]
    assert len(own) >= 15
    share, error = sum(inside) / len(inside), 2 * math.sqrt(COVERAGE * (1 - COVERAGE) / len(inside))
    assert COVERAGE - error <= share <= COVERAGE + error + 1 / len(inside)


@pytest.mark.parametrize("kind", KINDS[:2])
def test_bands_contain_them_if_their_whole_source_is_left_out(kind: str) -> None:
    records = read_records()
    own = [one for one in records if one.kind == kind and not one.is_fitted]
    inside = [
        is_inside(band_rule_of(kind, [other for other in records if source(other) != source(one)]), one)
        for one in own
    ]
    assert 0.85 <= sum(inside) / len(inside) <= 0.97


def source(record: ErrorRecord) -> str:
    return record.family.partition(":")[0]


def pairs(device: str) -> Iterator[tuple[ErrorRecord, ErrorRecord]]:
    """Yield (fewer ranks, more ranks) of the same model and machine."""
    families: defaultdict[tuple[str, str], list[ErrorRecord]] = defaultdict(list)
    for one in read_records():
        if one.kind.startswith(device):
            families[one.kind, one.family].append(one)
    for family in families.values():
        yield from ((one, more) for one in family for more in family if more.ranks > one.ranks)


@pytest.mark.parametrize("device", ["gpu", "cpu"])
def test_a_band_beyond_a_measurement_contains_what_was_measured_there(device: str) -> None:
    """With the smaller run as the measurement, and all records of the family left out."""
    records = read_records()
    inside = []
    for one, more in pairs(device):
        rule = band_rule_of(one.kind, [other for other in records if other.family != one.family])
        inside.append(is_inside(rule, more, Observation(one.ranks, one.log_ratio)))
    assert len(inside) >= 35
    assert 0.87 <= sum(inside) / len(inside) <= 0.97


def test_measurements_here_improve_forecasts_of_processors() -> None:
    plain, corrected = [], []
    for one, more in pairs("cpu-calibrated"):
        band = band_rule(one.kind).band(more.ranks, more.uncertainty, [Observation(one.ranks, one.log_ratio)])
        plain.append(abs(more.log_ratio))
        corrected.append(abs(more.log_ratio - math.log(band.factor)))
    assert sum(corrected) < 0.75 * sum(plain)


def test_a_band_is_the_measurement_where_there_is_one_and_widens_from_there() -> None:
    measured = [Observation(1, math.log(1.1)), Observation(4, math.log(1.2), half_width=0.01)]
    at, *beyond = [RULE.band(ranks, 0.15, measured) for ranks in (4, 8, 16, 64, 1024)]
    assert at.factor == pytest.approx(1.2, rel=0.01)
    assert math.log(at.high / at.factor) == pytest.approx(0.01, rel=0.1)
    widths = [math.log(one.high / one.low) for one in (at, *beyond)]
    assert widths == sorted(widths)
    factors = [one.factor for one in (at, *beyond)]
    assert factors == sorted(factors, reverse=True), "far away the plain forecast counts more"
    assert widths[-1] / 2 < 0.1 * math.sqrt(8), "and the drift no more than that"


def test_a_forecast_that_missed_by_more_than_its_band_gets_a_wider_one() -> None:
    good, bad = (RULE.band(256, 0.1, [Observation(1, error)]) for error in (0.05, 0.7))
    assert math.log(bad.high / bad.low) > 1.5 * math.log(good.high / good.low)
    assert bad.factor > 1.5, "what was measured counts more than a forecast that was far off"


def test_bands_widen_beyond_the_largest_machine_of_the_records() -> None:
    widths = [math.log(one.high) for one in (RULE.band(ranks, 0.1) for ranks in (8, 1024, 4096, 65536))]
    assert widths[0] == widths[1] == pytest.approx(0.1)
    assert widths[2] == pytest.approx(math.hypot(0.1, 0.1 * math.sqrt(2)))
    assert widths[3] == pytest.approx(math.hypot(0.1, 0.1 * math.sqrt(6)))


def test_a_quantile_of_few_values_is_the_largest() -> None:
    assert upper_quantile([3.0, 1.0, 2.0]) == 3.0
    assert upper_quantile([float(value) for value in range(1, 100)]) == 90.0


@pytest.mark.parametrize("kind", KINDS)
def test_the_stored_rules_are_those_of_this_planner(kind: str) -> None:
    """Else: python -m benchmarks.planner.scale_errors --write"""
    now, stored = band_rule_of(kind, read_records()), band_rule(kind)
    assert (stored.level, stored.drift) == pytest.approx((now.level, now.drift), abs=1e-3)
    counts = [(one.max_ranks, one.record_count, one.pair_count) for one in (now, stored)]
    assert counts[0] == counts[1]
