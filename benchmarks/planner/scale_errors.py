"""Errors of recorded forecasts of a step's time, from which `wanma bench scale` takes the width of its bands.

    python -m benchmarks.planner.scale_errors --write

They are those of published.csv, and of the runs in docs/results/planner-real.json: without a calibration,
with one, and with one that runs of other models corrected.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import math
from collections.abc import Iterator
from pathlib import Path

from benchmarks.common import ROOT
from benchmarks.planner.real import STATE
from benchmarks.planner.real_cases import MODELS, TAUGHT
from benchmarks.planner.real_report import forecast_of, read_rows, teach
from benchmarks.planner.rows import TABLES, read_cases
from benchmarks.planner.run import forecast
from wanma.bench.scale.bands import COLUMNS, ErrorRecord
from wanma.planner.hardware_model.calibration import Calibration

FILE = ROOT / "src" / "wanma" / "bench" / "scale" / "recorded_errors.csv"


def records(tables: Path = TABLES, state: Path = STATE) -> Iterator[ErrorRecord]:
    """Yield the errors of all recorded pairs of a forecast and a measurement."""
    cases, _ = read_cases(tables / "published.csv")
    for case in cases:
        found = forecast(case)
        yield ErrorRecord(
            "gpu-experts" if case.dimensions.experts else "gpu-dense",
            f"{case.source.partition(':')[0]}: {case.name.partition(' s')[0]} on {case.machine.chip.name}",
            case.plan.world_size,
            found.uncertainty,
            math.log(case.measured_seconds / found.seconds),
            case.is_fitted,
        )
    runs = json.loads(state.read_text())
    rows = read_rows(runs)
    measured = Calibration.from_json(runs["calibration"])
    corrected = teach(measured, [row for row in rows if MODELS[row.model].role == TAUGHT])
    for kind, calibration in (
        ("cpu-uncalibrated", Calibration()),
        ("cpu-calibrated", measured),
        ("cpu-corrected", corrected),
    ):
        for row in rows:
            step = forecast_of(row, calibration).step
            assert step is not None  # the peak of its processor was measured
            is_fitted = kind == "cpu-corrected" and MODELS[row.model].role == TAUGHT
            error = math.log(row.seconds.median / step.seconds)
            yield ErrorRecord(
                kind, f"planner-real: {row.model}", row.plan.world_size, step.uncertainty, error, is_fitted
            )


def text() -> str:
    """Return the records as CSV."""
    output = io.StringIO()
    writer = csv.writer(output, lineterminator="\n")
    writer.writerow(COLUMNS)
    for record in records():
        writer.writerow(
            (
                record.kind,
                record.family,
                record.ranks,
                f"{record.uncertainty:.4f}",
                f"{record.log_ratio:.4f}",
                int(record.is_fitted),
            )
        )
    return output.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help=f"write {FILE.relative_to(ROOT)}")
    if parser.parse_args().write:
        FILE.write_text(text())
    else:
        print(text(), end="")


if __name__ == "__main__":
    main()
