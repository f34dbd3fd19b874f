"""Tables and page of a machine result."""

from __future__ import annotations

import io
import re
from dataclasses import replace

import pytest
from rich.console import Console

from support.machine_results import machine_result
from wanma.bench.figures.summary import summarize
from wanma.bench.machine.machine_result import is_machine_result
from wanma.bench.machine_report.machine_blocks import (
    limit_groups,
    machine_blocks,
    nominal_line,
    quality_lines,
)
from wanma.bench.machine_report.page import machine_page
from wanma.bench.machine_report.roofline import TrainingPoint
from wanma.bench.presentation.blocks import terminal
from wanma.bench.results.result import BenchmarkResult

POINT = TrainingPoint("a run", "fp32", 4, 0.1, 20e9, 1e9, 0.25e9)


@pytest.fixture(scope="module")
def result() -> BenchmarkResult:
    return machine_result(
        4, 6, disturbed={3: 0.5}, speed=lambda first, second: 0.4 if (first, second) == (1, 2) else 1.0
    )


def text_of(result: BenchmarkResult) -> str:
    shown = io.StringIO()
    Console(file=shown, width=100).print(terminal(machine_blocks(result, [POINT])))
    return shown.getvalue()


def test_it_is_known_as_a_machine_result(result: BenchmarkResult) -> None:
    assert is_machine_result(result)


def test_tables_have_limits_pairs_slow_links_and_exclusions(result: BenchmarkResult) -> None:
    text = text_of(result)
    assert re.search(r"Matrix products, bf16 +[\d.]+ TFLOP/s \([\d.]+–[\d.]+\)", text)
    assert "GB/s from each rank (row) to each other" in text
    assert re.search(r"ranks=4: rank 1 to rank 2: \d\d\.\d % \(", text)
    assert re.search(r"ranks=4 +5 +1 +Other programs used 1.50 CPUs", text), "one execution is excluded"
    assert "ranks=4: collectives, gloo" in text
    assert "storage: /data" in text
    assert "a run: 200 GFLOP/s at 20 FLOP/B" in text
    assert "1024x512x512" not in text, "cases are in the CSV"


def test_where_nothing_is_slow_the_noise_is_told() -> None:
    assert re.search(
        r"none in \d+ comparisons; this noise shows differences from \d+", text_of(machine_result(4))
    )
    assert "not compared" in text_of(machine_result(2))


def test_the_page_has_every_limit_with_its_definition_and_no_network(result: BenchmarkResult) -> None:
    page = machine_page(result, [POINT])
    for metric in (one for _, metrics in limit_groups(result) for one in metrics):
        (own,) = (part for part in page.split('<div class="card">') if f"<h2>{metric.title}</h2>" in part)
        assert metric.definition.replace("'", "&#x27;") in own
        assert 'class="bar"' in own, "with its interval"
    assert re.findall(r"(?:src|href)=", page) == []
    assert "<generator" not in page
    assert 'aria-label="Roofline"' in page
    assert "rank 1 to rank 2" in page
    assert "GB/s from each rank (row) to each other" in page
    assert page.count("<svg") > 2, "roofline, and charts of collectives"


def test_a_gpu_is_set_beside_its_makers_figures(result: BenchmarkResult) -> None:
    """The made hardware has a peak of 100 TFLOP/s in bf16, and no other figure."""
    (record,) = result.contenders
    on_gpu = replace(record, settings={**record.settings, "device": "GPU"})
    share = result.summaries["ranks=4"]["products.bf16_flops_per_second"].median / 1e14
    assert (
        nominal_line(result, on_gpu) == f"ranks=4, of the maker's figures of chip: bf16 {100 * share:.1f} %"
    )
    assert nominal_line(result, record) == "", "a CPU's peaks are measured"


def test_cases_without_undisturbed_rounds_are_told(result: BenchmarkResult) -> None:
    assert not any("undisturbed" in line for line in quality_lines(result))
    measurements = tuple(
        replace(one, figures={**one.figures, "disturbed_share": 0.25}) for one in result.measurements
    )
    noisy = summarize(replace(result, measurements=measurements), [0] * len(measurements))
    assert quality_lines(noisy) == [
        "ranks=4: 25.0 % of the cases had fewer than three undisturbed rounds, and count with all their "
        "rounds"
    ]
