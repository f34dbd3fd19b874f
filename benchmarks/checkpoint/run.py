"""Cost of a save for the training step, and its rate beside the disk's: wanma beside torch's checkpoints.

    python benchmarks/checkpoint/run.py [--megabytes 400] [--ranks 2] [--folder DIR]
    python benchmarks/checkpoint/run.py --report

A round takes some ten seconds, in which the contenders take turns. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a file: find `benchmarks`

from benchmarks.checkpoint.report import report  # after the path is set
from benchmarks.common import (
    Results,
    carry_out,
    clean_environment,
    common_parser,
    own_environment,
    run_command,
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
    piece["environment"] = own_environment("torch")
    take_pairs(
        piece,
        {"measured": partial(_sample, options)},
        options,
        save=lambda: results.save(report(results.pieces)),
    )


def _sample(options: argparse.Namespace) -> dict[str, Any]:
    """Measure one round; return `seconds` by contender, and the `bytes` of the state."""
    with tempfile.TemporaryDirectory(prefix="wanma-bench-") as folder:
        output = Path(folder) / "seconds.json"
        command = [sys.executable, "-m", "benchmarks.checkpoint.measure", "--output", str(output)]
        command += ["--folder", str(options.folder.absolute())]
        command += ["--megabytes", str(options.megabytes), "--ranks", str(options.ranks)]
        environment = clean_environment(Path(sys.prefix))
        run_command(command, environment, Path(folder) / "log", ROUND_SECONDS)
        return dict(json.loads(output.read_text()))


def parse() -> argparse.Namespace:
    parser = common_parser(__doc__, "checkpoint", has_peers=False)
    parser.add_argument("--megabytes", type=int, default=400, help="size of the state, all ranks together")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=Path(), help="where to save; default: this folder")
    return parser.parse_args()


if __name__ == "__main__":
    main()
