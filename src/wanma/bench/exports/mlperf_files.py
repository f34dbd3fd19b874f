"""MLPerf logs of a result: a file for each measurement that counts, from the records of its run."""

from __future__ import annotations

from pathlib import Path

from wanma.bench.exports.mlperf_log import SampleCounts, Submission, mlperf_log, read_validations
from wanma.bench.measurements.measurement import Measurement
from wanma.bench.programs.job_program import run_of_execution
from wanma.bench.results.result import BenchmarkResult
from wanma.bench.runner import execution_folder
from wanma.data.opening import open_dataset
from wanma.job.errors import EXIT_USAGE, WanmaError
from wanma.job.file.loading import load_recorded_job
from wanma.job.plan.plan import Plan
from wanma.job.run.run_directory import RunDirectory
from wanma.job.sections.job import Job
from wanma.report.run_report import read_report


def write_mlperf_logs(
    result: BenchmarkResult, runs: Path, contender: str | None, submission: Submission, folder: Path
) -> list[Path]:
    """Write `result_N.txt` for each measurement of a contender, as a submission names them.

    The data of the job are opened, to count their samples.

    Args:
        result: a result with its measurements.
        runs: folder of the files of its executions.
        contender: name of the contender; None: the only one.
        submission: facts of the submission.
        folder: folder of the files.

    Returns:
        the files.

    Raises:
        WanmaError: the contender is none, is no job or has no measurement; or the records of a run are gone.
    """
    name = _contender(result, contender)
    plan = result.contender(name).plan
    measurements = result.measurements_of(name)
    if plan is None or not measurements:
        raise WanmaError(
            f"{result.id}: no job '{name}' was measured, and an MLPerf log needs a training of wanma",
            "export a result of `wanma bench train`",
            EXIT_USAGE,
        )
    written = []
    samples: SampleCounts | None = None
    for number, measurement in enumerate(measurements):
        run = _run(runs, measurement)
        job = load_recorded_job(run.job)
        samples = samples or _count_samples(job)
        validations = read_validations(read_report(run))
        text = mlperf_log(measurement, validations, job, samples, submission, Plan.from_json(plan["plan"]))
        path = folder / f"result_{number}.txt"
        path.write_text(text, encoding="utf-8")
        written.append(path)
    return written


def _contender(result: BenchmarkResult, name: str | None) -> str:
    names = result.contender_names
    if name is None and len(names) == 1:
        return names[0]
    if name not in names:
        problem = "has several contenders" if name is None else f"has no contender '{name}'"
        raise WanmaError(f"{result.id} {problem}", f"--contender: one of {', '.join(names)}", EXIT_USAGE)
    return name


def _run(runs: Path, measurement: Measurement) -> RunDirectory:
    run = run_of_execution(execution_folder(runs, measurement.contender, measurement.round))
    if not (run.job.exists() and run.events.exists()):
        raise WanmaError(
            f"{run.path} is gone, and with it the validations of the run",
            "measure again; the log is made from the files of the executions",
            EXIT_USAGE,
        )
    return run


def _count_samples(job: Job) -> SampleCounts:
    data = open_dataset(job.data, job.train)
    return SampleCounts(data.train_samples, min(job.train.validation_samples, data.validation_samples))
