"""Communication that a run waited for, beside what was under way and what was forecast."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict

import pytest

from wanma.job.forecast.forecast import StepTime
from wanma.job.run.run_directory import RunDirectory
from wanma.observe.console.progress import RunProgress
from wanma.observe.sinks.tensorboard import to_scalars
from wanma.report.exposed_communication import (
    ExposedCommunication,
    exposed_communication,
    exposed_communication_text,
)
from wanma.report.report_page import render_report_page
from wanma.report.run_report import read_report
from wanma.report.terminal import run_summary

NewRun = Callable[..., RunDirectory]


def communicating(run: RunDirectory) -> RunDirectory:
    """`run` as if each step had waited 0.1 of 0.4 s for data ranks and 0.05 s for stages; the first, 9 s."""
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    for line in lines:
        slow = 9.0 if line["step"] == 1 else 0.0
        line["exposed_communication_seconds"] = {"data": 0.1 + slow, "pipeline": 0.05}
        line["communication_seconds"] = {"data": 0.4 + slow, "pipeline": 0.05}
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run


def test_a_usual_step_is_told_kind_by_kind_without_warm_up(new_run: NewRun) -> None:
    data, pipeline = exposed_communication(read_report(communicating(new_run(20))))
    assert (data.name, data.exposed_seconds, data.total_seconds, data.forecast) == (
        "data parallel",
        0.1,
        0.4,
        None,
    )
    assert data.exposed_share == pytest.approx(0.25)
    assert (pipeline.name, pipeline.exposed_share) == ("pipeline", 1.0)


def test_a_run_of_two_steps_tells_these(new_run: NewRun) -> None:
    assert exposed_communication(read_report(communicating(new_run(2))))[0].exposed_seconds == pytest.approx(
        4.6
    )


def test_measured_stands_beside_forecast(new_run: NewRun) -> None:
    run = communicating(new_run(20))
    planned = json.loads(run.plan.read_text())
    planned["forecast"]["step"] = asdict(StepTime(0.5, 0.3, data=0.15, bubble=0.05))
    run.plan.write_text(json.dumps(planned))
    assert {one.name: one.forecast for one in exposed_communication(read_report(run))} == {
        "data parallel": 0.15,
        "pipeline": 0.05,
    }


def test_it_is_told_in_words_in_the_summary_and_on_the_page(new_run: NewRun) -> None:
    assert (
        exposed_communication_text(ExposedCommunication("data parallel", 0.1, 0.4, 0.15))
        == "data parallel 0.10 s of 0.40 s (25 %; forecast 0.15 s)"
    )
    report = read_report(communicating(new_run(20)))
    assert "data parallel 0.10 s of 0.40 s (25 %)" in run_summary(report)
    assert "Communication of a median step" in render_report_page(report)


def test_a_gpus_record_has_no_total(new_run: NewRun) -> None:
    run = communicating(new_run(20))
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    for line in lines:
        del line["communication_seconds"]
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    report = read_report(run)
    data, _ = exposed_communication(report)
    assert (data.exposed_seconds, data.total_seconds, data.exposed_share) == (0.1, None, None)
    assert "data parallel 0.10 s, pipeline 50 ms" in run_summary(report)
    assert "Communication of a median step" in render_report_page(report)
    assert exposed_communication_text(ExposedCommunication("data parallel", 0.1, None, 0.15)) == (
        "data parallel 0.10 s (forecast 0.15 s)"
    )


def test_a_run_that_says_nothing_of_it_shows_nothing(new_run: NewRun) -> None:
    report = read_report(new_run(20))
    assert exposed_communication(report) == []
    assert "exposed communication" not in run_summary(report)
    assert "Communication of a median step" not in render_report_page(report)


def test_the_console_tells_the_share_of_the_last_steps() -> None:
    progress = RunProgress(10)
    step = {"kind": "step", "loss": 1.0, "step_seconds": 2.0, "time": 0.0, "tokens_per_second": None}
    progress.update({**step, "step": 1})
    assert progress.exposed_communication_share() is None
    progress.update({**step, "step": 2, "exposed_communication_seconds": {"data": 0.5, "tensor": 0.1}})
    assert progress.exposed_communication_share() == pytest.approx(0.3)
    assert "exposed communication 30.0 %" in progress.metric_texts()


def test_tensorboard_draws_it() -> None:
    event = {
        "kind": "step",
        "phases": {},
        "exposed_communication_seconds": {"data": 0.5},
        "communication_seconds": {"data": 1.5},
    }
    assert to_scalars(event) == {"exposed_communication_seconds/data": 0.5, "communication_seconds/data": 1.5}
