"""Seconds of collectives between the processes of one machine: over shared memory, and over Gloo.

    python benchmarks/collectives/run.py --ranks 2 --collective all_reduce --minutes 3
    python benchmarks/collectives/run.py                 # what is still missing of the default
    python benchmarks/collectives/run.py --report

A piece is one collective and number of ranks, with all sizes; a round of it is a few seconds, in which the
contenders take turns. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a file: find `benchmarks`

from benchmarks.collectives.measure import COLLECTIVES  # after the path is set
from benchmarks.collectives.report import report
from benchmarks.common import (
    BenchmarkError,
    Noise,
    Results,
    clean_environment,
    common_parser,
    machine,
    run_command,
    take_pairs,
)

MEBIBYTES = (0.0625, 1.0, 4.0, 16.0, 64.0, 256.0)
ROUND_SECONDS = 300.0


def main() -> None:
    options = parse()
    try:
        if options.report:
            print(report(Results(options.results).pieces))
        else:
            run(options)
    except BenchmarkError as error:
        sys.exit(f"error: {error}")


def run(options: argparse.Namespace) -> None:
    """Measure every chosen piece that lacks rounds."""
    results = Results(options.results)
    deadline = time.monotonic() + options.minutes * 60
    for ranks, collective in itertools.product(options.ranks, options.collective):
        settings = {"collective": collective, "ranks": ranks, "mebibytes": list(options.mebibytes)}
        piece = results.piece(settings, options.fresh)
        versions = {"Python": platform.python_version(), "torch": version("torch")}
        piece["environment"] = {"machine": machine(), "versions": versions}
        print(f"{collective} of {ranks} ranks: {len(piece['pairs'])} rounds so far", flush=True)
        complete = take_pairs(
            piece,
            {"measured": partial(_sample, collective, ranks, options.mebibytes)},
            pairs=options.pairs,
            noise=Noise(options.foreign_limit, options.retries),
            deadline=deadline,
            save=lambda: results.save(report(results.pieces)),
        )
        if not complete:
            print("the time is over; run the same command again to carry on")
            return
    print(report(results.pieces))


def _sample(collective: str, ranks: int, mebibytes: Sequence[float]) -> dict[str, Any]:
    """Measure one round; return `seconds` by size and contender."""
    with tempfile.TemporaryDirectory(prefix="wanma-bench-") as folder:
        output = Path(folder) / "seconds.json"
        command = [sys.executable, "-m", "benchmarks.collectives.measure", collective]
        command += ["--ranks", str(ranks), "--output", str(output)]
        command += ["--mebibytes", *(f"{size:g}" for size in mebibytes)]
        environment = clean_environment(Path(sys.prefix))
        finished = run_command(command, environment, Path(folder) / "log", ROUND_SECONDS)
        seconds = json.loads(output.read_text())
    return {"seconds": seconds, "foreign_cpu": finished.foreign_cpu}


def parse() -> argparse.Namespace:
    parser = common_parser(__doc__, "collectives")
    add = parser.add_argument
    add("--collective", nargs="+", choices=COLLECTIVES, default=list(COLLECTIVES), help="default: all")
    add("--ranks", nargs="+", type=int, default=[2, 4], help="default: 2 4")
    add("--mebibytes", nargs="+", type=float, default=list(MEBIBYTES), help="of one rank's buffer")
    return parser.parse_args()


if __name__ == "__main__":
    main()
