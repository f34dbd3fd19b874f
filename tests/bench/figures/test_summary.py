"""Summary of a result: steady steps of the measurements that count, and verdicts against the baseline."""

from __future__ import annotations

import dataclasses
import math

import pytest

from support.benchmark_results import benchmark_result, measurement, with_step_samples
from wanma.bench.figures.metrics import METRICS, find_metric, metric_values
from wanma.bench.figures.summary import judge_metric, summarize
from wanma.bench.measurements.measurement import StepRecord
from wanma.bench.presentation.page import result_page
from wanma.bench.presentation.result_blocks import metric_block
from wanma.bench.presentation.result_tables import markdown_table
from wanma.bench.statistics.verdicts import Outcome

SLOW = [1.0, 1.01, 0.99, 1.0, 1.02, 0.98, 1.0]
FAST = [0.5 * pace for pace in SLOW]


def test_the_value_of_a_round_is_the_median_of_its_steady_steps() -> None:
    result = benchmark_result({"plain": SLOW})
    assert result.values["plain"]["step_seconds"][1] == pytest.approx(1.01 * 1.001)
    assert result.summaries["plain"]["step_seconds"].median == pytest.approx(1.001)
    assert result.summaries["plain"]["samples_per_second"].median == pytest.approx(8 / 1.001)


def test_a_measurement_that_does_not_count_is_in_no_figure() -> None:
    result = benchmark_result({"plain": SLOW})
    disturbed = dataclasses.replace(result.measurements[0], disturbances=("another program used 3 CPUs",))
    result = dataclasses.replace(result, measurements=(disturbed, *result.measurements[1:]))
    summarized = summarize(result, [1] * 7)
    assert sorted(summarized.values["plain"]["step_seconds"]) == [1, 2, 3, 4, 5, 6]
    assert summarized.summaries["plain"]["total_seconds"].count == 6


def test_figures_and_phases_are_metrics_like_the_others() -> None:
    summaries = benchmark_result({"plain": SLOW}).summaries["plain"]
    assert summaries["checkpoint_stall_seconds"].median == pytest.approx(0.5)
    assert summaries["phases.optimizer"].median == pytest.approx(0.25 * 1.001)
    assert summaries["peak_memory_bytes"].median == 1 << 30
    assert "mfu" not in summaries


def test_the_wait_for_data_is_a_share_of_all_steps() -> None:
    """Nine steps that never wait, and one that waits for as long as the others take."""
    one = measurement("plain", 0, 1.0, steps=11)
    waits = [9.0, *[0.0] * 9, 9.0]
    steps = [
        dataclasses.replace(step, seconds=1.0 + wait, phases={"data": wait, "forward_backward": 1.0})
        for step, wait in zip(one.steps, waits, strict=True)
    ]
    one = dataclasses.replace(one, steps=tuple(steps))
    assert metric_values(one, "data_share", 1) == pytest.approx([9 / 19])
    assert metric_values(measurement("plain", 0, 1.0), "data_share") == []


def test_a_contender_twice_as_fast_is_faster_in_seconds_and_in_rates() -> None:
    verdicts = benchmark_result({"plain": SLOW, "new": FAST}).verdicts
    assert list(verdicts) == ["new"]
    for metric in ("step_seconds", "samples_per_second"):
        assert verdicts["new"][metric].outcome is Outcome.FASTER
        assert verdicts["new"][metric].ratio.median == pytest.approx(2.0)
    assert verdicts["new"]["peak_memory_bytes"].outcome is Outcome.CANNOT_TELL
    assert not [metric for metric in verdicts["new"] if metric.startswith("phases.")]


