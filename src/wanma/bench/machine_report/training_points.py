"""Training points of runs and of results of `wanma bench train`, for a roofline."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from wanma.bench.figures.metrics import STEP_SECONDS
from wanma.bench.machine_report.roofline import TrainingPoint
from wanma.bench.programs.job_program import run_of_execution
from wanma.bench.results.directory import ResultDirectory
from wanma.bench.results.hardware_identity import hardware_identity
from wanma.bench.results.result import BenchmarkResult
from wanma.bench.runner import RUNS_FOLDER, execution_folder
from wanma.job.cluster import Cluster
from wanma.job.errors import EXIT_USAGE, WanmaError
from wanma.job.file.loading import load_recorded_job
from wanma.job.plan.plan import Plan
from wanma.job.run.run_directory import RunDirectory, write_json
from wanma.planner.forecast.problem import build_problem
from wanma.planner.forecast.step_traffic import forecast_step_traffic
from wanma.planner.preparation.job_planning import job_dimensions, job_workload
from wanma.report.forecast_comparison import MIN_MEASURED_STEPS, WARM_UP_STEPS, median_step_seconds
from wanma.report.run_report import read_report

POINTS_FILE = "roofline.json"
"""File of the points in the folder of a machine result."""
SCHEMA = 1
MAX_RESULTS = 3
"""Newest results from which points are taken unasked."""


def point_of_run(run: RunDirectory, name: str = "", step_seconds: float | None = None) -> TrainingPoint:
    """Return the point of a run.

    Args:
        run: run directory.
        name: name of the point; default: that of the run.
        step_seconds: step time from several runs; None: the median of this one.

    Raises:
        WanmaError: the folder has no run with a plan, the run has too few steps, or the bytes of its model
            are not known.
    """
    report = read_report(run)
    seconds = median_step_seconds(report) if step_seconds is None else step_seconds
    if seconds is None:
        raise WanmaError(
            f"{run.path} has {len(report.steps['step'])} steps, too few for a step time",
            f"give a run of at least {WARM_UP_STEPS + MIN_MEASURED_STEPS} steps",
            EXIT_USAGE,
        )
    try:
        plan, cluster = Plan.from_json(report.plan), Cluster.from_json(report.cluster)
    except (ValueError, TypeError, KeyError) as error:
        raise WanmaError(
            f"{run.plan} does not contain the plan and cluster of the run: {error}",
            "give a run of this version of wanma",
            EXIT_USAGE,
        ) from error
    job = load_recorded_job(run.job)
    workload = job_workload(job)
    ranks = max(plan.world_size // job.cluster.nodes, 1)
    traffic = None
    if workload is not None:
        problem = build_problem(job, cluster, workload, job_dimensions(job), ranks=ranks)
        traffic = forecast_step_traffic(problem, plan)
    if traffic is None:
        raise WanmaError(
            f"{run.path}: the operators of its model are not known, so that its bytes cannot be counted",
            "give a run with a preset, dimensions or a module that can be read, on equal ranks",
            EXIT_USAGE,
        )
    return TrainingPoint(
        name or run.name,
        "fp8" if plan.fp8 else plan.precision,
        ranks,
        plan.threads_per_rank if plan.device == "cpu" else 0,
        seconds,
        traffic.flops,
        traffic.memory_bytes,
        traffic.network_bytes,
    )


def points_of_results(
    results: Sequence[tuple[ResultDirectory, BenchmarkResult]], hardware: Mapping[str, Any]
) -> Iterator[TrainingPoint]:
    """Yield the points of the newest results of trainings on the same hardware.

    Results that have not ended, and contenders whose runs are gone or not known well enough, are left out.

    Args:
        results: results with their folders, oldest first.
        hardware: hardware of the machine result.
    """
    taken = 0
    for directory, result in reversed(results):
        if taken == MAX_RESULTS:
            return
        if not result.ended or hardware_identity(result.hardware) != hardware_identity(hardware):
            continue
        points = list(_points_of_result(directory, result))
        taken += bool(points)
        yield from points


def _points_of_result(directory: ResultDirectory, result: BenchmarkResult) -> Iterator[TrainingPoint]:
    for contender in result.contenders:
        estimate = result.summaries.get(contender.name, {}).get(STEP_SECONDS.name)
        rounds = sorted(result.values.get(contender.name, {}).get(STEP_SECONDS.name, {}))
        if contender.kind != "job" or estimate is None or not rounds:
            continue
        run = run_of_execution(execution_folder(directory.path / RUNS_FOLDER, contender.name, rounds[-1]))
        try:
            yield point_of_run(run, f"{contender.name} of {result.id}", estimate.median)
        except WanmaError:
            continue


def write_points(directory: ResultDirectory, points: Sequence[TrainingPoint]) -> None:
    """Write the points into the folder of a machine result."""
    write_json(
        directory.path / POINTS_FILE, {"schema": SCHEMA, "points": [point.to_json() for point in points]}
    )


def read_points(directory: ResultDirectory) -> list[TrainingPoint]:
    """Return the points in the folder of a machine result; none without a file.

    Raises:
        WanmaError: the file is damaged, or of a newer schema.
    """
    path: Path = directory.path / POINTS_FILE
    try:
        content = json.loads(path.read_text("utf-8"))
        if content["schema"] > SCHEMA:
            raise WanmaError(
                f"{path} has schema {content['schema']}; this wanma reads schemas up to {SCHEMA}",
                "read it with a newer version: pip install --upgrade wanma",
            )
        return [TrainingPoint.from_json(point) for point in content["points"]]
    except FileNotFoundError:
        return []
    except (ValueError, KeyError, TypeError) as error:
        raise WanmaError(f"{path} is damaged: {error}", "remove the file") from error


def with_new_point(points: Sequence[TrainingPoint], new: TrainingPoint) -> list[TrainingPoint]:
    """Return the points with a new one in place of that of the same name."""
    return [*(point for point in points if point.name != new.name), new]
