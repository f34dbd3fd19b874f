"""Planted slow-downs: repetitions of gates of `benchmarks/measuring`, and recorded steps."""

from __future__ import annotations

import random
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from benchmarks.measuring import run
from benchmarks.measuring.gates import SLOW_DOWNS
from benchmarks.suites.run import recorded_result

from wanma.bench.figures.metrics import metric_values
from wanma.bench.statistics.verdicts import Outcome, judge

OLD = {"is_slower": True, "outcome": "slower", "ratio": {"median": 0.95}}
EQUAL = {"is_slower": False, "outcome": "cannot tell", "ratio": {"median": 1.0}}


def gate_rows(folder: Path, **options: Any) -> dict[str, Any]:
    assert folder.is_dir()
    slow_down = options["slow_down"]
    return {"slow_down": slow_down, "outcome": "slower" if slow_down else None, "ratio": {"median": 0.9}}


def test_each_slow_down_gets_its_repetitions_beside_earlier_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "sample_gate", gate_rows)
    piece: dict[str, Any] = {"rows": [OLD, OLD, EQUAL], "machine": "m", "commit": "c", "date": "d"}
    options = run.parse(["--repetitions", "2"])
    while run.MEASURES["gate"](piece, options):
        pass
    counts = {one: sum(run.planted_slow_down(row) == one for row in piece["rows"]) for one in SLOW_DOWNS}
    assert counts == {0.1: 2, 0.05: 2, 0.0: 2}
    report = run.report({"gate": piece})
    assert "| 10% slower | 2 | 2 | 0 | 0.900 to 0.900 |" in report
    assert "| 5% slower | 2 | 2 | 0 | 0.950 to 0.950 |" in report


def test_recorded_rows_without_a_slow_down_of_ten_percent_have_no_row_of_it() -> None:
    piece: dict[str, Any] = {"rows": [OLD, EQUAL], "rounds": 10, "machine": "m", "commit": "c", "date": "d"}
    report = run.report({"gate": piece})
    assert "10% slower" not in report
    assert "| 5% slower | 1 | 1 |" in report


@pytest.mark.parametrize(("slow_down", "outcome"), [(1.0, Outcome.CANNOT_TELL), (1.05, Outcome.SLOWER)])
def test_five_percent_are_found_in_recorded_steps_and_nothing_where_there_is_nothing(
    slow_down: float, outcome: Outcome
) -> None:
    """Halves, drawn at random, of the steps of each recorded execution; one half is slowed down."""
    result = recorded_result("gpt")
    for contender in result.contender_names:
        steps = {
            one.round: metric_values(one, "step_seconds", warm_up)
            for one, warm_up in zip(result.measurements, result.warm_ups, strict=True)
            if one.contender == contender and one.counts
        }
        outcomes = []
        for seed in range(20):
            draw = random.Random(seed)
            halves: tuple[dict[int, float], dict[int, float]] = {}, {}
            for number, seconds in steps.items():
                drawn = draw.sample(seconds, len(seconds))
                for half, factor, values in ((0, 1.0, drawn[::2]), (1, slow_down, drawn[1::2])):
                    halves[half][number] = factor * median(values)
            outcomes.append(judge(*halves, lower_is_better=True).outcome)
        assert outcomes.count(outcome) >= 18, (contender, outcomes)
