"""Verdicts on planted differences: error rate, power and what is claimed, in simulated experiments."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from wanma.bench.runner import Rule
from wanma.bench.statistics.estimates import Estimate
from wanma.bench.statistics.verdicts import Outcome, Verdict, judge


def experiments(
    seed: int, count: int, rounds: int, difference: float, steps: int = 30
) -> list[tuple[dict[int, float], dict[int, float]]]:
    """Baseline and candidate of simulated experiments: median step seconds by round.

    Each step has lognormal noise of 5 % with a correlation of 0.5, each measurement an offset of 1 %,
    each round an offset of 2 % that both contenders share. The candidate is faster by `difference`.
    """
    generator = np.random.default_rng(seed)
    noise = generator.normal(size=(2, count, rounds, steps)) * 0.05
    for step in range(1, steps):
        noise[..., step] = 0.5 * noise[..., step - 1] + math.sqrt(0.75) * noise[..., step]
    noise += generator.normal(size=(2, count, rounds, 1)) * 0.01
    noise += generator.normal(size=(1, count, rounds, 1)) * 0.02
    medians = np.median(np.exp(noise), axis=-1)
    medians[1] /= 1 + difference
    return [
        (dict(enumerate(first.tolist())), dict(enumerate(second.tolist())))
        for first, second in zip(*medians, strict=True)
    ]


def outcomes(seed: int, rounds: int, difference: float, min_effect: float = 0.01) -> list[Outcome]:
    return [
        judge(baseline, candidate, lower_is_better=True, min_effect=min_effect).outcome
        for baseline, candidate in experiments(seed, 400, rounds, difference)
    ]


@pytest.mark.parametrize("rounds", [3, 5, 6, 7, 10])
def test_equal_contenders_are_told_apart_in_five_percent_of_experiments_at_most(rounds: int) -> None:
    """400 experiments: 5 % and two standard errors of it, with nothing left out as too small."""
    told = [outcome for outcome in outcomes(rounds, rounds, 0.0, min_effect=0) if outcome != "cannot tell"]
    assert len(told) / 400 <= 0.05 + 2 * math.sqrt(0.05 * 0.95 / 400)


@pytest.mark.parametrize(("rounds", "power"), [(5, 0.8), (7, 0.95), (10, 0.99)])
@pytest.mark.parametrize("difference", [0.05, -0.05])
def test_five_percent_are_found(rounds: int, power: float, difference: float) -> None:
    found = outcomes(20 + rounds, rounds, difference)
    right, wrong = (Outcome.FASTER, Outcome.SLOWER) if difference > 0 else (Outcome.SLOWER, Outcome.FASTER)
    assert found.count(right) / 400 >= power
    assert wrong not in found


def test_equal_contenders_measured_apart_are_told_apart_no_more_often() -> None:
    told = 0
    for number, (baseline, _) in enumerate(pairs := experiments(40, 400, 6, 0.0)):
        candidate = pairs[number - 1][1]  # of other rounds
        verdict = judge(baseline, candidate, lower_is_better=True, is_paired=False, min_effect=0)
        told += verdict.outcome is not Outcome.CANNOT_TELL
    assert told / 400 <= 0.05 + 2 * math.sqrt(0.05 * 0.95 / 400)


def test_the_smallest_difference_is_found_in_four_of_five_experiments() -> None:
    smallest = np.median(
        [judge(*pair, lower_is_better=True).smallest_difference for pair in experiments(50, 200, 8, 0.0)]
    )
    assert 0.02 < smallest < 0.05
    assert 0.75 <= outcomes(51, 8, float(smallest)).count(Outcome.FASTER) / 400 <= 0.95


def test_series_that_end_at_a_width_tell_equal_contenders_apart_no_more_often() -> None:
    """A look after each round, from the seventh on; from the third on, 10 % would be told apart."""
    told = 0
    for baseline, candidate in experiments(60, 200, 15, 0.0):
        for rounds in range(Rule().min_rounds, 16):
            taken = {number: candidate[number] for number in range(rounds)}
            verdict = judge(baseline, taken, lower_is_better=True, min_effect=0)
            if verdict.ratio.relative_half_width <= Rule().precision:
                break
        told += verdict.outcome is not Outcome.CANNOT_TELL
    assert told / 200 <= 0.05 + 2 * math.sqrt(0.05 * 0.95 / 200)


def test_a_difference_below_the_smallest_effect_is_not_claimed() -> None:
    baseline = {number: 1.0 + 0.01 * number for number in range(8)}
    candidate = {number: value / 1.005 for number, value in baseline.items()}
    verdict = judge(baseline, candidate, lower_is_better=True)
    assert verdict.outcome is Outcome.CANNOT_TELL
    assert verdict.ratio.median == pytest.approx(1.005)
    assert verdict.smallest_difference == 0.01
    assert judge(baseline, candidate, lower_is_better=True, min_effect=0.004).outcome is Outcome.FASTER


def test_the_direction_follows_the_unit() -> None:
    low, high = dict.fromkeys(range(7), 1.0), dict.fromkeys(range(7), 1.1)
    assert judge(low, high, lower_is_better=False).outcome is Outcome.FASTER
    assert judge(low, high, lower_is_better=True).outcome is Outcome.SLOWER
    assert judge(low, high, lower_is_better=False).ratio.median == pytest.approx(1.1)
    assert judge(low, high, lower_is_better=True).ratio.median == pytest.approx(1 / 1.1)
    assert judge(low, high, lower_is_better=True).effect == -1


def test_rounds_of_one_contender_alone_are_left_out() -> None:
    baseline = dict.fromkeys(range(8), 1.0) | {9: 50.0}
    candidate = dict.fromkeys(range(1, 9), 0.9)
    verdict = judge(baseline, candidate, lower_is_better=True)
    assert verdict.ratio.count == 7
    assert verdict.ratio.high == pytest.approx(1 / 0.9)
    with pytest.raises(ValueError, match="no round in common"):
        judge({0: 1.0}, {1: 1.0}, lower_is_better=True)


def test_two_rounds_say_nothing() -> None:
    verdict = judge({0: 1.0, 1: 1.0}, {0: 0.5, 1: 0.5}, lower_is_better=True)
    assert verdict.outcome is Outcome.CANNOT_TELL
    assert verdict.smallest_difference == math.inf
    assert str(verdict) == "cannot tell: 2 rounds, of 3 that are the least"


def test_a_smaller_error_rate_claims_less() -> None:
    baseline = dict.fromkeys(range(6), 1.0)
    candidate = {number: 0.9 + 0.01 * number for number in range(6)}
    usual = judge(baseline, candidate, lower_is_better=True)
    strict = judge(baseline, candidate, lower_is_better=True, error_rate=0.001)
    assert strict.ratio.low < usual.ratio.low < usual.ratio.high < strict.ratio.high


def test_a_verdict_prints_its_evidence_and_survives_json() -> None:
    ratio = Estimate(1.08, 1.05, 1.11, 7)
    faster = Verdict(Outcome.FASTER, ratio, 0.9, 0.04, True)
    assert str(faster) == "8.0% faster (5.0% to 11.0%), Cliff's delta +0.90, 7 rounds"
    slower = Verdict(Outcome.SLOWER, Estimate(0.9, 0.88, 0.95, 7), -1, 0.04, False)
    assert str(slower) == "10.0% slower (5.0% to 12.0%), Cliff's delta -1.00, 7 measurements"
    unclear = Verdict(Outcome.CANNOT_TELL, Estimate(1.01, 0.98, 1.04, 7), 0.1, 0.045, True)
    assert str(unclear) == (
        "cannot tell: speed ratio 1.010 (0.980–1.040), 7 rounds, which show differences from 4.5%"
    )
    nothing = judge({0: 1.0}, {0: 1.0}, lower_is_better=True)
    for verdict in (faster, slower, unclear, nothing):
        assert Verdict.from_json(json.loads(json.dumps(verdict.to_json(), allow_nan=False))) == verdict
