"""Terminal tables of results: medians with intervals, verdicts, and the measurements that do not count."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import pytest
from rich.console import Console

from support.benchmark_results import benchmark_result, measurement
from wanma.bench.comparisons.comparison import compare_results
from wanma.bench.comparisons.reproduction import judge_reproduction
from wanma.bench.figures.metrics import find_metric
from wanma.bench.figures.summary import summarize
from wanma.bench.presentation.blocks import Block, terminal
from wanma.bench.presentation.comparison_blocks import comparison_blocks, reproduction_blocks
from wanma.bench.presentation.page import result_page
from wanma.bench.presentation.result_blocks import (
    STEP_TIME_NOTE,
    definition_text,
    exclusion_reasons,
    result_blocks,
)
from wanma.bench.presentation.result_tables import markdown_table
from wanma.bench.results.result import BenchmarkResult
from wanma.bench.statistics.estimates import Estimate
from wanma.cli.output import print_content

SLOW = [1.0, 1.01, 0.99, 1.0, 1.02, 0.98, 1.0]
FAST = [0.5 * pace for pace in SLOW]


@pytest.fixture(scope="module")
def result() -> BenchmarkResult:
    return benchmark_result({"plain": SLOW, "new": FAST})


def lines(blocks: Iterable[Block], width: int = 120) -> list[str]:
    """Rendered lines with single spaces."""
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(terminal(blocks))
    return [" ".join(line.split()) for line in capture.get().splitlines()]


def test_a_metric_has_medians_intervals_ratios_and_verdicts(result: BenchmarkResult) -> None:
    text = lines(result_blocks(result, ["step_seconds"]))
    assert text[0] == "A small GPT"
    assert text[1] == "1 × (2 × chip), a processor, 8 cores, 64 GiB"
    assert "plain 1.001 s (0.982–1.020) 1 baseline" in text
    (new,) = (line for line in text if line.startswith("new 0.5005 s"))
    assert new.startswith("new 0.5005 s (0.4910–0.5100) 2.000 (2.000–2.000) faster ≥ 1.0 %")


def test_the_parts_of_a_step_stand_side_by_side_and_add_up(result: BenchmarkResult) -> None:
    text = lines(result_blocks(result, ["step_seconds"]))
    (heads,) = (row for row, line in enumerate(text) if line == "part plain new")
    rows = text[heads + 1 : heads + 5]
    assert rows[0].startswith("forward and backward, with communication 0.751 s 0.375 s")
    assert rows[1] == "optimizer 0.250 s 0.125 s"
    assert rows[2] == "not explained 0.000 s 0.000 s"
    assert rows[3] == "step 1.001 s 0.500 s"


def test_the_utilization_has_a_column_for_what_can_be_read(result: BenchmarkResult) -> None:
    text = lines(result_blocks(result, ["step_seconds"]))
    heads = text.index("contender CPU utilization Peak memory Disk")
    assert text[heads + 1 : heads + 3] == ["plain 75.0 % 1.0 GiB 2.05 kB/s", "new 150.0 % 1.0 GiB 2.05 kB/s"]
    assert "GPU utilization" not in " ".join(text)


def test_a_utilization_of_more_than_all_is_told_as_impossible(result: BenchmarkResult) -> None:
    assert not [line for line in lines(result_blocks(result)) if line.startswith("More than 100 %")]
    estimates = {**result.summaries["new"], "mfu": Estimate(1.44, 1.4, 1.5, 7)}
    wrong = dataclasses.replace(result, summaries={**result.summaries, "new": estimates})
    assert [
        line for line in lines(result_blocks(wrong, ["mfu"])) if "`wanma doctor` measures it again" in line
    ]
    assert "`wanma doctor` measures it again" in result_page(wrong)


def test_measurements_that_do_not_count_are_listed_with_their_reasons(result: BenchmarkResult) -> None:
    more = (
        measurement("new", 7, 1.0, disturbances=("another program used 3 CPUs",)),
        measurement("new", 8, 1.0, disturbances=("another program used 3 CPUs", "the clock stepped")),
        dataclasses.replace(measurement("new", 9, 1.0), exit_code=3),
        dataclasses.replace(measurement("new", 10, 1.0), error="out of memory"),
    )
    changed = dataclasses.replace(result, measurements=(*result.measurements, *more))
    assert exclusion_reasons(changed, "new") == [
        "another program used 3 CPUs (2 ×)",
        "the clock stepped",
        "exit code 3",
        "out of memory",
    ]
    text = lines(result_blocks(changed, ["step_seconds"]))
    assert "plain 7 0" in text
    assert "new 7 4 another program used 3 CPUs (2 ×); the clock stepped; exit code 3; out of memory" in text


def test_measurements_without_a_step_time_are_told(result: BenchmarkResult) -> None:
    warm_ups = [6 if one.contender == "new" and one.round < 2 else 1 for one in result.measurements]
    some, none = summarize(result, warm_ups), summarize(result, [6] * len(warm_ups))
    text = lines(result_blocks(some, ["step_seconds"]), 200)
    assert "new 7, 5 with a step time 0" in text
    assert "plain 7 0" in text
    assert STEP_TIME_NOTE in text
    page = result_page(some)
    assert '<td class="n">7, 5 with a step time</td>' in page
    assert STEP_TIME_NOTE in page
    assert STEP_TIME_NOTE not in result_page(result)
    rows = markdown_table(some, ["step_seconds"]).splitlines()
    assert rows[2].endswith("| 7 of 7 |")
    assert rows[3].endswith("| 7 of 7, 5 with a step time |")
    assert markdown_table(none).splitlines()[3].endswith("| 7 of 7, none with a step time |")
    assert markdown_table(some, ["startup_seconds"]).splitlines()[3].endswith("| 7 of 7 |"), "of no step"


def test_definitions_and_descriptions_are_in_terminal_and_page(result: BenchmarkResult) -> None:
    plain, *others = result.contenders
    told = dataclasses.replace(
        result,
        description="Images <made> here.",
        contenders=(dataclasses.replace(plain, description="The exact sum."), *others),
    )
    text = lines(result_blocks(told, ["step_seconds"]), 200)
    assert text[1:3] == ["Images <made> here.", "plain: The exact sum."]
    assert find_metric("step_seconds").definition in text
    page = result_page(told)
    assert "Images &lt;made&gt; here." in page
    assert "plain: The exact sum." in page
    assert BenchmarkResult.from_json(told.to_json()).description == told.description


def test_images_are_counted_per_minute_too(result: BenchmarkResult) -> None:
    name = "samples_per_second"
    assert "per minute" not in definition_text(result, name)
    plain, *others = result.contenders
    images = dataclasses.replace(plain, job='[data]\nimages = "cifar"\n')
    own = {**result.summaries["plain"], name: Estimate(33.4, 33.0, 34.0, 7)}
    found = dataclasses.replace(
        result, contenders=(images, *others), summaries={**result.summaries, "plain": own}
    )
    assert definition_text(found, name).endswith("Images per minute: plain 2,004.")
    assert "plain 2,004" not in definition_text(found, "step_seconds")


def test_a_benchmark_that_has_not_ended_says_so(result: BenchmarkResult) -> None:
    text = lines(result_blocks(dataclasses.replace(result, ended=""), ["step_seconds"]))
    assert text[-1] == "The benchmark has not ended: figures are of the measurements so far."


def test_tables_fit_80_columns(result: BenchmarkResult) -> None:
    console = Console(width=80, color_system=None)
    with console.capture() as capture:
        console.print(terminal(result_blocks(result)))
    assert max(map(len, capture.get().splitlines())) <= 80
    assert "…" not in capture.get()


def test_a_comparison_has_both_medians_and_what_differs(result: BenchmarkResult) -> None:
    older = dataclasses.replace(result, id="older", code={"commit": "aaa"})
    newer = dataclasses.replace(
        benchmark_result({"plain": FAST, "new": FAST}), id="newer", code={"commit": "bbb"}
    )
    text = lines(comparison_blocks(compare_results(older, newer)))
    assert text[:2] == ["older → newer", "code: commit: aaa → bbb"]
    (plain,) = (line for line in text if line.startswith("plain 1.001 s"))
    assert plain.startswith("plain 1.001 s (0.982–1.020) 0.5005 s (0.4910–0.5100) 2.000 (")
    assert plain.endswith("faster")


def test_a_reproduction_counts_its_decisions(result: BenchmarkResult) -> None:
    again = benchmark_result({"plain": [1.3 * pace for pace in SLOW]})
    text = lines(reproduction_blocks(judge_reproduction(result, again)), 160)
    assert any(line.startswith("plain Step time 1.001 s") and line.endswith("outside") for line in text)
    assert any(line.startswith("new Step time 0.5005 s") and line.endswith("– cannot tell") for line in text)
    assert any(line.startswith("cannot tell: the new result does not have this figure (") for line in text)


def test_brackets_and_colons_in_names_are_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    name = "python a.py [b,c] :key: [/d]"
    print_content(terminal(result_blocks(benchmark_result({name: [1.0, 1.01, 0.99]}), ["step_seconds"])))
    printed = capsys.readouterr().out
    assert "[b,c]" in printed
    assert ":key:" in printed
    assert "[/d]" in printed


def test_no_number_is_cut_on_a_narrow_terminal(
    result: BenchmarkResult, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    print_content(terminal(result_blocks(result, ["step_seconds"])))
    printed = capsys.readouterr().out
    for text in ("1.001 s (0.982–1.020)", "0.5005 s (0.4910–0.5100)", "faster", "detects"):
        assert text in printed


def test_one_contender_has_no_columns_of_comparisons() -> None:
    text = lines(result_blocks(benchmark_result({"job": SLOW}), ["step_seconds"]))
    assert "contender median (95 %)" in text
