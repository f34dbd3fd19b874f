"""Roofs, points below them, and shares of the limits."""

from __future__ import annotations

import pytest

from support.machine_results import machine_result
from wanma.bench.machine_report.roofline import (
    Roofs,
    TrainingPoint,
    find_roofs,
    limit_shares,
    point_line,
    roof_line,
    roofline_chart,
)
from wanma.report.components.line_chart import chart_figure

ROOFS = Roofs("ranks=4", 4, {"fp32": 1e12, "bf16": 4e12}, 100e9, 10e9)
POINT = TrainingPoint("a run", "fp32", 4, 0.1, 20e9, 1e9, 0.25e9)


def test_shares_are_those_of_each_limit() -> None:
    shares = limit_shares(ROOFS, POINT)
    assert shares["products"] == pytest.approx(0.2)
    assert shares["memory"] == pytest.approx(0.1)
    assert shares["the ring"] == pytest.approx(0.25)
    assert POINT.intensity == pytest.approx(20)
    assert shares["the roof"] == pytest.approx(0.2), "right of the ridge at 10 FLOP per byte"


def test_left_of_the_ridge_memory_is_the_roof() -> None:
    assert ROOFS.attainable("fp32", 2.0) == pytest.approx(200e9)
    assert ROOFS.attainable("fp32", 10.0) == pytest.approx(1e12)
    bound = TrainingPoint("streams", "fp32", 4, 0.1, 10e9, 5e9, 0.0)
    shares = limit_shares(ROOFS, bound)
    assert shares["the roof"] == pytest.approx(0.5) == pytest.approx(shares["memory"])


def test_lines_name_roofs_and_shares() -> None:
    assert roof_line(ROOFS) == (
        "ranks=4: fp32 1 TFLOP/s from 10 FLOP/B on, bf16 4 TFLOP/s from 40 FLOP/B on; memory 100 GB/s; "
        "ring 10 GB/s"
    )
    assert point_line(ROOFS, POINT) == (
        "a run: 200 GFLOP/s at 20 FLOP/B (fp32): 20.0 % of the roof, 20.0 % of products, 10.0 % of memory, "
        "25.0 % of the ring"
    )


def test_a_precision_without_a_roof_and_other_ranks_are_told() -> None:
    other = TrainingPoint("half", "fp16", 2, 0.1, 20e9, 1e9, 0.0)
    assert "products in fp16 were not measured" in point_line(ROOFS, other)
    fewer = TrainingPoint("fewer", "bf16", 2, 0.1, 20e9, 1e9, 0.0)
    assert "2 ranks on a node; the roofs are of 4" in point_line(ROOFS, fewer)


def test_roofs_are_medians_of_the_result() -> None:
    result = machine_result(4, 5)
    roofs = find_roofs(result)
    assert roofs is not None
    assert (roofs.contender, roofs.ranks_per_node) == ("ranks=4", 4)
    assert roofs.flops_per_second.keys() == {"bf16", "fp32"}
    estimate = result.summaries["ranks=4"]["memory_copy_bytes_per_second"]
    assert roofs.memory_bytes_per_second == estimate.median


def test_the_point_lies_below_its_roof_in_the_picture() -> None:
    chart = roofline_chart(ROOFS, [POINT])
    roof, training = chart.series
    assert list(roof.xs) == pytest.approx([1, 40, 400]), "the slope ends at the highest roof"
    assert list(roof.ys) == pytest.approx([0.1e12, 4e12, 4e12])
    assert chart.horizontal_lines == [("fp32 1 TFLOP/s", 1e12), ("bf16 4 TFLOP/s", 4e12)]
    assert (list(training.xs), list(training.ys)) == (pytest.approx([20]), pytest.approx([0.2e12]))


def test_names_cannot_become_code() -> None:
    evil = TrainingPoint("<script>", "fp32", 4, 0.1, 20e9, 1e9, 0.25e9)
    assert "<script>" not in chart_figure(roofline_chart(ROOFS, [evil]))
