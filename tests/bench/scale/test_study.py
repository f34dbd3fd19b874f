"""Study of a scaling: measured and forecast points together, in tables, charts and sentences."""

from __future__ import annotations

import csv
import io
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from support.benchmark_results import benchmark_result
from support.scaling_jobs import JOBS
from wanma.bench.presentation.blocks import terminal
from wanma.bench.presentation.charts import scale_charts
from wanma.bench.presentation.page import result_page
from wanma.bench.presentation.result_blocks import result_blocks
from wanma.bench.presentation.result_tables import scaling_csv
from wanma.bench.presentation.scale_blocks import curve_blocks
from wanma.bench.results.directory import ResultDirectory
from wanma.bench.results.result import BenchmarkResult
from wanma.bench.results.stored_study import (
    Curve,
    CurvePoint,
    Interval,
    PartGrowth,
    ScaleStudy,
    StoredKnee,
)
from wanma.bench.scale import targets
from wanma.bench.scale.sentences import curve_sentences, number_of_digits
from wanma.bench.scale.study import MeasuredPoint, read_growth, study_scaling
from wanma.bench.statistics.estimates import Estimate
from wanma.bench.suites.scale_table import ScaleTable
from wanma.hardware.cluster_file.shorthand import parse_shorthand

HERE = """\
[model]
family = "decoder"
layers = 2
hidden = 128
heads = 4

[data]
text = ["stdlib"]
tokenizer = "bytes"
sequence_length = 64

[train]
steps = 5
global_batch = 16

[cluster]
device = "cpu"
threads_per_rank = 1
"""


def quiet(_: str) -> None:
    """Receive progress, and do nothing."""


@pytest.fixture(scope="module")
def forecast_study(tmp_path_factory: pytest.TempPathFactory) -> ScaleStudy:
    """Study of shards over a slow network and a fast one, without measurements."""
    folder = tmp_path_factory.mktemp("study")
    path = JOBS["shards over a slow network"].write(folder)
    table = ScaleTable(
        to=512, weak=True, axis="dp_shard", clusters=["1x8 A100 SXM 80GB, 1x100G"], gpus=["H100 SXM"],
        batch_ranks=8,
    )  # fmt: skip
    scaled, growth = read_growth(table, path)
    return study_scaling(scaled, growth, table, {}, quiet)


