"""Speedup and efficiency of contenders on different amounts of hardware."""

from __future__ import annotations

from dataclasses import replace

import pytest

from support.scaling_results import record, result
from wanma.bench.figures.scaling import find_scaling
from wanma.bench.presentation.page import result_page
from wanma.bench.results.result import ContenderRecord


def test_the_published_curve_of_four_servers_is_recomputed() -> None:
    """Speedup 3.5 on 4 servers: efficiency 0.875."""
    scaling = find_scaling(result([record(4), record(1)], [350.0, 100.0]))
    assert scaling is not None
    assert (scaling.kind, scaling.unit) == ("strong", "GPUs")
    one, four = scaling.rows
    assert (one.ranks, one.speedup.median, one.efficiency) == (1, 1.0, 1.0)
    assert four.speedup.median == pytest.approx(3.5)
    assert four.ideal == 4.0
    assert four.efficiency == pytest.approx(0.875)
    assert four.forecast == pytest.approx(4**0.9)
    assert four.speedup.has_interval


def test_the_same_batch_per_rank_is_weak_scaling() -> None:
    scaling = find_scaling(result([record(1, 8), record(2, 16)], [100.0, 180.0]))
    assert scaling is not None
    assert scaling.kind == "weak"
    assert scaling.rows[1].efficiency == pytest.approx(0.9)


def test_on_cpus_the_devices_are_cores() -> None:
    scaling = find_scaling(result([record(1, device="cpu"), record(2, device="cpu")], [100.0, 150.0]))
    assert scaling is not None
    assert scaling.unit == "cores"
    assert [row.devices for row in scaling.rows] == [2, 4]


@pytest.mark.parametrize(
    "records",
    [
        [record(1)],
        [record(1), record(2, 12)],
        [record(1), record(2, **{"train.precision": "bf16"})],
        [record(2), replace(record(2), name="same")],
        [record(1), ContenderRecord("2", "command")],
    ],
    ids=["one", "another batch", "another setting", "the same ranks", "a command"],
)
def test_anything_else_is_no_scaling(records: list[ContenderRecord]) -> None:
    assert find_scaling(result(records, [100.0] * len(records))) is None


def test_a_contender_without_a_common_round_has_no_speedup() -> None:
    found = result([record(1), record(2), record(4)], [100.0, 190.0, 350.0])
    found.values["2"]["samples_per_second"] = {77: 190.0}  # type: ignore[index]
    scaling = find_scaling(found)
    assert scaling is not None
    assert [row.ranks for row in scaling.rows] == [1, 4]


def test_the_page_has_the_table_and_its_definitions() -> None:
    page = result_page(result([record(1), record(4)], [100.0, 350.0]))
    assert "Strong scaling" in page
    assert "87.5 %" in page
    assert "the quotient of the devices" in page
