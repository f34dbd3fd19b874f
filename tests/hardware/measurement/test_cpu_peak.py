"""The measured CPU peak is kept, found again without torch, and only ever rises."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from wanma.hardware.measurement import cpu_peak
from wanma.hardware.measurement.cpu_peak import (
    cpu_peak_file,
    measure_cpu_peak,
    read_cpu_peak,
    read_memory_rate,
)
from wanma.job.errors import WanmaError


@pytest.fixture(autouse=True)
def _short_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_peak, "PROBE_SECONDS", 0.01)
    monkeypatch.setattr(cpu_peak, "MATRIX_SIZE", 512)
    monkeypatch.setattr(cpu_peak, "CPU_COPY_BYTES", 1 << 20)


def test_a_measured_peak_is_read_back_for_the_same_threads_only(tmp_path: Path) -> None:
    path, before = tmp_path / "new" / "peak.json", torch.get_num_threads()
    peak = measure_cpu_peak(1, path)
    assert set(peak) == {"fp64", "fp32", "bf16", "fp16"}
    assert all(rate > 1e7 for rate in peak.values())
    assert read_cpu_peak(1, path) == peak
    assert read_cpu_peak(3, path) == {}
    memory_rate = read_memory_rate(1, path)
    assert memory_rate is not None
    assert memory_rate > 1e8
    assert read_memory_rate(3, path) is None
    assert torch.get_num_threads() == before


def test_a_slower_measurement_does_not_lower_the_peak(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = iter([5e9, 5e9, 5e9, 5e9, 2e9, 9e9, 2e9, 2e9])
    monkeypatch.setattr(cpu_peak, "_measure_precision", lambda _: next(rates))
    path = tmp_path / "peak.json"
    measure_cpu_peak(1, path)
    assert measure_cpu_peak(1, path) == {"fp64": 5e9, "fp32": 9e9, "bf16": 5e9, "fp16": 5e9}


def test_a_thread_that_waits_for_its_core_does_not_lower_the_peak(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run the wall clock 50 times as fast as CPU time, as on a busy node."""
    monkeypatch.setattr(cpu_peak, "PRECISIONS", ("fp32",))
    idle = measure_cpu_peak(1, tmp_path / "idle.json")["fp32"]
    clock = time.perf_counter
    monkeypatch.setattr(cpu_peak.time, "perf_counter", lambda: 50 * clock())
    assert measure_cpu_peak(1, tmp_path / "busy.json")["fp32"] > idle / 10


def test_threads_that_share_cores_with_other_programs_count_as_if_they_had_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_peak, "PRECISIONS", ("fp32",))
    monkeypatch.setattr(cpu_peak, "_cores_per_cpu", lambda: 1.0)
    alone = measure_cpu_peak(1, tmp_path / "alone.json")["fp32"]
    clock, now = time.perf_counter, time.perf_counter()
    monkeypatch.setattr(cpu_peak.time, "perf_counter", lambda: 50 * clock())  # nobody gets a core for long
    monkeypatch.setattr(cpu_peak, "busy_cpu_seconds", lambda: 100 * (clock() - now))
    assert measure_cpu_peak(4, tmp_path / "busy.json")["fp32"] > 2 * alone
    monkeypatch.setattr(cpu_peak, "busy_cpu_seconds", lambda: None)
    assert measure_cpu_peak(4, tmp_path / "unknown.json")["fp32"] < 2 * alone


def test_a_damaged_file_holds_nothing_and_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "peak.json"
    path.write_text('{"torn')
    assert read_cpu_peak(1, path) == {}
    peak = measure_cpu_peak(1, path)
    assert read_cpu_peak(1, path) == peak


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(WanmaError, match="cannot write the measured CPU peak"):
        measure_cpu_peak(1, tmp_path / "file" / "peak.json")


def test_the_file_lies_in_the_user_s_cache_folder() -> None:
    assert cpu_peak_file({"XDG_CACHE_HOME": "/cache"}) == Path("/cache/wanma/cpu-peak.json")
    assert cpu_peak_file({}) == Path.home() / ".cache/wanma/cpu-peak.json"


def test_reading_the_peak_back_imports_no_torch() -> None:
    code = (
        "import sys; from wanma.hardware.measurement.cpu_peak import read_cpu_peak; read_cpu_peak(1);"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
