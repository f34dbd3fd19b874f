"""HTML page of a run's report, `report.html`, without network requests.

Everything that comes from the run (names, job file, messages) is escaped where it enters the page.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from html import escape
from pathlib import Path
from typing import Any

from wanma.job.errors import WanmaError
from wanma.job.file.serialization import value_text
from wanma.job.forecast.forecast import MEMORY_KINDS
from wanma.job.run.run_directory import RunDirectory, write_atomically
from wanma.job.run.worker import Event
from wanma.observe.units import bytes_text, count_text, duration_text
from wanma.report.components.html_elements import (
    bar,
    bar_caption,
    card,
    document,
    key_figure_tiles,
    legend_entry,
    reason_list,
    table_header,
    table_row,
)
from wanma.report.components.line_chart import chart_figure
from wanma.report.exposed_communication import exposed_communication
from wanma.report.forecast_comparison import (
    MEMORY,
    forecast_comparison_sentence,
    forecast_comparisons,
    peak_memory_bytes,
    rank_memory_comparisons,
)
from wanma.report.key_figures import (
    FAILED_START_TEXT,
    data_loading_text,
    event_text,
    key_figures,
    parameter_count_text,
    phase_times,
    state_sentence,
    store_traffic_text,
)
from wanma.report.run_charts import run_charts
from wanma.report.run_report import Report, read_report

MAX_SHOWN_EVENTS = 200
MAX_SHOWN_RANKS = 64
NO_METRICS_HTML = (
    '<section class="empty"><b>This run has no metrics.</b> No step was finished; '
    "what each rank said is in its log.</section>"
)


def write_report(run: RunDirectory) -> Path:
    """Write `run.report` from the current content of the run directory.

    Raises:
        WanmaError: the page cannot be written.
    """
    text = render_report_page(read_report(run))
    try:
        write_atomically(run.report, text)
    except OSError as error:
        raise WanmaError(
            f"cannot write {run.report}: {error.strerror or error}",
            "make the run directory writable, or free disk space",
        ) from error
    return run.report


def render_report_page(report: Report) -> str:
    """Return the whole page as HTML."""
    return document(report.run.name, report_parts(report))


def report_parts(report: Report) -> list[str]:
    """Return the parts of the page as HTML."""
    return [
        _header(report),
        _problems(report),
        *([_key_figures(report), _charts(report)] if report.steps["step"] else [NO_METRICS_HTML]),
        _comparison(report),
        _details(report),
        _events(report),
    ]


def _header(report: Report) -> str:
    written = time.strftime("%Y-%m-%d %H:%M", time.localtime())
    started = (
        time.strftime("%Y-%m-%d %H:%M", time.localtime(report.starts[0]["time"]))
        if report.starts
        else "not started"
    )
    facts = " · ".join(
        escape(text)
        for text in (
            report.plan_text,
            parameter_count_text(report),
            f"started {started}",
            f"page written {written}",
        )
        if text
    )
    return (
        f'<header><h1>{escape(report.run.name)} <span class="state {report.state}">{report.state}</span></h1>'
        f"<p>{escape(state_sentence(report))}</p><p class=facts>{facts}</p></header>"
    )


def _problems(report: Report) -> str:
    """Render errors and unreadable files, before anything else."""
    texts = [report.failure] if report.failure else []
    texts += [f"{FAILED_START_TEXT}: {report.failed_start}"] if report.failed_start else []
    texts += [str(event.get("text", "")) for event in report.messages if event.get("level") == "error"]
    texts += [f"could not be read: {problem}" for problem in report.problems]
    return "".join(f'<p class="problem">{escape(text)}</p>' for text in texts)


def _key_figures(report: Report) -> str:
    return key_figure_tiles(key_figures(report))


def _charts(report: Report) -> str:
    return f'<section class="charts">{"".join(chart_figure(chart) for chart in run_charts(report))}</section>'


def _comparison(report: Report) -> str:
    """Render time and memory beside their forecasts, and time by phase."""
    parts = [_step_comparison(report), _memory(report), _phases(report), _exposed(report)]
    shown = "".join(part for part in parts if part)
    return f'<section class="pair">{shown}</section>' if shown else ""


def _step_comparison(report: Report) -> str:
    """Render the forecast and measured time of a step by phase."""
    lines = [comparison for comparison in forecast_comparisons(report) if comparison.name != MEMORY]
    if not lines:
        return ""
    rows = "".join(
        table_row(escape(comparison.name.replace("_", " and ")), *comparison.texts) for comparison in lines
    )
    head = table_header(("", "forecast", "measured", ""))
    return card(
        "Step time: forecast and measured",
        f"<table>{head}{rows}</table><p class=note>{escape(forecast_comparison_sentence(report))}</p>",
    )


def _memory(report: Report) -> str:
    forecast, peak = report.forecast, peak_memory_bytes(report)
    total = forecast.get("memory_bytes")
    if not total:
        return ""
    full = max(total, peak[0] if peak is not None else 0)
    named = enumerate(MEMORY_KINDS.items(), 1)
    kinds = [(colour, label, forecast.get(key, 0)) for colour, (key, label) in named]
    rows = "".join(
        table_row(legend_entry(label, colour), bytes_text(size)) for colour, label, size in kinds if size
    )
    parts = [
        bar((f"c{colour}", size / full) for colour, _, size in kinds),
        bar_caption("forecast, largest rank", bytes_text(total)),
    ]
    if peak is not None:
        measured, rank = peak
        parts += [
            bar([("measured", measured / full)]),
            bar_caption(f"measured, rank {rank}{_memory_source_text(report)}", bytes_text(measured)),
        ]
    parts.append(f"<table>{rows}</table>")
    parts.append(_ranks(report))
    parts.append(reason_list(forecast.get("reasons") or ()))
    return card("Memory: forecast and measured", "".join(parts))


def _memory_source_text(report: Report) -> str:
    return ", allocated by torch" if report.plan.get("device") == "cuda" else ""


def _ranks(report: Report) -> str:
    """Render each rank's memory beside its forecast, where there are several ranks."""
    ranks = rank_memory_comparisons(report)
    if len(ranks) < 2:
        return ""
    head = table_header(("", "forecast", "measured", ""))
    rows = "".join(
        table_row(comparison.name.removeprefix(f"{MEMORY} of "), *comparison.texts)
        for comparison in ranks[:MAX_SHOWN_RANKS]
    )
    hidden_count = len(ranks) - MAX_SHOWN_RANKS
    note = f"<p class=note>and {hidden_count} more ranks</p>" if hidden_count > 0 else ""
    return f"<table>{head}{rows}</table>{note}"


