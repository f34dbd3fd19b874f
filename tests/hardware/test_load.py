"""Load of the processors, from a made-up /proc/stat."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from wanma.hardware.discovery.cpu_load import busy_cpu_seconds


def test_user_system_and_stolen_time_count_and_idle_and_interrupts_do_not(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    # user nice system idle iowait irq softirq steal
    (tmp_path / "proc/stat").write_text("cpu  100 20 30 5000 600 70 80 9 0 0\ncpu0 1 2 3 4 5 6 7 8 9 0\n")
    assert busy_cpu_seconds(tmp_path) == pytest.approx(159 / os.sysconf("SC_CLK_TCK"))


def test_where_the_kernel_says_nothing_nothing_is_known(tmp_path: Path) -> None:
    assert busy_cpu_seconds(tmp_path) is None
