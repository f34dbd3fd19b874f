"""Pages of the dashboard, made of the components of the report."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from html import escape
from pathlib import Path
from urllib.parse import quote, urlencode

from wanma.job.run.run_directory import RunDirectory, read_tail
from wanma.observe.units import bytes_text, duration_text, number_text, percent_text
from wanma.report.components.heat_map import heat_map
from wanma.report.components.html_elements import card, document, table_header, table_row
from wanma.report.components.line_chart import Chart, Series, chart_figure
from wanma.report.rank_work import RankWindows, read_rank_windows
from wanma.report.report_page import flat_values, log_list, report_parts
from wanma.report.run_report import Report, RunState, read_report
from wanma.report.script_run import ScriptRun, read_script_run, script_cells, script_summary

LOG_TAIL_BYTES = 1 << 14
"""Bytes of a rank's log that a page shows."""
COMPARED_KEYS = {
    "loss": "loss",
    "tokens_per_second": "throughput",
    "step_seconds": "seconds per step",
    "grad_norm": "gradient norm",
    "learning_rate": "learning rate",
    "mfu": "MFU",
    "memory_bytes": "memory",
}
"""Columns of which a comparison has a chart each, with their titles."""
MAX_COMPARED = 12
"""Most runs of one comparison: as many as there are colours."""


def runs_page(runs: Sequence[RunDirectory], folder: Path) -> str:
    """Return the page with all runs of a folder, newest first."""
    numbers = ("steps", "loss", "throughput", "MFU", "memory", "last activity")
    rows = "".join(_run_row(run) for run in runs)
    heads = table_header(("", "run", "state", *numbers), numbers)
    body = (
        f'<form action="compare"><table class="runs">{heads}{rows}</table>'
        '<p><button class="switch">compare</button></p></form>'
        if runs
        else "<p>There are no runs here yet; <code>wanma train JOB</code> makes one.</p>"
    )
    header = f"<header><h1>Runs</h1><p class=facts>{escape(str(folder))}</p></header>"
    return document("runs", [header, f'<section class="card">{body}</section>'], changes="events")


def _run_row(run: RunDirectory) -> str:
    if (script := read_script_run(run)) is not None:  # without steps to compare
        return _row(run.name, script.state, script_cells(script), is_comparable=False)
    report = read_report(run, tail_only=True)
    age = f"{duration_text(time.time() - report.last_activity)} ago" if report.last_activity else "–"
    cells = (
        f"{report.last_step:,}/{report.total_steps:,}",
        number_text(report.last("loss")),
        f"{number_text(report.median('tokens_per_second'))} {report.throughput_unit}",
        percent_text(report.median("mfu")),
        bytes_text(report.highest("memory_bytes")),
        age,
    )
    return _row(run.name, report.state, cells, is_comparable=True)


def _row(run: str, state: RunState, cells: Sequence[str], *, is_comparable: bool) -> str:
    name = escape(run)
    box = f'<input type="checkbox" name="run" value="{name}" aria-label="compare {name}">'
    numbers = "".join(f'<td class="n">{escape(cell)}</td>' for cell in cells)
    return (
        f'<tr><td>{box if is_comparable else ""}</td><td><a href="runs/{quote(run)}/">{name}</a></td>'
        f'<td><span class="state {state}">{state}</span></td>{numbers}</tr>'
    )


def run_page(report: Report, diagnosis: str) -> str:
    """Return the page of one run, with the text of `wanma diagnose`."""
    back = '<nav><a href="../../">all runs</a></nav>'
    header, problems, *others = report_parts(report)
    parts = [back, header, problems, card("Diagnosis", f"<pre>{escape(diagnosis)}</pre>")]
    parts += [*others[:-2], _ranks(report), *others[-2:]]
    return document(report.run.name, parts, changes=f"../../events?{urlencode({'run': report.run.name})}")


def script_page(script: ScriptRun) -> str:
    """Return the page of a script of `wanma launch` without a session: its summary and logs."""
    name, state = script.run.name, script.state
    parts = [
        '<nav><a href="../../">all runs</a></nav>',
        f'<header><h1>{escape(name)} <span class="state {state}">{state}</span></h1></header>',
        card("Script", f"<pre>{escape(script_summary(script))}</pre>"),
    ]
    if logs := log_list(script.run):
        parts.append(card("Logs", logs))
    return document(name, parts, changes=f"../../events?{urlencode({'run': name})}")


