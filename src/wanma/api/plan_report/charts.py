"""Charts of a plan's HTML page: one step, memory against time, and throughput by number of devices."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from wanma.job.forecast.forecast import Workload
from wanma.job.plan.plan import Plan
from wanma.observe.units import bytes_text, duration_text, percent_text
from wanma.planner.explain.scaling import ScalingPoint, scaling_unit
from wanma.planner.explain.timeline import Span, SpanKind, Timeline
from wanma.planner.presentation.formatting import evenly_spread_indices, throughput, throughput_unit
from wanma.planner.search.result import Candidate, SearchResult
from wanma.report.components.axis import AxisScale
from wanma.report.components.gantt_chart import GanttInterval, GanttRow, gantt_figure
from wanma.report.components.line_chart import Chart, Series

MAX_SHOWN_RANKS = 16
"""Maximum pipeline ranks in the chart of a step; of more, evenly spread ones with both ends."""

SPAN_COLORS: dict[SpanKind, int] = {
    "forward": 1,
    "backward": 3,
    "weight gradient": 6,
    "gather": 4,
    "reduce": 4,
    "optimizer": 5,
    "in-memory checkpoint": 7,
    "data loading": 7,
}
"""Colour number of each kind of span; other kinds are not drawn."""
EXPOSED_COLOR = 2


def step_figure(timeline: Timeline) -> str:
    """Return the chart of one step, a row for each pipeline rank, as an HTML `<figure>`."""
    plan, pp = timeline.plan, timeline.plan.pp
    shown = evenly_spread_indices(pp, MAX_SHOWN_RANKS)
    rows: list[GanttRow] = []
    for rank in shown:
        rank_spans = [span for span in timeline.spans if span.rank == rank]
        rows.append(
            GanttRow(
                _rank_name(rank, plan), [*_intervals(rank_spans, "compute"), *_exposed_intervals(rank_spans)]
            )
        )
        if exchanged := list(_intervals(rank_spans, "exchange")):
            rows.append(GanttRow("", exchanged, is_secondary=True))
    kinds = {span.kind for span in timeline.spans}
    legend: list[tuple[str, int]] = [(kind, SPAN_COLORS[kind]) for kind in SPAN_COLORS if kind in kinds]
    if any(span.parts.keys() - {"compute"} for span in timeline.spans):
        legend.append(("exposed communication", EXPOSED_COLOR))
    count = f"{timeline.micro_batches:,} micro-batch{'' if timeline.micro_batches == 1 else 'es'}"
    notes = [f"{count}, {duration_text(timeline.seconds)}."]
    if pp > 1:
        notes.append("Each row is one pipeline rank, with all data, context and tensor ranks of its stages.")
    if len(shown) < pp:
        notes.append(f"{len(shown)} of {pp} pipeline ranks are drawn.")
    if any(row.is_secondary for row in rows):
        notes.append("Thin rows: parameter gathers and gradient reductions that overlap compute.")
    return gantt_figure("Timeline of one step", rows, timeline.seconds, legend, " ".join(notes))


def _rank_name(rank: int, plan: Plan) -> str:
    if plan.pp == 1:
        return "every rank"
    numbers = plan.stages_of_pipeline_rank(rank)
    return f"stage {', '.join(map(str, numbers[:2]))}{'…' if len(numbers) > 2 else ''}"


def _intervals(spans: Iterable[Span], track: str) -> Iterator[GanttInterval]:
    for span in spans:
        if span.track == track and span.kind in SPAN_COLORS:
            text = f"{_span_name(span)}: {duration_text(span.seconds)}"
            yield GanttInterval(span.start, span.seconds, SPAN_COLORS[span.kind], text)


def _exposed_intervals(spans: Iterable[Span]) -> Iterator[GanttInterval]:
    """Yield the exposed communication of forwards and backwards, drawn at their ends for simplicity."""
    for span in spans:
        exposed = sum(seconds for part, seconds in span.parts.items() if part != "compute")
        if exposed > 0:
            parts = ", ".join(f"{part} {duration_text(seconds)}" for part, seconds in span.parts.items())
            yield GanttInterval(
                span.end - exposed, exposed, EXPOSED_COLOR, f"{_span_name(span)}: {parts}", is_nested=True
            )


def _span_name(span: Span) -> str:
    """Return the name of a span, such as 'forward 3 of stage 0'."""
    number = "" if span.micro_batch is None else f" {span.micro_batch}"
    return f"{span.kind}{number}" + ("" if span.stage is None else f" of stage {span.stage}")


def pareto_chart(search_result: SearchResult, memory_limit_bytes: float | None) -> Chart:
    """Return the chart of the Pareto front of memory and time, with other layouts up to twice its time.

    Args:
        memory_limit_bytes: memory in bytes that a plan may fill.
    """
    front = sorted(search_result.pareto_front, key=lambda candidate: candidate.seconds)
    farthest = 2 * front[-1].seconds
    other_plans = [
        candidate
        for candidate in search_result.candidates
        if candidate not in search_result.pareto_front and candidate.seconds <= farthest
    ]
    lines = [_plan_points("front", 1, front, is_joined=True)]
    if other_plans:
        lines.append(_plan_points("other plans", 7, other_plans, is_joined=False))
    xs = [x for line in lines for x in line.xs]
    largest = max(y for line in lines for y in line.ys)
    is_near = memory_limit_bytes is not None and largest > memory_limit_bytes / 3
    return Chart(
        "Memory by step time",
        lines,
        "of the largest rank, over step time",
        bytes_text,
        bytes_text,
        axis_unit=float(2**30),
        wide=True,
        horizontal_lines=[("memory limit", memory_limit_bytes)]
        if memory_limit_bytes is not None and is_near
        else [],
        x_ticks=AxisScale(min(xs), max(*xs, 1.001 * min(xs)), 0.0, 1.0).ticks(),
        x_text=_tick_text,
        tooltip_text=lambda bucket: f"{duration_text(bucket.center)} per step",
        note="No other plan is both faster and smaller than a plan of the front.",
    )


def _tick_text(seconds: float) -> str:
    """Return a time with as many digits as neighbouring ticks of an axis need."""
    return f"{1000 * seconds:.4g} ms" if seconds < 1 else f"{seconds:.4g} s"


def _plan_points(name: str, colour: int, plans: Iterable[Candidate], *, is_joined: bool) -> Series:
    ordered = sorted(plans, key=lambda candidate: candidate.seconds)
    xs = [candidate.seconds for candidate in ordered]
    ys = [float(candidate.memory_bytes) for candidate in ordered]
    return Series(name, colour, xs, ys, marks_all_points=True, draws_line=is_joined)


def scale_charts(points: Sequence[ScalingPoint], workload: Workload | None) -> list[Chart]:
    """Return charts of throughput and efficiency by number of devices; none if no time is known."""
    timed = [
        (float(point.device_count), throughput(point.best.forecast, workload) or 0.0, point.efficiency)
        for point in points
        if point.best is not None and point.efficiency is not None
    ]
    if not timed:
        return []
    xs, rates, shares = ([entry[column] for entry in timed] for column in range(3))
    unit, counted = throughput_unit(workload), scaling_unit(points)
    charts = (
        Chart("Throughput", [Series(unit, 3, xs, rates, marks_all_points=True)], unit),
        Chart(
            "Efficiency",
            [Series(f"per {counted[:-1]}", 1, xs, shares, marks_all_points=True)],
            f"per {counted[:-1]}, relative to the fewest",
            percent_text,
            lambda share: f"{100 * share:.3g} %",
        ),
    )
    return [
        replace(
            chart,
            x_ticks=xs,
            x_text=lambda devices: f"{devices:,.0f}",
            x_is_log=len(xs) > 1,
            tooltip_text=lambda bucket: f"{bucket.center:,.0f} {counted}",
        )
        for chart in charts
    ]
