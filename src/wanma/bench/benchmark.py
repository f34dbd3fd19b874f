"""Benchmark from its suite to its result: rounds, figures, page; a benchmark that was interrupted goes on."""

from __future__ import annotations

import contextlib
import datetime
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from wanma.bench.comparisons.reproduction import ReproducedFigure, judge_reproduction
from wanma.bench.display import page_of
from wanma.bench.figures.precision import first_steady_step, is_precise
from wanma.bench.figures.summary import summarize
from wanma.bench.machine.machine_result import is_machine_result, node_count
from wanma.bench.meter.disturbance import DisturbanceLimits, DisturbanceRule
from wanma.bench.meter.machine_meter import MachineMeter
from wanma.bench.place import describe_code, describe_environment, describe_hardware, hardware_identity
from wanma.bench.programs.contender import Contender
from wanma.bench.programs.execution import check_turns
from wanma.bench.programs.job_program import run_of_execution
from wanma.bench.programs.limited_link import require_link
from wanma.bench.programs.places import SUITE, filled, place_contender, with_words, word
from wanma.bench.programs.places import TREES as TREES_WORD
from wanma.bench.programs.redaction import redact_command, redact_text, shown_value
from wanma.bench.results.directory import (
    DISK_FULL_ERRNOS,
    ResultDirectory,
    create_result_directory,
    read_results,
)
from wanma.bench.results.result import BenchmarkResult, ContenderRecord, SuiteRecord
from wanma.bench.runner import RUNS_FOLDER, Rule, Surroundings, execution_folder, run_rounds
from wanma.bench.scale.measured import with_forecasts
from wanma.bench.stored_suite import read_stored_suite, write_stored_suite
from wanma.bench.suites.prepared_data import prepare_cifar10
from wanma.bench.suites.suite_file import JOB_FILE, Suite
from wanma.data.stores.file_locks import exclusive_lock
from wanma.job.errors import EXIT_USAGE, WanmaError
from wanma.job.file.loading import load_job
from wanma.job.run.run_directory import RunDirectory

DATA_FOLDER = "data"
"""Folder of made data, beside the results."""
DATA = "data"
"""Word of a job for the folder of the made data of its suite."""
IMAGES = "data.images"
"""Key of the job by which a user names images in place of those."""
LOCK_FILE = ".lock"
TREES = "trees"
"""Folder of the files of commits, in the folder of a gate's result, while it runs."""


def run_benchmark(
    suite: Suite,
    rule: Rule,
    directory: ResultDirectory,
    *,
    limits: DisturbanceLimits,
    progress: Callable[[str], None],
) -> BenchmarkResult:
    """Measure the contenders of a suite, after what the folder already has, and write the result.

    Args:
        directory: folder of the result, new or of a benchmark that was interrupted.

    Raises:
        WanmaError: no execution succeeded; or a file cannot be written.
    """
    with exclusive_lock(directory.path / LOCK_FILE, 0) as lock:
        if lock is None:
            raise WanmaError(
                f"another process measures in {directory.path}",
                "wait for its end, or use --fresh",
                EXIT_USAGE,
            )
        try:
            return _run_locked(suite, rule, directory, limits, progress)
        except OSError as error:
            if error.errno not in DISK_FULL_ERRNOS:
                raise
            raise directory.unwritable(error) from error


