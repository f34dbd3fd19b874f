"""The table of installations, from rounds as they are kept."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

from benchmarks.installation.report import report
from benchmarks.installation.run import _sizes as sizes


def sample(seconds: float, disturbed: bool = False) -> dict[str, Any]:
    return {
        "install_seconds": seconds,
        "first_step_seconds": seconds + 5,
        "all_seconds": seconds + 30,
        "environment_bytes": 1100 << 20,
        "foreign_cpu": 0.0,
        "disturbed": disturbed,
    }


def test_the_report_has_medians_of_undisturbed_rounds_and_the_size_of_the_wheel(tmp_path: Path) -> None:
    wheel = tmp_path / "wanma.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("wanma/a.py", bytes(2 << 20))
        for level in ("x86-64-v3", "x86-64-v2"):
            archive.writestr(f"wanma/native/{level}/group.so", bytes(1 << 20))
    rounds = [
        {
            "date": "2026-01-01T00:00:00+00:00",
            "commit": "abc",
            "wheel": sample(seconds, seconds > 100),
            "clone": sample(2 * seconds),
        }
        for seconds in (10.0, 20.0, 60.0, 900.0)
    ]
    piece = {
        "settings": {"steps": 20, "foreign_limit": 0.1},
        "environment": {"machine": "a machine", "versions": {"torch": "2.13"}},
        "pairs": rounds,
        "wheel": {"commit": "def", **sizes(wheel)},
    }
    text = report([piece])
    assert "| wheel | 20.0 | 25.0 | 50.0 | 1,100 |" in text
    assert "| clone, `make train` | 40.0 | 45.0 | 70.0 | 1,100 |" in text
    assert "3 rounds of 20 steps" in text
    assert "wheel of def has 4.0 MiB, and 4.0 MiB" in text
    assert "2.0 MiB are 2 compiled libraries" in text