def test_the_time_of_steps_with_fewer_samples_is_shown_with_them_and_not_judged() -> None:
    """Steps half as long with half of the samples, as of asynchronous servers, are as fast."""
    result = benchmark_result({"plain": SLOW, "asynchronous": FAST})
    judged = with_step_samples(result, {"asynchronous": 4.0})
    verdicts = judged.verdicts["asynchronous"]
    assert "step_seconds" not in verdicts
    assert verdicts["samples_per_second"].ratio.median == pytest.approx(1.0)
    earlier = dataclasses.replace(judged, verdicts=result.verdicts)  # as an earlier version has stored it
    for one in (judged, earlier):
        row = markdown_table(one, ["step_seconds"]).splitlines()[3]
        assert row.startswith("| asynchronous | 0.5005 s (0.4910–0.5100), steps of 4 samples |")
        assert metric_block(one, "step_seconds").rows[1][2:] == ["", "steps of 4 samples", ""]
        assert "asynchronous: samples per second" in result_page(one)


def test_two_rounds_are_no_verdict() -> None:
    verdict = benchmark_result({"plain": SLOW[:2], "new": FAST[:2]}).verdicts["new"]["step_seconds"]
    assert verdict.outcome is Outcome.CANNOT_TELL


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("step_seconds", {0: 0.0}, {0: 1.0}),
        ("step_seconds", {0: 1.0}, {1: 1.0}),
        ("answer", {0: 1.0}, {0: 1.0}),
    ],
    ids=["zero", "no common round", "no better direction"],
)
def test_some_values_have_no_ratio(name: str, before: dict[int, float], after: dict[int, float]) -> None:
    values = {"plain": {name: before}, "new": {name: after}}
    result = dataclasses.replace(benchmark_result({"plain": SLOW}), values=values)
    assert judge_metric(name, (result, "plain"), (result, "new"), is_paired=True, error_rate=0.05) is None


def test_a_loss_of_nan_is_no_value() -> None:
    result = benchmark_result({"plain": SLOW})
    steps = (*result.measurements[0].steps, StepRecord(7, 1.0, 1.0, loss=math.nan))
    diverged = dataclasses.replace(result.measurements[0], steps=steps)
    result = dataclasses.replace(result, measurements=(diverged, *result.measurements[1:]))
    assert sorted(summarize(result, [1] * 7).values["plain"]["loss"]) == [1, 2, 3, 4, 5, 6]


def test_each_measurement_needs_its_warm_up() -> None:
    with pytest.raises(ValueError, match="zip"):
        summarize(benchmark_result({"plain": SLOW}), [1])


@pytest.mark.parametrize(
    ("name", "title", "unit", "better", "text"),
    [
        ("checkpoint_stall_seconds", "Checkpoint stall", "s", "lower", "1.50 s"),
        ("disk_bytes", "Disk", "B", "lower", "2 B"),
        ("images_per_second", "Images per second", "1/s", "higher", "1.500/s"),
        ("phases.forward_backward", "Phase forward backward", "s", "lower", "1.50 s"),
        ("answer", "Answer", "", "", "1.500"),
        ("mfu", "Model FLOPs utilization", "share", "higher", "150.0 %"),
    ],
)
def test_a_metric_gets_unit_and_direction_from_its_name(
    name: str, title: str, unit: str, better: str, text: str
) -> None:
    metric = find_metric(name)
    assert (metric.title, metric.unit, metric.better, metric.text(1.5)) == (title, unit, better, text)


def test_every_metric_is_defined_in_a_sentence() -> None:
    assert [metric.name for metric in METRICS if not metric.definition.endswith(".")] == []


def test_values_leave_out_the_warm_up_of_metrics_per_step_alone() -> None:
    one = measurement("plain", 0, 1.0, steps=3)
    assert metric_values(one, "step_seconds", 1) == pytest.approx([1.002, 1.0])
    assert metric_values(one, "startup_seconds", 1) == pytest.approx([8.0])


@pytest.mark.parametrize(
    ("name", "unit"),
    [
        ("seconds", "s"),
        ("epoch_seconds", "s"),
        ("tokens_per_second", "1/s"),
        ("step_milliseconds", ""),
        ("heap_megabytes", ""),
        ("link_gigabytes_per_second", "1/s"),
    ],
)
def test_the_unit_of_a_figure_is_the_last_word_of_its_name(name: str, unit: str) -> None:
    assert find_metric(name).unit == unit