def _run_locked(
    suite: Suite,
    rule: Rule,
    directory: ResultDirectory,
    limits: DisturbanceLimits,
    progress: Callable[[str], None],
) -> BenchmarkResult:
    scratch = directory.path / RUNS_FOLDER
    scratch.mkdir(exist_ok=True)
    words, job = _write_job(suite, directory, scratch)
    places = replace(suite.places, trees=directory.path / TREES)
    contenders = [
        replace(place_contender(one, places), job=str(job) if one.kind == "job" else "")
        for one in suite.contenders
    ]
    for one in contenders:
        if one.kind == "job":
            _check_job(one, job)
    if rule.turn_seconds:
        check_turns(contenders, rule.turn_seconds)
    result = _begin(suite, rule, directory, limits, check_environments(contenders))
    earlier = directory.read_measurements()
    baseline = (result.baseline or None) if rule.turn_seconds else None
    surroundings = Surroundings(
        MachineMeter,
        DisturbanceRule(limits, (one.machine for one in earlier)),
        partial(is_precise, metrics=suite.file.metrics, baseline=baseline),
    )
    run_rounds(
        contenders,
        rule,
        suite.target,
        scratch,
        surroundings,
        earlier=earlier,
        save=directory.add_measurement,
        progress=progress,
    )
    result = replace(result, measurements=directory.read_measurements(), ended=_now())
    result = _with_plans(result, scratch, words)
    result = summarize(result, [first_steady_step(one) for one in result.measurements])
    problem = None
    try:
        result = with_forecasts(result, suite.file, job, progress)
    except WanmaError as error:
        problem = error  # the measurements are kept all the same
    directory.write_result(result)
    directory.write_page(page_of(result, directory))
    if problem is not None:
        raise problem
    failed = [one.error for one in result.measurements if one.error]
    if failed and not any(one.counts for one in result.measurements):
        raise WanmaError(f"no contender could be measured: {failed[0]}", f"the files are in {scratch}")
    return result


def _write_job(suite: Suite, directory: ResultDirectory, scratch: Path) -> tuple[dict[str, str], Path]:
    """Write the job of a suite into its result, and as it runs on this machine into `scratch`.

    Returns:
        places of this machine by the word that stands for them in the result, and the file that runs.
    """
    words, job = {}, scratch / JOB_FILE
    if suite.job_text:
        if _synthetic_contenders(suite):
            words[DATA] = str(prepare_cifar10(directory.path.parent / DATA_FOLDER))
        (directory.path / JOB_FILE).write_text(suite.job_text)
        job.write_text(filled(suite.job_text, words))
    if any(word(SUITE) in value for one in suite.contenders for value in one.settings.values()):
        words[SUITE] = str(suite.folder.resolve())
    return words, job


def _synthetic_contenders(suite: Suite) -> list[str]:
    """Return the contenders that train on images made here; the others name files of the user."""
    if suite.file.prepare is None or word(DATA) not in suite.job_text:
        return []
    return [one.name for one in suite.contenders if one.kind == "job" and IMAGES not in one.settings]


def data_sentence(suite: Suite) -> str:
    """Name the contenders that train on synthetic images; empty: none does."""
    synthetic = _synthetic_contenders(suite)
    if not synthetic:
        return ""
    names = "" if len(synthetic) == len(suite.contenders) else f" of {', '.join(synthetic)}"
    return f"The images{names} are synthetic: no loss or accuracy here says anything about real ones."


def _check_job(contender: Contender, path: Path) -> None:
    """Check the job of a contender, before any is measured.

    Raises:
        WanmaError: a key is wrong, or its engine cannot do what the contender wants.
    """
    engine = load_job(path, contender.overrides, f"contender '{contender.name}'").cluster.engine
    if engine == "local" and contender.link_megabits_per_second is not None:
        require_link()
    if engine != "local" and contender.fault is not None:
        raise WanmaError(
            f"{contender.name}: ranks are killed on this machine alone, and cluster.engine is '{engine}'",
            "remove `fault` from the contender, or set cluster.engine = 'local'",
            EXIT_USAGE,
        )
    if engine == "ssh" and contender.environment:
        raise WanmaError(
            f"{contender.name}: environment variables of a contender do not reach hosts of ssh: "
            f"{', '.join(contender.environment)}",
            "set them on the hosts, or measure with cluster.engine = 'local'",
            EXIT_USAGE,
        )


