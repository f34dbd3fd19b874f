"""Host behind a device: measured as plans use it, and kept with the calibration."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from wanma.planner.calibration.host_benchmarks import COPIED_BYTES, fit_host_model, host_benchmark_cases
from wanma.planner.hardware_model.calibration import BenchmarkPoint
from wanma.planner.hardware_model.model import HostModel


def test_every_rate_of_a_cpus_host_is_measured_on_the_disk_in_question(tmp_path: Path) -> None:
    cases = {
        operator: (shape, make())
        for operator, shape, make in host_benchmark_cases(torch.device("cpu"), tmp_path)
    }
    assert set(cases) == {"host_stream", "file_write", "file_read", "fresh", "disk"}
    for operator, (shape, run) in cases.items():
        run()
        run()
        moved = {"host_stream": 2 << 28, "fresh": 4 * COPIED_BYTES}
        assert shape == (moved.get(operator, COPIED_BYTES),)
    assert list(tmp_path.iterdir()) == []  # files have no names


def test_rates_are_those_of_the_points_and_no_doubt_is_left() -> None:
    points = [
        BenchmarkPoint("stream", (8,), 1.0),
        BenchmarkPoint("host_stream", (400,), 2.0),
        BenchmarkPoint("to_host", (90,), 3.0),
        BenchmarkPoint("file_read", (50,), 1.0),
        BenchmarkPoint("file_write", (40,), 2.0),
        BenchmarkPoint("disk", (10,), 1.0),
    ]
    assert fit_host_model(points) == HostModel(
        30.0, 200.0, 50.0, 20.0, HostModel().fresh_bytes_per_second, 10.0, keeps_files=True, doubt=0.0
    )


def test_where_nothing_was_measured_it_is_as_usual_and_in_doubt() -> None:
    assert fit_host_model([BenchmarkPoint("stream", (8,), 1.0)]) == HostModel()
    assert HostModel().doubt > 0


def test_files_are_no_faster_than_the_disk_where_memory_cannot_keep_them() -> None:
    host = HostModel(
        file_read_bytes_per_second=5.0, file_write_bytes_per_second=2.0, disk_bytes_per_second=3.0
    )
    assert (host.read_rate, host.write_rate) == (5.0, 2.0)
    lost = HostModel(
        file_read_bytes_per_second=5.0,
        file_write_bytes_per_second=2.0,
        disk_bytes_per_second=3.0,
        keeps_files=False,
    )
    assert (lost.read_rate, lost.write_rate) == (3.0, pytest.approx(2.0))
