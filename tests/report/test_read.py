"""Reading a run directory, whatever state the run was left in."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from wanma.api.run.run_records import record_run_end
from wanma.job.run.run_directory import RunDirectory
from wanma.observe.sinks.jsonl import JsonLinesSink, append_final_event
from wanma.report.report_page import render_report_page
from wanma.report.run_report import read_report
from wanma.report.terminal import run_summary

NewRun = Callable[..., RunDirectory]


def dead_process() -> int:
    """The number of a process that existed and is gone."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def rewrite_start(run: RunDirectory, **changes: Any) -> None:
    lines = [json.loads(line) for line in run.events.read_text().splitlines()]
    lines[0] |= changes
    run.events.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_finished_run_is_told_in_full(new_run: NewRun) -> None:
    report = read_report(new_run(30))
    assert report.state == "finished"
    assert list(report.steps["step"]) == [float(step) for step in range(1, 31)]
    assert list(report.steps["phases.communication"]) == [0.06] * 30
    assert (report.last_step, report.total_steps) == (30, 30)
    assert report.job["train"]["precision"] == "bf16"
    assert report.forecast["memory_bytes"] == 544 << 20
    assert report.plan_text == "2 ranks (dp_replicate 2), bf16, cpu"
    assert len({len(column) for column in report.steps.values()}) == 1
    assert report.best_validation["step"] == 30
    highest = dataclasses.replace(
        report, job={"checkpoint": {"best_metric": "perplexity", "best_mode": "max"}}
    ).best_validation
    assert highest["step"] < 30
    assert report.problems == ()


def test_a_run_that_goes_on_is_running(new_run: NewRun) -> None:
    assert read_report(new_run(5, total=10, finish=None)).state == "running"


def test_a_run_whose_process_is_gone_died(new_run: NewRun) -> None:
    run = new_run(5, total=10, finish=None)
    rewrite_start(run, process=dead_process())
    assert read_report(run).state == "crashed"


@pytest.mark.parametrize(("age", "state"), [(10.0, "running"), (1000.0, "crashed")])
def test_a_run_on_another_machine_is_judged_by_its_silence(new_run: NewRun, age: float, state: str) -> None:
    run = new_run(0, total=10, finish=None)
    rewrite_start(run, host="elsewhere", time=time.time() - age)
    assert read_report(run).state == state


def test_an_interrupted_run_is_neither_finished_nor_dead(new_run: NewRun) -> None:
    assert read_report(new_run(5, total=10, finish="interrupted")).state == "interrupted"


def test_a_run_that_was_asked_to_end_and_recorded_no_end_is_aborted(new_run: NewRun) -> None:
    run = new_run(5, total=10, finish=None)
    rewrite_start(run, process=dead_process())
    assert read_report(run).state == "crashed"
    record_run_end(run, None, print, events_before_start=0, is_aborted=True)
    assert read_report(run).state == "aborted"
    assert "Aborted after 5 of 10 steps" in run_summary(read_report(run))


@pytest.mark.parametrize("finish", ["finished", "interrupted"])
def test_a_run_that_recorded_its_end_is_not_aborted(new_run: NewRun, finish: str) -> None:
    run = new_run(5, total=10, finish=finish)
    record_run_end(run, None, print, events_before_start=0, is_aborted=True)
    assert read_report(run).state == finish


def test_a_failed_run_says_why(new_run: NewRun) -> None:
    run = new_run(5, total=10, finish=None)
    with run.events.open("ab") as file:
        file.write(b'{"kind": "val')  # the recorder was killed
    append_final_event(run, "finish", outcome="failed", text="rank 1: out of memory")
    report = read_report(run)
    assert (report.state, report.failure) == ("failed", "rank 1: out of memory")
    assert report.problems == ()
    assert "rank 1: out of memory" in run_summary(report)
    assert "rank 1: out of memory</p>" in render_report_page(report)


@pytest.mark.parametrize(("finish", "state"), [("finished", "finished"), ("interrupted", "interrupted")])
def test_a_start_that_failed_before_it_began_leaves_the_run_as_it_was(
    new_run: NewRun, finish: str, state: str
) -> None:
    run = new_run(5, finish=finish)
    before = read_report(run)
    late = {"kind": "start_failed", "time": time.time() + 9000, "text": "step-5 is\nfrom <another> model"}
    with run.events.open("a") as file:
        file.write(json.dumps(late) + "\n")
    report = read_report(run)
    assert (report.state, report.failure) == (state, "")
    assert (report.seconds, report.last_activity) == (before.seconds, before.last_activity)
    assert report.failed_start == "step-5 is\nfrom <another> model"
    note = [
        "  a later start failed before its first step and left the run unchanged:",
        "    step-5 is",
        "    from <another> model",
    ]
    shown, shown_before = run_summary(report).splitlines(), run_summary(before).splitlines()
    assert [line for line in shown if line not in shown_before] == note
    assert "&lt;another&gt; model</p>" in render_report_page(report)

    append_final_event(run, "start", step=5, steps=9)
    assert read_report(run).failed_start == ""


