"""Fit of sustained rates to the fitted half of the published rows, which single operators do not show.

These are the rate that a device kind sustains over hours, and that of the attention kernel of 2023 next to
the measured one.

    python -m benchmarks.planner.sustain
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.planner.rows import TABLES, Case, read_cases
from benchmarks.planner.run import forecast

LONG = 8192
"""Tokens of a sequence above which attention is a large part of a step."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tables", type=Path, default=TABLES, help="folder of published.csv")
    cases, _ = read_cases(parser.parse_args().tables / "published.csv")
    fitted = [case for case in cases if case.is_fitted]
    for name in sorted({case.machine.chip.name for case in fitted}):
        rows = [case for case in fitted if case.machine.chip.name == name]
        # Mixtures depend on much else, so they count where there is nothing else.
        rows = [case for case in rows if not case.dimensions.experts] or rows
        if rows:
            rate, error = _best(rows, np.arange(0.5, 1.001, 0.01), _sustained)
            print(f"{name}: sustains {rate:.2f} of {len(rows)} rows' products; median |error| {error:.1%}")
    for gpu in ("A100", "H100"):
        rows = [case for case in fitted if case.source.startswith("MosaicML") and case.sequence >= LONG]
        rows = [case for case in rows if case.machine.chip.name.startswith(gpu)]
        rate, error = _best(rows, np.arange(0.2, 1.001, 0.02), _attention)
        print(f"FlashAttention 1 on {gpu}: {rate:.2f}, {len(rows)} rows; median |error| {error:.1%}")


def _sustained(case: Case, rate: float) -> Case:
    return replace(case, machine=replace(case.machine, chip=replace(case.machine.chip, sustained=rate)))


def _attention(case: Case, rate: float) -> Case:
    return replace(case, software=replace(case.software, attention_efficiency=rate))


def _best(
    rows: list[Case], rates: Iterable[float], changed: Callable[[Case, float], Case]
) -> tuple[float, float]:
    """Return the rate of the least median error, so that disturbed rows do not count."""

    def error(rate: float) -> float:
        forecasts = [forecast(changed(case, rate)).seconds / case.measured_seconds for case in rows]
        return statistics.median(abs(math.log(ratio)) for ratio in forecasts)

    best = min((error(float(rate)), float(rate)) for rate in rates)
    return best[1], best[0]


if __name__ == "__main__":
    main()
