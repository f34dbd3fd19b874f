"""Charts of a plan's HTML page: one step, memory against time, and throughput by number of devices."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from wanma.job.forecast.forecast import Workload
from wanma.job.plan.plan import Plan
from wanma.observe.units import bytes_text, duration_text, share_text
from wanma.planner.explain.scaling import ScalePoint
from wanma.planner.explain.timeline import Span, SpanKind, Timeline
from wanma.planner.presentation.formatting import rate, rate_unit, spread
from wanma.planner.search.result import Candidate, Found
from wanma.report.components.axis import Scale
from wanma.report.components.gantt_chart import Interval, Row, rows_figure
from wanma.report.components.line_chart import Chart, Line

SHOWN_RANKS = 16
"""Maximum pipeline ranks in the chart of a step; of more, evenly spread ones with both ends."""

SPAN_COLOURS: dict[SpanKind, int] = {
    "forward": 1,
    "backward": 3,
    "weights": 6,
    "gather": 4,
    "reduce": 4,
    "optimizer": 5,
    "snapshot": 7,
    "load": 7,
}
"""Colour number of each kind of span; other kinds are not drawn."""
EXPOSED_COLOUR = 2


def step_figure(steps: Timeline) -> str:
    """Return the chart of one step, a row for each pipeline rank, as an HTML `<figure>`."""
    plan, pp = steps.plan, steps.plan.pp
    shown = spread(pp, SHOWN_RANKS)
    rows: list[Row] = []
    for rank in shown:
        mine = [span for span in steps.spans if span.rank == rank]
        rows.append(Row(_rank_name(rank, plan), [*_intervals(mine, "compute"), *_exposed(mine)]))
        if exchanged := list(_intervals(mine, "exchange")):
            rows.append(Row("", exchanged, is_thin=True))
    kinds = {span.kind for span in steps.spans}
    legend: list[tuple[str, int]] = [(kind, SPAN_COLOURS[kind]) for kind in SPAN_COLOURS if kind in kinds]
    if any(span.parts.keys() - {"compute"} for span in steps.spans):
        legend.append(("of it exposed communication", EXPOSED_COLOUR))
    count = f"{steps.micro_batches:,} micro-batch{'' if steps.micro_batches == 1 else 'es'}"
    notes = [f"{count}, {duration_text(steps.seconds)}."]
    if pp > 1:
        notes.append("A row is a pipeline rank, with all data, context and tensor ranks of its stages.")
    if len(shown) < pp:
        notes.append(f"{len(shown)} of {pp} pipeline ranks are drawn.")
    if any(row.is_thin for row in rows):
        notes.append("Thin rows: weights gathered and gradients reduced beside computing.")
    return rows_figure("One step", rows, steps.seconds, legend, " ".join(notes))


def _rank_name(rank: int, plan: Plan) -> str:
    if plan.pp == 1:
        return "every rank"
    numbers = plan.stages_of(rank)
    return f"stage {', '.join(map(str, numbers[:2]))}{'…' if len(numbers) > 2 else ''}"


def _intervals(spans: Iterable[Span], track: str) -> Iterator[Interval]:
    for span in spans:
        if span.track == track and span.kind in SPAN_COLOURS:
            text = f"{_name(span)}: {duration_text(span.seconds)}"
            yield Interval(span.start, span.seconds, SPAN_COLOURS[span.kind], text)


def _exposed(spans: Iterable[Span]) -> Iterator[Interval]:
    """Yield the exposed communication of forwards and backwards, drawn at their ends for simplicity."""
    for span in spans:
        exposed = sum(seconds for part, seconds in span.parts.items() if part != "compute")
        if exposed > 0:
            parts = ", ".join(f"{part} {duration_text(seconds)}" for part, seconds in span.parts.items())
            yield Interval(
                span.end - exposed, exposed, EXPOSED_COLOUR, f"{_name(span)}: {parts}", is_part=True
            )


def _name(span: Span) -> str:
    """Return the name of a span, such as 'forward 3 of stage 0'."""
    number = "" if span.micro_batch is None else f" {span.micro_batch}"
    return f"{span.kind}{number}" + ("" if span.stage is None else f" of stage {span.stage}")


def front_chart(found: Found, limit: float | None) -> Chart:
    """Return the chart of the Pareto front of memory and time, with other layouts up to twice its time.

    Args:
        limit: memory in bytes that a plan may fill.
    """
    front = sorted(found.pareto, key=lambda one: one.seconds)
    farthest = 2 * front[-1].seconds
    others = [one for one in found.candidates if one not in found.pareto and one.seconds <= farthest]
    lines = [_points("front", 1, front, is_joined=True)]
    if others:
        lines.append(_points("other layouts", 7, others, is_joined=False))
    xs = [x for line in lines for x in line.xs]
    largest = max(y for line in lines for y in line.ys)
    is_near = limit is not None and largest > limit / 3
    return Chart(
        "Memory against time",
        lines,
        "of the fullest rank, over the time of a step",
        bytes_text,
        bytes_text,
        axis_unit=float(2**30),
        wide=True,
        limits=[("a plan may fill", limit)] if limit is not None and is_near else [],
        across_ticks=Scale(min(xs), max(*xs, 1.001 * min(xs)), 0.0, 1.0).ticks(),
        across_text=_tick_text,
        point_text=lambda bucket: f"{duration_text(bucket.middle)} a step",
        note="No plan is both faster and smaller than one of the front.",
    )


def _tick_text(seconds: float) -> str:
    """Return a time with as many digits as neighbouring ticks of an axis need."""
    return f"{1000 * seconds:.4g} ms" if seconds < 1 else f"{seconds:.4g} s"


def _points(name: str, colour: int, plans: Iterable[Candidate], *, is_joined: bool) -> Line:
    ordered = sorted(plans, key=lambda one: one.seconds)
    xs, ys = [one.seconds for one in ordered], [float(one.memory_bytes) for one in ordered]
    return Line(name, colour, xs, ys, dots=True, is_joined=is_joined)


def scale_charts(points: Sequence[ScalePoint], workload: Workload | None) -> list[Chart]:
    """Return charts of throughput and efficiency by number of devices; none if no time is known."""
    timed = [
        (float(point.devices), rate(point.best.forecast, workload) or 0.0, point.efficiency)
        for point in points
        if point.best is not None and point.efficiency is not None
    ]
    if not timed:
        return []
    xs, rates, shares = ([one[column] for one in timed] for column in range(3))
    unit = rate_unit(workload)
    drawn = (
        Chart("Throughput", [Line(unit, 3, xs, rates, dots=True)], unit),
        Chart(
            "Efficiency",
            [Line("per device", 1, xs, shares, dots=True)],
            "of a device, next to the fewest",
            share_text,
            lambda share: f"{100 * share:.3g} %",
        ),
    )
    return [
        replace(
            chart,
            across_ticks=xs,
            across_text=lambda devices: f"{devices:,.0f}",
            across_is_log=len(xs) > 1,
            point_text=lambda bucket: f"{bucket.middle:,.0f} devices",
        )
        for chart in drawn
    ]
