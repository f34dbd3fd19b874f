"""Summary of a result: values by round, estimates and verdicts, from its measurements."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from wanma.bench.figures.metrics import METRICS, PHASE, find_metric, metric_values
from wanma.bench.figures.utilization import convention_ratios, with_conventions
from wanma.bench.measurements.measurement import Measurement
from wanma.bench.results.result import BenchmarkResult, Values
from wanma.bench.statistics.estimates import Estimate, estimate, estimate_measurements
from wanma.bench.statistics.ratios import ERROR_RATE
from wanma.bench.statistics.verdicts import MIN_EFFECT, Verdict, judge
from wanma.models.workload.flop_conventions import OWN as MFU


def summarize(
    result: BenchmarkResult, warm_ups: Sequence[int], min_effect: float = MIN_EFFECT
) -> BenchmarkResult:
    """Return the result with `warm_ups`, and `values`, `summaries` and `verdicts` of its measurements.

    Measurements that do not count are left out, and so are values that are not finite, such as a loss of NaN.

    Args:
        result: a result with its measurements and its baseline.
        warm_ups: steps at the beginning of each measurement that do not count.
        min_effect: difference below which a verdict claims nothing, 0.01 for 1 %.

    Raises:
        ValueError: `warm_ups` has not one number for each measurement.
    """
    values: dict[str, dict[str, dict[int, float]]] = {}
    summaries: dict[str, dict[str, Estimate]] = {}
    pairs = list(zip(result.measurements, warm_ups, strict=True))
    for contender in result.contender_names:
        counted = [pair for pair in pairs if pair[0].contender == contender and pair[0].counts]
        for name in metric_names(measurement for measurement, _ in counted):
            series = {
                measurement.round: numbers
                for measurement, steps in counted
                if (numbers := _finite(metric_values(measurement, name, steps)))
            }
            if series:
                medians = {number: float(np.median(numbers)) for number, numbers in series.items()}
                values.setdefault(contender, {})[name] = medians
                summaries.setdefault(contender, {})[name] = (
                    estimate_measurements(list(series.values()))
                    if find_metric(name).is_per_step
                    else estimate(list(medians.values()))
                )
        ratios = convention_ratios(result.contender(contender)) if MFU in values.get(contender, {}) else {}
        for name, ratio in ratios.items():
            own = values[contender][MFU]
            values[contender][name] = {number: ratio * value for number, value in own.items()}
        summaries.get(contender, {}).update(with_conventions(summaries.get(contender, {}), ratios))
    return dataclasses.replace(
        result,
        values=values,
        summaries=summaries,
        verdicts=_verdicts(values, result.baseline, min_effect),
        warm_ups=tuple(warm_ups),
    )


def judge_metric(
    name: str,
    baseline: Mapping[int, float],
    candidate: Mapping[int, float],
    *,
    is_paired: bool,
    error_rate: float,
    min_effect: float = MIN_EFFECT,
) -> Verdict | None:
    """Return the verdict on a metric; None if it has no better direction, no value in common, or one below 0.

    Args:
        name: name of the metric.
        baseline: value by round.
        candidate: the same.
        is_paired: True if both ran in the same rounds.
        error_rate: share of equal contenders for which a difference may be claimed.
        min_effect: difference below which nothing is claimed.
    """
    better = find_metric(name).better
    if not better or min((*baseline.values(), *candidate.values()), default=0.0) <= 0:
        return None
    if not (baseline.keys() & candidate.keys() if is_paired else baseline and candidate):
        return None
    return judge(
        baseline,
        candidate,
        lower_is_better=better == "lower",
        is_paired=is_paired,
        min_effect=min_effect,
        error_rate=error_rate,
    )


def metric_names(measurements: Iterable[Measurement]) -> list[str]:
    """Return the names of all metrics that one of the measurements may have: known ones, phases, figures."""
    names = dict.fromkeys(metric.name for metric in METRICS)
    for measurement in measurements:
        names.update(dict.fromkeys(f"{PHASE}{phase}" for step in measurement.steps for phase in step.phases))
        names.update(dict.fromkeys(measurement.figures))
    return list(names)


def _verdicts(values: Values, baseline: str, min_effect: float) -> dict[str, dict[str, Verdict]]:
    """Return the verdicts on all contenders but the baseline, without the phases of a step."""
    candidates = [contender for contender in values if contender != baseline]
    verdicts: dict[str, dict[str, Verdict]] = {}
    for contender in candidates if baseline in values else ():
        for name, own in values[contender].items():
            verdict = None
            if not name.startswith(PHASE):
                verdict = judge_metric(
                    name,
                    values[baseline].get(name, {}),
                    own,
                    is_paired=True,
                    error_rate=ERROR_RATE / len(candidates),
                    min_effect=min_effect,
                )
            if verdict is not None:
                verdicts.setdefault(contender, {})[name] = verdict
    return verdicts


def _finite(numbers: list[float]) -> list[float]:
    return [number for number in numbers if math.isfinite(number)]
