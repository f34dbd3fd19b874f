"""Guard of the mean errors of forecasts of published figures, by source, against `recorded.csv`.

    python -m benchmarks.planner.guard            # the table
    python -m benchmarks.planner.guard --write    # records errors that became smaller, and new sources

A test holds every source within a point of the recorded error. A figure is only raised by hand, and the
commit gives the reason.
"""

from __future__ import annotations

import argparse
import csv
import statistics
from pathlib import Path

from benchmarks.planner import memory, run
from benchmarks.planner.rows import TABLES, read_cases

RECORDED = TABLES / "recorded.csv"
MOST_GROWTH = 0.01
"""Allowed growth of a mean error, as a share of the measurement."""

Errors = dict[tuple[str, str], float]
"""Mean error by ('time' or 'memory', source), as a share of the measurement."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help=f"write {RECORDED}")
    options = parser.parse_args()
    before, now = recorded(), mean_errors()
    for key, error in now.items():
        was = f"recorded {before[key]:.1%}" if key in before else "not recorded"
        print(f"{key[0]:6}  now {error:5.1%}  {was:14}  {key[1]}")
    if options.write:
        write({key: min(error, before.get(key, error)) for key, error in now.items()})


def mean_errors(tables: Path = TABLES) -> Errors:
    """Return the mean errors of all forecast rows: by source, of mixtures of experts, and of all."""
    cases, _ = read_cases(tables / "published.csv")
    judged, _ = memory.read(tables / "published.csv")
    entries = [("time", case.source, abs(run.error(case, run.forecast(case)))) for case in cases]
    entries += [("memory", one.case.source, abs(one.error)) for one in judged]
    entries += [
        ("time", "mixtures of experts", entry[2])
        for case, entry in zip(cases, entries, strict=False)
        if case.dimensions.experts
    ]
    entries += [(what, "all", error) for what, source, error in entries if source != "mixtures of experts"]
    errors: dict[tuple[str, str], list[float]] = {}
    for what, source, error in entries:
        errors.setdefault((what, source), []).append(error)
    return {key: statistics.fmean(found) for key, found in sorted(errors.items())}


def recorded() -> Errors:
    """Return the figures of `recorded.csv`."""
    if not RECORDED.exists():
        return {}
    with RECORDED.open(newline="") as file:
        return {
            (record["figure"], record["source"]): float(record["mean_error"])
            for record in csv.DictReader(file)
        }


def write(errors: Errors) -> None:
    with RECORDED.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("figure", "source", "mean_error"))
        writer.writerows((*key, f"{error:.5f}") for key, error in sorted(errors.items()))


def grown(before: Errors, now: Errors) -> list[str]:
    """Return a sentence for each source whose mean error grew too much, is not recorded, or is gone."""
    told = [
        f"{what} of {source}: mean error {now[what, source]:.1%}, recorded {error:.1%}"
        for (what, source), error in before.items()
        if (what, source) in now and now[what, source] > error + MOST_GROWTH
    ]
    told += [
        f"{what} of {source}: recorded, and forecast no more" for what, source in before.keys() - now.keys()
    ]
    told += [f"{what} of {source}: forecast, and not recorded" for what, source in now.keys() - before.keys()]
    return sorted(told)


if __name__ == "__main__":
    main()
