"""Buckets lose no spike, axes are round, and a chart draws what it was given."""

from __future__ import annotations

import json
import math
import re
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wanma.report.components.axis import AxisScale, linear_range, log_range, tick_text
from wanma.report.components.downsampling import downsample
from wanma.report.components.heat_map import heat_map
from wanma.report.components.line_chart import (
    BOTTOM,
    HALF_WIDTH,
    HEIGHT,
    LEFT,
    RIGHT,
    Chart,
    Series,
    chart_figure,
)

numbers = st.floats(-1e12, 1e12)


@given(st.lists(numbers | st.just(math.nan), min_size=1, max_size=300), st.integers(1, 50))
def test_buckets_cover_every_point_and_keep_the_extremes(values: list[float], limit: int) -> None:
    xs = [float(index) for index in range(len(values))]
    buckets = downsample(xs, values, limit)
    assert len(buckets) == min(limit, len(values))
    assert (buckets[0].first, buckets[-1].last) == (xs[0], xs[-1])
    assert all(left.last + 1 == right.first for left, right in pairwise(buckets))
    finite = [value for value in values if math.isfinite(value)]
    if finite:
        assert min(b.low for b in buckets if math.isfinite(b.low)) == min(finite)
        assert max(b.high for b in buckets if math.isfinite(b.high)) == max(finite)


def test_few_points_are_their_own_buckets() -> None:
    (first, second) = downsample([1.0, 2.0], [5.0, 7.0], 10)
    assert (first.mean, first.low, first.high, first.center) == (5.0, 5.0, 5.0, 1.0)
    assert second.mean == 7.0


@given(numbers, st.floats(1e-9, 1e12), st.booleans())
def test_a_linear_axis_holds_its_values_and_has_ticks_within(
    low: float, width: float, from_zero: bool
) -> None:
    values = [low, low + width]
    bottom, top = linear_range(values, from_zero)
    scale = AxisScale(bottom, top, 200.0, 0.0)
    assert bottom < top
    assert all(bottom <= value <= top for value in values)
    ticks = scale.ticks()
    assert 1 <= len(ticks) <= 8
    assert all(-1e-6 <= scale(tick) <= 200 + 1e-6 for tick in ticks)


@given(st.floats(1e-12, 1e12), st.floats(1.0, 1e15))
def test_a_logarithmic_axis_holds_its_values_and_has_ticks_within(low: float, factor: float) -> None:
    bottom, top = log_range([low, low * factor])
    scale = AxisScale(bottom, top, 200.0, 0.0, logarithmic=True)
    assert bottom < low <= low * factor < top
    ticks = scale.ticks()
    assert 1 <= len(ticks) <= 9
    assert all(-0.1 <= scale(tick) <= 200.1 for tick in ticks)


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [(0.0, 10.0, [0, 2, 4, 6, 8, 10]), (0.0, 0.8, [0, 0.2, 0.4, 0.6, 0.8]), (1.0, 300.0, [100, 200, 300])],
)
def test_ticks_are_round(low: float, high: float, ticks: list[float]) -> None:
    assert AxisScale(low, high, 0, 1).ticks() == pytest.approx(ticks)


def test_ticks_of_bytes_are_round_in_their_unit() -> None:
    ticks = AxisScale(0.0, 680 * 2.0**20, 0, 1).ticks(unit=2.0**20)
    assert [tick / 2**20 for tick in ticks] == [0, 200, 400, 600]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (0.25, "0.25"),
        (2500.0, "2.5k"),
        (1e6, "1M"),
        (3e9, "3G"),
        (1e-5, "1e-05"),
        (-5000.0, "-5k"),
    ],
)
def test_ticks_are_short(value: float, text: str) -> None:
    assert tick_text(value) == text


def hover(drawn: str) -> list[Any]:
    found = re.search(r'<script type="application/json">(.*?)</script>', drawn)
    points: list[Any] = json.loads(found[1])
    return points


def test_every_step_of_a_short_run_has_a_dot_and_a_hover_text() -> None:
    drawn = chart_figure(Chart("Loss", [Series("train", 1, [1, 2, 3], [3.0, 2.0, 1.5])]))
    assert drawn.count("<circle") == 3
    assert [point[1:] for point in hover(drawn)] == [
        ["step 1", "train 3.000"],
        ["step 2", "train 2.000"],
        ["step 3", "train 1.500"],
    ]


def test_one_step_is_drawn() -> None:
    assert chart_figure(Chart("Loss", [Series("train", 1, [7], [3.0])])).count("<circle") == 1


def test_a_spike_among_many_steps_is_in_the_band_and_in_the_hover_text() -> None:
    steps = list(range(1, 100_001))
    values = [1.0] * 100_000
    values[54_321] = 99.0
    drawn = chart_figure(Chart("Loss", [Series("train", 1, steps, values)]))
    assert len(drawn) < 100_000
    assert 'class="band c1"' in drawn
    (spike,) = [point for point in hover(drawn) if "(1.000 to 99.00)" in point[2]]
    assert spike[1] == "steps 54,201 to 54,400"


