"""Summary of a result: values by round, estimates and verdicts, from its measurements."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Iterable, Sequence

import numpy as np

from wanma.bench.figures.metrics import METRICS, find_metric
from wanma.bench.figures.precision import finite_values, metric_estimate
from wanma.bench.figures.texts import step_size_text
from wanma.bench.measurements.measurement import PHASE, Measurement
from wanma.bench.results.result import BenchmarkResult, ContenderRecord
from wanma.bench.statistics.estimates import Estimate
from wanma.bench.statistics.ratios import ERROR_RATE
from wanma.bench.statistics.verdicts import Verdict, judge
from wanma.job.errors import WanmaError
from wanma.job.file.loading import to_job
from wanma.job.plan.plan import Plan
from wanma.models.workload.flop_conventions import OWN, training_flops
from wanma.planner.preparation.job_planning import job_dimensions


def summarize(result: BenchmarkResult, warm_ups: Sequence[int]) -> BenchmarkResult:
    """Return the result with `warm_ups`, and `values`, `summaries` and `verdicts` of its measurements.

    Measurements that do not count are left out, and so are values that are not finite, such as a loss of NaN.

    Args:
        warm_ups: steps at the beginning of each measurement that do not count.

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
                if (numbers := finite_values(measurement, name, steps))
            }
            if series:
                medians = {number: float(np.median(numbers)) for number, numbers in series.items()}
                values.setdefault(contender, {})[name] = medians
                summaries.setdefault(contender, {})[name] = metric_estimate(name, list(series.values()))
        if OWN in values.get(contender, {}):
            rounds, own = values[contender][OWN], summaries[contender][OWN]
            for name, ratio in convention_ratios(result.contender(contender)).items():
                values[contender][name] = {number: ratio * value for number, value in rounds.items()}
                summaries[contender][name] = Estimate(
                    ratio * own.median, ratio * own.low, ratio * own.high, own.count
                )
    result = dataclasses.replace(result, values=values, summaries=summaries, warm_ups=tuple(warm_ups))
    return dataclasses.replace(result, verdicts=_verdicts(result))


def judge_metric(
    name: str,
    baseline: tuple[BenchmarkResult, str],
    candidate: tuple[BenchmarkResult, str],
    *,
    is_paired: bool,
    error_rate: float,
) -> Verdict | None:
    """Return the verdict on a metric of two contenders, each of a summarized result.

    None if it has no better direction, no value in common, or one below 0, and for the time of steps with
    other numbers of samples.

    Args:
        error_rate: share of equal contenders for which a difference may be claimed.
    """
    better = find_metric(name).better
    before, after = (result.values.get(own, {}).get(name, {}) for result, own in (baseline, candidate))
    if not better or min((*before.values(), *after.values()), default=0.0) <= 0:
        return None
    if not (before.keys() & after.keys() if is_paired else before and after):
        return None
    if step_size_text(*candidate, name, baseline):
        return None
    return judge(before, after, lower_is_better=better == "lower", is_paired=is_paired, error_rate=error_rate)


def metric_names(measurements: Iterable[Measurement]) -> list[str]:
    """Return the names of all metrics that one of the measurements may have: known ones, phases, figures."""
    names = dict.fromkeys(metric.name for metric in METRICS)
    for measurement in measurements:
        names.update(dict.fromkeys(f"{PHASE}{phase}" for step in measurement.steps for phase in step.phases))
        names.update(dict.fromkeys(measurement.figures))
    return list(names)


def _verdicts(result: BenchmarkResult) -> dict[str, dict[str, Verdict]]:
    """Return the verdicts on all contenders but the baseline, without the phases of a step."""
    candidates = [contender for contender in result.values if contender != result.baseline]
    verdicts: dict[str, dict[str, Verdict]] = {}
    for contender in candidates if result.baseline in result.values else ():
        for name in result.values[contender]:
            verdict = None
            if not name.startswith(PHASE):
                verdict = judge_metric(
                    name,
                    (result, result.baseline),
                    (result, contender),
                    is_paired=True,
                    error_rate=ERROR_RATE / len(candidates),
                )
            if verdict is not None:
                verdicts.setdefault(contender, {})[name] = verdict
    return verdicts


def convention_ratios(record: ContenderRecord) -> dict[str, float]:
    """Return the FLOPs of a contender's steps by convention, over those of its own MFU.

    Returns:
        ratios by metric, without `mfu`; empty for a command, and for models whose FLOPs are not those of a
        decoder that trains all of its parameters.
    """
    if not record.job or not record.plan:
        return {}
    try:
        plan = Plan.from_json(dict(record.plan["plan"]))
        job = to_job(tomllib.loads(record.job))
        config = job_dimensions(job)
        own = float(record.plan["flops_per_sample"])
    except (WanmaError, KeyError, TypeError, ValueError):
        return {}
    if config is None:
        return {}
    flops = training_flops(config, job.data.sequence_length, plan.recompute, plan.recompute_share)
    if abs(own / flops[OWN] - 1) > 1e-6:  # frozen parameters or adapters: no table counts them
        return {}
    return {name: value / flops[OWN] for name, value in flops.items() if name != OWN}
