"""Study of a scaling: measurements and forecasts of a job, put together into curves."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from wanma.bench.results.stored_study import Curve, CurvePoint, Interval, ScaleStudy
from wanma.bench.scale.bands import COVERAGE, Band, BandRule, Observation, band_rule
from wanma.bench.scale.forecasts import ScaledJob
from wanma.bench.scale.growth import Growth, growth_of
from wanma.bench.scale.knee import find_knee
from wanma.bench.scale.sentences import curve_sentences, measured_sentences
from wanma.bench.scale.targets import Target, target_here, target_of_cluster, target_of_device
from wanma.bench.statistics.estimates import Estimate
from wanma.bench.suites.scale_table import ScaleTable, doubled_counts


@dataclass(frozen=True)
class MeasuredPoint:
    """Measurement of one number of ranks."""

    throughput: Estimate
    """Samples per second."""
    speedup: Estimate
    """Relative to the fewest ranks that were measured."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Mean seconds of a step by part, as rank 0 records them."""


def read_growth(table: ScaleTable, job_file: Path) -> tuple[ScaledJob, Growth]:
    """Return the job of a file and its growth, as a table describes it.

    Raises:
        WanmaError: the job is wrong, or its model cannot be forecast.
    """
    scaled = ScaledJob.read(job_file, table.settings)
    growth = growth_of(
        scaled.job(table.settings),
        table.axis,
        is_weak=table.weak,
        batch_ranks=table.batch_ranks,
        settings=table.settings,
    )
    return scaled, growth


def study_scaling(
    scaled: ScaledJob,
    growth: Growth,
    table: ScaleTable,
    measured: Mapping[int, MeasuredPoint],
    progress: Callable[[str], None],
) -> ScaleStudy:
    """Forecast a job's scaling on all hardware of the table, beside its measurements.

    Raises:
        WanmaError: a cluster is wrong.
    """
    curves = []
    for target in _targets(scaled, table, growth):
        own = measured if target.is_here else {}
        first = min(own, default=growth.others)
        points = []
        for count in doubled_counts(first, max(table.to, first), also=[*own]):
            if count % growth.others == 0:
                points.append(scaled.forecast_layout(target, growth, count))
                progress(f"forecast {target.name}, {growth.axis}: {count:,}")
        rule = band_rule(scaled.hardware_class(target))
        curves.append(_curve(target, points, own, rule, table))
    return ScaleStudy(
        kind="weak" if table.weak else "strong",
        limit=table.efficiency,
        curves=curves,
        notes=_notes(growth, table),
    )


def _targets(scaled: ScaledJob, table: ScaleTable, growth: Growth) -> Iterable[Target]:
    job = scaled.job(growth.settings)
    if table.measure or not (table.clusters or table.gpus):
        yield target_here(table.measure, uses_cpu=job.cluster.device == "cpu", network=table.network)
    for text in table.clusters:
        yield target_of_cluster(text, job.cluster.threads_per_rank)
    for name in table.gpus:
        yield target_of_device(name)


def _curve(
    target: Target,
    points: Sequence[CurvePoint],
    measured: Mapping[int, MeasuredPoint],
    rule: BandRule,
    table: ScaleTable,
) -> Curve:
    knee = find_knee(points, table.efficiency)
    stored = _curve_points(points, measured, rule)
    spans_nodes = knee is not None and knee.ranks > target.ranks_per_node
    network = target.cluster.nodes[0].network_text if spans_nodes else ""
    parts = {ranks: found.parts for ranks, found in measured.items()}
    return Curve(
        name=f"{target.name}, {table.axis}",
        unit=target.unit,
        points=stored,
        knee=knee,
        band=band_text(rule, has_measurements=bool(measured)),
        sentences=[
            *curve_sentences(stored, knee, target.unit, table.efficiency, network),
            *measured_sentences(stored, parts, target.unit, table.efficiency),
        ],
    )


