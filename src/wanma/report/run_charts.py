"""Charts of a run's report, with their series."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from wanma.observe.units import bytes_text, count_text, duration_text, number_text, percent_text
from wanma.report.components.axis import tick_text
from wanma.report.components.line_chart import Chart, Series
from wanma.report.forecast_comparison import forecast_step_of, rank_0_memory_forecast
from wanma.report.key_figures import PHASE_COLOURS
from wanma.report.run_report import Report


def run_charts(report: Report) -> list[Chart]:
    """Return the charts of a report that has steps, without charts that have no number."""
    charts = [
        _loss(report),
        _throughput(report),
        _phases(report),
        _memory(report),
        _gradient(report),
        _learning_rate(report),
        _mfu(report),
        Chart("GPU utilization", [_column(report, "gpu_utilization", "busy", 1)], "", percent_text, _percent),
        Chart("GPU power", [_column(report, "gpu_power_watts", "power", 2)], "W"),
    ]
    shown = [chart for chart in charts if any(math.isfinite(y) for line in chart.series for y in line.ys)]
    if shown and sum(not chart.wide for chart in shown) % 2:  # two charts in a row; a last odd one is wide
        shown[-1] = replace(shown[-1], wide=True)
    return shown


def _column(report: Report, key: str, name: str, colour: int) -> Series:
    return Series(name, colour, report.steps["step"], report.steps.get(key, []))


def _loss(report: Report) -> Chart:
    lines = [_column(report, "loss", "train", 1)]
    known = [event for event in report.validations if event.get("loss") is not None]
    if known:
        steps = [float(event["step"]) for event in known]
        lines.append(
            Series("validation", 2, steps, [float(event["loss"]) for event in known], marks_all_points=True)
        )
    resumes = [("resume", event.get("step", 0) + 0.5) for event in report.starts if event.get("step", 0) > 0]
    non_finite_steps = [("bad", float(step)) for step in report.non_finite]
    notes = []
    if resumes:
        notes.append("Dashed: the run resumed from a checkpoint.")
    if non_finite_steps:
        notes.append(
            f"Red: {count_text(len(non_finite_steps), 'step')} with a NaN or infinite number, "
            f"the first at {report.non_finite[0]:,}."
        )
    return Chart(
        "Loss",
        lines,
        wide=True,
        from_zero=False,
        offers_log_scale=True,
        vertical_lines=[*resumes, *non_finite_steps[:200]],
        note=" ".join(notes),
    )


def _throughput(report: Report) -> Chart:
    line = _column(report, "tokens_per_second", report.throughput_unit, 3)
    step = forecast_step_of(report)
    rate, seconds = report.median("tokens_per_second"), report.median("step_seconds")
    forecast = rate * seconds / step.seconds if step is not None and rate and seconds else None
    limits = _forecast_line(forecast, number_text)
    return Chart("Throughput", [line], report.throughput_unit, horizontal_lines=limits)


def _mfu(report: Report) -> Chart:
    limits = _forecast_line(report.forecast.get("model_flops_utilisation"), percent_text)
    line = _column(report, "mfu", "MFU", 3)
    return Chart("MFU", [line], "", percent_text, _percent, horizontal_lines=limits)


def _forecast_line(value: float | None, text: Callable[[float], str]) -> list[tuple[str, float]]:
    """Return the horizontal line of a forecast; empty where there is none."""
    return [] if not value else [(f"forecast {text(value)}", float(value))]


def _phases(report: Report) -> Chart:
    """Return the chart of step time by phase, without validation, which happens between steps."""
    lines = [
        _column(report, f"phases.{name}", name.replace("_", " and "), colour)
        for name, colour in PHASE_COLOURS.items()
        if name != "validation" and any(value > 0 for value in report.steps.get(f"phases.{name}", []))
    ]
    lines = lines or [_column(report, "step_seconds", "step", 1)]
    step = forecast_step_of(report)
    limits = _forecast_line(None if step is None else step.seconds, duration_text)
    return Chart("Step time by phase", lines, "s", duration_text, stacked=True, horizontal_lines=limits)


def _memory(report: Report) -> Chart:
    line = _column(report, "memory_bytes", "peak", 5)
    limits = _forecast_line(rank_0_memory_forecast(report), bytes_text)
    highest = max([report.highest("memory_bytes") or 1.0, *(value for _, value in limits)])
    unit = 1024.0 ** max(0, math.floor(math.log(highest, 1024)))
    return Chart("Memory", [line], "", bytes_text, bytes_text, axis_unit=unit, horizontal_lines=limits)


def _gradient(report: Report) -> Chart:
    clip = report.job.get("train", {}).get("gradient_clip", 0)
    line = _column(report, "grad_norm", "norm", 4)
    note = f"Clipped at {number_text(clip)}; the chart shows the norm before clipping." if clip else ""
    return Chart("Gradient norm", [line], offers_log_scale=True, note=note)


def _learning_rate(report: Report) -> Chart:
    return Chart("Learning rate", [_column(report, "learning_rate", "rate", 6)], axis_text=tick_text)


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"
