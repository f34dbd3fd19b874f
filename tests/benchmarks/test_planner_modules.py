"""Forecasts beside published training speeds of convolutional networks and a recommender."""

import pytest
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
