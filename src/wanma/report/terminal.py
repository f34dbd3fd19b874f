"""Summary of a run, and table of runs, for the terminal."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wanma.job.errors import first_names
from wanma.job.forecast.forecast import MEMORY_KINDS
from wanma.job.run.run_directory import RunDirectory
from wanma.observe.console.progress import DownsampledSeries, sparkline
from wanma.observe.units import bytes_text, duration_text, number_text, percent_text
from wanma.report.exposed_communication import exposed_communication, exposed_communication_text
from wanma.report.forecast_comparison import forecast_comparison_sentence, rank_memory_comparisons
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
from wanma.report.run_report import Report, RunState, read_report
from wanma.report.script_run import read_script_run, script_cells

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

STATE_STYLES = {
    "new": "dim",
    "pending": "dim",
    "cancelled": "yellow",
    "unknown": "yellow",
    "running": "cyan",
    "finished": "green",
    "interrupted": "yellow",
    "aborted": "yellow",
    "failed": "red",
    "crashed": "red",
}
SPARKLINE_WIDTH = 60
MAX_SHOWN_MESSAGES = 10
MAX_SHOWN_RANKS = 8


@dataclass(frozen=True)
class Placement:
    """Engine of a submitted run, and the run's state as the engine knows it."""

    state: str
    place: str
    """Engine and its name of the run, such as 'slurm 4711'."""
    has_silent_hosts: bool = False
    """True if the state is unknown as hosts of the run, which write its records, do not answer."""

    def overrules(self, recorded: RunState) -> bool:
        """Return True if the engine knows better than the records, which a lost run no longer writes."""
        ended = recorded in ("finished", "interrupted", "aborted", "failed")
        known = self.state in ("finished", "failed", "cancelled", "running") or self.has_silent_hosts
        return self.state == "pending" or (known and not ended)


def run_summary(report: Report) -> str:
    """Return the summary of a run beside its forecast: plain text of some twenty lines."""
    lines = [f"{report.run.name}: {state_sentence(report)}", f"  {report.run.path}"]
    if report.failure:
        lines += [f"  {line}" for line in report.failure.splitlines()]
    if described := [text for text in (report.plan_text, parameter_count_text(report)) if text]:
        lines.append("  " + ", ".join(described))
    if report.steps["step"]:
        curve = DownsampledSeries()
        for loss in report.steps.get("loss", []):
            if loss == loss:  # not NaN
                curve.add(loss)
        lines += ["", f"  loss  {sparkline(curve.points, SPARKLINE_WIDTH)}"]
        tiles = key_figures(report)
        width = max(len(tile.label) for tile in tiles)
        for tile in tiles:
            note = f"  ({tile.note})" if tile.note else ""
            lines.append(f"  {tile.label:<{width}}  {tile.value}{note}")
        lines += _phase_lines(report) + _forecast_lines(report)
    else:
        log = report.run.rank_log(0)  # missing where the ranks were never started
        see_log = f" See its logs: {log}" if log.exists() else ""
        lines += ["", f"  This run has no metrics: no step was finished.{see_log}"]
    if report.checkpoints:
        lines += ["", f"  last: {event_text(report.checkpoints[-1])}"]
    if report.recoveries:
        lines += [
            "",
            *(
                textwrap.indent(event_text(recovery), "  ")
                for recovery in report.recoveries[-MAX_SHOWN_MESSAGES:]
            ),
        ]
    if report.failed_start:
        lines += [
            "",
            f"  {FAILED_START_TEXT}:",
            *(f"    {line}" for line in report.failed_start.splitlines()),
        ]
    messages = [event for event in report.events if event.get("level") in ("warning", "error")]
    if messages:
        lines += [
            "",
            *(f"  {event['level']}: {event_text(event)}" for event in messages[-MAX_SHOWN_MESSAGES:]),
        ]
    lines += [f"  could not be read: {problem}" for problem in report.problems]
    return "\n".join(lines)


