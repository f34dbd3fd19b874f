"""A run whose ranks wait, without computing, before a step that the test has not allowed."""

from __future__ import annotations

from pathlib import Path

from wanma.job.run.run_directory import RunDirectory, write_atomically
from wanma.report.run_report import read_report

ENDLESS = 100_000
FACTORY = "paced:Paced"
_MODEL = """
import time
from pathlib import Path
import torch
class Paced(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(512, 8)
        self.head = torch.nn.Linear(8, 512)
        self.forwards = 0
    def forward(self, tokens):
        self.forwards += not tokens.is_meta
        while self.forwards > int(Path({limit!r}).read_text()):
            time.sleep(0.02)
        return self.head(self.embedding(tokens))
"""


class Pace:
    """Number of forwards that each process of a rank may compute.

    Args:
        folder: working directory of the run, where its model is written.
        forwards: number at the beginning.
    """

    def __init__(self, folder: Path, forwards: int) -> None:
        self._limit = folder / "limit"
        (folder / "paced.py").write_text(_MODEL.format(limit=str(self._limit)))
        self.allow(forwards)

    def allow(self, forwards: int = ENDLESS) -> None:
        self._allowed = forwards
        write_atomically(self._limit, f"{forwards}")

    def allow_more(self, forwards: int) -> None:
        self.allow(self._allowed + forwards)


def last_start(run: RunDirectory, nodes: int, starts: int) -> tuple[int, bool]:
    """Return the nodes of the newest start, 0 before, and True if so many nodes compute after so many starts.

    Then every rank has finished a step, which another one records: before, a loss ends the run.
    """
    report = read_report(run)
    if not report.starts:
        return 0, False
    start = report.starts[-1]
    steps = list(report.steps["step"]) if run.metrics.exists() else []
    is_reached = start["nodes"] == nodes and len(report.starts) >= starts
    return int(start["nodes"]), is_reached and bool(steps) and steps[-1] >= start["step"] + 2
