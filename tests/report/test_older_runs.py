"""Run directory of an older release: its records have other names, and are read under those of today."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from wanma.api.run.run_records import job_change_notes
from wanma.job.file.loading import load_job, load_recorded_job, to_job
from wanma.job.file.upgrade import upgrade_file
from wanma.job.run.run_directory import RunDirectory
from wanma.report.exposed_communication import exposed_communication
from wanma.report.renamed_records import with_new_names
from wanma.report.report_page import write_report
from wanma.report.run_report import Report, read_report
from wanma.report.terminal import run_summary

OLDER_RUN = Path(__file__).parents[1] / "support" / "older_run"


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    shutil.copytree(OLDER_RUN, tmp_path / "older")
    return RunDirectory(tmp_path / "older")


@pytest.fixture
def report(run: RunDirectory) -> Report:
    return read_report(run)


def test_job_plan_metrics_and_events_have_the_names_of_today(report: Report) -> None:
    assert report.problems == ("environment.json: missing",)
    assert report.job["cluster"]["hang_timeout_seconds"] == 120.0
    assert "2 ranks" in report.plan_text
    assert list(report.steps["expert_load_imbalance"]) == [1.0] * 4
    waited = report.steps["exposed_communication_seconds.data"]
    assert waited[0] == 0.008683315000098446
    assert report.steps["communication_seconds.data"][0] == 0.009490805000041291
    [moved] = [event for event in report.events if event["kind"] == "batch_shares"]
    assert (moved["batch_shares"], moved["previous_batch_shares"]) == ([3, 1], [4, 4])


def test_summary_and_page_show_what_was_recorded(run: RunDirectory, report: Report) -> None:
    assert [one.name for one in exposed_communication(report)] == ["data parallel"]
    assert "data parallel" in run_summary(report)
    write_report(run)
    assert "data parallel" in run.report.read_text()


def test_a_recovery_and_a_resize_of_an_older_run_are_counted(run: RunDirectory) -> None:
    events = [
        {"kind": "growth", "time": 1795640981.0, "step": 4, "change": {"machines": 3}},
        {"kind": "start", "time": 1795640982.0, "step": 0, "steps": 4, "again": True},
    ]
    with run.events.open("a") as file:
        file.writelines(json.dumps(event) + "\n" for event in events)
    report = read_report(run)
    assert [event["kind"] for event in report.recoveries] == ["resize"]
    assert len(report.starts) == 2, "a restart at step 0 begins no new run"


def test_every_renamed_record_is_read() -> None:
    assert with_new_names({"kind": "slow_rank", "time": 1.0, "rank": 3}) == {
        "kind": "straggler",
        "time": 1.0,
        "rank": 3,
    }
    assert with_new_names({"kind": "health", "text": "x"}) == {"kind": "health_check", "text": "x"}
    bad = {"step": 1, "outer_norm": None, "non_finite": {"outer_norm": "nan", "under_way.data": "inf"}}
    assert with_new_names(bad) == {
        "step": 1,
        "pseudo_gradient_norm": None,
        "non_finite": {"pseudo_gradient_norm": "nan", "communication_seconds.data": "inf"},
    }
    assert with_new_names({"kind": "recovery", "again": 1, "before": 2}) == {
        "kind": "recovery",
        "again": 1,
        "before": 2,
    }


def test_an_older_run_continues_as_the_same_job(run: RunDirectory, tmp_path: Path) -> None:
    file = tmp_path / "own.toml"
    shutil.copy(run.job, file)
    upgrade_file(file)
    assert job_change_notes(run, load_job(file)) == []
    told = job_change_notes(run, load_job(file, ["parallel.cp_method=ring", "train.steps=9"]))
    assert told == [
        "changed since this run's last start: train.steps = 4 → 9",
        'changed since this run\'s last start: parallel.cp_method = "all_to_all" → "ring"',
    ]
    assert to_job(load_recorded_job(run.job)) == load_job(file)
