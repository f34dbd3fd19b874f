"""The table of collectives, from rounds as they are kept."""

from __future__ import annotations

from typing import Any

from benchmarks.collectives.report import report


def a_round(factor: float, disturbed: bool = False) -> dict[str, Any]:
    seconds = {"gloo": 0.010 * factor, "staged": 0.0025 * factor, "copy": 0.001}
    return {
        "date": "2026-01-01T00:00:00+00:00",
        "commit": "abc",
        "measured": {"seconds": {"16": seconds}, "foreign_cpu": 0.0, "disturbed": disturbed},
    }


def test_times_are_medians_and_ratios_are_taken_within_a_round() -> None:
    piece = {
        "settings": {"collective": "broadcast", "ranks": 2, "mebibytes": [16.0]},
        "environment": {"machine": "a machine", "versions": {"torch": "2.13"}},
        "pairs": [a_round(1.0), a_round(2.0), a_round(3.0), a_round(100.0, disturbed=True)],
    }
    (row,) = [line for line in report([piece]).splitlines() if line.startswith("| broadcast")]
    assert row == "| broadcast | 2 | 16 | 20 | 5 | – | 4.00 (4.00–4.00) | – | 1 |"
