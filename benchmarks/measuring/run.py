"""`wanma bench` itself: its cost, its error rates between two commits, and whether a suite repeats.

    python benchmarks/measuring/run.py --part cost
    python benchmarks/measuring/run.py --part gate
    python benchmarks/measuring/run.py --part turns
    python benchmarks/measuring/run.py --part repeat

Rows are added to those of earlier runs of the same commit and machine; --fresh forgets them. See
benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a file: find `benchmarks`

from benchmarks.common import RESULTS, BenchmarkError, commit, machine, table
from benchmarks.measuring.cost import SUITE, sample_cost
from benchmarks.measuring.gates import SLOW_DOWNS, sample_gate
from benchmarks.measuring.repeats import measure_again
from wanma.bench.meter.disturbance import NO_LIMITS
from wanma.bench.statistics.estimates import estimate

PARTS = ("cost", "gate", "turns", "repeat")
PAIRS_AT_ONCE = 10
"""Pairs of intervals of one training of the part `cost`."""
TURN_SECONDS = 0.1
"""Duration of a turn of the part `turns`, some ten steps of its program."""
COST_GOAL = 0.003
"""Largest cost of measuring, as a share of a step."""


def main() -> None:
    options = parse()
    content = json.loads(options.results.read_text()) if options.results.exists() else {}
    if options.report:
        print(report(content))
        return
    try:
        for part in options.part:
            if options.fresh:
                content.pop(part, None)
            deadline = time.monotonic() + options.minutes * 60
            piece = content.setdefault(part, {"rows": []})
            while time.monotonic() < deadline and MEASURES[part](piece, options):
                piece |= {"machine": machine(), "commit": commit(), "date": _now()}
                options.results.write_text(json.dumps(content, indent=1) + "\n")
                options.results.with_suffix(".md").write_text(report(content))
    except BenchmarkError as error:
        sys.exit(f"error: {error}")
    print(report(content))


def _measure_cost(piece: dict[str, Any], options: argparse.Namespace) -> bool:
    """Add the pairs of one training; return False if there were enough."""
    quiet = [row for row in piece["rows"] if row["foreign_cpu"] <= options.foreign_limit]
    if len(quiet) >= options.pairs:
        return False
    with tempfile.TemporaryDirectory(prefix="wanma-bench-") as folder:
        piece["rows"] += sample_cost(Path(folder), PAIRS_AT_ONCE, options.seconds, options.ranks)
    piece |= {"seconds": options.seconds, "ranks": options.ranks, "foreign_limit": options.foreign_limit}
    print(f"{len(piece['rows'])} pairs", flush=True)
    return True


def _measure_gate(piece: dict[str, Any], options: argparse.Namespace, turn_seconds: float = 0.0) -> bool:
    """Add one repetition of each kind of commit that has too few; return False if there were enough."""
    counts = Counter(planted_slow_down(row) for row in piece["rows"])
    missing = [one for one in SLOW_DOWNS if counts[one] < options.repetitions]
    for slow_down in missing:
        with tempfile.TemporaryDirectory(prefix="wanma-bench-") as folder:
            row = sample_gate(
                Path(folder),
                slow_down=slow_down,
                rounds=options.rounds,
                foreign_limit=NO_LIMITS.foreign_cpu if turn_seconds else options.foreign_limit,
                turn_seconds=turn_seconds,
            )
        piece["rows"].append(row)
        print(row, flush=True)
    piece["rounds"], piece["turn_seconds"] = options.rounds, turn_seconds
    return bool(missing)


def planted_slow_down(row: Mapping[str, Any]) -> float:
    """Return the planted slow-down of a repetition; rows of earlier versions have one of 5 % or none."""
    return float(row["slow_down"] if "slow_down" in row else 0.05 * row["is_slower"])


def _measure_turns(piece: dict[str, Any], options: argparse.Namespace) -> bool:
    """Add one repetition of each kind of commit in turns; return False if there were enough."""
    return _measure_gate(piece, options, TURN_SECONDS)


def _measure_repeat(piece: dict[str, Any], options: argparse.Namespace) -> bool:
    """Run the recorded result again; return False if there were enough."""
    if len(piece["rows"]) >= options.repeats:
        return False
    piece["suite"] = SUITE
    piece["rows"].append(measure_again(SUITE, options.results_folder))
    return True


MEASURES = {
    "cost": _measure_cost,
    "gate": _measure_gate,
    "turns": _measure_turns,
    "repeat": _measure_repeat,
}


def report(content: dict[str, Any]) -> str:
    """Return all results as Markdown."""
    parts = [part for part in PARTS if content.get(part, {}).get("rows")]
    if not parts:
        return "Nothing has been measured yet.\n"
    makers = {
        "cost": _cost_report,
        "gate": _gate_report,
        "turns": _gate_report,
        "repeat": _repeat_report,
    }
    lines = ["# `wanma bench` itself\n"]
    for part in parts:
        piece = content[part]
        lines += [makers[part](piece), f"{piece['machine']}; wanma at {piece['commit']}; {piece['date']}\n"]
    return "\n".join(lines)


def _cost_report(piece: dict[str, Any]) -> str:
    rows = [row for row in piece["rows"] if row["foreign_cpu"] <= piece["foreign_limit"]]
    if not rows:
        return "## Cost of measuring\n\nAll pairs were disturbed by other programs.\n"
    ratio = estimate([row["on_step_seconds"] / row["off_step_seconds"] for row in rows])
    cpus = estimate([row["meter_cpu"] / piece["ranks"] for row in rows])
    shown = [
        ["step time with the meter, relative to without it", ratio.text(".4f"), f"≤ {1 + COST_GOAL}"],
        ["CPU of the measuring process, as a share of the ranks' cores", cpus.text(".5f"), f"≤ {COST_GOAL}"],
    ]
    return (
        "## Cost of measuring\n\n"
        f"One training of suite `{SUITE}` on {piece['ranks']} ranks, with the meter of `wanma bench` on and "
        f"off in turn for {piece['seconds']:g} s each: {len(rows)} pairs, "
        f"{len(piece['rows']) - len(rows)} disturbed ones left out.\n\n"
        + table(["figure", "median (95 %)", "goal"], shown)
    )


def _gate_report(piece: dict[str, Any]) -> str:
    shown = []
    for slow_down in SLOW_DOWNS:
        rows = [row for row in piece["rows"] if planted_slow_down(row) == slow_down]
        if not rows:
            continue
        name = f"{slow_down:.0%} slower" if slow_down else "only a comment differs"
        ratios = [row["ratio"]["median"] for row in rows if row["ratio"] is not None]
        refused = sum(row["outcome"] == "slower" for row in rows)
        unjudged = sum(row["outcome"] is None for row in rows)
        shown.append([name, str(len(rows)), str(refused), str(unjudged), _range_text(ratios)])
    header = ["second commit", "repetitions", "flagged as slower", "not judged", "speed ratios"]
    title, manner = "Gate between two commits", ""
    if turns := piece.get("turn_seconds"):
        load = median(row["foreign_cpu"] for row in piece["rows"])
        title = "Gate on a shared machine, in turns"
        manner = f", in turns of {turns:g} s, while other programs used up to {load:.2f} CPUs (median)"
    return (
        f"## {title}\n\n"
        f"`wanma bench gate` of {piece['rounds']} rounds on a repository of two commits whose program is a "
        f"training in NumPy{manner}.\n\n" + table(header, shown)
    )


def _range_text(ratios: Sequence[float]) -> str:
    return f"{min(ratios):.3f} to {max(ratios):.3f}" if ratios else "–"


def _repeat_report(piece: dict[str, Any]) -> str:
    rows = [
        [str(number), row["contender"], row["metric"], _ratio_text(row["stored"]), _ratio_text(row["new"]),
         row["decision"]]
        for number, run in enumerate(piece["rows"], 1)
        for row in run
    ]  # fmt: skip
    header = ["repetition", "contender", "metric", "stored ratio", "new ratio", "decision"]
    return (
        "## Repetition of a suite\n\n"
        f"The [recorded result](suites.md) of suite `{piece['suite']}` by `wanma bench reproduce`: ratios to "
        "the baseline.\n\n" + table(header, rows)
    )


def _ratio_text(content: dict[str, Any] | None) -> str:
    if content is None:
        return "–"
    if content["low"] is None:
        return f"{content['median']:.3f}"
    return f"{content['median']:.3f} ({content['low']:.3f}–{content['high']:.3f})"


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS), help="default: all")
    parser.add_argument("--minutes", type=float, default=60.0, help="begin nothing of a part after this")
    parser.add_argument("--fresh", action="store_true", help="forget the earlier rows of the chosen parts")
    parser.add_argument("--pairs", type=int, default=100, help="undisturbed pairs of the cost; default: 100")
    parser.add_argument("--seconds", type=float, default=4.0, help="duration of an interval; default: 4")
    parser.add_argument("--ranks", type=int, default=2, help="ranks of the training; default: 2")
    parser.add_argument("--repetitions", type=int, default=20, help="of each kind of commits; default: 20")
    parser.add_argument("--rounds", type=int, default=10, help="rounds of a gate; default: 10")
    parser.add_argument("--repeats", type=int, default=2, help="repetitions of the suite; default: 2")
    parser.add_argument(
        "--foreign-limit", type=float, default=0.1, metavar="CPUS",
        help="what others may use in an undisturbed sample; default: 0.1",
    )  # fmt: skip
    parser.add_argument("--results", type=Path, default=RESULTS / "measuring.json")
    parser.add_argument(
        "--results-folder", type=Path, default=Path("bench-results"), help="results of the part repeat"
    )
    parser.add_argument("--report", action="store_true", help="only print the report of the results")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
