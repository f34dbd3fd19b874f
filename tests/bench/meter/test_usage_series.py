"""Utilization between two times of a measurement, from readings that lie elsewhere."""

from __future__ import annotations

import pytest

from wanma.bench.measurements.measurement import Utilization
from wanma.bench.meter.usage_series import UsageReading, foreign_cpu_between, utilization_between

READINGS = [
    UsageReading(100.0, 0.0, 0.0, None),
    UsageReading(101.0, 0.2, 1000.0, None, [0.1, 0.3], 1e9),
    UsageReading(102.0, 2.2, 1000.0, None, [1.0, 0.8], 3e9),
    UsageReading(103.0, 4.2, 3000.0, None, [1.0, 1.0], 2e9),
]


def test_the_start_is_no_part_of_the_steps() -> None:
    found = utilization_between(READINGS, 101.0, 103.0, cores=2)
    assert found == Utilization(
        cpu_utilization=pytest.approx(1.0),
        gpu_utilization=pytest.approx(0.95),
        gpu_memory_bytes=3e9,
        network_bytes_per_second=pytest.approx(1000.0),
        disk_bytes_per_second=None,
    )


def test_counters_between_two_readings_are_interpolated() -> None:
    found = utilization_between(READINGS, 101.5, 102.5, cores=4)
    assert found.cpu_utilization == pytest.approx(2.0 / 4)
    assert found.network_bytes_per_second == pytest.approx(1000.0)
    # A reading of a GPU tells of the second before it.
    assert found.gpu_utilization == pytest.approx(1.0)


def test_steps_shorter_than_an_interval_have_a_utilization() -> None:
    found = utilization_between(READINGS, 102.2, 102.4, cores=2)
    assert found.cpu_utilization == pytest.approx(1.0)
    assert found.gpu_utilization == 1.0


def test_foreign_load_is_that_of_the_interval_alone() -> None:
    readings = [
        UsageReading(100.0 + second, 0.0, None, None, foreign_seconds=seconds)
        for second, seconds in enumerate((0.0, 0.1, 2.1, 2.1))
    ]
    assert foreign_cpu_between(readings, 101.0, 102.0) == pytest.approx(2.0)
    assert foreign_cpu_between(readings, 101.5, 102.5) == pytest.approx(1.0)
    assert foreign_cpu_between(readings, 102.0, 103.0) == 0.0
    assert foreign_cpu_between(readings, 102.5, 103.5) is None, "nobody watched to the end"
    assert foreign_cpu_between(readings, 99.5, 100.5) is None
    assert foreign_cpu_between(READINGS, 101.0, 102.0) is None, "the kernel does not tell"


def test_after_the_last_reading_nothing_is_added() -> None:
    assert utilization_between(READINGS, 103.0, 105.0, cores=2).cpu_utilization == 0.0


@pytest.mark.parametrize(("readings", "start", "end"), [(READINGS[:1], 100, 101), (READINGS, 102, 102)])
def test_no_time_and_no_readings_are_no_utilization(
    readings: list[UsageReading], start: float, end: float
) -> None:
    assert utilization_between(readings, start, end) == Utilization()
