"""Forecast of a run beside its measurements."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace

import pytest

from wanma.job.forecast.forecast import StepTime
from wanma.job.plan.plan import Plan
from wanma.job.run.run_directory import RunDirectory
from wanma.report.forecast_comparison import (
    ForecastComparison,
    forecast_comparison_sentence,
    forecast_comparisons,
    median_step_seconds,
    peak_memory_bytes,
    rank_memory_bytes,
    rank_memory_comparisons,
)
from wanma.report.report_page import render_report_page
from wanma.report.run_charts import run_charts
from wanma.report.run_report import read_report
from wanma.report.terminal import run_summary

NewRun = Callable[..., RunDirectory]

STEP = StepTime(0.5, 0.36, data=0.08, optimizer=0.03, loading=0.0, checkpoint=0.03, uncertainty=0.1)


def promised(run: RunDirectory, step: StepTime | None = STEP, plan: Plan | None = None) -> RunDirectory:
    """`run` as if its forecast had said so."""
    planned = json.loads(run.plan.read_text())
    planned["forecast"]["step"] = asdict(step) if step is not None else None
    if plan is not None:
        planned["plan"] = plan.to_json()
    run.plan.write_text(json.dumps(planned))
    return run


def by_name(run: RunDirectory) -> dict[str, ForecastComparison]:
    return {one.name: one for one in forecast_comparisons(read_report(run))}


def test_a_step_is_set_beside_its_forecast_phase_by_phase(new_run: NewRun) -> None:
    found = by_name(promised(new_run(300)))
    assert found["step"].forecast == 0.5
    assert found["step"].measured == pytest.approx(0.72, abs=0.01)
    assert found["forward_backward"].forecast == 0.36
    assert found["forward_backward"].measured == pytest.approx(0.62, abs=0.01)
    assert (found["communication"].forecast, found["communication"].measured) == (0.08, 0.06)
    assert (found["optimizer"].forecast, found["optimizer"].measured) == (0.03, 0.03)


def test_charts_have_the_forecast_as_a_line(new_run: NewRun) -> None:
    run = promised(new_run(50), plan=Plan(dp_replicate=2, micro_batch=8, device="cuda"))
    planned = json.loads(run.plan.read_text())
    planned["forecast"] |= {"model_flops_utilisation": 0.25, "tensor_bytes": 400 << 20}
    run.plan.write_text(json.dumps(planned))
    charts = run_charts(read_report(run))
    lines = {chart.title: [value for _, value in chart.horizontal_lines] for chart in charts}
    assert (lines["MFU"], lines["Step time by phase"]) == ([0.25], [0.5])
    assert lines["Throughput"] == [pytest.approx(8192 / 0.5, rel=0.02)]
    assert lines["Memory"] == [400 << 20], "of a GPU what torch allocates"


def test_what_a_few_steps_do_counts_as_each_steps_share(new_run: NewRun) -> None:
    # Three of the 298 steps after warm-up saved, for 0.09 s each.
    assert by_name(promised(new_run(300)))["checkpoint"].measured == pytest.approx(3 * 0.09 / 298)


def test_the_first_slow_steps_do_not_count(new_run: NewRun) -> None:
    assert median_step_seconds(read_report(new_run(5))) == pytest.approx(0.72, abs=0.02)
    assert median_step_seconds(read_report(new_run(4))) is None


def test_of_a_run_whose_plan_has_changed_only_steps_under_the_new_one_count(new_run: NewRun) -> None:
    run = new_run(30)
    before = median_step_seconds(read_report(run))
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    for line in lines[20:]:
        line["step_seconds"] = 9.0
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert median_step_seconds(read_report(run)) == pytest.approx(before, abs=0.1)
    growth = {"kind": "resize", "time": 1.0, "step": 20, "change": {"machines": 3}}
    with run.events.open("a") as events:
        events.write(json.dumps(growth) + "\n")
    assert median_step_seconds(read_report(run)) == 9.0


def test_communication_of_a_pipeline_is_part_of_forward_and_backward(new_run: NewRun) -> None:
    found = by_name(promised(new_run(30), replace(STEP, bubble=0.1), Plan(pp=2)))
    assert "communication" not in found
    assert found["forward_backward"].forecast == pytest.approx(0.36 + 0.08 + 0.1)
    assert found["forward_backward"].measured == pytest.approx(0.68, abs=0.01)


def test_the_sentence_names_the_kind_that_missed_most(new_run: NewRun) -> None:
    told = forecast_comparison_sentence(read_report(promised(new_run(300))))
    assert told.startswith(
        "step 0.72 s / 0.50 s (+44 %, outside the 90 % interval of ±10 %; "
        "largest error: forward and backward +0.26 s)"
    )
    assert told.endswith("memory 680 MiB / 544 MiB (+25 %)")


def test_a_promise_that_was_kept_is_said_to_be(new_run: NewRun) -> None:
    told = forecast_comparison_sentence(read_report(promised(new_run(300), replace(STEP, seconds=0.7))))
    assert "+3 %, within the 90 % interval of ±10 %" in told


def test_what_was_faster_than_forecast_names_what_took_less(new_run: NewRun) -> None:
    slow = replace(STEP, seconds=1.0, compute=0.86)
    told = forecast_comparison_sentence(read_report(promised(new_run(300), slow)))
    assert "(-28 %, outside the 90 % interval of ±10 %; largest error: forward and backward −0.24 s)" in told


def test_without_a_promise_of_time_memory_alone_is_set_beside(new_run: NewRun) -> None:
    run = promised(new_run(30), None)
    assert list(by_name(run)) == ["memory"]
    assert forecast_comparison_sentence(read_report(run)) == "memory 680 MiB / 544 MiB (+25 %)"


def test_a_promise_of_another_version_is_left_alone(new_run: NewRun) -> None:
    run = promised(new_run(30))
    planned = json.loads(run.plan.read_text())
    planned["forecast"]["step"]["warp"] = 1.0
    run.plan.write_text(json.dumps(planned))
    assert list(by_name(run)) == ["memory"]


def test_the_fullest_rank_is_found_in_the_ranks_logs(new_run: NewRun) -> None:
    run = new_run(30)
    line = "step {}/30  loss 2.1  gradient norm 0.4  0.720 s  peak memory {} bytes\n"
    run.rank_log(0).write_text(line.format(10, 400) + line.format(20, 500))
    run.rank_log(1).write_text(line.format(10, 700) + line.format(20, 900) + "a line of the user's\n")
    assert rank_memory_bytes(run) == {0: 500, 1: 900}
    assert peak_memory_bytes(read_report(run)) == (900, 1)


def with_ranks(run: RunDirectory, device: str) -> RunDirectory:
    """`run` as a pipeline of two stages, whose ranks' logs say what they held."""
    promised(run, STEP, Plan(pp=2, tp=2, device=device))
    planned = json.loads(run.plan.read_text())
    of_ranks = [{"memory_bytes": 1000, "tensor_bytes": 800}, {"memory_bytes": 600, "tensor_bytes": 400}]
    planned["forecast"] |= {"memory_bytes": 1000, "tensor_bytes": 800, "pipeline_ranks": of_ranks}
    run.plan.write_text(json.dumps(planned))
    line = "step 10/30  loss 2.1  gradient norm 0.4  0.720 s  peak memory {} bytes\n"
    for rank, peak in ((0, 900), (1, 1100), (3, 300)):
        run.rank_log(rank).write_text(line.format(peak))
    return run