def check_environments(contenders: Sequence[Contender]) -> dict[str, dict[str, str]]:
    """Return the versions by package of each contender that has a Python environment of its own.

    Raises:
        WanmaError: an environment is missing, or a version is not the pinned one.
    """
    found: dict[tuple[str, str], dict[str, str]] = {}
    packages = {}
    for one in contenders:
        if (environment := one.python_environment) is not None:
            key = environment.folder, environment.requirements
            if key not in found:
                found[key] = environment.check()
            packages[one.name] = found[key]
    return packages


def _check_unchanged(record: ContenderRecord, packages: Mapping[str, str]) -> None:
    """Check that the packages of a contender are those with which its measurements began.

    Raises:
        WanmaError: they are others.
    """
    names = sorted({*record.packages, *packages})
    changed = [name for name in names if record.packages.get(name) != packages.get(name)]
    if changed:
        texts = [
            f"{name} {record.packages.get(name, 'absent')} then, {packages.get(name, 'absent')} now"
            for name in changed
        ]
        raise WanmaError(
            f"{record.name}: its Python environment has changed since the first measurement: "
            f"{', '.join(texts)}",
            "begin a new result with --fresh",
            EXIT_USAGE,
        )


def find_unfinished(root: Path, suite: Suite) -> ResultDirectory | None:
    """Return the newest benchmark of the same suite, code and place that has not ended, and does not run."""
    for directory, result in reversed(list(read_results(root))):
        if result.ended or result.suite.hash != suite.digest or _is_locked(directory):
            continue
        place = hardware_identity(describe_hardware()) == hardware_identity(result.hardware)
        same = place and describe_environment() == result.environment
        if same and result.code.get("hash") == describe_code()["hash"]:
            return directory
    return None


def _is_locked(directory: ResultDirectory) -> bool:
    """Return True if a process measures in a folder."""
    with exclusive_lock(directory.path / LOCK_FILE, 0) as lock:
        return lock is None


def new_directory(root: Path, suite: Suite) -> ResultDirectory:
    """Create the folder of a new result."""
    return create_result_directory(root, suite.name, _now())


def open_directory(
    root: Path, suite: Suite, progress: Callable[[str], None], *, is_fresh: bool = False
) -> ResultDirectory:
    """Return the folder of a suite's unfinished benchmark, which goes on; else, or if fresh, a new one."""
    directory = None if is_fresh else find_unfinished(root, suite)
    if directory is None:
        return new_directory(root, suite)
    progress(f"goes on with {directory.path}, which has not ended")
    return directory


def _begin(
    suite: Suite,
    rule: Rule,
    directory: ResultDirectory,
    limits: DisturbanceLimits,
    packages: Mapping[str, Mapping[str, str]],
) -> BenchmarkResult:
    """Write the result before its first measurement; of one that goes on, the rule of now.

    Args:
        packages: versions by package of the contenders that have a Python environment of their own.

    Raises:
        WanmaError: the earlier part of the result has other versions.
    """
    stated = {f"limits.{name}": limit for name, limit in asdict(limits).items()}
    measuring = {**rule.model_dump(), **stated, "target": suite.file.target}
    if directory.result.exists():
        result = replace(directory.read(with_measurements=False), rule=measuring)
        for record in result.contenders:
            _check_unchanged(record, packages.get(record.name, {}))
    else:
        names = [one.name for one in suite.contenders]
        baseline = suite.file.baseline if suite.file.baseline in names else None
        result = BenchmarkResult(
            id=directory.id,
            name=suite.name,
            title=suite.title,
            description=" ".join(filter(None, (suite.file.description, data_sentence(suite)))),
            created=_now(),
            contenders=tuple(
                replace(_record(contender), packages=packages.get(contender.name, {}))
                for contender in suite.contenders
            ),
            suite=SuiteRecord(suite.name, suite.digest),
            baseline=baseline or (names[0] if len(names) > 1 else ""),
            rule=measuring,
            environment=describe_environment(),
            hardware=describe_hardware(),
            code=describe_code(),
        )
    directory.write_result(result)
    write_stored_suite(directory, suite, rule, limits)
    return result


