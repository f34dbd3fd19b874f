"""Cache of reports: of a run whose records have grown, only what is new is read."""

from __future__ import annotations

import threading
from collections import OrderedDict
from pathlib import Path

from wanma.job.run.run_directory import RunDirectory
from wanma.report.run_report import Report, StepTable, read_report

MAX_RUNS = 32
"""Most runs whose steps are kept in memory."""

Stamp = tuple[tuple[int, int], ...]
"""Sizes and times of a run's files, which tell whether it has changed."""


class ReportCache:
    """Cache of the reports of some runs; its methods may be called from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tables: OrderedDict[Path, StepTable] = OrderedDict()
        self._reports: dict[Path, tuple[Stamp, Report]] = {}

    def read(self, run: RunDirectory) -> Report:
        """Return the report of a run, as its directory has it now."""
        with self._lock:
            stamp = run_stamp(run)
            known = self._reports.get(run.path)
            # A run that is over stays as it is; one that lives changes its state with the time, too.
            if known is not None and known[0] == stamp and known[1].state != "running":
                return known[1]
            table = self._tables.pop(run.path, None) or StepTable(run.metrics)
            self._tables[run.path] = table
            while len(self._tables) > MAX_RUNS:
                dropped, _ = self._tables.popitem(last=False)
                self._reports.pop(dropped, None)
            report = read_report(run, table=table)
            self._reports[run.path] = (stamp, report)
            return report


def run_stamp(run: RunDirectory) -> Stamp:
    """Return sizes and times of the files of a run that change during it."""
    stamps = []
    for path in (run.metrics, run.events, run.job, run.plan, run.node_usage(0)):
        try:
            state = path.stat()
        except OSError:
            stamps.append((0, 0))
        else:
            stamps.append((state.st_size, state.st_mtime_ns))
    return tuple(stamps)
