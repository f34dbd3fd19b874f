"""Cache of reports: of a run whose records have grown, only what is new is read."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path

from wanma.job.run.run_directory import RunDirectory
from wanma.report.run_report import Report, StepTable, read_report

MAX_RUNS = 16
"""Most runs whose steps are kept in memory."""

Stamp = tuple[tuple[int, int], ...]
"""Sizes and times of a run's files, which tell whether it has changed."""


class ReportCache:
    """Cache of the reports of some runs; its methods may be called from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: OrderedDict[Path, tuple[Stamp, StepTable, Report]] = OrderedDict()

    def read(self, run: RunDirectory) -> Report:
        """Return the report of a run, as its directory has it now."""
        with self._lock:
            stamp, known = run_stamp(run), self._known.pop(run.path, None)
            # A run that is over stays as it is; one that lives changes its state with the time, too.
            if known is None or known[0] != stamp or known[2].state == "running":
                table = StepTable(run.metrics) if known is None else known[1]
                known = (stamp, table, read_report(run, table=table))
            self._known[run.path] = known
            if len(self._known) > MAX_RUNS:
                self._known.popitem(last=False)
            return known[2]


def run_stamp(run: RunDirectory) -> Stamp:
    """Return sizes and times of the files of a run that change during it."""
    return file_stamps([run.metrics, run.events, run.job, run.plan, run.node_usage(0)])


def file_stamps(paths: Iterable[Path]) -> Stamp:
    """Return sizes and times of files, zeros of one that is missing."""
    stamps = []
    for path in paths:
        try:
            state = path.stat()
        except OSError:
            stamps.append((0, 0))
        else:
            stamps.append((state.st_size, state.st_mtime_ns))
    return tuple(stamps)