def test_every_rank_of_a_pipeline_is_set_beside_the_forecast_of_its_stage(new_run: NewRun) -> None:
    report = read_report(with_ranks(new_run(30), "cpu"))
    found = [(one.name, one.forecast, one.measured) for one in rank_memory_comparisons(report)]
    assert found == [
        ("memory of rank 0", 1000, 900),
        ("memory of rank 1", 1000, 1100),
        ("memory of rank 3", 600, 300),
    ]
    told = "  memory by rank, measured / forecast: rank 0 900 B / 1000 B (-10 %), rank 1 1.1 KiB / 1000 B"
    assert told in run_summary(report)
    assert '<td>rank 3</td><td class="n">600 B</td><td class="n">300 B</td>' in render_report_page(report)


def test_on_a_gpu_what_torch_allocates_is_set_beside_its_forecast(new_run: NewRun) -> None:
    report = read_report(with_ranks(new_run(30), "cuda"))
    assert [one.forecast for one in rank_memory_comparisons(report)] == [800, 800, 400]
    (memory,) = (one for one in forecast_comparisons(report) if one.name == "memory")
    assert (memory.forecast, memory.measured) == (800, 1100)


def test_without_a_pipeline_every_rank_is_as_full_as_the_fullest(new_run: NewRun) -> None:
    run = promised(new_run(30), STEP, Plan(dp_replicate=2))
    line = "step 10/30  loss 2.1  gradient norm 0.4  0.720 s  peak memory {} bytes\n"
    for rank in (0, 1):
        run.rank_log(rank).write_text(line.format(500 << 20))
    report = read_report(run)
    assert [one.forecast for one in rank_memory_comparisons(report)] == [report.forecast["memory_bytes"]] * 2


def test_terminal_and_page_show_the_promise(new_run: NewRun) -> None:
    report = read_report(promised(new_run(300)))
    assert "step 0.72 s / 0.50 s (+44 %" in run_summary(report)
    shown = render_report_page(report)
    assert "Step time: forecast and measured" in shown
    assert "<td>forward and backward</td>" in shown
