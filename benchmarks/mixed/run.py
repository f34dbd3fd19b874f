"""Comparison of even, planned and moving shares of the batch with the ideal, on two unlike ranks.

    python benchmarks/mixed/run.py --quota 30 --pairs 2      # a run of a contender takes some three minutes
    python benchmarks/mixed/run.py --minutes 10              # what is still missing of the default
    python benchmarks/mixed/run.py --report

Needs root and the kernel's cgroups v1 (/sys/fs/cgroup/cpu). Every quota is one piece; a piece adds its runs
to the results file, so that it can be run bit by bit. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import datetime
import platform
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a file: find `benchmarks`

from benchmarks.common import (  # after the path is set
    Results,
    carry_out,
    commit,
    common_parser,
    machine,
)
from benchmarks.mixed.contenders import (
    CONTENDERS,
    Setting,
    Shares,
    measure,
    plan_shares,
    prepare_data,
)
from benchmarks.mixed.quota import why_no_quotas
from benchmarks.mixed.report import report, summary
from benchmarks.pace import product_seconds


def main() -> None:
    carry_out(parse(), run, report)


def run(options: argparse.Namespace) -> None:
    """Measure every chosen quota that lacks rounds."""
    if reason := why_no_quotas():
        print(f"nothing is measured here: {reason}")  # the other benchmarks of `make bench` go on
        return
    results = Results(options.results)
    deadline = time.monotonic() + options.minutes * 60
    environment = {
        "machine": machine(),
        "versions": {
            "Python": platform.python_version(),
            **{name: version(name) for name in ("wanma", "torch", "numpy")},
        },
    }
    for setting in settings(options):
        piece = results.piece(asdict(setting), options.fresh)
        piece["environment"] = environment
        piece["job"] = setting.job("even", setting.by_quota, setting.total_steps)
        prepare_data(setting)
        wanted = {
            name: max(options.pairs - len(piece.setdefault("turns", {}).get(name, [])), 0)
            for name in CONTENDERS
            if name in options.contenders
        }
        if not any(wanted.values()):
            continue
        planned = plan_shares(setting, options.venv)
        print(f"a quota of {setting.quota}%: shares planned as {list(planned)}", flush=True)
        for _ in range(max(wanted.values())):
            for name in (name for name, left in wanted.items() if left):
                if time.monotonic() >= deadline:
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
    """Run a contender once beside the ideal; mark the disturbed parts."""
    taken: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "product_seconds": product_seconds(),
    }
    with tempfile.TemporaryDirectory(prefix="wanma-bench-") as folder:
        taken.update(measure(setting, name, planned, options.venv, Path(folder), number))
    for one in (*taken["rounds"], *taken.get("steps", [])):
        one["disturbed"] = one["foreign_cpu"] > options.foreign_limit
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
    # No peers to install: wanma runs beside itself, in the environment of this command.
    parser.set_defaults(venv=Path(sys.prefix), pairs=3)
    add = parser.add_argument
    add("--quota", nargs="+", type=int, default=[30, 50], metavar="PERCENT", help="of a core (default 30 50)")
    add(
        "--contenders",
        nargs="+",
        choices=CONTENDERS,
        default=CONTENDERS,
        help="each beside the ideal (default all)",
    )
    add("--steps", type=int, default=45, help="measured steps (default 45)")
    add("--settle", type=int, default=20, help="steps before them, in which shares may move (default 20)")
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
