"""Output files of `wanma plan`: the HTML page, and the trace of one step for Perfetto."""

from __future__ import annotations

import json
from pathlib import Path

from wanma.api.plan_report.html_page import answers_page
from wanma.job.errors import EXIT_USAGE, WanmaError
from wanma.job.run.run_directory import write_atomically
from wanma.planner.explain.timeline import chrome_trace
from wanma.planner.presentation.plan_analysis import Answers


def write_page(answers: Answers, path: Path, title: str) -> None:
    """Write the HTML page.

    Raises:
        WanmaError: the file cannot be written.
    """
    _write(path, answers_page(answers, title))


def write_trace(answers: Answers, path: Path) -> None:
    """Write one step in the Trace Event Format, as JSON.

    Raises:
        WanmaError: the step's time is unknown, the plan has unequal replicas, or the file cannot be written.
    """
    if answers.study.planned.plan.placement:
        raise WanmaError(
            f"--trace {path}: steps of replicas that are unlike each other are not drawn",
            "plan for one kind of machines",
            EXIT_USAGE,
        )
    if answers.timeline is None:
        because = f": {answers.study.untimed}" if answers.study.untimed else ""
        raise WanmaError(
            f"--trace {path}: there is no forecast of this plan's step{because}",
            "plan for devices whose rates are known (`wanma cluster --devices`)",
            EXIT_USAGE,
        )
    _write(path, json.dumps(chrome_trace(answers.timeline), allow_nan=False))


def _write(path: Path, text: str) -> None:
    try:
        write_atomically(path, text)
    except OSError as error:
        reason = error.strerror or str(error)
        raise WanmaError(
            f"cannot write {path}: {reason}", "name a file in a folder that is there", EXIT_USAGE
        ) from error
