"""Comparison of even, planned and moving shares of the batch with the ideal, on two unlike ranks.

    python benchmarks/mixed/run.py                           # what is missing of the default: 13 minutes
    python benchmarks/mixed/run.py --quota 50                # the same with another quota: 10 minutes
    python benchmarks/mixed/run.py --report

Needs root and the kernel's cgroups v1 (/sys/fs/cgroup/cpu). Every quota is one piece; a piece adds its runs
to the results file, so that it can be run bit by bit. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a file: find `benchmarks`

from benchmarks.commands import prepare_data
from benchmarks.common import (  # after the path is set
    Results,
    carry_out,
    common_parser,
    describe_environment,
    disturbance_rule,
    origin,
)
from benchmarks.mixed.contenders import (
    CONTENDERS,
    Setting,
    Shares,
    measure,
    plan_shares,
)
from benchmarks.mixed.quota import why_no_quotas
from benchmarks.mixed.report import report, summary


def main() -> None:
    carry_out(parse(), run, report)


def run(options: argparse.Namespace) -> None:
    """Measure every chosen quota that lacks rounds."""
    if reason := why_no_quotas():
        print(f"nothing is measured here: {reason}")  # the other benchmarks of `make bench` go on
        return
    results = Results(options.results)
    environment = describe_environment(options.venv)
    for setting in settings(options):
        piece = results.piece(asdict(setting), options.fresh)
        piece["environment"] = environment
        piece["job"] = setting.job("even", setting.by_quota, setting.total_steps)
        prepare_data(piece["job"])
        wanted = {
            name: max(options.pairs * runs - len(piece.setdefault("turns", {}).get(name, [])), 0)
            for name, runs in CONTENDERS.items()
            if name in options.contenders
        }
        if not any(wanted.values()):
            continue
        planned = plan_shares(setting, options.venv)
        print(f"a quota of {setting.quota}%: shares planned as {list(planned)}", flush=True)
        for _ in range(max(wanted.values())):
            for name in (name for name, left in wanted.items() if left):
                if time.monotonic() >= options.deadline:
                    print("the time is over; run the same command again to carry on")
                    return
                wanted[name] -= 1
                runs = piece["turns"].setdefault(name, [])
                runs.append(take(setting, name, planned, options, len(runs)))
                results.save(report(results.pieces))
                print(summary(piece, name), flush=True)


def take(
    setting: Setting, name: str, planned: Shares, options: argparse.Namespace, number: int
) -> dict[str, Any]:
    """Run a contender once beside the ideal."""
    taken: dict[str, Any] = dict(origin())
    rule = disturbance_rule(options)
    with tempfile.TemporaryDirectory(prefix="wanma-bench-") as folder:
        taken |= measure(setting, name, planned, options.venv, Path(folder), number, rule)
    print(f"  {name}: moves {taken['moves']}", flush=True)
    return taken


def settings(options: argparse.Namespace) -> Iterator[Setting]:
    for quota in options.quota:
        yield Setting(
            quota=quota,
            steps=options.steps,
            settle=options.settle,
            layers=options.layers,
            hidden=options.hidden,
            sequence=options.sequence,
            batch=options.batch,
            micro_batch=options.micro_batch,
        )


def parse() -> argparse.Namespace:
    parser = common_parser(__doc__, "mixed")
    parser.set_defaults(pairs=1)
    add = parser.add_argument
    add("--quota", nargs="+", type=int, default=[30], metavar="PERCENT", help="of a core (default 30)")
    add(
        "--contenders",
        nargs="+",
        choices=CONTENDERS,
        default=CONTENDERS,
        help="each beside the ideal (default all)",
    )
    add("--steps", type=int, default=30, help="measured steps (default 30)")
    add("--settle", type=int, default=8, help="steps before them, in which shares may move (default 8)")
    add("--layers", type=int, default=4)
    add("--hidden", type=int, default=256)
    add("--sequence", type=int, default=128)
    add("--batch", type=int, default=26, help="samples of a step (default 26)")
    add("--micro-batch", type=int, default=4)
    options = parser.parse_args()
    if options.settle < 1:
        parser.error("--settle is at least 1: speeds are those after a step")
    return options


if __name__ == "__main__":
    main()