def _ranks(report: Report) -> str:
    """Render the work of each rank over time, phase by phase, and the newest values."""
    windows = read_rank_windows(report.run)
    if not windows:
        return ""
    whole = {work.name: work.work_seconds for work in windows}
    phases = {
        "Computation": {work.name: work.compute_seconds for work in windows},
        "Waiting for data": {work.name: work.data_seconds for work in windows},
    }
    maps = (
        f"<p>{phase}</p>{heat_map(rows, lambda seconds: f'{duration_text(seconds)} a step', whole)}"
        for phase, rows in phases.items()
    )
    title = "Work of a step by rank and phase, without waits for others"
    return card(title, "".join(maps) + _rank_table(windows))


def _rank_table(windows: Sequence[RankWindows]) -> str:
    columns = ("compute", "data", "processors", "memory")
    # NaN, of a rank without a step, sorts as -1.
    rows = "".join(
        table_row(
            escape(work.name),
            duration_text(work.compute_seconds[-1]),
            duration_text(work.data_seconds[-1]),
            number_text(work.cores),
            bytes_text(work.memory_bytes),
        )
        for work in sorted(windows, key=lambda work: max(-1.0, work.work_seconds[-1]), reverse=True)[:16]
    )
    return f"<table>{table_header(('slowest first', *columns), columns)}{rows}</table>"


def comparison_page(reports: Sequence[Report]) -> str:
    """Return the page that compares runs, each in a colour of its own."""
    names = ", ".join(report.run.name for report in reports)
    charts = []
    for key, title in COMPARED_KEYS.items():
        lines = [
            Series(report.run.name, number, report.steps["step"], report.steps[key])
            for number, report in enumerate(reports, 1)
            if key in report.steps
        ]
        if any(math.isfinite(value) for line in lines for value in line.ys):
            is_loss = key == "loss"
            charts.append(chart_figure(Chart(title, lines, from_zero=not is_loss, offers_log_scale=is_loss)))
    validations = []
    for number, report in enumerate(reports, 1):
        known = [event for event in report.validations if event.get("loss") is not None]
        steps, losses = ([float(event[key]) for event in known] for key in ("step", "loss"))
        validations.append(Series(report.run.name, number, steps, losses, marks_all_points=True))
    if any(line.ys for line in validations):
        charts.insert(1, chart_figure(Chart("validation loss", validations, from_zero=False)))
    query = urlencode([("run", report.run.name) for report in reports])
    parts = [
        '<nav><a href="./">all runs</a></nav>',
        f"<header><h1>Compare</h1><p class=facts>{escape(names)}</p></header>",
        _settings(reports),
        f'<section class="charts">{"".join(charts)}</section>',
    ]
    return document(f"compare {names}", parts, changes=f"events?{query}")


def _settings(reports: Sequence[Report]) -> str:
    """Render the settings in which the runs differ."""
    flat = [dict(flat_values(report.job)) for report in reports]
    keys = [key for key in dict.fromkeys(key for values in flat for key in values) if key != "observe.name"]
    differing = [key for key in keys if len({values.get(key, "–") for values in flat}) > 1]
    cells = ((key, *(values.get(key, "–") for values in flat)) for key in differing[:60])
    rows = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in cells)
    heads = table_header(("", *(report.run.name for report in reports)))
    return card("Settings that differ", f"<table>{heads}{rows}</table>") if rows else ""


def log_page(run: RunDirectory, rank: int, text: str) -> str:
    """Return the page that shows the end of a rank's log and follows it."""
    back = f'<nav><a href="../">{escape(run.name)}</a></nav>'
    path = escape(str(run.rank_log(rank)))
    header = f"<header><h1>Log of rank {rank}</h1><p class=facts>{path}</p></header>"
    query = urlencode({"run": run.name, "rank": rank})
    log = f'<section class="card"><pre>{escape(text)}</pre></section>'
    return document(f"log of rank {rank}", [back, header, log], changes=f"../../../events?{query}")


def log_text(run: RunDirectory, rank: int) -> str | None:
    """Return the end of a rank's log; None: there is none here."""
    try:
        return read_tail(run.rank_log(rank), LOG_TAIL_BYTES).decode(errors="replace")
    except OSError:
        return None
