"""History of a metric: a change of level is found, chance is not."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from support.benchmark_results import HARDWARE, benchmark_result
from wanma.bench.comparisons.history import check_subject, find_change_point, metric_histories
from wanma.bench.results.directory import ResultDirectory
from wanma.bench.results.index import IndexedFigure, ResultIndex
from wanma.bench.results.result import SuiteRecord
from wanma.bench.statistics.estimates import Estimate
from wanma.job.errors import WanmaError


def figures(medians: list[float], half_width: float = 0.01) -> list[IndexedFigure]:
    return [
        IndexedFigure(
            f"result-{number}",
            f"2026-11-{number + 1:02d}",
            "key",
            "commit",
            "plain",
            "settings",
            "step_seconds",
            Estimate(median, median - half_width, median + half_width, 6),
        )
        for number, median in enumerate(medians)
    ]


def test_a_change_of_level_is_told_with_both_medians() -> None:
    change = find_change_point(figures([1.0, 1.01, 0.99, 1.0, 1.02, 1.2, 1.21, 1.19, 1.2, 1.22]))
    assert change is not None
    assert change.first_after.id == "result-5"
    assert (change.median_before, change.median_after) == (1.0, 1.2)
    assert change.p_value < 0.05
    text = change.text("step_seconds")
    assert "median 1.00 s before result-5, 1.20 s from it on (× 1.200)" in text
    assert "A suggestion" in text


def test_a_change_within_the_intervals_is_none() -> None:
    levels = [1.0, 1.01, 0.99, 1.0, 1.02, 1.2, 1.21, 1.19, 1.2, 1.22]
    assert find_change_point(figures(levels, half_width=0.2)) is None


def test_few_results_are_no_history() -> None:
    assert find_change_point(figures([1.0, 1.0, 1.0, 2.0, 2.0, 2.0])) is None


def test_equal_figures_have_no_change_point() -> None:
    assert find_change_point(figures([1.0] * 12)) is None


def test_a_change_is_found_in_few_series_without_one() -> None:
    random = np.random.default_rng(1)
    found = [find_change_point(figures(list(random.normal(1.0, 0.1, 12)), half_width=0.0)) for _ in range(60)]
    assert sum(change is not None for change in found) <= 7


def test_each_hardware_has_a_history_of_its_own(tmp_path: Path) -> None:
    for number, processor in enumerate(("a", "b", "a")):
        name = f"2026112{number}-000000-gpt"
        result = benchmark_result(
            {"plain": [1.0 + number] * 3},
            name,
            created=f"2026-11-2{number}",
            hardware={**HARDWARE, "processor": processor},
        )
        ResultDirectory(tmp_path / name).write_result(result)
    with ResultIndex(tmp_path) as index:
        first, second = metric_histories(index, "plain", "step_seconds")
        assert metric_histories(index, "plain", "step_seconds", first.figures[0].hardware) == [first]
        assert metric_histories(index, "nobody", "step_seconds") == []
    assert [figure.estimate.median for figure in first.figures] == pytest.approx([1.001, 3.003])
    assert len(second.figures) == 1
    assert (first.change, first.note) == (None, "A change point needs 8 results, and there are 2.")


def test_each_suite_has_a_history_of_its_own_and_a_change_of_its_content_is_told(tmp_path: Path) -> None:
    suites = (SuiteRecord("a", "1"), SuiteRecord("b", "1"), SuiteRecord("a", "2"))
    for number, suite in enumerate(suites):
        name = f"2026112{number}-000000-gpt"
        result = benchmark_result({"plain": [1.0] * 3}, name, created=f"2026-11-2{number}", suite=suite)
        ResultDirectory(tmp_path / name).write_result(result)
    with ResultIndex(tmp_path) as index:
        first, second = metric_histories(index, "plain", "step_seconds")
        assert metric_histories(index, "plain", "step_seconds", suite="b") == [second]
    assert [len(first.figures), len(second.figures)] == [2, 1]
    assert first.note == "The suite, its job or its scripts changed over these results."
    assert second.note == "A change point needs 8 results, and there are 1."


@pytest.mark.parametrize(
    ("words", "message", "hint"),
    [
        (
            {"metric": "step_second"},
            "has the metric 'step_second'. Did you mean 'step_seconds'?",
            "metrics: .*step_seconds",
        ),
        ({"contender": "plan"}, "has the contender 'plan'. Did you mean 'plain'?", "contenders: plain"),
        ({"suite": "other"}, "has the suite 'other'", "suites: gpt"),
    ],
    ids=["metric", "contender", "suite"],
)
def test_what_no_result_has_is_an_error_that_names_what_there_is(
    words: dict[str, str], message: str, hint: str, tmp_path: Path
) -> None:
    made = benchmark_result({"plain": [1.0] * 3}, "20261120-000000-gpt", suite=SuiteRecord("gpt", "1"))
    ResultDirectory(tmp_path / made.id).write_result(made)
    with ResultIndex(tmp_path) as index:
        check_subject(index, "plain", "step_seconds")
        with pytest.raises(WanmaError) as refused:
            check_subject(index, **{"contender": "plain", "metric": "step_seconds", **words})
    assert message in refused.value.message
    assert re.match(hint, refused.value.hint)
    assert refused.value.exit_code == 2


def test_a_folder_without_results_is_an_error(tmp_path: Path) -> None:
    with ResultIndex(tmp_path) as index, pytest.raises(WanmaError, match="there are no results in"):
        check_subject(index, "job", "step_seconds")