def test_a_run_on_another_machine_is_no_livelier_for_a_start_that_failed(new_run: NewRun) -> None:
    run = new_run(0, total=10, finish=None)
    rewrite_start(run, host="elsewhere", time=time.time() - 1000)
    append_final_event(run, "start_failed", text="other data")
    assert read_report(run).state == "crashed"


def test_what_a_resume_repeats_counts_once_and_lost_validations_are_gone(new_run: NewRun) -> None:
    run = new_run(12, total=12, finish=None)  # validations at 2, 4, ..., 12; checkpoints at 4, 8, 12
    sink = JsonLinesSink()
    sink.open(run, first_step=9)
    sink.write(
        {"kind": "start", "time": time.time(), "step": 8, "steps": 12, "process": os.getpid(), "host": "x"}
    )
    sink.write({"kind": "step", "time": time.time(), "step": 9, "loss": 1.0})
    sink.write({"kind": "validation", "time": time.time(), "step": 10, "loss": 1.0})
    sink.close()
    report = read_report(run)
    assert [event["step"] for event in report.validations] == [2, 4, 6, 8, 10]
    assert [event["step"] for event in report.checkpoints] == [4, 8]
    assert list(report.steps["step"][-2:]) == [8, 9]
    assert len(report.starts) == 2


def test_non_finite_numbers_are_gaps_and_their_steps_are_listed(new_run: NewRun) -> None:
    report = read_report(new_run(5, loss=lambda step: math.nan if step == 3 else 1.0))
    assert report.non_finite == (3,)
    assert math.isnan(report.steps["loss"][2])
    assert report.last("loss") == 1.0


def test_an_empty_directory_is_a_new_run_with_its_gaps_named(tmp_path: Any) -> None:
    report = read_report(RunDirectory(tmp_path))
    assert report.state == "new"
    assert report.problems == ("job.toml: missing", "plan.json: missing", "environment.json: missing")
    assert report.last("loss") is report.median("mfu") is report.highest("memory_bytes") is None


def test_damage_is_named_and_the_rest_is_told(new_run: NewRun) -> None:
    run = new_run(5)
    lines = run.metrics.read_bytes().splitlines(keepends=True)
    run.metrics.write_bytes(lines[0] + b"\0\0\0\n" + b"".join(lines[1:]) + b'{"step": 6, "lo')
    run.plan.write_text("{")
    report = read_report(run)
    assert report.last_step == 5
    assert report.plan == {}
    assert any(problem.startswith("plan.json: ") for problem in report.problems)
    assert "metrics.jsonl: 1 damaged lines were skipped" in report.problems


def test_a_key_that_only_some_steps_have_is_a_column_with_gaps(new_run: NewRun) -> None:
    run = new_run(2)
    with run.metrics.open("a") as file:
        file.write('{"step": 3, "gpu_power_watts": 640.0}\n')
    power = read_report(run).steps["gpu_power_watts"]
    assert power[2] == 640.0
    assert math.isnan(power[0])


def test_a_brief_report_reads_the_end_only(new_run: NewRun) -> None:
    run = new_run(2000)
    brief = read_report(run, tail_only=True)
    assert brief.last_step == 2000
    assert 100 <= len(brief.steps["step"]) < 2000
    assert brief.last("loss") == read_report(run).last("loss")


def test_pauses_between_starts_are_no_time_of_the_run(new_run: NewRun) -> None:
    run = new_run(0, total=10, finish=None)
    events = [
        {"kind": "start", "time": 100.0, "step": 0, "steps": 10},
        {"kind": "message", "time": 160.0, "level": "info", "text": "a minute"},
        {"kind": "start", "time": 1000.0, "step": 4, "steps": 10},
        {"kind": "finish", "time": 1030.0, "step": 10, "outcome": "finished"},
    ]
    run.events.write_text("".join(json.dumps(event) + "\n" for event in events))
    assert read_report(run).seconds == pytest.approx(90.0)


def test_a_run_that_began_anew_is_told_from_there(new_run: NewRun) -> None:
    run = new_run(0, total=10, finish=None)
    events = [
        {"kind": "start", "time": 100.0, "step": 0, "steps": 10},
        {"kind": "message", "time": 160.0, "level": "warning", "text": "of the run before"},
        {"kind": "start", "time": 1000.0, "step": 0, "steps": 10},
        {"kind": "start", "time": 1010.0, "step": 0, "steps": 10, "is_restart": True},
        {"kind": "finish", "time": 1030.0, "step": 10, "outcome": "finished"},
    ]
    run.events.write_text("".join(json.dumps(event) + "\n" for event in events))
    report = read_report(run)
    assert len(report.starts) == 2, "a recovery from the beginning is part of the run"
    assert report.messages == ()
    assert report.seconds == pytest.approx(20.0)


def test_reading_imports_no_torch() -> None:
    code = "import sys, wanma.report.report_page, wanma.report.terminal; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_run_that_never_started_took_no_time(tmp_path: Path) -> None:
    assert read_report(RunDirectory(tmp_path)).seconds == 0.0
