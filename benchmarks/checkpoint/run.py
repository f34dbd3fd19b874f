"""Cost of a save for the training step, and its rate beside the disk's: wanma beside torch's checkpoints.

    python benchmarks/checkpoint/run.py [--megabytes 400] [--ranks 2] [--folder DIR]
    python benchmarks/checkpoint/run.py --report

A round takes some ten seconds, in which the contenders take turns. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a file: find `benchmarks`

from benchmarks.checkpoint.report import report  # after the path is set
from benchmarks.common import (
    Results,
    carry_out,
    common_parser,
    describe_environment,
    run_module,
    take_pairs,
)

ROUND_SECONDS = 600.0


def main() -> None:
    carry_out(parse(), run, report)


def run(options: argparse.Namespace) -> None:
    """Measure rounds until there are enough."""
    results = Results(options.results)
    settings = {name: getattr(options, name) for name in ("megabytes", "ranks", "foreign_limit")}
    piece = results.piece(settings, options.fresh)
    piece["environment"] = describe_environment()
    take_pairs(
        piece,
        {"measured": partial(_sample, options)},
        options,
        save=lambda: results.save(report(results.pieces)),
    )


def _sample(options: argparse.Namespace) -> dict[str, Any]:
    """Measure one round; return `seconds` by contender, and the `bytes` of the state."""
    arguments = ["--folder", str(options.folder.absolute())]
    arguments += ["--megabytes", str(options.megabytes), "--ranks", str(options.ranks)]
    return dict(run_module("checkpoint.measure", arguments, ROUND_SECONDS))


def parse() -> argparse.Namespace:
    parser = common_parser(__doc__, "checkpoint")
    parser.add_argument("--megabytes", type=int, default=400, help="size of the state, all ranks together")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=Path(), help="where to save; default: this folder")
    return parser.parse_args()


if __name__ == "__main__":
    main()
