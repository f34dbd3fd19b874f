"""Error rates of `wanma bench gate`: commits that are 10 % or 5 % slower, and those that differ in a comment.

Each commit runs alone, or both live at once in turns.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from wanma.bench.gate import run_gate
from wanma.bench.meter.disturbance import DisturbanceLimits
from wanma.bench.runner import Rule
from wanma.bench.suites.suite_of_commands import suite_of_commands

SLOW_DOWNS = (0.1, 0.05, 0.0)
"""Planted extra CPU time of each step, as a share of the step; 0: only a comment differs."""
TRAIN = '''\
"""Gradient descent of a small network in NumPy, with its step times."""
import os
import time

os.environ["OPENBLAS_NUM_THREADS"] = "1"
import numpy as np

EXTRA = {extra}  # {note}
random = np.random.default_rng(0)
data, weights = random.normal(size=(192, 192)), [random.normal(size=(192, 192)) / 14 for _ in range(4)]
for step in range(60):
    began = time.perf_counter()
    for _ in range(2):
        layers = [data]
        for weight in weights:
            layers.append(np.tanh(layers[-1] @ weight))
        gradient = layers[-1] - data
        for index in range(len(weights) - 1, -1, -1):
            gradient = gradient * (1 - layers[index + 1] ** 2)
            change = layers[index].T @ gradient
            gradient = gradient @ weights[index].T
            weights[index] -= 1e-4 * change
    ended = time.perf_counter()
    while time.perf_counter() < ended + EXTRA * (ended - began):
        pass
    print("wanma step", "seconds", time.perf_counter() - began, flush=True)
'''


def sample_gate(
    folder: Path, *, slow_down: float, rounds: int, foreign_limit: float, turn_seconds: float = 0.0
) -> dict[str, object]:
    """Make a repository of two commits, run the gate once, and return its verdict.

    Args:
        folder: empty folder.
        slow_down: extra CPU time of the second commit's steps; 0 changes a comment.
        rounds: rounds of the gate.
        foreign_limit: CPUs of other programs that disturb an execution.
        turn_seconds: duration of a turn; 0: each commit runs alone.
    """
    repository = folder / "repository"
    repository.mkdir()
    _git(repository, "init", "--quiet")
    for number in (0, 1):
        extra = slow_down if number else 0.0
        (repository / "train.py").write_text(TRAIN.format(extra=extra, note=f"commit {number}"))
        _git(repository, "add", "--all")
        _git(repository, "commit", "--quiet", "--message", f"commit {number}")
    suite, _ = suite_of_commands([[sys.executable, "train.py"]], patterns={})
    rule = Rule(rounds=rounds, min_rounds=min(7, rounds), timeout_seconds=120.0, turn_seconds=turn_seconds)
    result, findings, directory = run_gate(
        suite,
        rule,
        ("HEAD~1", "HEAD"),
        folder / "results",
        folder=repository,
        limits=DisturbanceLimits(foreign_cpu=foreign_limit),
        progress=lambda _: None,
    )
    (finding,) = findings
    verdict = finding.verdict
    excluded = sum(not one.counts for one in result.measurements)
    shutil.rmtree(directory.path)
    return {
        "slow_down": slow_down,
        "is_refused": finding.is_refused,
        "outcome": None if verdict is None else verdict.outcome.value,
        "ratio": None if verdict is None else verdict.ratio.to_json(),
        "executions": len(result.measurements),
        "excluded": excluded,
        "foreign_cpu": max((one.machine.foreign_cpu or 0.0 for one in result.measurements), default=0.0),
    }


def _git(folder: Path, *words: str) -> None:
    identity: Sequence[str] = ("-c", "user.name=benchmark", "-c", "user.email=benchmark@localhost")
    subprocess.run(
        ["git", *identity, "-c", "commit.gpgsign=false", *words], cwd=folder, check=True, capture_output=True
    )