def runs_table(runs: Iterable[RunDirectory], placements: Mapping[Path, Placement] | None = None) -> Table:
    """Return a table with one line per run; reads only the end of each run's metrics.

    Args:
        runs: run directories.
        placements: engines of the submitted runs, by run directory; None: no run was submitted.
    """
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("run", overflow="fold")
    table.add_column("state", no_wrap=True)
    for name in ("steps", "loss", "tokens/s", "MFU", "memory", "last activity"):
        # On a narrow terminal these columns wrap too, not only the names.
        table.add_column(name, justify="right", no_wrap=name not in ("steps", "last activity"))
    if placements:
        table.add_column("engine", overflow="fold")
    for run in runs:
        placement = (placements or {}).get(run.path)
        places = [placement.place if placement is not None else "–"] if placements else []
        if (script := read_script_run(run)) is not None:
            state = _state_cell(script.state, placement)
            table.add_row(Text(run.name), state, *script_cells(script), *places)
            continue
        report = read_report(run, tail_only=True)
        age = duration_text(time.time() - report.last_activity) + " ago" if report.last_activity else "–"
        table.add_row(
            Text(run.name),
            _state_cell(report.state, placement),
            f"{report.last_step:,}/{report.total_steps:,}",
            number_text(report.last("loss")),
            number_text(report.median("tokens_per_second"))
            + (f" {report.throughput_unit}" if report.throughput_unit != "tokens/s" else ""),
            percent_text(report.median("mfu")),
            bytes_text(report.highest("memory_bytes")),
            age,
            *places,
        )
    return table


def run_json(
    run: RunDirectory, placement: Placement | None = None, *, tail_only: bool = False
) -> dict[str, Any]:
    """Return a run in a form for JSON: state, steps and figures, None where unknown; bytes and seconds.

    Args:
        run: the run directory.
        placement: engine of a submitted run.
        tail_only: read only the last steps, for lists of many runs.
    """
    script = read_script_run(run)
    report = None if script is not None else read_report(run, tail_only)
    recorded: RunState = script.state if script is not None else report.state if report is not None else "new"
    state = placement.state if placement is not None and placement.overrules(recorded) else recorded
    common = {"run": run.name, "path": str(run.path), "state": state}
    if report is None:
        assert script is not None
        figures = {"script": script.script, "exit_code": script.exit_code, "failure": script.failure}
        return {
            **common,
            **figures,
            "metrics": dict(script.newest_metrics),
            "last_activity": script.last_activity,
        }
    best = report.best_validation
    return {
        **common,
        "failure": report.failure,
        "step": report.last_step,
        "steps": report.total_steps,
        "plan": report.plan_text,
        "loss": report.last("loss"),
        "best_validation": None if best is None else {"step": best["step"], "loss": best["loss"]},
        "rate": report.median("tokens_per_second"),
        "rate_unit": report.throughput_unit,
        "step_seconds": report.median("step_seconds"),
        "mfu": report.median("mfu"),
        "memory_bytes": report.highest("memory_bytes"),
        "last_activity": report.last_activity,
    }


def _state_cell(recorded: RunState, placement: Placement | None) -> Text:
    """Return the state by the records, or by the engine of a submitted run where that knows better."""
    from rich.text import Text

    name: str = recorded
    if placement is not None and placement.overrules(recorded):
        name = placement.state
    return Text(name, STATE_STYLES.get(name, ""))


def _phase_lines(report: Report) -> list[str]:
    shares = phase_times(report)
    total = sum(share.seconds for share in shares)
    parts = ", ".join(f"{share.name} {100 * share.seconds / total:.0f} %" for share in shares)
    if not shares:
        return []
    waited = ", ".join(exposed_communication_text(part) for part in exposed_communication(report))
    return [
        f"  time: {parts}",
        *(f"  {text}" for text in (data_loading_text(report), store_traffic_text(report)) if text),
        *([f"  exposed communication, median step: {waited}"] if waited else []),
    ]


def _rank_lines(report: Report) -> list[str]:
    ranks = rank_memory_comparisons(report)
    if len(ranks) < 2:
        return []
    texts = []
    for comparison in ranks:
        forecast, measured, deviation = comparison.texts
        texts.append(f"{comparison.name.removeprefix('memory of ')} {measured} / {forecast} ({deviation})")
    return [f"  memory by rank, measured / forecast: {first_names(texts, MAX_SHOWN_RANKS)}"]


def _forecast_lines(report: Report) -> list[str]:
    """Return lines on deviations from the forecast, or the forecast alone where nothing was measured."""
    if sentence := forecast_comparison_sentence(report):
        return [f"  measured / forecast: {sentence}", *_rank_lines(report)]
    if not report.forecast.get("memory_bytes"):
        return []
    parts = ", ".join(
        f"{label} {bytes_text(report.forecast.get(key))}"
        for key, label in MEMORY_KINDS.items()
        if report.forecast.get(key)
    )
    return [f"  memory forecast: {bytes_text(report.forecast['memory_bytes'])} ({parts})"]
