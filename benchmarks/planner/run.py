"""Forecasts of published measurements, and how far off they are, by source.

python -m benchmarks.planner.run --tables ../shared/tables [--write] [--rows TEXT]
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

from benchmarks.common import RESULTS
from benchmarks.planner.rows import Case, read_cases, sources
from wanma.planner.timing import StepTime, step_time


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tables", type=Path, default=Path("../shared/tables"))
    parser.add_argument("--rows", help="print every row of the sources whose name has this text")
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS / 'planner.md'}")
    options = parser.parse_args()
    cases, refused = read_cases(options.tables / "published.csv")
    began = time.perf_counter()
    forecasts = [forecast(case) for case in cases]
    seconds = time.perf_counter() - began
    if options.rows is not None:
        for case, found in zip(cases, forecasts, strict=True):
            if options.rows in case.source:
                print(row(case, found))
    text = report(cases, forecasts, refused)
    print(text)
    print(f"{len(cases)} forecasts in {seconds:.1f} s")
    if options.write:
        (RESULTS / "planner.md").write_text(text)


def forecast(case: Case) -> StepTime:
    return step_time(
        case.dimensions,
        case.sequence,
        case.plan,
        case.global_batch,
        case.machine,
        case.software,
        case.in_flight,
    )


def error(case: Case, found: StepTime) -> float:
    return found.seconds / case.measured_seconds - 1


def row(case: Case, found: StepTime) -> str:
    kinds = " ".join(
        f"{name} {getattr(found, name) / found.seconds:.0%}"
        for name in ("compute", "tensor", "context", "expert", "data", "bubble", "optimizer")
        if getattr(found, name) / found.seconds >= 0.005
    )
    mark = "fit" if case.is_fitted else "   "
    return f"{error(case, found):+7.1%} {mark} {case.measured_seconds:9.3f} s {case.name} | {kinds}"


def report(cases: list[Case], forecasts: list[StepTime], refused: list[str]) -> str:
    errors = {id(case): error(case, found) for case, found in zip(cases, forecasts, strict=True)}
    lines = [
        "| source | rows | n | mean | median | 90th percentile | bias |",
        "|---|---|---|---|---|---|---|",
    ]
    for source, group in (*sources(cases), ("all", cases)):
        for name, chosen in (
            ("all", group),
            ("fitted", [case for case in group if case.is_fitted]),
            ("checked", [case for case in group if not case.is_fitted]),
            ("not recalled", [case for case in group if not case.is_recalled]),
        ):
            if chosen and (name != "not recalled" or len(chosen) < len(group)):
                lines.append(_line(source, name, [errors[id(case)] for case in chosen]))
    lines += ["", "Not forecast:", "", *(f"- {line}" for line in refused), ""]
    return "\n".join(lines)


def _line(source: str, name: str, errors: list[float]) -> str:
    sizes = sorted(abs(value) for value in errors)
    percentile = sizes[min(int(0.9 * len(sizes)), len(sizes) - 1)]
    mean, median, bias = statistics.fmean(sizes), statistics.median(sizes), statistics.fmean(errors)
    return (
        f"| {source} | {name} | {len(errors)} | {mean:.1%} | {median:.1%} | {percentile:.1%} | {bias:+.1%} |"
    )


if __name__ == "__main__":
    main()
