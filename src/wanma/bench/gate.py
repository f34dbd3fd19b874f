"""Gate between two commits: the same contenders with the code of each, in turns."""

from __future__ import annotations

import io
import os
import shutil
import tarfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from wanma.bench.benchmark import TREES, open_directory, run_benchmark
from wanma.bench.figures.summary import judge_metric
from wanma.bench.figures.texts import step_size_text
from wanma.bench.meter.disturbance import DisturbanceLimits
from wanma.bench.programs.contender import Contender
from wanma.bench.programs.places import TREES as TREES_WORD
from wanma.bench.programs.places import word
from wanma.bench.results.directory import ResultDirectory
from wanma.bench.results.result import BenchmarkResult
from wanma.bench.runner import Rule
from wanma.bench.statistics.ratios import ERROR_RATE
from wanma.bench.statistics.verdicts import Outcome, Verdict
from wanma.bench.suites.suite_file import Suite
from wanma.engines.code.git import NoRepositoryError, repository_root, run_git
from wanma.job.errors import EXIT_USAGE, WanmaError

DEFAULT_METRICS = ("step_seconds", "samples_per_second", "total_seconds")
"""Metrics of which the first that all executions have decides; the step time only between equal steps."""
TREE_NAME = 12
"""Digits of a commit's hash in the name of the folder of its files."""


@dataclass(frozen=True)
class GateFinding:
    """Verdict on one contender: the later commit beside the earlier one."""

    contender: str
    metric: str
    verdict: Verdict | None
    """None: one of the commits has no figure, or their steps have other numbers of samples."""
    failures: int
    """Executions of the later commit that failed."""
    step_size: str = ""
    """Samples of the later commit's steps, if the step time cannot be judged by them; empty: it can."""

    @property
    def is_refused(self) -> bool:
        """Return True if the later commit is slower or fails, or if nothing can be said."""
        if self.failures or self.verdict is None or not self.verdict.ratio.has_interval:
            return True
        return self.verdict.outcome is Outcome.SLOWER

    def __str__(self) -> str:
        text = str(self.verdict or self.step_size or "no figures of both commits")
        failed = f"; {self.failures} executions of the later commit failed" if self.failures else ""
        return f"{self.contender}, {self.metric}: {text}{failed}"


def run_gate(
    suite: Suite,
    rule: Rule,
    commits: tuple[str, str],
    root: Path,
    *,
    folder: Path,
    metrics: Sequence[str] = (),
    limits: DisturbanceLimits,
    progress: Callable[[str], None],
    is_fresh: bool = False,
) -> tuple[BenchmarkResult, list[GateFinding], ResultDirectory]:
    """Measure the contenders of a suite with the code of two commits, and judge the second beside the first.

    Jobs run in the working directory of the caller, with the commit's code before all others; commands run in
    the commit's files.

    Args:
        commits: names of the commits, as git takes them: the earlier, the later.
        metrics: names of the metrics to be judged; default: the first of `DEFAULT_METRICS`.
        is_fresh: True begins a new result, even if one of this suite and these commits is unfinished.

    Raises:
        WanmaError: there is no repository or commit, or nothing could be measured.
    """
    try:
        repository = repository_root(folder)
    except NoRepositoryError as error:
        raise WanmaError(str(error), "run the gate in the repository of the commits", EXIT_USAGE) from error
    hashes = [resolve_commit(repository, commit) for commit in commits]
    if hashes[0] == hashes[1]:
        raise WanmaError(
            f"{commits[0]} and {commits[1]} are the same commit, {hashes[0][:10]}",
            "name two commits that differ",
            EXIT_USAGE,
        )
    both = replace(suite, digest=f"{suite.digest[:16]}-{hashes[0]}-{hashes[1]}")
    directory = open_directory(root, both, progress, is_fresh=is_fresh)
    try:
        trees = directory.path / TREES
        for commit in hashes:
            _unpack(repository, commit, trees / commit[:TREE_NAME])
        contenders = [
            _at_commit(contender, commit, trees) for contender in suite.contenders for commit in hashes
        ]
        both = replace(both, contenders=tuple(contenders))
        result = run_benchmark(both, rule, directory, limits=limits, progress=progress)
    finally:
        shutil.rmtree(directory.path / TREES, ignore_errors=True)
    names = [contender.name for contender in suite.contenders]
    return result, judge_commits(result, names, hashes, metrics), directory


def judge_commits(
    result: BenchmarkResult, names: Sequence[str], hashes: Sequence[str], metrics: Sequence[str]
) -> list[GateFinding]:
    """Return the verdict on each contender and metric, paired by round; errors are those of all together."""
    findings = []
    for name in names:
        both = [_name(name, commit) for commit in hashes]
        before, after = (result.values.get(one, {}) for one in both)
        counted = [len(result.measurements_of(one)) for one in both]
        failures = sum(bool(one.error) for one in result.measurements if one.contender == both[1])
        chosen = (
            metrics
            or [
                metric
                for metric in DEFAULT_METRICS
                if counted == [len(before.get(metric, {})), len(after.get(metric, {}))] != [0, 0]
                and not step_size_text(result, both[1], metric, (result, both[0]))
            ][:1]
        )
        for metric in chosen or DEFAULT_METRICS[:1]:
            step_size = step_size_text(result, both[1], metric, (result, both[0]))
            verdict = judge_metric(
                metric,
                (result, both[0]),
                (result, both[1]),
                is_paired=True,
                error_rate=ERROR_RATE / (len(names) * max(len(chosen), 1)),
            )
            findings.append(GateFinding(name, metric, verdict, failures, step_size))
    return findings


def resolve_commit(root: Path, name: str) -> str:
    """Return the hash of a commit.

    Raises:
        WanmaError: there is none of this name.
    """
    output = run_git(
        root, "rev-parse", "--verify", "--quiet", f"{name}^{{commit}}", accepted_exit_codes=(0, 1)
    )
    if not output.text.strip():
        raise WanmaError(f"there is no commit '{name}' in {root}", "see `git log --oneline`", EXIT_USAGE)
    return output.text.decode().strip()


def _unpack(root: Path, commit: str, folder: Path) -> None:
    """Write the files of a commit into a new folder."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    archive = run_git(root, "archive", "--format=tar", commit).text
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(folder, filter="data")


def _at_commit(contender: Contender, commit: str, trees: Path) -> Contender:
    """Return the contender with the code of a commit, whose files are in a folder below `trees`."""
    tree, place = trees / commit[:TREE_NAME], f"{word(TREES_WORD)}/{commit[:TREE_NAME]}"
    paths = [f"{place}/src"] if (tree / "src").is_dir() else []
    paths += [path for path in (place, contender.environment.get("PYTHONPATH", "")) if path]
    return replace(
        contender,
        name=_name(contender.name, commit),
        environment={**contender.environment, "PYTHONPATH": os.pathsep.join(paths)},
        folder=place if contender.kind == "command" else "",
    )


def _name(contender: str, commit: str) -> str:
    return f"{contender} @ {commit[:10]}"
