"""Exports of a result: steps and summaries in CSV and Markdown."""

from __future__ import annotations

import csv
import dataclasses
import io

import pytest

from support.benchmark_results import benchmark_result
from wanma.bench.presentation.blocks import Block
from wanma.bench.presentation.result_tables import (
    markdown_block,
    markdown_table,
    steps_csv,
    summaries_csv,
    summary_metrics,
)
from wanma.bench.results.result import BenchmarkResult

SLOW = [1.0, 1.01, 0.99, 1.0, 1.02, 0.98, 1.0]


@pytest.fixture(scope="module")
def result() -> BenchmarkResult:
    return benchmark_result({"plain": SLOW, "new | better": [0.5 * pace for pace in SLOW]})


def rows(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def test_every_step_is_a_line(result: BenchmarkResult) -> None:
    lines = rows(steps_csv(result))
    assert len(lines) == 2 * 7 * 6
    assert lines[0] == {
        "measurement": "0",
        "contender": "plain",
        "round": "0",
        "counts": "True",
        "is_warm_up": "True",
        "step": "1",
        "time": "1700000008.0",
        "seconds": "3.0",
        "samples": "8.0",
        "targets": "512.0",
        "loss": "4.0",
        "mfu": "",
        "phases.forward_backward": "2.25",
        "phases.optimizer": "0.75",
    }
    assert lines[1]["is_warm_up"] == "False"


def test_a_disturbed_measurement_is_marked(result: BenchmarkResult) -> None:
    disturbed = dataclasses.replace(result.measurements[0], disturbances=("hot",))
    changed = dataclasses.replace(result, measurements=(disturbed, *result.measurements[1:]))
    assert {line["counts"] for line in rows(steps_csv(changed))[:6]} == {"False"}


def test_a_summary_has_interval_ratio_and_verdict(result: BenchmarkResult) -> None:
    lines = {(line["contender"], line["metric"]): line for line in rows(summaries_csv(result))}
    slow, fast = lines["plain", "step_seconds"], lines["new | better", "step_seconds"]
    assert (slow["unit"], slow["count"], slow["speed_ratio"], slow["verdict"]) == ("s", "7", "", "")
    assert float(slow["low"]) < float(slow["median"]) < float(slow["high"])
    assert (float(fast["speed_ratio"]), fast["verdict"]) == (pytest.approx(2.0), "faster")


def test_an_interval_that_does_not_exist_is_empty() -> None:
    line = rows(summaries_csv(benchmark_result({"plain": [1.0]})))[0]
    assert (line["low"], line["high"], line["count"]) == ("", "", "1")


def test_the_markdown_table_has_a_row_for_each_contender(result: BenchmarkResult) -> None:
    lines = markdown_table(result, ["step_seconds", "peak_memory_bytes"]).splitlines()
    assert lines[:2] == [
        "| contender | Step time (95 %) | Peak memory (95 %) | measurements |",
        "| --- | ---: | ---: | ---: |",
    ]
    assert lines[2].startswith("| plain | 1.001 s (0.982–1.020) | 1.000 GiB (1.000–1.000) | 7 of 7 |")
    assert lines[3].startswith("| new \\| better | 0.5005 s (0.4910–0.5100), 2.000 (2.000–2.000) faster | ")
    assert len(lines) == 4


def test_the_markdown_table_has_all_metrics_but_phases(result: BenchmarkResult) -> None:
    heads = markdown_table(result).splitlines()[0]
    assert "Checkpoint stall (95 %)" in heads
    assert "Phase" not in heads
    assert not [name for name in summary_metrics(result) if name.startswith("phases.")]


def test_names_with_commas_pipes_lines_and_markup_stay_one_cell() -> None:
    name = """sh -c 'a, "b" | c
  <d> __e__ *f* g_h [i](j) é马'"""
    result = benchmark_result({name: SLOW})
    assert {line["contender"] for line in rows(steps_csv(result))} == {name}
    assert {line["contender"] for line in rows(summaries_csv(result))} == {name}
    _, _, line = markdown_table(result, ["step_seconds"]).splitlines()
    cell = r"""| sh -c 'a, "b" \| c \<d\> \_\_e\_\_ \*f\* g_h \[i\](j) é马' | 1.001 s"""
    assert line.startswith(cell)


def test_a_result_without_measurements_is_exported() -> None:
    empty = dataclasses.replace(benchmark_result({"plain": SLOW}), measurements=(), summaries={}, verdicts={})
    assert rows(steps_csv(empty)) == rows(summaries_csv(empty)) == []
    assert markdown_table(empty).splitlines()[2] == "| plain | 0 of 0 |"


def test_a_block_is_a_table_above_its_sentences() -> None:
    block = Block("a | b", ("contender", "speedup"), [["x_y", "1.5"]], ["Over *cores*."], ["Few rounds."])
    assert markdown_block(block) == (
        "**a \\| b**\n\n"
        "| contender | speedup |\n| --- | ---: |\n| x_y | 1.5 |\n\n"
        "Over \\*cores\\*.\n\nFew rounds.\n"
    )
