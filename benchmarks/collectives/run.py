"""Seconds of collectives between the processes of one machine: over shared memory, and over Gloo.

    python benchmarks/collectives/run.py --ranks 2 --collective all_reduce      # one comparison: a minute
    python benchmarks/collectives/run.py                 # what is still missing of the default: 12 minutes
    python benchmarks/collectives/run.py --report

A piece is one collective and number of ranks, with all sizes; a round of it is a few seconds, in which the
contenders take turns. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a file: find `benchmarks`

from benchmarks.collectives.measure import COLLECTIVES  # after the path is set
from benchmarks.collectives.report import report
from benchmarks.common import (
    Results,
    carry_out,
    common_parser,
    describe_environment,
    run_module,
    take_pairs,
)

MEBIBYTES = (0.0625, 1.0, 16.0, 256.0)
"""Sizes of one message, of which the second fits into a cache of a core, and the last into none."""
ROUND_SECONDS = 300.0


def main() -> None:
    carry_out(parse(), run, report)


def run(options: argparse.Namespace) -> None:
    """Measure every chosen piece that lacks rounds."""
    results = Results(options.results)
    for ranks, collective in itertools.product(options.ranks, options.collective):
        settings = {"collective": collective, "ranks": ranks, "mebibytes": list(options.mebibytes)}
        piece = results.piece(settings, options.fresh)
        piece["environment"] = describe_environment()
        print(f"{collective} of {ranks} ranks: {len(piece['pairs'])} rounds so far", flush=True)
        complete = take_pairs(
            piece,
            {"measured": partial(_sample, collective, ranks, options.mebibytes)},
            options,
            save=lambda: results.save(report(results.pieces)),
        )
        if not complete:
            return


def _sample(collective: str, ranks: int, mebibytes: Sequence[float]) -> dict[str, Any]:
    """Measure one round; return `seconds` by size and contender."""
    arguments = [collective, "--ranks", str(ranks), "--mebibytes", *(f"{size:g}" for size in mebibytes)]
    return {"seconds": run_module("collectives.measure", arguments, ROUND_SECONDS)}


def parse() -> argparse.Namespace:
    parser = common_parser(__doc__, "collectives")
    parser.set_defaults(pairs=5)
    add = parser.add_argument
    add("--collective", nargs="+", choices=COLLECTIVES, default=list(COLLECTIVES), help="default: all")
    add("--ranks", nargs="+", type=int, default=[2, 4], help="default: 2 4")
    add("--mebibytes", nargs="+", type=float, default=list(MEBIBYTES), help="of one rank's buffer")
    return parser.parse_args()


if __name__ == "__main__":
    main()