def reproduce(
    stored: ResultDirectory,
    root: Path,
    progress: Callable[[str], None],
    environments: Path | None = None,
) -> tuple[list[ReproducedFigure], ResultDirectory]:
    """Run a result again, by the same rule and limits, and judge its figures by the new one.

    It runs in the working directory in which it was measured, if the result lies in that.

    Raises:
        WanmaError: the result has not ended, is one of two commits, or cannot be run.
    """
    before = stored.read()
    if not before.ended:
        raise WanmaError(
            f"{stored.path} has not ended", "repeat the command that began it, which goes on", EXIT_USAGE
        )
    if is_machine_result(before) and any(node_count(one) > 1 for one in before.contenders):
        raise WanmaError(
            f"{stored.path} is of several nodes, which one command does not start",
            "run `wanma bench machine` again with its options on each node, and compare both results",
            EXIT_USAGE,
        )
    found = read_stored_suite(stored)
    values = [value for one in found.suite.contenders for value in one.environment.values()]
    if any(f"{word(TREES_WORD)}/" in value for value in values):
        raise WanmaError(
            f"{stored.path} has the code of two commits, whose files are gone",
            "run `wanma bench gate COMMIT_A COMMIT_B` again",
            EXIT_USAGE,
        )
    folder = None if environments is None else environments.absolute()
    suite, results = replace(found.suite, environments=folder), root.absolute()
    with contextlib.chdir(_working_folder(stored, found.working_folder)):
        directory = open_directory(results, suite, progress)
        new = run_benchmark(suite, found.rule, directory, limits=found.limits, progress=progress)
    return judge_reproduction(before, new), ResultDirectory(root / directory.id)


def _working_folder(stored: ResultDirectory, folder: Path | None) -> Path:
    """Return the working directory in which a result is run again.

    Raises:
        WanmaError: it is gone.
    """
    if folder is not None and not folder.is_dir():
        raise WanmaError(
            f"{stored.path} was measured in {folder}, which is gone",
            "move the result back into the folder of its files",
            EXIT_USAGE,
        )
    return folder or Path.cwd()


def _record(contender: Contender) -> ContenderRecord:
    settings: dict[str, Any] = {key: redact_text(value) for key, value in contender.settings.items()}
    for name, value in contender.environment.items():
        settings[name] = shown_value(name, value)
    if contender.fault is not None:
        settings["fault"] = f"SIGKILL of rank {contender.fault.rank} after step {contender.fault.after_step}"
    command = contender.command or ("wanma", "train", Path(contender.job).name, *contender.overrides)
    return ContenderRecord(
        contender.name, contender.kind, settings, redact_command(command), description=contender.description
    )


def _with_plans(result: BenchmarkResult, scratch: Path, words: Mapping[str, str]) -> BenchmarkResult:
    """Return the result with the resolved jobs and plans of its contenders, and the nodes of their plans.

    Args:
        words: places of this machine by the word that stands for them in a result.
    """
    runs: dict[str, list[RunDirectory]] = {record.name: [] for record in result.contenders}
    for one in reversed(result.measurements):
        if not one.error:
            folder = execution_folder(scratch, one.contender, one.round)
            runs[one.contender].append(run_of_execution(folder))
    contenders = []
    for record in result.contenders:
        run = next((run for run in runs[record.name] if run.job.exists() and run.plan.exists()), None)
        if run is None:
            contenders.append(record)
            continue
        job, plan = with_words(run.job.read_text(), words), json.loads(run.plan.read_text())
        contenders.append(replace(record, job=job, plan=plan))
    hardware = describe_hardware(run for found in runs.values() for run in found)
    return replace(result, contenders=tuple(contenders), hardware=hardware)


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
