"""The table of saves, from rounds as they are kept, and a small round of real processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmarks.checkpoint.report import report

ROOT = Path(__file__).resolve().parents[2]


def a_round(stall: float, disturbed: bool = False) -> dict[str, Any]:
    seconds = {
        "wanma": {"stall": stall, "durable": 0.5},
        "torch.distributed.checkpoint.save": {"stall": 10 * stall, "durable": 10 * stall},
        "torch.distributed.checkpoint.async_save": {"stall": 3 * stall, "durable": 0.4},
        "write and fsync of the same bytes": {"stall": 0.2, "durable": 0.2},
    }
    return {
        "date": "2026-01-01T00:00:00+00:00",
        "commit": "abc",
        "measured": {
            "bytes": 400_000_000,
            "seconds": seconds,
            "foreign_cpu": 0.0,
            "disturbed": disturbed,
        },
    }


def test_ratios_are_taken_within_a_round() -> None:
    piece = {
        "settings": {"megabytes": 400, "ranks": 2, "foreign_limit": 0.1},
        "environment": {"machine": "a machine", "versions": {"torch": "2.13"}},
        "pairs": [a_round(0.03), a_round(0.04), a_round(0.05), a_round(9.0, disturbed=True)],
    }
    text = report([piece])
    assert "0.40 GB of state, 2 ranks; 3 rounds of new processes" in text
    assert "| wanma | 0.040 | 0.10 (0.10–0.10) | 0.500 | 0.80 | 0.40 (0.40–0.40) |" in text
    assert "| `torch.distributed.checkpoint.async_save` | 0.120 | 0.30 (0.30–0.30) | 0.400 | 1.00 |" in text
    assert "| write and fsync of the same bytes | – | – | 0.200 | 2.00 | – |" in text


@pytest.mark.full
def test_a_round_has_the_seconds_of_every_contender(tmp_path: Path) -> None:
    output = tmp_path / "seconds.json"
    command = [sys.executable, "-m", "benchmarks.checkpoint.measure", "--output", str(output)]
    subprocess.run([*command, "--folder", str(tmp_path), "--megabytes", "2"], cwd=ROOT, check=True)
    found = json.loads(output.read_text())
    assert 1.5e6 < found["bytes"] < 2e6
    assert len(found["seconds"]) == 4
    for seconds in found["seconds"].values():
        assert 0 < seconds["stall"] <= seconds["durable"]
    assert list(tmp_path.iterdir()) == [output], "the checkpoints are gone"
