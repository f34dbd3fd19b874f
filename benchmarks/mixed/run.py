"""Two ranks, one of which has a share of a core: shares of the batch even, planned and moving, and the ideal.

    python benchmarks/mixed/run.py --quota 30 --pairs 3     # a round takes some three minutes
    python benchmarks/mixed/run.py --minutes 10             # what is still missing of the default
    python benchmarks/mixed/run.py --report

Needs root and the kernel's cgroups v1 (/sys/fs/cgroup/cpu). Every quota is one piece; a piece adds its rounds
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
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a file: find `benchmarks`

from benchmarks.common import (  # after the path is set
    Noise,
    Results,
    carry_out,
    commit,
    common_parser,
    machine,
    take_pairs,
)
from benchmarks.mixed.contenders import (
    CONTENDERS,
    IN_TURNS,
    Setting,
    Shares,
    measure,
    measure_in_turns,
    plan_shares,
    prepare_data,
)
from benchmarks.mixed.quota import why_no_quotas
from benchmarks.mixed.report import in_turns_text, report, summary


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
        piece["job"] = setting.job("even", setting.by_quota)
        prepare_data(setting)
        planned = plan_shares(setting, options.venv)
        print(f"a quota of {setting.quota}%: shares planned as {list(planned)}", flush=True)
        if options.turn_seconds is not None:
            in_turns(setting, planned, piece, options)
            results.save(report(results.pieces))
            continue
        print(f"  {len(piece.get('pairs', []))} rounds so far", flush=True)
        contenders = ("apart", *(name for name in CONTENDERS[1:] if name in options.contenders))
        complete = take_pairs(
            piece,
            {name: partial(_sample, setting, name, planned, options.venv) for name in contenders},
            pairs=options.pairs,
            noise=Noise(options.foreign_limit, options.retries),
            deadline=deadline,
            save=lambda: results.save(report(results.pieces)),
        )
        print(summary(piece), flush=True)
        if not complete:
            print("the time is over; run the same command again to carry on")
            return


def in_turns(setting: Setting, planned: Shares, piece: dict[str, Any], options: argparse.Namespace) -> None:
    """Contenders whose shares stay, each beside the ideal; their rounds are kept apart from the others."""
    facts = {"date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), "commit": commit()}
    for name in (name for name in IN_TURNS if name in options.contenders):
        with tempfile.TemporaryDirectory(prefix="wanma-bench-") as folder:
            rounds = measure_in_turns(
                setting, name, planned, options.venv, Path(folder), options.turn_seconds
            )
        for taken in rounds:
            for sample in taken.values():
                sample["disturbed"] = sample["foreign_cpu"] > options.foreign_limit
        piece.setdefault("turns", {}).setdefault(name, []).extend({**facts, **taken} for taken in rounds)
        print(f"  {name}: {in_turns_text(piece, name)}", flush=True)


def _sample(setting: Setting, name: str, planned: Shares, venv: Path) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="wanma-bench-") as folder:
        sample = measure(setting, name, planned, venv, Path(folder))
    print(f"  {name}: {sample['tokens_per_second']:,.0f} tokens/s, moves {sample['moves']}", flush=True)
    return sample


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
    parser.set_defaults(venv=Path(sys.prefix), pairs=5)
    add = parser.add_argument
    add("--quota", nargs="+", type=int, default=[30, 50], metavar="PERCENT", help="of a core (default 30 50)")
    add(
        "--contenders",
        nargs="+",
        choices=CONTENDERS[1:],
        default=CONTENDERS[1:],
        help="of a round, beside the ideal (default all)",
    )
    add("--steps", type=int, default=30, help="measured steps (default 30)")
    add("--settle", type=int, default=20, help="steps before them, in which shares may move (default 20)")
    add("--layers", type=int, default=4)
    add("--hidden", type=int, default=256)
    add("--sequence", type=int, default=128)
    add("--batch", type=int, default=26, help="samples of a step (default 26)")
    add("--micro-batch", type=int, default=4)
    add(
        "--turn-seconds",
        type=float,
        help="have the ideal and a contender whose shares stay live beside each other and stop them in turn, "
        "after so long: on a machine that others slow down. --steps are then those of a whole run",
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
