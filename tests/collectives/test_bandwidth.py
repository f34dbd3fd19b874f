"""Bandwidths by nccl-tests' definitions."""

from __future__ import annotations

import pytest

from wanma.collectives.measurement.bandwidth import BUS_FACTORS, CollectiveTiming


def test_bus_bandwidth_is_what_each_link_carries() -> None:
    """An all-reduce of 1 GB in a second on 4 ranks: each sends 1.5 GB, whatever the algorithm."""
    timing = CollectiveTiming("all_reduce", "ring", 4, 1_000_000_000, 1.0, 3e9)
    assert timing.bus_bandwidth == 1.5e9
    assert timing.link_utilization == 0.5


@pytest.mark.parametrize(
    ("collective", "factor"),
    [
        ("all_reduce", 1.75),
        ("all_gather", 0.875),
        ("reduce_scatter", 0.875),
        ("all_to_all", 0.875),
        ("broadcast", 1.0),
    ],
)
def test_factors_of_eight_ranks_are_those_that_nccl_tests_names(collective: str, factor: float) -> None:
    assert BUS_FACTORS[collective](8) == factor
