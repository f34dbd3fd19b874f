"""Memory readers, model FLOPs utilization, and numbers as people read them."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wanma.observe.metrics.memory import AllocatorState, allocator_state, peak_memory_bytes, resident_memory
from wanma.observe.metrics.mfu import model_flops_utilization
from wanma.observe.units import bytes_text, count_text, duration_text, number_text, percent_text


def test_the_kernel_s_numbers_are_read_in_bytes(tmp_path: Path) -> None:
    status = tmp_path / "status"
    status.write_text("Name:\tpython\nVmHWM:\t  2048 kB\nVmRSS:\t  1024 kB\n")
    memory = resident_memory(status)
    assert (memory.resident_bytes, memory.peak_bytes) == (1 << 20, 2 << 20)


def test_files_in_memory_are_not_a_process_s_own() -> None:
    code = """
import mmap, os
from wanma.observe.metrics.memory import resident_memory
before = resident_memory()
file = os.memfd_create("copies")
os.ftruncate(file, 64 << 20)
memory = mmap.mmap(file, 64 << 20)
memory[:] = b"x" * (64 << 20)
after = resident_memory()
print(after.resident_bytes - before.resident_bytes)
"""
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert abs(int(answer.stdout)) < 16 << 20


def test_the_peak_remembers_what_was_let_go_until_it_is_reset() -> None:
    code = """
from wanma.observe.metrics.memory import resident_memory, peak_memory_bytes, reset_peak_memory
block = bytearray(b"x") * (64 << 20)
del block
print(peak_memory_bytes())
reset_peak_memory()
print(peak_memory_bytes())
"""
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    before, after = map(int, answer.stdout.split())
    assert before > 64 << 20
    assert before - after > 48 << 20


def test_this_process_has_a_peak() -> None:
    assert peak_memory_bytes() >= resident_memory().resident_bytes // 2 > 1 << 20


def test_memory_beyond_the_peak_of_tensors_is_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    statistics: dict[str, Any] = {
        "reserved_bytes": {"all": {"current": 70}},
        "allocated_bytes": {"all": {"peak": 60}},
        "num_alloc_retries": 2,
    }
    monkeypatch.setattr("torch.cuda.memory_stats_as_nested_dict", lambda: statistics)
    assert allocator_state("cuda") == AllocatorState(10, 2)
    statistics["allocated_bytes"]["all"]["peak"] = 80  # since then the cache was freed
    assert allocator_state("cuda").cached_bytes == 0
    assert allocator_state("cpu") == AllocatorState(0, 0)


def test_utilization_is_model_flops_over_peak() -> None:
    # 32 samples of 6 GFLOP in 2 s on 2 devices of 100 GFLOP/s: 96 of 200 GFLOP/s.
    assert model_flops_utilization(6e9, 32, 2.0, 2, 1e11) == pytest.approx(0.48)


@pytest.mark.parametrize(("seconds", "peak"), [(0.0, 1e12), (1.0, None), (1.0, 0.0)])
def test_utilization_is_unknown_without_time_or_peak(seconds: float, peak: float | None) -> None:
    assert model_flops_utilization(1e9, 1, seconds, 1, peak) is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (bytes_text(0), "0 B"),
        (bytes_text(1536), "1.5 KiB"),
        (bytes_text(120 * 2**20), "120 MiB"),
        (bytes_text(141e9), "131 GiB"),
        (bytes_text(None), "–"),
        (duration_text(0.012), "12 ms"),
        (duration_text(0.456), "0.46 s"),
        (duration_text(59.4), "59 s"),
        (duration_text(185), "3 min 05 s"),
        (duration_text(3720), "1 h 02 min"),
        (duration_text(4 * 86400), "4 d 00 h"),
        (duration_text(math.nan), "–"),
        (number_text(6844.2), "6,844"),
        (number_text(2.34567), "2.346"),
        (number_text(0.001), "0.001000"),
        (number_text(1.234e-5), "1.23e-05"),
        (number_text(0), "0"),
        (percent_text(0.4832), "48.3 %"),
        (count_text(1, "step"), "1 step"),
        (count_text(1200, "step"), "1,200 steps"),
    ],
)
def test_numbers_read_well(text: str, expected: str) -> None:
    assert text == expected


@given(st.floats() | st.none())
def test_no_number_breaks_a_text(value: float | None) -> None:
    assert all(text(value) for text in (bytes_text, number_text, percent_text))
    if value is None or not value < 0:
        assert duration_text(value)
