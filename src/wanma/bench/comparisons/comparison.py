"""Comparison of two results, contender by contender, with what differs in the conditions.

Measurements of two results share no rounds, so a change of the machine between them is part of every ratio.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from wanma.bench.figures.summary import judge_metric
from wanma.bench.machine_figures.definitions import is_machine_detail
from wanma.bench.measurements.measurement import PHASE
from wanma.bench.place import hardware_identity
from wanma.bench.results.result import BenchmarkResult
from wanma.bench.statistics.estimates import Estimate
from wanma.bench.statistics.ratios import ERROR_RATE
from wanma.bench.statistics.verdicts import Verdict
from wanma.job.errors import EXIT_USAGE, WanmaError


@dataclass(frozen=True)
class Difference:
    """Condition in which two results differ."""

    subject: str
    """Name of the condition, such as 'hardware: processor' or 'settings of fsdp: train.precision'."""
    before: str
    after: str
    is_obstacle: bool
    """True if the figures are not comparable because of it."""

    def __str__(self) -> str:
        return f"{self.subject}: {self.before or 'none'} → {self.after or 'none'}"


@dataclass(frozen=True)
class MetricComparison:
    """Estimates of one metric of one contender in both results."""

    contender: str
    metric: str
    before: Estimate
    after: Estimate
    verdict: Verdict | None
    """None: the metric has no better direction, a value is not positive, or steps differ in their samples."""


@dataclass(frozen=True)
class ResultComparison:
    """Comparison of two results."""

    before: BenchmarkResult
    after: BenchmarkResult
    differences: tuple[Difference, ...]
    rows: tuple[MetricComparison, ...]


def compare_results(
    before: BenchmarkResult, after: BenchmarkResult, allows_differences: bool = False
) -> ResultComparison:
    """Compare the contenders that both results have, metric by metric.

    Phases of steps are left out, and the cases, ranks and pairs of a machine benchmark.

    Args:
        before: the older result, which takes the place of the baseline.
        allows_differences: True compares also where hardware, suite or settings differ.

    Raises:
        WanmaError: no contender is in both results, or hardware, suite or settings differ.
    """
    shared = [name for name in before.contender_names if name in after.contender_names]
    if not shared:
        raise WanmaError(
            f"{before.id} and {after.id} have no contender in common",
            f"{', '.join(before.contender_names)} in one, {', '.join(after.contender_names)} in the other",
            EXIT_USAGE,
        )
    differences = tuple(find_differences(before, after))
    obstacles = [difference for difference in differences if difference.is_obstacle]
    if obstacles and not allows_differences:
        raise WanmaError(
            f"{before.id} and {after.id} are not comparable: {'; '.join(map(str, obstacles))}",
            "compare them nevertheless with --allow-differences",
            EXIT_USAGE,
        )
    return ResultComparison(before, after, differences, tuple(_rows(before, after, shared)))


def find_differences(before: BenchmarkResult, after: BenchmarkResult) -> Iterator[Difference]:
    """Yield the conditions in which two results differ, obstacles first."""
    yield from _differing(
        "hardware", hardware_identity(before.hardware), hardware_identity(after.hardware), True
    )
    if before.suite.hash != after.suite.hash:
        old, new = (f"{suite.name} {suite.hash[:12]}".strip() for suite in (before.suite, after.suite))
        yield Difference("suite", old, new, True)
    contenders = {one.name: one for one in after.contenders}
    shared = [(one, contenders[one.name]) for one in before.contenders if one.name in contenders]
    for one, other in shared:
        yield from _differing(f"settings of {one.name}", one.settings, other.settings, True)
        if one.kind == other.kind == "command" and one.command != other.command:
            yield Difference(f"command of {one.name}", " ".join(one.command), " ".join(other.command), True)
    kernels = [{"kernel": result.hardware.get("kernel")} for result in (before, after)]
    yield from _differing("hardware", kernels[0], kernels[1], False)
    yield from _differing("version", before.environment, after.environment, False)
    for one, other in shared:
        yield from _differing(f"version of {one.name}", one.packages, other.packages, False)
    yield from _differing("code", before.code, after.code, False)


def _differing(
    subject: str, before: Mapping[str, Any], after: Mapping[str, Any], is_obstacle: bool
) -> Iterator[Difference]:
    for key in dict.fromkeys((*before, *after)):
        one, other = before.get(key), after.get(key)
        if one != other:
            old, new = ("" if value is None else str(value) for value in (one, other))
            yield Difference(f"{subject}: {key}", old, new, is_obstacle)


def _rows(
    before: BenchmarkResult, after: BenchmarkResult, contenders: list[str]
) -> Iterator[MetricComparison]:
    for contender in contenders:
        old, new = before.summaries.get(contender, {}), after.summaries.get(contender, {})
        for metric in old:
            if metric in new and not metric.startswith(PHASE) and not is_machine_detail(metric):
                verdict = judge_metric(
                    metric,
                    (before, contender),
                    (after, contender),
                    is_paired=False,
                    error_rate=ERROR_RATE / len(contenders),
                )
                yield MetricComparison(contender, metric, old[metric], new[metric], verdict)