def test_a_gap_splits_the_line() -> None:
    steps = list(range(1, 101))
    values = [math.nan if step == 50 else 1.0 for step in steps]
    drawn = chart_figure(Chart("Loss", [Series("train", 1, steps, values)]))
    assert drawn.count("<polyline") == 2
    assert ["step 50", "train: no finite number"] in [point[1:] for point in hover(drawn)]


def test_a_logarithmic_axis_is_offered_where_it_helps() -> None:
    assert 'data-kind="log"' in chart_figure(
        Chart("Loss", [Series("t", 1, [1, 2], [9.0, 1.0])], offers_log_scale=True)
    )
    assert 'data-kind="log"' not in chart_figure(
        Chart("Loss", [Series("t", 1, [1, 2], [1.1, 1.0])], offers_log_scale=True)
    )


@given(st.lists(st.floats(50, 100), min_size=1, max_size=40), st.floats(10, 200), st.booleans())
def test_the_label_of_a_horizontal_line_covers_no_point(
    values: list[float], limit: float, is_stacked: bool
) -> None:
    series = Series("rate", 1, list(range(len(values))), values)
    lines = [("forecast 123.4 k", limit)]
    drawn = chart_figure(Chart("Rate", [series], stacked=is_stacked, horizontal_lines=lines))
    (text,) = re.findall(r'<text class="limit" x="(\S+)" y="(\S+)" text-anchor="end">', drawn)
    right, baseline = map(float, text)
    left, top, bottom = right - 6 * len(lines[0][0]), baseline - 9, baseline + 2
    assert LEFT <= left < right <= HALF_WIDTH - RIGHT
    assert 0 <= top < bottom <= HEIGHT - BOTTOM
    for bar in re.findall(r'<rect x="(\S+)" y="(\S+)" width="(\S+)" height="(\S+)"/>', drawn):
        x, y, width, height = map(float, bar)
        assert x + width < left or x > right or y > bottom or y + height < top
    for line in re.findall(r'<polyline class="line c1" points="(.*?)"/>', drawn):
        points = [complex(*map(float, point.split(","))) for point in line.split()]
        for start, end in pairwise(points):
            for part in range(101):
                point = start + (end - start) * part / 100
                assert not (left <= point.real <= right and top <= point.imag <= bottom)


def test_a_slow_first_step_does_not_flatten_a_stacked_chart_and_is_mentioned() -> None:
    steps = list(range(1, 101))
    lines = [
        Series("forward", 1, steps, [15.0] + [0.5] * 99),
        Series("data", 2, steps, [0.1] * 100),
    ]
    drawn = chart_figure(Chart("Time", lines, stacked=True))
    assert "the highest at step 1: 15.10." in drawn
    assert drawn.count('class="area') == 2


def test_names_are_escaped_in_drawing_and_hover_text() -> None:
    evil = "</script><script>alert(1)</script>"
    drawn = chart_figure(Chart(evil, [Series(evil, 1, [1, 2], [1.0, 2.0]), Series("b", 2, [1], [1.0])]))
    assert "<script>alert" not in drawn
    assert drawn.count("</script>") == 1
    assert hover(drawn)[0][2] == f"{evil} 1.000"


def test_an_axis_may_be_of_other_things_than_steps() -> None:
    chart = Chart(
        "Throughput",
        [Series("tokens/s", 1, [64.0, 128.0, 1024.0], [1.0, 2.0, 9.0]), Series("at", 2, [64.0], [3.0])],
        x_ticks=[64.0, 1024.0],
        x_text=lambda value: f"{value:.0f} GPUs",
        x_is_log=True,
        tooltip_text=lambda bucket: f"on {bucket.first:.0f}",
    )
    drawing = chart_figure(chart)
    places = re.findall(r'<text x="([\d.]+)" y="\d+" text-anchor="middle">(\d+) GPUs</text>', drawing)
    assert [name for _, name in places] == ["64", "1024"]
    dots = [float(x) for x in re.findall(r'class="dot c1" cx="([\d.]+)"', drawing)]
    # Logarithmic: one doubling of four.
    assert (dots[1] - dots[0]) / (dots[2] - dots[0]) == pytest.approx(1 / 4, abs=0.01)
    assert '"on 128"' in drawing


def test_points_may_stand_alone() -> None:
    drawing = chart_figure(Chart("Plans", [Series("others", 1, [1.0, 2.0], [3.0, 4.0], draws_line=False)]))
    assert "polyline" not in drawing
    assert drawing.count('class="dot c1"') == 2


def test_a_colour_of_a_heat_map_is_as_strong_as_the_part_matters_to_the_whole() -> None:
    part, whole = {"rank 0": [0.1], "rank 1": [0.2]}, {"rank 0": [1.0], "rank 1": [1.1]}
    assert re.findall(r'opacity="([0-9.]+)"', heat_map(part, str, whole)) == ["0.17", "0.17"]
    assert re.findall(r'opacity="([0-9.]+)"', heat_map(part, str, part)) == ["0.69", "0.69"]
