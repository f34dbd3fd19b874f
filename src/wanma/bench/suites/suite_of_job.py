"""Suite of a job, or of a suite file, with what the command line changes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from wanma.bench.runner import Rule, duration_seconds
from wanma.bench.suites.suite_file import (
    ContenderTable,
    Suite,
    SuiteFile,
    is_suite,
    make_suite,
    parse_over,
    read_suite_file,
)
from wanma.job.errors import EXIT_USAGE, WanmaError
from wanma.job.file.loading import load_job, parse_override

DEFAULT_STEPS = 60
"""Optimizer steps of an execution of a job for which nothing else is said."""


def read_suite_or_job(
    path: Path,
    *,
    overrides: Sequence[str] = (),
    over: Sequence[str] = (),
    baseline: str | None = None,
    target: str | None = None,
    steps: int | None = None,
    weak: bool = False,
    turns: str | None = None,
    is_smoke: bool = False,
    environments: Path | None = None,
    contenders: Sequence[str] = (),
) -> tuple[Suite, Rule]:
    """Return suite and rule of a suite file or a job file.

    Args:
        overrides: settings of all contenders, as KEY=VALUE.
        over: values of keys to be measured, as KEY=V,V.
        turns: duration of turns of contenders that live at once, such as "1s".
        contenders: names of the contenders of the suite that are measured; empty: all.

    Raises:
        WanmaError: a file or an argument is wrong.
    """
    file = with_contenders(read_suite_file_or_job(path, target), contenders)
    changes: dict[str, Any] = {"over": {**file.over, **parse_over(over)}}
    if baseline is not None:
        changes["baseline"] = baseline
    if target is not None or is_smoke:  # a suite in small does not reach its own
        changes["target"] = target
    if weak:
        changes["weak"] = True
    named = {"steps": steps, "turn_seconds": None if turns is None else duration_seconds(turns)}
    changes["rule"] = file.rule.model_copy(
        update={name: value for name, value in named.items() if value is not None}
    )
    if overrides:
        tables = file.contenders or [ContenderTable(name="" if changes["over"] else "job")]
        extra = override_settings(overrides)
        changes["contenders"] = [
            table.model_copy(update={"settings": {**table.settings, **extra}}) for table in tables
        ]
    file = file.model_copy(update=changes)
    suite = make_suite(
        path.stem,
        file,
        path.parent,
        source=str(path),
        overrides=overrides,
        is_smoke=is_smoke,
        environments=environments,
    )
    small = {"rounds": file.smoke.rounds, "steps": file.smoke.steps, "budget_seconds": None}
    return suite, file.rule.model_copy(update=small if is_smoke else {})


def with_contenders(file: SuiteFile, names: Sequence[str]) -> SuiteFile:
    """Return a suite with some of its listed contenders; no names: all.

    Raises:
        WanmaError: there is no contender of a name.
    """
    if not names:
        return file
    listed = {table.name: table for table in file.contenders}
    if unknown := [name for name in names if name not in listed]:
        raise WanmaError(
            f"--contender: the suite lists no '{unknown[0]}'",
            f"its contenders: {', '.join(listed) or 'none by name'}",
            EXIT_USAGE,
        )
    kept = [table for table in file.contenders if table.name in names]
    baseline = file.baseline if file.baseline in names or file.over else None
    return file.model_copy(update={"contenders": kept, "baseline": baseline})


def read_suite_file_or_job(path: Path, target: str | None = None) -> SuiteFile:
    """Return the suite of a suite file, or a suite of the job of a job file.

    Args:
        target: end of each execution, which then limits the steps of a job instead of `DEFAULT_STEPS`.

    Raises:
        WanmaError: the file is wrong.
    """
    if is_suite(path):
        return read_suite_file(path)
    job = load_job(path)
    rule = Rule() if target else Rule(steps=min(DEFAULT_STEPS, job.train.steps))
    return SuiteFile(title=f"job {path.name}", job=path.name, rule=rule)


def override_settings(texts: Sequence[str]) -> dict[str, str]:
    """Return overrides, each KEY=VALUE, as settings of a contender.

    Raises:
        JobError: a text is no override.
    """
    for text in texts:
        parse_override(text)
    return {key: value for key, _, value in (text.partition("=") for text in texts)}
