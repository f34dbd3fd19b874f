"""Output files of `wanma plan`: the HTML page, and the trace of one step for Perfetto."""

from __future__ import annotations

import json
from pathlib import Path

from wanma.api.plan_report.html_page import report_html
from wanma.job.errors import EXIT_USAGE, WanmaError
from wanma.job.run.run_directory import write_atomically
from wanma.planner.explain.timeline import chrome_trace
from wanma.planner.presentation.plan_analysis import PlanAnalysis


def write_page(report: PlanAnalysis, path: Path, title: str) -> None:
    """Write the HTML page.

    Raises:
        WanmaError: the file cannot be written.
    """
    _write(path, report_html(report, title))


def write_trace(report: PlanAnalysis, path: Path) -> None:
    """Write one step in the Trace Event Format, as JSON.

    Raises:
        WanmaError: the step's time is unknown, the plan has unequal replicas, or the file cannot be written.
    """
    if report.study.plan_result.plan.placement:
        raise WanmaError(
            f"--trace {path}: plans with unequal replicas are not supported",
            "plan for nodes of one kind, or remove --trace",
            EXIT_USAGE,
        )
    if report.timeline is None:
        reason = f": {report.study.time_unavailable_reason}" if report.study.time_unavailable_reason else ""
        raise WanmaError(
            f"--trace {path}: the plan has no step time forecast{reason}",
            "plan for devices of the catalogue (`wanma cluster --devices`)",
            EXIT_USAGE,
        )
    _write(path, json.dumps(chrome_trace(report.timeline), allow_nan=False))


def _write(path: Path, text: str) -> None:
    try:
        write_atomically(path, text)
    except OSError as error:
        reason = error.strerror or str(error)
        raise WanmaError(
            f"cannot write {path}: {reason}", "give a file in an existing folder", EXIT_USAGE
        ) from error
