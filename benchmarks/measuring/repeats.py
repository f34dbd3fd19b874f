"""Repetition of a recorded suite: the ratios of further results beside the first one's intervals."""

from __future__ import annotations

from pathlib import Path

from benchmarks.suites.run import FOLDER, recorded_result
from wanma.bench.benchmark import reproduce
from wanma.bench.results.directory import ResultDirectory


def measure_again(suite: str, root: Path) -> list[dict[str, object]]:
    """Run the recorded result of a suite again, and return a row for each of its ratios.

    Args:
        suite: name of the suite.
        root: folder of the new result.
    """
    stored = ResultDirectory(FOLDER / recorded_result(suite).id)
    figures, _ = reproduce(stored, root, print)
    return [
        {
            "result": stored.id,
            "contender": figure.contender,
            "metric": figure.metric,
            "stored": figure.stored.to_json(),
            "new": None if figure.new is None else figure.new.to_json(),
            "decision": figure.decision.value,
        }
        for figure in figures
        if figure.is_ratio
    ]
