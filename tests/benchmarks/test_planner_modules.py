"""Forecasts beside published training speeds of convolutional networks and a recommender."""

import csv

import pytest
from benchmarks.planner import recommenders
from benchmarks.planner.modules import ROWS, Row, error


@pytest.mark.parametrize(
    "row", [row for row in ROWS if row.model == "ResNet-50" and row.precision != "fp32"], ids=str
)
def test_residual_networks_on_tensor_cores_take_as_long_as_forecast(row: Row) -> None:
    assert abs(error(row)) < 0.12


def test_a_recommender_takes_as_long_as_forecast() -> None:
    mixed, single = (row for row in ROWS if row.model == "DLRM")
    assert abs(error(single)) < 0.05
    # Gradients of elements picked one by one are slower than what they move.
    assert -0.30 < error(mixed) < 0.0


def test_intervals_of_submissions_are_a_twentieth_of_the_data() -> None:
    with recommenders.TABLE.open(newline="") as file:
        shares = [
            int(row["steps"]) * int(row["global_batch"]) / 4_195_197_692 for row in csv.DictReader(file)
        ]
    assert shares == [pytest.approx(0.05, rel=0.002)] * 11


def test_a_recommender_on_many_devices_is_forecast_too_slow_rather_than_too_fast() -> None:
    runs = recommenders.submissions()
    on_one_node = [recommenders.error(run) for run in runs if run.devices <= 8]
    assert all(0.0 < share < 0.32 for share in on_one_node)
    assert all(-0.05 < recommenders.error(run) < 0.8 for run in runs)