@pytest.fixture(scope="module")
def measured_study(tmp_path_factory: pytest.TempPathFactory) -> ScaleStudy:
    """Study of nodes like this one, with measurements of 1 and 2 ranks that are half of the forecast."""
    path = tmp_path_factory.mktemp("here") / "job.toml"
    path.write_text(HERE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(targets, "with_measured_cpu_peak", lambda _: parse_shorthand("1x2 cores EPYC 9654"))
        return study_with_measurements(path)


def study_with_measurements(path: Path) -> ScaleStudy:
    table = ScaleTable(measure=[1, 2], to=32, axis="dp_replicate", network="1x25G")
    scaled, growth = read_growth(table, path)
    plain = study_scaling(scaled, growth, table, {}, quiet).curves[0]
    rates = {point.ranks: (point.forecast or 0.0) / 2 for point in plain.points}
    measured = {
        1: MeasuredPoint(
            Estimate(rates[1], 0.99 * rates[1], 1.01 * rates[1], 7), Estimate(1.0, 1.0, 1.0, 7),
            {"forward": 1.0, "backward": 2.0, "reduce": 0.0},
        ),
        2: MeasuredPoint(
            Estimate(0.7 * rates[2], 0.69 * rates[2], 0.71 * rates[2], 7), Estimate(1.35, 1.3, 1.4, 7),
            {"forward": 0.5, "backward": 1.0, "reduce": 0.8},
        ),
    }  # fmt: skip
    return study_scaling(scaled, growth, table, measured, quiet)


def points_of(curve: Curve) -> dict[int, tuple[float | None, float | None]]:
    return {
        point.ranks: (point.forecast, point.expected.value if point.expected else None)
        for point in curve.points
    }


def test_a_curve_goes_from_one_device_to_the_last(forecast_study: ScaleStudy) -> None:
    slow, fast = forecast_study.curves
    assert (slow.name, fast.name) == ("1x8 A100 SXM 80GB, 1x100G, dp_shard", "H100 SXM, dp_shard")
    assert [point.ranks for point in slow.points] == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
    assert [point.global_batch for point in slow.points if point.plan] == [8, 16, 32, 64, 128, 256, 512, 1024]
    assert "does not fit" in slow.points[0].reason
    first, second = slow.points[2:4]
    assert first.speedup is not None
    assert (first.speedup.value, first.ideal, second.ideal) == (1.0, 1.0, 2.0)
    assert second.speedup is not None
    assert second.forecast is not None
    assert first.forecast is not None
    assert second.speedup.value == pytest.approx(second.forecast / first.forecast)
    assert second.efficiency is not None
    assert second.efficiency.value == pytest.approx(second.speedup.value / 2)


def test_bands_of_a_speedup_widen_with_the_doublings(forecast_study: ScaleStudy) -> None:
    widths = [
        math.log(point.speedup.high / point.speedup.low)
        for point in forecast_study.curves[1].points
        if point.speedup is not None
    ]
    assert widths[0] == 0
    assert widths == sorted(widths)
    assert widths[4] == pytest.approx(2 * widths[1])


def test_a_part_that_adds_time_while_its_share_falls_is_not_said_to_grow() -> None:
    knee = StoredKnee(
        ranks=2,
        reference_ranks=1,
        efficiency=0.77,
        growths=[
            PartGrowth(part="compute", before=0.96, after=0.86, added=0.16),
            PartGrowth(part="optimizer", before=0.04, after=0.14, added=0.14),
        ],
    )
    point = CurvePoint(ranks=1, global_batch=1, speedup=Interval(value=1.0, low=1.0, high=1.0))
    text = " ".join(curve_sentences([point], knee, "GPUs", 0.8, ""))
    assert "falls from 96 % to 86 % of a step" in text
    assert "optimizer from 4.0 % to 14 %" in text


def test_sentences_name_knee_and_cause(forecast_study: ScaleStudy) -> None:
    slow, fast = forecast_study.curves
    text = " ".join(slow.sentences)
    assert slow.knee is not None
    assert f"from {slow.knee.ranks} GPUs on" in text
    assert "(dp) grows from 1.2 % to 16 % of a step" in text
    assert "over a network of 1 × 100G per node" in text
    assert fast.sentences[-1] == "Efficiency stays at or above 80 % up to 512 GPUs."


def test_measurements_stand_beside_their_forecasts(measured_study: ScaleStudy) -> None:
    (curve,) = measured_study.curves
    assert "(here)" in curve.name
    one, two, four = curve.points[:3]
    assert one.measured is not None
    assert one.error == pytest.approx(1.0), "the forecast is twice the measurement"
    assert two.error == pytest.approx(2 / 0.7 - 1)
    assert two.speedup is not None
    assert (two.speedup.value, two.speedup.low, two.speedup.high) == (1.35, 1.3, 1.4)
    assert four.expected is not None
    assert four.forecast is not None
    assert four.expected.value < 0.65 * four.forecast, "corrected by what was measured"
    assert four.expected.low < four.expected.value < four.expected.high
    assert four.speedup is not None
    assert four.speedup.value == pytest.approx(four.expected.value / one.measured.value)


def test_the_measured_part_that_grows_is_named(measured_study: ScaleStudy) -> None:
    text = " ".join(measured_study.curves[0].sentences)
    assert "on 2 ranks efficiency is 68 %" in text
    assert "0.0 % of a step on 1, 35 % on 2." in text


def test_nodes_without_a_network_have_no_forecast_beyond_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = parse_shorthand("1x2 cores EPYC 9654")
    monkeypatch.setattr(targets, "with_measured_cpu_peak", lambda _: node)
    path = tmp_path / "job.toml"
    path.write_text(HERE)
    table = ScaleTable(measure=[1, 2], to=8, axis="dp_replicate")
    scaled, growth = read_growth(table, path)
    study = study_scaling(scaled, growth, table, {}, quiet)
    (curve,) = study.curves
    assert [point.forecast is not None for point in curve.points] == [True, True, False, False]
    assert "the network between the 2 nodes" in curve.points[2].reason
    (block,) = curve_blocks(study)
    assert [row[0] for row in block.rows] == ["1", "2"]
    assert any(note.startswith("4–8 ranks: ") for note in block.notes), (
        "neighbours with the same reason share a note"
    )


def result_with(study: ScaleStudy) -> BenchmarkResult:
    return replace(benchmark_result({"dp_replicate=1": [1.0] * 7}), scale=study)


def test_a_plan_that_cannot_run_is_told_with_its_reason(measured_study: ScaleStudy) -> None:
    (curve,) = measured_study.curves
    reason = "train.fp8: CPUs do not support fp8 matrix products"
    points = [
        point.model_copy(update={"unsupported": reason if 2 <= point.ranks <= 8 else ""})
        for point in curve.points
    ]
    study = measured_study.model_copy(update={"curves": [curve.model_copy(update={"points": points})]})
    (plain,), (block,) = curve_blocks(measured_study), curve_blocks(study)
    assert plain.warnings == []
    assert block.warnings == [f"2–8 ranks: this plan cannot run: {reason}."]
    assert block.rows == plain.rows, "its forecast stays"
    assert block.warnings[0] in result_page(result_with(study))


def test_a_result_keeps_its_study(forecast_study: ScaleStudy, tmp_path: Path) -> None:
    directory = ResultDirectory(tmp_path / "result")
    directory.write_result(result_with(forecast_study))
    assert directory.read(with_measurements=False).scale == forecast_study


def test_the_points_of_a_scaling_are_exported(measured_study: ScaleStudy) -> None:
    rows = list(csv.DictReader(io.StringIO(scaling_csv(result_with(measured_study)))))
    points = [point for curve in measured_study.curves for point in curve.points]
    assert [int(row["ranks"]) for row in rows] == [point.ranks for point in points]
    assert rows[0]["curve"] == measured_study.curves[0].name
    first, third = points[0], points[2]
    assert first.measured is not None
    assert third.expected is not None
    assert float(rows[0]["measured_low"]) == first.measured.low
    assert rows[2]["measured"] == ""
    assert float(rows[2]["expected"]) == third.expected.value
    assert scaling_csv(benchmark_result({"job": [1.0] * 7})) == ""


def test_the_page_draws_bands_and_needs_no_network(measured_study: ScaleStudy) -> None:
    page = result_page(result_with(measured_study))
    assert re.findall(r"(?:src|href)=", page) == []
    assert 'class="band c1"' in page
    assert "Throughput by devices" in page
    assert "Efficiency by devices" in page
    assert "stroke-dasharray" in page
    for sentence in measured_study.curves[0].sentences:
        assert sentence.replace("'", "&#x27;") in page


def test_charts_have_measured_points_apart(measured_study: ScaleStudy) -> None:
    throughput, efficiency = scale_charts(measured_study)
    names = [series.name for series in throughput.series]
    curve = measured_study.curves[0].name
    assert names == [curve, "", f"{curve}, measured"]
    assert throughput.series[0].band
    assert not throughput.series[2].draws_line
    assert list(throughput.series[2].xs) == [1.0, 2.0]
    assert [series.name for series in efficiency.series] == [curve]


def test_the_terminal_shows_everything_in_its_width(
    measured_study: ScaleStudy, forecast_study: ScaleStudy
) -> None:
    for study in (measured_study, forecast_study):
        console = Console(width=100, record=True, file=io.StringIO())
        console.print(terminal(result_blocks(result_with(study))))
        text = console.export_text()
        for curve in study.curves:
            assert curve.name in text.replace("\n", " ")
            for point in curve.points:
                if point.speedup is not None:
                    assert number_of_digits(point.speedup.value, 4) in text
        assert "…" not in text
    for block in curve_blocks(forecast_study):
        assert block.columns == ("GPUs", "expected/s (90 %)", "speedup", "ideal", "efficiency")


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [(1234.5, 3, "1,234"), (12.345, 3, "12.3"), (0.012345, 3, "0.0123"), (100.0, 4, "100"), (7.0, 4, "7")],
)
def test_numbers_have_no_exponents(value: float, digits: int, text: str) -> None:
    assert number_of_digits(value, digits) == text
