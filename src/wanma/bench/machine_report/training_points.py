"""Training points of results of `wanma bench train`, for a roofline."""

from __future__ import annotations

from collections.abc import Iterator

from wanma.bench.figures.metrics import STEP_SECONDS
from wanma.bench.machine_report.roofline import TrainingPoint
from wanma.bench.place import hardware_identity
from wanma.bench.programs.job_program import run_of_execution
from wanma.bench.results.directory import ResultDirectory, read_results
from wanma.bench.results.result import BenchmarkResult
from wanma.bench.runner import RUNS_FOLDER, execution_folder
from wanma.job.cluster import Cluster
from wanma.job.errors import WanmaError
from wanma.job.file.loading import load_recorded_job
from wanma.job.plan.plan import Plan
from wanma.job.run.run_directory import RunDirectory
from wanma.planner.forecast.problem import build_problem
from wanma.planner.forecast.step_traffic import forecast_step_traffic
from wanma.planner.preparation.job_planning import job_dimensions, job_workload
from wanma.report.run_report import read_report

MAX_RESULTS = 3
"""Newest results from which points are taken."""


def _point_of_run(run: RunDirectory, name: str, step_seconds: float) -> TrainingPoint | None:
    """Return the point of a run; None: the bytes of its model are not known.

    Raises:
        WanmaError, ValueError, TypeError, KeyError: the folder has no run with a plan of this version.
    """
    report = read_report(run)
    plan, cluster = Plan.from_json(report.plan), Cluster.from_json(report.cluster)
    job = load_recorded_job(run.job)
    if (workload := job_workload(job)) is None:
        return None
    ranks = max(plan.world_size // job.cluster.nodes, 1)
    problem = build_problem(job, cluster, workload, job_dimensions(job), ranks=ranks)
    if (traffic := forecast_step_traffic(problem, plan)) is None:
        return None
    return TrainingPoint(
        name,
        "fp8" if plan.fp8 else plan.precision,
        ranks,
        step_seconds,
        traffic.flops,
        traffic.memory_bytes,
        traffic.network_bytes,
    )


def training_points(directory: ResultDirectory, result: BenchmarkResult) -> list[TrainingPoint]:
    """Return the points of the newest results of trainings beside a machine result, on the same hardware.

    Results that have not ended, and contenders whose runs are gone or not known well enough, are left out.
    """
    found: list[TrainingPoint] = []
    taken = 0
    for other_directory, other in reversed(list(read_results(directory.path.parent))):
        same = hardware_identity(other.hardware) == hardware_identity(result.hardware)
        if other.ended and same and (points := list(_points_of_result(other_directory, other))):
            found += points
            taken += 1
        if taken == MAX_RESULTS:
            break
    return found[::-1]


def _points_of_result(directory: ResultDirectory, result: BenchmarkResult) -> Iterator[TrainingPoint]:
    for contender in result.contenders:
        estimate = result.summaries.get(contender.name, {}).get(STEP_SECONDS.name)
        rounds = sorted(result.values.get(contender.name, {}).get(STEP_SECONDS.name, {}))
        if contender.kind != "job" or estimate is None or not rounds:
            continue
        run = run_of_execution(execution_folder(directory.path / RUNS_FOLDER, contender.name, rounds[-1]))
        try:
            point = _point_of_run(run, f"{contender.name} of {result.id}", estimate.median)
        except (WanmaError, ValueError, TypeError, KeyError):
            continue
        if point is not None:
            yield point
