"""Errors of recorded forecasts of a step's time, and the width of the bands of `wanma bench scale` by them.

    python -m benchmarks.planner.scale_errors            # list the errors
    python -m benchmarks.planner.scale_errors --write    # write the widths

They are those of published.csv, and of the runs in docs/results/planner-real.json: without a calibration,
with one, and with one that runs of other models corrected.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, fields
from pathlib import Path
from typing import NamedTuple

from benchmarks.common import ROOT
from benchmarks.planner.real import STATE
from benchmarks.planner.real_cases import MODELS, TAUGHT
from benchmarks.planner.real_report import forecast_of, read_rows, teach
from benchmarks.planner.rows import TABLES, read_cases
from benchmarks.planner.run import forecast
from wanma.bench.scale.bands import COVERAGE, FILE, BandRule
from wanma.planner.hardware_model.calibration import Calibration


class ErrorRecord(NamedTuple):
    """Error of one recorded forecast."""

    kind: str
    """Class of hardware and model, as of `ScaledJob.hardware_class`."""
    family: str
    """Source, model and device; records of one family differ in layout and ranks."""
    ranks: int
    uncertainty: float
    """Half of the forecast's own 90 % interval, as a share of its time."""
    log_ratio: float
    """ln(measured step time / forecast step time)."""
    is_fitted: bool
    """True if constants were fitted to the measurement: it checks nothing."""


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


def band_rule_of(kind: str, records: Sequence[ErrorRecord]) -> BandRule:
    """Return the rule of the bands of one class of hardware.

    Split conformal prediction: the smallest width that holds ⌈0.9 (n + 1)⌉ of n records.
    """
    own = [one for one in records if one.kind == kind]
    checks = [one for one in own if not one.is_fitted]
    level = upper_quantile([abs(one.log_ratio) / one.uncertainty for one in checks])
    device = kind.partition("-")[0]
    drifts = scaled_drifts(one for one in records if one.kind.partition("-")[0] == device)
    largest = max(one.ranks for one in own)
    return BandRule(kind, level, upper_quantile(drifts), largest, len(checks), len(drifts))


def scaled_drifts(records: Iterable[ErrorRecord]) -> list[float]:
    """Return |difference of errors| / √doublings of all pairs of records within a family."""
    families: defaultdict[tuple[str, str], list[ErrorRecord]] = defaultdict(list)
    for record in records:
        families[record.kind, record.family].append(record)
    return [
        abs(more.log_ratio - fewer.log_ratio) / math.sqrt(math.log2(more.ranks / fewer.ranks))
        for family in families.values()
        for fewer in family
        for more in family
        if more.ranks > fewer.ranks
    ]


def upper_quantile(values: Sequence[float], coverage: float = COVERAGE) -> float:
    """Return the smallest value that holds ⌈coverage (n + 1)⌉ of n values; the largest of too few."""
    ordered = sorted(values)
    return ordered[min(math.ceil(coverage * (len(ordered) + 1)), len(ordered)) - 1]


def rules() -> list[BandRule]:
    """Return the rules of all classes of hardware."""
    found = list(records())
    return [band_rule_of(kind, found) for kind in dict.fromkeys(one.kind for one in found)]


def text(columns: Sequence[str], rows: Iterable[tuple[object, ...]]) -> str:
    """Return rows as CSV, numbers with four decimals."""
    output = io.StringIO()
    writer = csv.writer(output, lineterminator="\n")
    writer.writerow(columns)
    for row in rows:
        writer.writerow(f"{cell:.4f}" if isinstance(cell, float) else cell for cell in row)
    return output.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help=f"write {FILE.relative_to(ROOT)}")
    if parser.parse_args().write:
        FILE.write_text(text([one.name for one in fields(BandRule)], map(astuple, rules())))
    else:
        print(text(ErrorRecord._fields, records()), end="")


if __name__ == "__main__":
    main()
