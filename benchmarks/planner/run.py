"""Forecasts of published measurements, and their errors by source.

python -m benchmarks.planner.run [--write] [--rows TEXT]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.common import RESULTS
from benchmarks.planner.rows import TABLES, Case, read_cases
from benchmarks.planner.step_times import decoder_step_time
from wanma.job.forecast.forecast import StepTime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tables", type=Path, default=TABLES, help="folder of published.csv")
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
    return decoder_step_time(
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
    judged = [
        (case, error(case, found), found.uncertainty) for case, found in zip(cases, forecasts, strict=True)
    ]
    lines = [
        "# Forecast step time beside published measurements",
        "",
        "One set of constants per device kind. About half of the rows, by a hash, were given to fitting; the",
        "others check. `inside`: share of the measurements within the forecast's own interval of 90 %.",
        "",
        "| rows of | which | n | mean error | median | 90th percentile | bias | inside | goal |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, goal, belongs in GROUPS:
        group = [entry for entry in judged if belongs(entry[0])]
        certain = [entry for entry in group if not entry[0].is_recalled]
        stated = [entry for entry in group if not (entry[0].is_recalled or entry[0].is_derived)]
        parts = [
            ("all", group),
            ("fitted", [entry for entry in group if entry[0].is_fitted]),
            ("checked", [entry for entry in group if not entry[0].is_fitted]),
            ("without recalled", certain if len(certain) < len(group) else []),
            ("without recalled and derived", stated if len(stated) < len(certain) else []),
        ]
        for number, (which, entries) in enumerate(parts):
            if entries:
                lines.append(_line(name, which, entries, goal if number == 0 else ""))
    lines += ["", "Not forecast:", "", *(f"- {line}" for line in refused), ""]
    return "\n".join(lines)


def _from(*prefixes: str) -> Callable[[Case], bool]:
    return lambda case: case.source.startswith(prefixes)


def _is_dense_bridge(case: Case) -> bool:
    return "Megatron-Bridge" in case.source and not case.dimensions.experts


GROUPS: tuple[tuple[str, str, Callable[[Case], bool]], ...] = (
    ("Korthikanti 2022", "4 %", _from("Korthikanti")),
    ("Megatron-LM SC21", "6 %", _from("Megatron-LM SC21")),
    ("Megatron-LM README 2020", "", _from("Megatron-LM README")),
    ("vTrain, several nodes", "9 %", _from("vTrain")),
    ("Zero-Bubble 2023", "", _from("Zero-Bubble")),
    ("NeMo 24.07", "", _from("NVIDIA NeMo")),
    ("Megatron-Bridge, dense", "10 %", _is_dense_bridge),
    ("llm-foundry on A100", "10 %", _from("MosaicML llm-foundry MPT benchmarks: A100")),
    ("llm-foundry on H100", "10 %", _from("MosaicML llm-foundry MPT benchmarks: H100")),
    ("torchtitan", "10 %", _from("torchtitan")),
    ("SimuMax on B200", "", _from("SimuMax")),
    ("mixtures of experts", "15 %", lambda case: case.dimensions.experts > 0),
    ("all", "", lambda _: True),
)


def _line(name: str, which: str, entries: list[tuple[Case, float, float]], goal: str) -> str:
    errors = [error for _, error, _ in entries]
    sizes = sorted(abs(error) for error in errors)
    percentile = sizes[min(int(0.9 * len(sizes)), len(sizes) - 1)]
    # The interval is around the forecast: `error` is measured from the measurement.
    inside = statistics.fmean(abs(1 / (1 + error) - 1) <= half for _, error, half in entries)
    figures = (statistics.fmean(sizes), statistics.median(sizes), percentile)
    numbers = " | ".join(f"{figure:.1%}" for figure in figures)
    return (
        f"| {name} | {which} | {len(errors)} | {numbers} | {statistics.fmean(errors):+.1%} "
        f"| {inside:.0%} | {goal} |"
    )


if __name__ == "__main__":
    main()
