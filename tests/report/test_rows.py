"""Rows of intervals as a picture: what is drawn is what was given, and it stays small."""

from __future__ import annotations

import re

import pytest

from wanma.report.components.gantt_chart import LEFT, MAX_TOOLTIPS, GanttInterval, GanttRow, gantt_figure
from wanma.report.components.line_chart import FULL_WIDTH, RIGHT


def widths(drawing: str) -> list[tuple[float, float]]:
    found = re.findall(r'<rect class="piece c\d" x="([\d.]+)" y="[\d.]+" width="([\d.]+)"', drawing)
    return [(float(x), float(width)) for x, width in found]


def test_an_interval_is_as_long_as_its_time() -> None:
    rows = [
        GanttRow(
            "rank 0", [GanttInterval(0.0, 1.0, 1, "forward 0"), GanttInterval(2.0, 2.0, 3, "backward 0")]
        )
    ]
    drawing = gantt_figure("Step", rows, 4.0, [("forward", 1)])
    whole = FULL_WIDTH - RIGHT - LEFT
    (first, second) = widths(drawing)
    assert first == pytest.approx((LEFT, whole / 4), abs=0.01)
    assert second == pytest.approx((LEFT + whole / 2, whole / 2), abs=0.01)
    assert "<title>forward 0</title>" in drawing
    assert '<span class="key c1">forward</span>' in drawing


def test_neighbours_too_narrow_to_see_become_one() -> None:
    many = [GanttInterval(index / 100_000, 1 / 100_000, 1, f"forward {index}") for index in range(100_000)]
    drawing = gantt_figure("Step", [GanttRow("rank 0", many)], 1.0, [])
    found = widths(drawing)
    assert len(found) < 2 * FULL_WIDTH
    assert sum(width for _, width in found) == pytest.approx(FULL_WIDTH - RIGHT - LEFT, rel=0.01)
    assert "<title>forward 0…</title>" in drawing


def test_narrow_intervals_far_apart_stay_apart() -> None:
    rows = [
        GanttRow("rank 0", [GanttInterval(0.0, 1e-6, 1, "forward"), GanttInterval(0.5, 1e-6, 1, "forward")])
    ]
    assert len(widths(gantt_figure("Step", rows, 1.0, []))) == 2


def test_neighbours_of_unlike_kinds_stay_apart() -> None:
    rows = [
        GanttRow("rank 0", [GanttInterval(0.0, 1e-6, 1, "forward"), GanttInterval(1e-6, 1e-6, 3, "backward")])
    ]
    assert len(widths(gantt_figure("Step", rows, 1.0, []))) == 2


def test_names_are_left_out_where_there_are_too_many() -> None:
    rows = [
        GanttRow(
            f"rank {rank}", [GanttInterval(index / 300, 1 / 400, 1 + index % 2, "x") for index in range(300)]
        )
        for rank in range(MAX_TOOLTIPS // 300 + 2)
    ]
    assert "<title>" not in gantt_figure("Step", rows, 1.0, [])


def test_names_are_escaped() -> None:
    drawing = gantt_figure(
        "<b>", [GanttRow("<i>", [GanttInterval(0, 1, 1, "<u>")])], 1.0, [("<s>", 1)], "<q>"
    )
    assert not re.search(r"<(b>|i>|u>|s>|q>)&|<(i|u|s|q)>", drawing.replace("<figcaption><b>", ""))