def _phases(report: Report) -> str:
    shares = phase_times(report)
    if not shares:
        return ""
    total = sum(share.seconds for share in shares)
    notes = [text for text in (data_loading_text(report), store_traffic_text(report)) if text]
    rows = "".join(
        table_row(
            legend_entry(share.name, share.colour),
            duration_text(share.seconds),
            f"{100 * share.seconds / total:.1f} %",
        )
        for share in shares
    )
    return card(
        "Step time by phase",
        bar((f"c{share.colour}", share.seconds / total) for share in shares)
        + bar_caption(count_text(len(report.steps["step"]), "recorded step"), duration_text(total))
        + f"<table>{rows}</table>"
        + "".join(f"<p class=note>{escape(note)}</p>" for note in notes),
    )


def _exposed(report: Report) -> str:
    """Render exposed and total communication of a median step."""
    kinds = exposed_communication(report)
    if not kinds:
        return ""
    head = table_header(("", "forecast", "exposed", "total", ""))
    rows = "".join(
        table_row(
            escape(kind.name),
            "–" if kind.forecast is None else duration_text(kind.forecast),
            duration_text(kind.exposed_seconds),
            duration_text(kind.total_seconds),
            "" if kind.exposed_share is None else f"{100 * kind.exposed_share:.0f} %",
        )
        for kind in kinds
    )
    return card("Communication of a median step, rank 0", f"<table>{head}{rows}</table>")


def _details(report: Report) -> str:
    parts = [
        ("Job", f"<pre>{escape(report.job_text)}</pre>" if report.job_text else ""),
        ("Plan", _table(report.plan)),
        ("Environment", _table(report.environment)),
        ("Logs", log_list(report.run)),
    ]
    cards = "".join(card(title, body) for title, body in parts if body)
    return f'<section class="pair details">{cards}</section>' if cards else ""


def log_list(run: RunDirectory) -> str:
    """Return links to the logs of a run's ranks, relative to its page; empty: there are none."""
    logs = sorted(run.path.glob("logs/rank-*.log"), key=lambda path: (len(path.name), path.name))
    links = "".join(f'<li><a href="logs/{escape(path.name)}">{escape(path.name)}</a></li>' for path in logs)
    return f"<ul>{links}</ul>" if links else ""


def _table(values: Mapping[str, Any]) -> str:
    rows = "".join(
        f"<tr><td>{escape(key)}</td><td>{escape(value)}</td></tr>" for key, value in flat_values(values)
    )
    return f"<table>{rows}</table>" if rows else ""


def flat_values(value: Any, name: str = "") -> Iterable[tuple[str, str]]:
    """Yield nested values as pairs of a dotted name ('devices.0.name') and text."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from flat_values(inner, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list) and any(isinstance(inner, dict | list) for inner in value):
        for index, inner in enumerate(value):
            yield from flat_values(inner, f"{name}.{index}")
    elif isinstance(value, list):
        yield name, " ".join(str(inner) for inner in value) or "none"
    else:
        yield name, value if isinstance(value, str) else value_text(value)


def _events(report: Report) -> str:
    if not report.events:
        return ""
    begin = report.events[0]["time"]
    shown = report.events[-MAX_SHOWN_EVENTS:]
    rows = "".join(_event_row(event, begin) for event in shown)
    left_out = len(report.events) - len(shown)
    note = f'<p class="note">{count_text(left_out, "earlier event")} in events.jsonl.</p>' if left_out else ""
    return f'<section class="card"><h2>Events</h2>{note}<table class="events">{rows}</table></section>'


def _event_row(event: Event, begin: float) -> str:
    level = escape(str(event.get("level", "info")))
    return (
        f'<tr class="{level}"><td class="n">+{duration_text(event["time"] - begin)}</td>'
        f"<td>{escape(event['kind'])}</td><td>{escape(event_text(event))}</td></tr>"
    )
