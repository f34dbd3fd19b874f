"""Load of the processors, from a made-up /proc/stat."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from wanma.hardware.measurement.cpu_load import busy_cpu_seconds


def test_all_but_idle_time_and_interrupts_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "proc").mkdir()
    monkeypatch.setattr("time.clock_gettime", lambda _: 40.0)  # seconds since boot
    # user nice system idle iowait irq softirq steal; ticks give programs 1 second less than they used
    ticks = os.sysconf("SC_CLK_TCK")
    times = (10 * ticks, 2 * ticks, 3 * ticks, 50 * ticks, 6 * ticks, 3 * ticks, 1 * ticks, 4 * ticks)
    lines = [f"cpu  {' '.join(map(str, times))} 0 0", "cpu0 1 2 3 4 5 6 7 8 9 0", "cpu1 1 2 3 4 5 6 7 8 9 0"]
    (tmp_path / "proc/stat").write_text("\n".join([*lines, "intr 12 3", "ctxt 5", ""]))
    assert busy_cpu_seconds(tmp_path) == pytest.approx(20.0)  # of 2 processors


def test_where_the_kernel_says_nothing_nothing_is_known(tmp_path: Path) -> None:
    assert busy_cpu_seconds(tmp_path) is None