def _curve_points(
    points: Sequence[CurvePoint], measured: Mapping[int, MeasuredPoint], rule: BandRule
) -> list[CurvePoint]:
    observations = [
        Observation(
            point.ranks, math.log(point.forecast / found.throughput.median), _half_width(found.throughput)
        )
        for point in points
        if (found := measured.get(point.ranks)) is not None and point.forecast is not None
    ]
    stored: list[CurvePoint] = []
    first: CurvePoint | None = None
    for point in points:
        found = measured.get(point.ranks)
        changes: dict[str, Interval] = {} if found is None else {"measured": _interval(found.throughput)}
        if point.forecast is not None and point.uncertainty is not None:
            band = rule.band(point.ranks, point.uncertainty, observations)
            changes["expected"] = _throughput_band(point.forecast, band)
        one = point.model_copy(update=changes)
        if first is None and (one.measured or one.expected):
            first = one
        if first is not None:
            one = one.model_copy(
                update={
                    "ideal": one.ranks / first.ranks,
                    "speedup": _speedup(one, first, found, rule, is_measured=bool(measured)),
                }
            )
        stored.append(one)
    return stored


def _speedup(
    point: CurvePoint, first: CurvePoint, found: MeasuredPoint | None, rule: BandRule, *, is_measured: bool
) -> Interval | None:
    """Return the speedup of a point, measured or forecast, over the measured or forecast first point."""
    if point.ranks == first.ranks:
        return Interval(value=1.0, low=1.0, high=1.0)
    if found is not None and first.measured is not None:
        return _interval(found.speedup)
    if point.expected is None:
        return None
    base = first.measured or first.expected
    assert base is not None  # the first point has one of them
    value = point.expected.value / base.value
    if is_measured:
        return Interval(
            value=value, low=point.expected.low / base.value, high=point.expected.high / base.value
        )
    return forecast_speedup(rule, value, point.ranks, first.ranks)


def forecast_speedup(rule: BandRule, speedup: float, ranks: int, first: int) -> Interval:
    """Return a speedup by two forecasts, of `ranks` ranks over `first`, with its band."""
    factor = math.exp(rule.speedup_half_width(ranks, first))
    return Interval(value=speedup, low=speedup / factor, high=speedup * factor)


def _throughput_band(forecast: float, band: Band) -> Interval:
    """Return the band of a throughput from that of the step's time."""
    return Interval(value=forecast / band.factor, low=forecast / band.high, high=forecast / band.low)


def _half_width(estimate: Estimate) -> float:
    return estimate.relative_half_width if estimate.has_interval else 0.0


def _interval(estimate: Estimate) -> Interval:
    low, high = estimate.bounds
    return Interval(value=estimate.median, low=low, high=high)


def band_text(rule: BandRule, *, has_measurements: bool) -> str:
    """Return the source of a band's width in words."""
    text = (
        f"Band: {100 * COVERAGE:.0f} % of measurements are expected in it. Half width: {rule.level:.2f} × "
        f"the uncertainty of the forecast, as in {rule.record_count} recorded forecasts ({rule.kind}). "
    )
    drift = f"±{100 * math.expm1(rule.drift):.0f} % × √doublings ({rule.pair_count} recorded pairs)"
    if has_measurements:
        text += f"Near a measurement: {drift} from it, until the first is narrower. "
    return text + f"Beyond {rule.max_ranks:,} ranks, the most recorded, it widens by {drift}."


def _notes(growth: Growth, table: ScaleTable) -> list[str]:
    batch = (
        f"Weak scaling: {growth.global_batch / growth.batch_ranks:.12g} samples of a step for each rank."
        if growth.is_weak
        else f"Strong scaling: {growth.global_batch:,} samples of a step on any number of ranks."
    )
    return [
        f"{batch} {growth.axis} grows; all else of the layout stays.",
        "Speedup: throughput over that of the first row of a curve; efficiency: speedup over ideal, the "
        "quotient of the ranks.",
        f"Knee: the fewest ranks, of those forecast, whose throughput per rank is below "
        f"{100 * table.efficiency:.0f} % of the highest on fewer ranks.",
    ]
