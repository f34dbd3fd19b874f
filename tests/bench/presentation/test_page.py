"""Page of a result: offline, with every figure beside its definition, and text that cannot become code."""

from __future__ import annotations

import dataclasses
import re

import pytest

from support.benchmark_results import benchmark_result, measurement
from wanma.bench.figures.metrics import find_metric
from wanma.bench.presentation.charts import result_charts
from wanma.bench.presentation.page import result_page
from wanma.bench.presentation.result_tables import summary_metrics
from wanma.bench.results.result import BenchmarkResult

SLOW = [1.0, 1.01, 0.99, 1.0, 1.02, 0.98, 1.0]
EVIL = "<script>alert(1)</script>"


@pytest.fixture(scope="module")
def result() -> BenchmarkResult:
    return benchmark_result({"plain": SLOW, EVIL: [0.5 * pace for pace in SLOW]})


@pytest.fixture(scope="module")
def page(result: BenchmarkResult) -> str:
    return result_page(result)


def test_the_page_needs_no_network_and_takes_no_code_from_names(page: str) -> None:
    assert EVIL not in page
    assert "&lt;script&gt;alert(1)" in page
    assert re.findall(r"(?:src|href)=", page) == []
    assert "default-src 'none'" in page


def test_every_metric_stands_beside_its_definition(result: BenchmarkResult, page: str) -> None:
    for name in summary_metrics(result):
        metric = find_metric(name)
        (own,) = (part for part in page.split('<div class="card">') if f"<h2>{metric.title}</h2>" in part)
        assert metric.definition in own


def test_intervals_and_verdicts_are_those_of_the_result(page: str) -> None:
    assert "1.001 s (0.982–1.020)" in page
    assert "faster, 2.000 (2.000–2.000)" in page
    assert '<td class="n">faster</td><td class="n">≥ 1.0 %</td>' in page


def test_the_bar_of_an_interval_ends_at_its_upper_end(page: str) -> None:
    own = page.split("<h2>Step time</h2>")[1].split("</section>")[0]
    first, second = re.findall(
        r'<span class="c(\d)" style="width:([\d.]+)%"></span><span class="measured"', own
    )[:2]
    widths = [float(width) for width in re.findall(r'"measured" style="width:([\d.]+)%', own)[:2]]
    assert (first[0], second[0]) == ("1", "2")
    assert float(first[1]) + widths[0] == pytest.approx(100.0, abs=0.02)
    assert float(second[1]) + widths[1] == pytest.approx(50.0, abs=0.02)


def test_charts_have_a_line_for_each_contender(result: BenchmarkResult) -> None:
    charts = {chart.title: chart for chart in result_charts(result)}
    assert list(charts) == ["Step time by step", "Median step time by round", "Loss by step"]
    steps = charts["Step time by step"]
    assert [series.name for series in steps.series] == ["plain", EVIL]
    assert steps.series[0].xs == [1, 2, 3, 4, 5, 6]
    assert steps.series[0].ys[0] == pytest.approx(3.0)
    assert charts["Median step time by round"].series[1].ys == pytest.approx(
        [0.5 * 1.001 * pace for pace in SLOW]
    )


def test_a_step_of_each_contender_is_a_stacked_bar_of_its_parts(page: str) -> None:
    own = page.split("<h2>Breakdown of a step</h2>")[1]
    assert re.search(r'with communication</td><td class="n">0\.751 s</td><td class="n">0\.375 s', own)
    # Bars are as long as their step beside the longest one: the second contender's half as long.
    bars = re.findall(r'<div class="bar">(.*?)</div>', page.split("<h2>Breakdown of a step</h2>")[1])[:2]
    lengths = [sum(float(width) for width in re.findall(r"width:([\d.]+)%", bar)) for bar in bars]
    assert lengths == pytest.approx([100.0, 50.0], abs=0.1)
    assert [re.findall(r'class="c(\d+)"', bar) for bar in bars] == [["1", "5"], ["1", "5"]]


def test_the_utilization_is_a_table(page: str) -> None:
    own = page.split("<h2>Utilization</h2>")[1].split("</table>")[0]
    assert '<td>plain</td><td class="n">75.0 %</td><td class="n">1.0 GiB</td>' in own


def test_a_result_without_times_of_steps_has_no_breakdown() -> None:
    one = measurement("plain", 0, 1.0)
    steps = tuple(dataclasses.replace(step, phases={}) for step in one.steps)
    result = benchmark_result({"plain": [1.0]}, measurements=(dataclasses.replace(one, steps=steps),))
    assert "Breakdown of a step" not in result_page(result)


def test_measurements_that_do_not_count_have_their_reason(result: BenchmarkResult) -> None:
    more = measurement("plain", 7, 1.0, disturbances=("the CPU was throttled",))
    text = result_page(dataclasses.replace(result, measurements=(*result.measurements, more)))
    assert "Measurements: 14 of 15 count" in text
    assert '<td class="n">1</td><td class="n">the CPU was throttled</td>' in text


def test_the_environment_is_a_table(page: str) -> None:
    for row in ("<td>torch</td><td>2.11.0</td>", "<td>kernel</td><td>6.1</td>", "<td>hash</td><td>ff00</td>"):
        assert row in page


def test_a_result_without_measurements_is_a_page() -> None:
    empty = dataclasses.replace(
        benchmark_result({"plain": SLOW}), measurements=(), values={}, summaries={}, ended=""
    )
    text = result_page(empty)
    assert "The benchmark has not ended." in text
    assert "<figure" not in text
