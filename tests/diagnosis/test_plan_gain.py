"""Changes of a plan that a diagnosis suggests, with the forecast of the planner."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support.diagnosed_run import FORECAST, GIB, HEALTHY, Records
from wanma.diagnosis.evidence import read_evidence
from wanma.diagnosis.finding import Finding
from wanma.diagnosis.plan_gain import with_forecasts
from wanma.diagnosis.presentation import findings_text
from wanma.hardware.catalogue.lookup import require_device_kind
from wanma.hardware.cluster_file.node_builder import build_node_group
from wanma.job.cluster import Cluster
from wanma.job.file.serialization import job_to_toml
from wanma.job.plan.plan import Plan
from wanma.job.sections.job import Job
from wanma.job.sections.model import ModelSection
from wanma.planner.explain.what_if import apply_changes
from wanma.planner.forecast.plan_forecast import forecast_plan
from wanma.planner.forecast.problem import PlanningInputs
from wanma.planner.preparation.job_planning import job_dimensions, job_workload
from wanma.report.run_report import read_report

H100 = Cluster((build_node_group(require_device_kind("H100 SXM"), 1, 8, nics=None),))
JOB = Job.model_validate(
    {
        "model": {"preset": "gpt-350m", "vocabulary": 50304},
        "data": {"sequence_length": 1024},
        "train": {"steps": 1000, "global_batch": 128, "precision": "bf16"},
    }
)
PLAN = Plan(dp_replicate=8, micro_batch=4, precision="bf16", device="cuda", recompute="full")


def run_of(folder: Path, plan: Plan, of: Job = JOB, nodes: Cluster = H100) -> Records:
    records = Records(folder)
    records.run.job.write_text(job_to_toml(of))
    content = {"plan": plan.to_json(), "forecast": FORECAST, "cluster": nodes.to_json()}
    records.run.plan.write_text(json.dumps(content))
    return records


def seconds_of(plan: Plan) -> float:
    workload = job_workload(JOB)
    assert workload is not None
    step = forecast_plan(PlanningInputs(JOB, H100, workload, job_dimensions(JOB)).problem(ranks=8), plan).step
    assert step is not None
    return step.seconds


def forecast_of(records: Records, *keys: str, needs_gain: bool = False) -> list[Finding]:
    finding = Finding("cause", "slow", "it is slow", (), "change it", 0.3, keys, needs_gain)
    records.train(HEALTHY)
    records.diagnose()  # writes the records
    return with_forecasts(read_report(records.run), [finding])


def test_recompute_without_need_is_named_with_the_forecast_of_the_plan_without_it(tmp_path: Path) -> None:
    records = run_of(tmp_path, PLAN)
    records.train(HEALTHY)
    for record in records.usage:
        record["gpus"] = [{"gpu": 0, "memory_bytes": 20 * GIB, "total_memory_bytes": 80 * GIB}]
    (finding,) = [finding for finding in records.diagnose() if finding.name == "recompute"]
    gain = seconds_of(PLAN) / seconds_of(replace(PLAN, recompute="none")) - 1
    assert gain > 0.1
    assert finding.gain == pytest.approx(gain)
    assert finding.forecast.startswith("parallel.recompute=none (forecast: ")
    text = findings_text(read_evidence(read_report(records.run)), [finding])
    assert f"(forecast: {100 * gain:.1f} % faster)" in text
    assert f"faster, {1 / (1 + gain):.2f} s a step)" in text  # of the step that was measured
    assert "at most" not in text


@pytest.mark.parametrize(
    ("plan", "key", "settings"),
    [
        (replace(PLAN, micro_batch=1), "micro_batch", r"parallel.micro_batch=(2|4|8)"),
        (replace(PLAN, dp_replicate=1, tp=8), "tp", r"parallel.dp_replicate=2 parallel.tp=4"),
        (replace(PLAN, dp_replicate=1, dp_shard=8, shard="parameters"), "shard", r"parallel.shard=\w+"),
        (
            replace(PLAN, dp_replicate=2, pp=4, stage_cuts=(6, 12, 18), recompute="none", schedule="gpipe"),
            "schedule",
            r".*parallel.schedule=\w+.*",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_each_key_of_the_plan_has_a_change_that_is_faster_by_forecast(
    tmp_path: Path, plan: Plan, key: str, settings: str
) -> None:
    (finding,) = forecast_of(run_of(tmp_path, plan), key)
    assert re.match(rf"{settings} \(forecast: ", finding.forecast), finding.forecast
    assert finding.gain is not None
    assert finding.gain > 0.01


def test_a_plan_of_which_no_change_is_faster_is_said_to_be_so_and_recompute_with_need_is_no_finding(
    tmp_path: Path,
) -> None:
    best = replace(PLAN, recompute="none")
    (finding,) = forecast_of(run_of(tmp_path / "best", best), "tp")
    assert finding.gain is None
    assert finding.forecast == "forecast: no other value of parallel.tp that fits is faster"
    small = apply_changes(H100, "memory=9GB")
    assert forecast_of(run_of(tmp_path / "small", PLAN, nodes=small), "recompute", needs_gain=True) == []


@pytest.mark.parametrize(
    ("of", "plan", "reason"),
    [
        (
            JOB.model_copy(update={"model": ModelSection(factory="own:model")}),
            PLAN.to_json(),
            "by its job file alone",
        ),
        (JOB, {"dimension_of_the_future": 2}, "another version"),
    ],
)
def test_without_a_forecast_the_bound_is_shown_as_such_with_the_reason(
    tmp_path: Path, of: Job, plan: dict[str, Any], reason: str
) -> None:
    records = run_of(tmp_path, PLAN, of)
    content = json.loads(records.run.plan.read_text())
    records.run.plan.write_text(json.dumps({**content, "plan": plan}))
    (finding,) = forecast_of(records, "micro_batch", needs_gain=True)
    assert reason in finding.forecast
    assert finding.gain is None
    text = findings_text(read_evidence(read_report(records.run)), [finding])
    assert "it is slow  (at most 30.0 % of the step to gain)" in text
    assert f"· {finding.forecast}" in text


def test_a_finding_that_the_plan_does_not_change_has_no_forecast(tmp_path: Path) -> None:
    (finding,) = forecast_of(run_of(tmp_path, PLAN))
    assert (finding.forecast, finding.gain) == ("", None)
