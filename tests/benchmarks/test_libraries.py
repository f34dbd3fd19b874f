"""The table of the wheel's libraries, from rounds as they are kept."""

from __future__ import annotations

from typing import Any

from benchmarks.libraries.report import report


def a_round(native: float, disturbed: bool = False) -> dict[str, Any]:
    seconds = {"native": native, "x86-64-v4": native / 1.02, "x86-64-v2": native / 0.5}
    return {
        "date": "2026-01-01T00:00:00+00:00",
        "commit": "abc",
        "measured": {
            "seconds": {"all_reduce|float16|1": seconds},
            "foreign_cpu": 0.0,
            "disturbed": disturbed,
        },
    }


def test_ratios_are_speeds_relative_to_the_native_library() -> None:
    piece = {
        "settings": {"levels": ["native", "x86-64-v4", "x86-64-v2"], "foreign_limit": 2.0},
        "environment": {"machine": "a machine", "versions": {"torch": "2.13"}},
        "pairs": [a_round(0.001), a_round(0.002), a_round(0.003), a_round(0.1, disturbed=True)],
    }
    text = report([piece])
    assert "x86-64-v4 1.02, x86-64-v2 0.50; 3 rounds" in text
    assert "| all_reduce | float16 | 1 | 2 | 1.02 (1.02–1.02) | 0.50 (0.50–0.50) |" in text
