"""Knees: the named cause is the part of a step that grew most."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.scaling_jobs import JOBS, ScalingJob, curve
from wanma.bench.programs.places import filled
from wanma.bench.results.stored_study import CurvePoint
from wanma.bench.scale.forecasts import ScaledJob
from wanma.bench.scale.growth import growth_of
from wanma.bench.scale.knee import find_knee
from wanma.bench.scale.targets import target_of_cluster
from wanma.bench.suites.prepared_data import prepare_cifar10
from wanma.bench.suites.scale_table import doubled_counts
from wanma.bench.suites.suite_file import find_suite, make_suite, read_suite_file
from wanma.job.file.loading import load_job
from wanma.job.forecast.forecast import STEP_TIME_KINDS, StepTime
from wanma.planner.explain.step_time_parts import step_time_parts
from wanma.planner.forecast.problem import build_problem
from wanma.planner.job_planner import build_layout, complete_plan
from wanma.planner.preparation.job_cluster import job_on_cluster

LIMIT = 0.8
JOB_PARAMETERS = pytest.mark.parametrize("job", JOBS.values(), ids=JOBS.keys())
DATA = "data"


def rank_seconds(job: ScalingJob, folder: Path, ranks: int, overrides: dict[str, str]) -> dict[str, float]:
    """Return seconds of all ranks per sample by kind, planned without the code under test."""
    scaled, target, _ = job.read(folder)
    cluster = target.nodes_for(ranks)
    loaded = load_job(folder / "job.toml", [f"{key}={value}" for key, value in overrides.items()])
    loaded = job_on_cluster(loaded, cluster)
    planned = complete_plan(
        loaded, build_layout(loaded, cluster), cluster, scaled.workload, scaled.dimensions
    )
    assert planned.plan.world_size == ranks
    assert planned.forecast is not None
    step = planned.forecast.step
    assert isinstance(step, StepTime)
    problem = build_problem(loaded, cluster, scaled.workload, scaled.dimensions)
    parts = step_time_parts(problem, planned.plan, step)
    exchanged = sum(parts.values()) - sum(getattr(step, kind) for kind in STEP_TIME_KINDS if kind != DATA)
    assert exchanged == pytest.approx(step.data, abs=1e-9 * step.seconds)
    return {name: seconds * ranks / loaded.train.global_batch for name, seconds in parts.items()}


@JOB_PARAMETERS
def test_the_named_cause_is_the_part_that_grew_most(job: ScalingJob, tmp_path: Path) -> None:
    _, _, growth, points = curve(job, tmp_path)
    knee = find_knee(points, LIMIT)
    assert knee is not None
    assert knee.growths[0].part == job.cause
    before, after = (
        rank_seconds(job, tmp_path, ranks, growth.settings_of(ranks))
        for ranks in (knee.reference_ranks, knee.ranks)
    )
    added = {part: after.get(part, 0.0) - before.get(part, 0.0) for part in {**before, **after}}
    assert max(added, key=lambda part: added[part]) == job.cause
    efficiency = sum(before.values()) / sum(after.values())
    assert knee.efficiency == pytest.approx(efficiency)
    assert sum(one.added for one in knee.growths) == pytest.approx(1 / efficiency - 1)
    for one in knee.growths:
        assert one.added == pytest.approx(added[one.part] / sum(before.values()), abs=1e-9)
        assert one.after == pytest.approx(after.get(one.part, 0.0) / sum(after.values()), abs=1e-9)


@JOB_PARAMETERS
def test_the_knee_is_the_first_number_below_the_limit(job: ScalingJob, tmp_path: Path) -> None:
    _, _, _, points = curve(job, tmp_path)
    knee = find_knee(points, LIMIT)
    assert knee is not None
    rates = [(point.ranks, point.forecast / point.ranks) for point in points if point.forecast is not None]
    for number, (ranks, rate) in enumerate(rates):
        best = max(one for _, one in rates[: number + 1])
        if ranks < knee.ranks:
            assert rate >= LIMIT * best
        elif ranks == knee.ranks:
            assert rate < LIMIT * best


def test_a_layout_that_ends_says_why(tmp_path: Path) -> None:
    job = JOBS["shards over a fast network"]._replace(is_weak=False, batch=64, to=256)
    _, _, _, points = curve(job, tmp_path)
    knee = find_knee(points, LIMIT)
    assert knee is not None
    assert (knee.ranks, knee.efficiency) == (128, None)
    assert "less than one sample each" in knee.reason


def test_a_curve_without_a_forecast_has_no_knee() -> None:
    points = [CurvePoint(ranks=ranks, global_batch=8, reason="no") for ranks in (1, 2)]
    assert find_knee(points, LIMIT) is None


def test_a_loader_that_is_too_slow_is_named(tmp_path: Path) -> None:
    path = find_suite("cifar10")
    text = make_suite("cifar10", read_suite_file(path), path.parent).job_text
    job = tmp_path / "job.toml"
    job.write_text(filled(text, {"data": str(prepare_cifar10(tmp_path))}))
    settings = {"train.global_batch": "2048", "cluster.device": "auto", "data.workers": "1"}
    scaled = ScaledJob.read(job, settings)
    target = target_of_cluster("1x4 V100 SXM2 16 GB, 1x100G")
    growth = growth_of(scaled.job(settings), "dp_replicate", is_weak=False, batch_ranks=1, settings=settings)
    points = [scaled.forecast_layout(target, growth, count) for count in doubled_counts(1, 64)]
    knee = find_knee(points, LIMIT)
    assert knee is not None
    assert knee.growths[0].part == "exposed data loading"
