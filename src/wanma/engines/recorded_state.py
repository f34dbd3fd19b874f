"""State of a run by its records in the run directory, for engines whose schedulers forget it."""

from __future__ import annotations

from wanma.job.run.run_directory import RunDirectory
from wanma.report.run_report import RunState, read_report
from wanma.report.script_run import read_script_run


def read_recorded_state(run: RunDirectory) -> tuple[RunState, str, float]:
    """Return the state of a run by its records, its failure, and their time in unix seconds.

    That is the start of a script, which has one record, and the newest event of a training.
    """
    if (script := read_script_run(run)) is not None:
        return script.state, script.failure, script.started
    if run.job.is_file():
        report = read_report(run, tail_only=True)
        newest = max((float(event["time"]) for event in report.events), default=0.0)
        return report.state, report.failure or report.failed_start, newest
    return "new", "", 0.0
