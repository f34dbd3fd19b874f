"""Comparison of two results: ratios with verdicts, and refusal where the conditions differ."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from support.benchmark_results import HARDWARE, benchmark_result, with_step_samples
from wanma.bench.comparisons.comparison import compare_results, find_differences
from wanma.bench.presentation.comparison_blocks import comparison_blocks
from wanma.bench.results.result import BenchmarkResult, SuiteRecord
from wanma.bench.statistics.verdicts import Outcome
from wanma.job.errors import WanmaError

SLOW = [1.0, 1.01, 0.99, 1.0, 1.02, 0.98, 1.0]
FAST = [0.8 * pace for pace in SLOW]


def result(
    paces: list[float] = SLOW, name: str = "older", contender: str = "plain", **changes: Any
) -> BenchmarkResult:
    return benchmark_result({contender: paces}, name, **changes)


def test_a_contender_that_became_faster_has_a_ratio_above_one() -> None:
    comparison = compare_results(result(), result(FAST, "newer"))
    rows = {row.metric: row for row in comparison.rows}
    verdict = rows["step_seconds"].verdict
    assert verdict is not None
    assert verdict.outcome is Outcome.FASTER
    assert verdict.ratio.median == pytest.approx(1.25, rel=0.01)
    assert not verdict.is_paired
    assert rows["step_seconds"].after.median == pytest.approx(0.8008)
    assert comparison.differences == ()


def test_the_same_figures_are_no_difference() -> None:
    rows = compare_results(result(), result(name="newer")).rows
    assert {row.verdict.outcome for row in rows if row.verdict is not None} == {Outcome.CANNOT_TELL}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"hardware": {**HARDWARE, "processor": "another"}}, "hardware: processor: a processor → another"),
        ({"hardware": {**HARDWARE, "cores": None}}, "hardware: cores: 8 cores → none"),
        ({"suite": SuiteRecord("training", "c3d4")}, "suite: training a1b2 → training c3d4"),
    ],
)
def test_results_of_other_conditions_are_refused_by_name(changes: dict[str, Any], text: str) -> None:
    newer = result(FAST, "newer", **changes)
    with pytest.raises(WanmaError, match="older and newer are not comparable") as raised:
        compare_results(result(), newer)
    assert text in raised.value.message
    comparison = compare_results(result(), newer, allows_differences=True)
    assert [str(difference) for difference in comparison.differences] == [text]
    assert comparison.rows != ()


def test_other_settings_of_a_contender_are_named() -> None:
    older = result()
    changed = dataclasses.replace(older.contenders[0], settings={"parallel.dp_shard": 4, "train.fp8": True})
    newer = dataclasses.replace(older, id="newer", contenders=(changed,))
    with pytest.raises(WanmaError) as raised:
        compare_results(older, newer)
    assert "plain: parallel.dp_shard: 1 → 4" in raised.value.message
    assert "plain: train.fp8: none → True" in raised.value.message


def test_another_kernel_version_or_commit_is_told_but_does_not_refuse() -> None:
    newer = result(
        name="newer",
        hardware={**HARDWARE, "kernel": "6.9"},
        environment={"wanma": "0.2.0", "torch": "2.11.0"},
        code={"commit": "fedcba", "is_dirty": False, "hash": "ff00"},
    )
    differences = compare_results(result(), newer).differences
    assert [difference.subject for difference in differences] == [
        "hardware: kernel",
        "version: wanma",
        "code: commit",
    ]
    assert not any(difference.is_obstacle for difference in differences)


def test_another_command_is_an_obstacle() -> None:
    older = result()
    command = dataclasses.replace(older.contenders[0], kind="command", command=("torchrun", "a.py"))
    other = dataclasses.replace(command, command=("torchrun", "b.py"))
    differences = find_differences(
        dataclasses.replace(older, contenders=(command,)), dataclasses.replace(older, contenders=(other,))
    )
    assert [str(difference) for difference in differences] == [
        "command of plain: torchrun a.py → torchrun b.py"
    ]


def test_results_without_a_common_contender_cannot_be_compared() -> None:
    with pytest.raises(WanmaError) as raised:
        compare_results(result(), result(contender="new", name="newer"))
    assert raised.value.hint == "plain in one, new in the other"


def test_the_time_of_steps_with_other_samples_is_not_judged() -> None:
    newer = with_step_samples(result(FAST, "newer"), {"plain": 4.0})
    comparison = compare_results(result(), newer, allows_differences=True)
    judged = {row.metric for row in comparison.rows if row.verdict is not None}
    assert "step_seconds" not in judged
    assert {"samples_per_second", "total_seconds"} <= judged
    blocks = {block.title: block for block in comparison_blocks(comparison)}
    assert blocks["Step time"].rows[0][3:] == ["", "steps of 4 samples"]
